"""Activation checkpointing of any kind, at any place, in either order with sharding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial

import pytest
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

from composable_fsdp import checkpoint
from composable_fsdp.access import (
    set_modules_to_forward_prefetch,
    set_reshard_after_forward,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.doors import checkpoint_wrapper as wrappers
from composable_fsdp.doors.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import TRANSPARENT
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    apply_units,
    assert_same_training,
    backward,
    gpt_input,
    loss_of,
    sgd,
    train,
    trained_reference,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
Recompute = Callable[[nn.Module], nn.Module]

KINDS: dict[str, Recompute] = {
    "in place": checkpoint,
    "in place, reentrant": partial(checkpoint, use_reentrant=True),
    "wrapper": checkpoint_wrapper,
    "wrapper, reentrant": partial(
        checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT
    ),
    "torch's wrapper": torchs.checkpoint_wrapper,
    "offload": offload_wrapper,
}
PLACES = {
    "around units": ["body"],
    "on a unit": ["body.1"],
    "in a unit": ["body.0.up", "body.1.norm_1", "body.1.down"],
    "nested": ["body", "body.1", "body.1.qkv"],
}
UNITS = ("body.0", "body.1")


class Counted(nn.Linear):
    """Counts how often its forward runs."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count, and map ``x``."""
        self.calls += 1
        return super().forward(x)


class Tower(nn.Module):
    """Token embedding, a stack that is one module, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        gpt = TinyGPT(layers=3, tied_head=True)
        self.tokens, self.head = gpt.tokens, gpt.head
        self.body = nn.Sequential(*gpt.blocks)
        for block in self.body:
            block.up.__class__ = Counted

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(batch, time)`` to logits."""
        y: Tensor = self.head(self.body(self.tokens(tokens)))
        return y


def inside(module: nn.Module, name: str) -> nn.Module:
    """The submodule of a plain name, without the wrappers around it."""
    for part in [*name.split("."), ""] if name else [""]:
        module = module.get_submodule(part) if part else module
        while found := [
            module._modules[c] for c in TRANSPARENT if c in module._modules
        ]:
            module = found[0]  # type: ignore[assignment]
    return module


def recompute(model: nn.Module, names: Iterable[str], kind: Recompute) -> None:
    """Checkpoint the submodules of those names, wrappers and all."""
    for name in sorted(names, key=len, reverse=True):
        parent, _, key = name.rpartition(".")
        holder = inside(model, parent)
        setattr(holder, key, kind(holder.get_submodule(key)))


def build(path: str, kind: str, place: str, order: str) -> nn.Module:
    """A sharded tower with the ``place`` checkpointed before or after sharding."""
    model = Tower()
    if order == "before":
        recompute(model, PLACES[place], KINDS[kind])
    units = [n for n, m in model.named_modules() if m in unit_modules(model)]
    sharded = apply_units(model, units, path=path)
    if order == "after":
        recompute(sharded, PLACES[place], KINDS[kind])
    return sharded


def unit_modules(model: nn.Module) -> list[nn.Module]:
    """What stands in the places of the units: a block, or its checkpoint wrapper."""
    body = inside(model, "body")
    return [body.get_submodule(name.rpartition(".")[2]) for name in UNITS]


@pytest.mark.req("S2-05", "B-12")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_recomputed_model_trains_as_the_plain_one(
    world: World, path: str, kind: str, place: str, order: str
) -> None:
    """Either flavour, around, on, in a unit and nested, tied head, both nestings."""
    model = build(path, kind, place, order)
    plain, expected = trained_reference(Tower, world.world_size, gpt_input, sgd)
    losses = train(model, world.rank, gpt_input, sgd)

    assert_same_training(model, plain, losses, [s[world.rank] for s in expected])
    counted = sum(m.calls for m in model.modules() if isinstance(m, Counted))
    assert (counted > 3 * 3) is (kind != "offload")


