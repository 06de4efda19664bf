"""Weights are read between the wait for their all-gather and the reshard, or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import FSDPError, PhaseError, ShardingStrategy
from composable_fsdp.config import BackwardPrefetch
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    assert_same_training,
    backward,
    sgd,
    train,
    train_reference,
    wide_input,
)
from tests.support.sharded import message_of
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
WIDTH = 8


class Block(nn.Module):
    """A unit; subclasses differ in how tensors leave them."""

    aux: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))

    def run(self, x: Tensor) -> Tensor:
        """What every kind computes."""
        out: Tensor = torch.tanh(self.layer(x)) * self.gain
        return out

    def forward(self, x: Tensor) -> Any:
        """Map ``(batch, WIDTH)`` to itself."""
        return self.run(x)

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """How the parent calls it: its output, and what goes to the loss beside."""
        return unit(x), 0.0


class AuxiliaryLoss(Block):
    """Keeps a loss on an attribute, made after its output."""

    def forward(self, x: Tensor) -> Tensor:
        """As ``Block``."""
        out = self.run(x)
        self.aux = (out * self.gain).square().mean() * self.layer.weight.sum()
        return out

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """The attribute is read through the wrapper as well."""
        out = unit(x)
        aux: Any = unit.aux
        return out, 0.1 * aux


class AuxiliaryList(Block):
    """Keeps losses in a list of a module below it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = nn.Identity()
        self.losses.kept = []  # type: ignore[assignment]  # a list, not a module

    def forward(self, x: Tensor) -> Tensor:
        """As ``Block``."""
        out = self.run(x)
        self.losses.kept = [(out / self.gain).square().mean()]  # type: ignore[assignment]
        return out

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """All of the list."""
        out = unit(x)
        return out, sum(unit.losses.kept)  # type: ignore[union-attr, arg-type]


class AuxiliaryBuffer(Block):
    """Keeps a loss in the place of a buffer."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """As ``Block``."""
        out = self.run(x)
        self.kept = (out * self.gain).square().mean()
        return out

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """The buffer has a graph now."""
        out = unit(x)
        kept: Any = unit.kept
        return out, 0.1 * kept


class HookReads(Block):
    """A hook on its output reads a weight, in a way that autograd does not see."""

    def forward(self, x: Tensor) -> Tensor:
        """Hooks of a tensor run before those of its node."""
        gain, out = self.gain, self.run(x)
        hook: Any = out.register_hook  # untyped in torch
        hook(lambda gradient: gradient * gain.detach())
        return out


class ReturnsView(Block):
    """Its parent changes the view that it returns in place."""

    def forward(self, x: Tensor) -> Tensor:
        """A view of another shape."""
        return self.run(x).view(-1, 2, WIDTH // 2).transpose(0, 1)

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Scale in place, then flatten."""
        out = unit(x)
        out.mul_(0.5)
        out[:, 0] += 1.0
        return out.transpose(0, 1).reshape(-1, WIDTH), 0.0


class InPlace(Block):
    """Called for what it does to its input."""

    def forward(self, x: Tensor) -> None:
        """Add to ``x``."""
        x.add_(self.run(x.clone()))

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """The result is dropped."""
        unit(x)
        return x, 0.0


class InPlaceOfView(Block):
    """The same with a view of a larger tensor, passed by keyword in a dict."""

    def forward(  # type: ignore[override]  # units differ in what they take
        self, *, state: dict[str, Tensor]
    ) -> None:
        """Add to ``state["x"]``."""
        state["x"].add_(self.run(state["x"].clone()))

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """The first rows of a tensor are changed."""
        whole = torch.cat([x, x])
        unit(state={"x": whole[: len(x)]})
        return whole[: len(x)] + whole[len(x) :], 0.0


class Appends(Block):
    """Leaves a loss in a list, and another in a dict, that it was given."""

    def forward(  # type: ignore[override]  # units differ in what they take
        self, x: Tensor, losses: list[Tensor], kept: dict[str, Any]
    ) -> Tensor:
        """As ``Block``."""
        out = self.run(x)
        losses.append((out * self.gain).square().mean())
        kept["loss"] = [(self.gain / (1 + out.square())).sum()]
        return out

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """One container has a tensor that needs a gradient before, one has none."""
        losses: list[Tensor] = [x.sum()]
        kept: dict[str, Any] = {}
        out = unit(x, losses, kept=kept)
        return out, losses[1] + kept["loss"][0]