def gathers(world: World, place: str | None, kind: str) -> list[int]:
    """All-gathers of forward and of backward, in the second of two steps."""
    model = apply_units(Tower(), UNITS)
    if place is not None:
        recompute(model, PLACES[place], KINDS[kind])
    backward(loss_of(model, gpt_input(0, world.rank)))
    with record() as calls:
        loss = loss_of(model, gpt_input(1, world.rank))
        forward = len(calls)
        backward(loss)
    ops = [call.op for call in calls]
    assert ops.count("reduce_scatter") == 3
    return [ops[:forward].count("all_gather"), ops[forward:].count("all_gather")]


@pytest.mark.req("B-12")
@pytest.mark.parametrize("kind", ["in place", "in place, reentrant", "wrapper"])
@pytest.mark.parametrize("place", ["around units", "on a unit", "in a unit"])
def test_recomputation_gathers_no_unit_twice(
    ranks: RankCount, place: str, kind: str
) -> None:
    """Backward gathers each unit once, for recomputation and gradients together."""
    usual = ranks(2).run(gathers, None, kind)

    assert ranks(2).run(gathers, place, kind) == usual == [[3, 2]] * 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: checkpoint(m.blocks), r"ModuleList, which has no forward"),
        (lambda m: checkpoint(list(m.blocks)), r"got a list.*one after"),
        (
            lambda m: checkpoint(m, use_reentrant=True, debug=True),
            r"neither context_fn nor debug",
        ),
    ],
)
def test_what_cannot_be_checkpointed_is_refused(
    call: Callable[[TinyGPT], object], text: str
) -> None:
    """The error says why and what to do, and nothing is left behind."""
    model = TinyGPT()

    with pytest.raises(CompositionError, match=text):
        call(model)

    assert all("forward" not in vars(m) for m in model.modules())
    assert all(checkpoint.state(m) is None for m in model.modules())


@pytest.mark.req("S2-05")
@pytest.mark.parametrize(
    "name",
    ["checkpoint_wrapper", "offload_wrapper", "apply_activation_checkpointing"],
)
def test_wrappers_have_the_signatures_of_torch(name: str) -> None:
    """Names, order and kinds of the arguments, and defaults that are plain values."""
    ours, theirs = (
        inspect.signature(getattr(where, name)).parameters.values()
        for where in (wrappers, torchs)
    )

    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert str(getattr(a.default, "name", type(a.default))) == str(
            getattr(b.default, "name", type(b.default))
        )
    assert list(CheckpointImpl.__members__) == list(torchs.CheckpointImpl.__members__)


def fqns(model: nn.Module) -> list[str]:
    """Names that the handles give to parameters."""
    return [n for s in _get_fsdp_states(model) for n in s.handle._fqns]


@pytest.mark.req("S2-05", "S3-04")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ["before", "after"])
@on_ranks(2)
def test_wrappers_leave_no_trace_in_state_dicts(
    world: World, path: str, order: str
) -> None:
    """Keys are the plain model's, of the whole and of a wrapped part."""
    plain = Tower()
    model = build(path, "wrapper", "nested", order)
    train(model, world.rank, gpt_input, sgd, steps=1)
    saved = model.state_dict()
    assert list(saved) == list(plain.state_dict())
    plain.load_state_dict(saved)
    body = inside(model, "").get_submodule("body")
    assert list(body.state_dict()) == list(plain.body.state_dict())
    train(model, world.rank, gpt_input, sgd, steps=1)

    result = model.load_state_dict(saved)

    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same_training(model, plain, [], [])
    assert all(n.count(".") < 4 for n in fqns(model)), fqns(model)


@pytest.mark.parametrize("path", PATHS)
def test_settings_of_a_unit_that_was_wrapped_later_find_it(
    one_rank: World, path: str
) -> None:
    """By the module that stands in the tree, whichever wrapper is outside."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = apply_units(layers, ["0", "1"], path=path)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
    held = list(getattr(model, "module", model).children())
    set_reshard_after_forward(held[0], False, recurse=False)
    set_modules_to_forward_prefetch(held[0], [held[1]])
    first, second = _get_fsdp_states(model)[1:]

    assert first.settings.reshard_after_forward is False
    assert second.settings.reshard_after_forward is None
    assert first.ahead_in_forward == (second,)