class Buffered(Block):
    """Adds to a buffer that needs no gradient before."""

    def forward(  # type: ignore[override]  # units differ in what they take
        self, x: Tensor, out: Tensor
    ) -> None:
        """Write to ``out``."""
        out.add_(self.run(x))

    @staticmethod
    def use(unit: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """The buffer is new each time."""
        out = torch.zeros_like(x)
        unit(x, out)
        return out, 0.0


KINDS = (
    AuxiliaryLoss,
    AuxiliaryList,
    AuxiliaryBuffer,
    HookReads,
    ReturnsView,
    InPlace,
    InPlaceOfView,
    Appends,
    Buffered,
)


class Stack(nn.Module):
    """Three units of one kind between a plain layer and a head."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        x, beside = self.first(x), torch.zeros(())
        for block in self.blocks:
            x, aux = self.kind.use(block, x)
            beside = beside + aux
        loss: Tensor = self.head(x).square().mean() + beside
        return loss


def build(kind: type[Block]) -> Stack:
    """The same values in every process."""
    torch.manual_seed(0)
    return Stack(kind)


def whole_loss(model: nn.Module, x: Tensor) -> Tensor:
    """The model returns its loss."""
    loss: Tensor = model(x)
    return loss


UNITS = tuple(f"blocks.{i}" for i in range(3))


@pytest.mark.few(1)
@pytest.mark.req("P-01")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backward_prefetch": None},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    ],
    ids=["pre", "none", "post", "grad_op"],
)
@on_ranks(2)
def test_tensors_that_leave_by_another_way_than_the_output_train_as_the_plain_model(
    world: World, path: str, options: dict[str, Any]
) -> None:
    """Attributes, views changed in place, and units called for an in-place effect.

    Each kind trains as the plain model does.
    """
    for kind in KINDS:
        plain = build(kind)
        model = apply_units(copy.deepcopy(plain), UNITS, path=path, **options)
        make = wide_input(WIDTH)
        losses = train(model, world.rank, make, sgd, loss_of=whole_loss)
        expected = train_reference(
            plain, world.world_size, make, sgd, loss_of=whole_loss
        )
        mine = [step[world.rank] for step in expected]
        assert_same_training(model, plain, losses, mine, tolerance=1e-6)


@pytest.mark.req("P-01")
@on_ranks(2)
def test_a_copy_finds_the_attributes_on_which_it_keeps_tensors(world: World) -> None:
    """Not those of the model it was copied from.

    A copy of a model that has run looks at its own modules.
    """
    plain = build(AuxiliaryLoss)
    model = apply_units(copy.deepcopy(plain), UNITS)
    make = wide_input(WIDTH)
    train(model, world.rank, make, sgd, loss_of=whole_loss)
    train_reference(plain, world.world_size, make, sgd, loss_of=whole_loss)
    for block in model.blocks:  # type: ignore[union-attr]  # a ModuleList
        block.aux = None
    copied = copy.deepcopy(model)
    losses = train(copied, world.rank, make, sgd, loss_of=whole_loss)
    expected = train_reference(plain, world.world_size, make, sgd, loss_of=whole_loss)
    mine = [step[world.rank] for step in expected]
    assert_same_training(copied, plain, losses, mine, tolerance=1e-6)


class Escapes(Block):
    """Hands a tensor to a place where nobody looks."""

    def __init__(
        self,
        read: Callable[[Tensor, Tensor], Tensor],
        keep: Callable[[Tensor], object],
    ) -> None:
        super().__init__()
        self.read, self.keep = read, keep

    def forward(self, x: Tensor) -> Tensor:
        """Give something of ``x`` and a weight to a function of somebody else's."""
        self.keep(self.read(x, self.gain).sum())
        return x * 1.0


class Function(torch.autograd.Function):
    """Keeps its weight where autograd does not look at versions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """A product."""
        ctx.save_for_backward(x)
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Both gradients, of which that of ``x`` needs no weight here."""
        (x,) = ctx.saved_tensors
        return grads[0], grads[0] * x


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, w: x * w,
    "div": lambda x, w: x / w,
    "pow": lambda x, w: w.square() * x,
    "prelu": lambda x, w: torch.nn.functional.prelu(x, w),
    "rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (WIDTH,), w),
    "mv": lambda x, w: x @ w,
    "function": Function.apply,
}


def escape(
    world: World, read: str, prefetch: BackwardPrefetch | None
) -> tuple[str, float]:
    """The error of a backward through an escaped tensor; then a step that is right."""
    place: list[Tensor] = []
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Escapes(READS[read], place.append),
        nn.Linear(WIDTH, WIDTH),
    )
    apply_units(model, ["1"], backward_prefetch=prefetch)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(world.rank))
    model(x)
    with pytest.raises(FSDPError) as caught:
        backward(place[0])
    model.zero_grad()
    loss = model(x).square().mean()
    backward(loss)
    return str(caught.value), loss.item()


@pytest.mark.req("P-01")
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, None])
@pytest.mark.parametrize("read", READS)
def test_a_read_outside_the_window_names_the_parameter_and_the_way_out(
    read: str, prefetch: BackwardPrefetch | None, ranks: RankCount
) -> None:
    """Never freed memory, never memory that an all-gather is writing."""
    for text, _ in ranks(2).run(escape, read, prefetch):
        assert "1" in text
        assert "sharded" in text
        assert "Return the tensor from the forward" in text
        if read != "function":
            assert "'1.gain'" in text


def write_between(world: World, how: str, strategy: ShardingStrategy) -> list[str]:
    """The errors of plain and sharded model if weights change before backward."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = apply_units(copy.deepcopy(plain), ["0", "1"], strategy=strategy)
    errors = []
    for each in (plain, model):
        optimizer = adamw(each.parameters())
        backward(each(torch.ones(2, WIDTH)).sum())
        saved = copy.deepcopy(each.state_dict())
        loss = each(torch.ones(2, WIDTH)).square().sum()
        if how == "step":
            optimizer.step()
        elif how == "load":
            each.load_state_dict(saved)
        else:
            with torch.no_grad():
                for p in each.parameters():
                    p.mul_(0.5)
        with pytest.raises(RuntimeError) as caught:
            backward(loss)
        errors.append(str(caught.value))
        # What broke leaves nothing behind.
        each.zero_grad()
        backward(each(torch.ones(2, WIDTH)).square().sum())
        optimizer.step()
    return errors


@pytest.mark.req("P-11")
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name)
@pytest.mark.parametrize("how", ["step", "load", "write"])
def test_a_change_of_weights_between_forward_and_backward_raises_as_in_plain_torch(
    how: str, strategy: ShardingStrategy, ranks: RankCount
) -> None:
    """Backward with other weights than the forward's is nobody's gradient."""
    for errors in ranks(2).run(write_between, how, strategy):
        assert all("modified by an inplace operation" in text for text in errors)


def step_of_rows(world: World) -> list[str]:
    """What each rank is told where some hold nothing of some parameters."""
    told = []
    for kept in (True, False):
        kinds: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}]
        for kind in (*kinds, {"fused": True}):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1), nn.Linear(1, 3))
            model = apply_units(plain, ["0", "1", "2"])
            optim = torch.optim.AdamW(model.parameters(), **kind)
            x = torch.ones(2, 3)
            backward(model(x).sum())
            loss = model(x).sum()
            if not kept:
                for parameter in model.parameters():
                    if not parameter.numel():
                        parameter.grad = None
            optim.step()
            try:
                backward(loss)
            except RuntimeError as error:
                told.append(f"{kind} {error}".partition(" [")[0])
            else:
                told.append(f"{kind} nothing")
            # Cleared gradients step on no rank.
            optim.zero_grad()
            loss = model(x).sum()
            optim.step()
            backward(loss)
    return told


@pytest.mark.req("P-11")
def test_ranks_that_hold_nothing_of_a_weight_raise_with_the_others(
    ranks: RankCount,
) -> None:
    """With an empty gradient or none, which optimizers pass by."""
    first, *others = ranks(2).run(step_of_rows)

    assert all(each == first for each in others)
    assert sum("modified by an inplace operation" in text for text in first) == 6


@pytest.mark.req("P-11", "X-32")
@on_ranks(2)
def test_a_step_counts_as_a_write_of_the_parameters_that_have_gradients(
    world: World,
) -> None:
    """Fused kernels change no version counter, and are told from the others by nothing.

    A backward that reads only weights without a gradient is right, and one that reads
    a weight with a gradient is refused, as in the plain model with a counted step.
    """
    kinds: list[dict[str, Any]] = [{"foreach": False}, {"fused": True}]
    told = []
    for cleared, (is_sharded, kind) in product(
        ("0.", "1.", "0.bias", "1.weight"),
        [(False, kinds[0]), *((True, kind) for kind in kinds)],
    ):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
        if is_sharded:
            model = apply_units(model, ["0", "1"])
        optimizer = torch.optim.AdamW(model.parameters(), **kind)
        x = torch.ones(2, WIDTH)
        backward(model(x).sum())
        # The gradient of the input reads the weight of layer 1, and of no other.
        loss = model(x).sum()
        for name, parameter in model.named_parameters():
            if name.startswith(cleared):
                parameter.grad = None
        optimizer.step()
        text = message_of(partial(backward, loss))
        told.append((cleared, "modified by an inplace operation" in text))

    refused = {"0.": True, "1.": False, "0.bias": True, "1.weight": False}
    assert told == [each for each in refused.items() for _ in range(3)]


@pytest.mark.req("P-11")
@on_ranks(2)
def test_graphs_of_equal_weights_can_be_run_in_any_order(world: World) -> None:
    """A reshard and a new gather of the same values do not count as a write.

    Two graphs and repeated backwards with no write between stay good.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = apply_units(copy.deepcopy(plain), ["0", "1"])
    x = torch.ones(2, WIDTH)
    for each in (plain, model):
        first, second = each(x).square().sum(), each(2 * x).square().sum()
        torch.autograd.backward(second, retain_graph=True)
        backward(first)
        backward(second)
        sgd(each.parameters()).step()
    assert_same_training(model, plain, [], [], tolerance=1e-6)


@pytest.mark.req("P-01")
@on_ranks(2)
def test_a_gradient_that_comes_to_a_sharded_unit_is_refused(world: World) -> None:
    """Values that were read of it, if any, are of no use.

    A bias that a graph uses without reading a weight is refused by the unit.
    """
    place: list[Tensor] = []
    bias = Escapes(lambda x, w: w * 1.0, place.append)
    model = nn.Sequential(bias, nn.Linear(WIDTH, 2))
    apply_units(model, ["0"])
    model(torch.ones(2, WIDTH))
    with pytest.raises(PhaseError, match="Backward reached a parameter of unit '0'"):
        backward(place[0])
