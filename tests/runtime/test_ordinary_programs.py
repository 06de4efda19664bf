"""Programs that users write, on modules and tools of torch that no other test has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, rnn
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint_sequential

from composable_fsdp import unshard_params
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    assert_same_training,
    averaged_gradients,
    backward,
    differences,
    loss_of,
    sgd,
    train,
)
from tests.support.world import World

WIDTH = 6
STEPS = 3


def features(step: int, rank: int, *shape: int) -> Tensor:
    """Inputs ``(3, *shape)`` of (step, rank)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, *(shape or (WIDTH,)), generator=generator)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))


class Packed(nn.Module):
    """One unit gives a packed sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Packs(), nn.GRU(WIDTH, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = rnn.pad_packed_sequence(self.last(self.first(x))[0], batch_first=True)
        return y


class Packs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return rnn.pack_padded_sequence(super().forward(x), [4, 3, 1], True)


class Attends(nn.Module):
    """The mask leaves out one key, and the weights are a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, -1] = True
        y, weights = self.first(x, x, x, key_padding_mask=mask)
        return torch.cat([x + y, weights], 2)


class Chunks(nn.Module):
    """Recomputed in two pieces that are no units."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(*(block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint_sequential(self.chain, 2, x, use_reentrant=False)  # type: ignore[no-untyped-call]  # of torch
        return y


class Features(nn.Module):
    """Hooks of the user collect what units and their parts give, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = block(), block()
        self.found: dict[str, Tensor] = {}
        for name in ("first", "last.1"):
            self.get_submodule(name).register_forward_hook(Collects(self.found, name))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return torch.cat([y, *self.found.values()], 1)


class Collects:
    """A hook that ``copy.deepcopy`` copies with the model."""

    def __init__(self, found: dict[str, Tensor], name: str) -> None:
        self.found, self.name = found, name

    def __call__(self, module: nn.Module, args: Any, y: Tensor) -> None:
        self.found[self.name] = y


class Routes(nn.Module):
    """An expert per batch, chosen by a number that all ranks have; others rest."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([block() for _ in range(3)])
        self.gate, self.calls = nn.Linear(WIDTH, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        at = self.calls // 2 % 3
        y: Tensor = self.experts[at](x) * self.gate(x).softmax(-1)[:, at : at + 1]
        return y


class Autocasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = block(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.last(self.first(x))
        return y


def chain(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def pruned() -> nn.Module:
    linear = square()
    prune.l1_unstructured(linear, "weight", 0.3)  # type: ignore[no-untyped-call]  # of torch
    return linear


def images() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    model: Any = nn.Sequential(*layers, nn.Conv2d(4, 2, 3))
    made: nn.Module = model.to(memory_format=torch.channels_last)
    return made


class Case(NamedTuple):
    """A model, its units below the root, and the shape of a row of its input."""

    build: Callable[[], nn.Module]
    units: tuple[str, ...] = ("0", "2")
    shape: tuple[int, ...] = (WIDTH,)
    optimize: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw


CASES = {
    "packed sequences": Case(Packed, ("first", "last"), (4, WIDTH)),
    "attention weights": Case(Attends, ("first",), (4, WIDTH)),
    "recomputed chunks": Case(Chunks, ("chain.0", "chain.1", "chain.3")),
    "collected features": Case(Features, ("first", "last")),
    "routed experts": Case(Routes, ("experts.0", "experts.1", "experts.2")),
    "autocast": Case(Autocasts, ("first", "last"), optimize=sgd),
    "channels last": Case(images, ("0", "3"), (3, 8, 8)),
    "pruning": Case(lambda: chain(pruned())),
    "weight norm": Case(lambda: chain(parametrizations.weight_norm(square()))),
    "orthogonal weights": Case(lambda: chain(parametrizations.orthogonal(square()))),
    "spectral norm by hooks": Case(lambda: chain(nn.utils.spectral_norm(square()))),
}


def build(case: Case) -> nn.Module:
    """The same model at each call; pruned models cannot be copied."""
    torch.manual_seed(0)
    return case.build()


def train_replicas(case: Case, world: World) -> tuple[nn.Module, list[float]]:
    """Train one plain model per rank, by data parallelism; this rank's and losses."""
    replicas = [build(case) for _ in range(world.world_size)]
    optimizers = [case.optimize(each.parameters()) for each in replicas]
    losses = []
    for step in range(STEPS):
        for rank, each in enumerate(replicas):
            loss = loss_of(each, features(step, rank, *case.shape))
            backward(loss)
            losses += [loss.item()] if rank == world.rank else []
        for same in zip(*(each.parameters() for each in replicas), strict=True):
            grads = [p.grad for p in same if p.grad is not None]
            for p in same if grads else ():
                p.grad = torch.stack(grads).mean(0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return replicas[world.rank], losses


@pytest.mark.few(5)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_a_program_trains_and_evaluates_as_the_plain_one(
    world: World, name: str, path: str
) -> None:
    """With buffers of each rank's own."""
    case = CASES[name]
    model = apply_units(build(case), case.units, path=path)

    def make(step: int, rank: int) -> Tensor:
        return features(step, rank, *case.shape)

    losses = train(model, world.rank, make, case.optimize, steps=STEPS)
    reference, expected = train_replicas(case, world)

    assert_same_training(model, reference, losses, expected, tolerance=1e-5)
    x = features(9, 0, *case.shape)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), reference.eval()(x))


def normed() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


@on_ranks(2)
def test_averaged_models_are_those_of_the_plain_model(world: World) -> None:
    """An AveragedModel with an average over lists, and its batch norms made anew."""
    torch.manual_seed(0)
    plain = normed()
    models = [plain, apply_units(copy.deepcopy(plain), ["0", "3"])]
    average = swa_utils.get_ema_multi_avg_fn(0.5)  # type: ignore[no-untyped-call]  # of torch
    averaged = [swa_utils.AveragedModel(m, multi_avg_fn=average) for m in models]
    found = []
    for model, slow in zip(models, averaged, strict=True):
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            backward(loss_of(model, features(step, 0)))
            optimizer.step()
            optimizer.zero_grad()
            slow.update_parameters(model)
        swa_utils.update_bn([features(step, 0) for step in range(2)], slow)
        slow.eval()
        found.append([slow(features(9, 0)), *slow.module.state_dict().values()])

    torch.testing.assert_close(*found)


@on_ranks(2)
def test_a_rank_whose_batch_is_empty_takes_part(world: World) -> None:
    """Its gradients are zeros, which count in the mean."""
    torch.manual_seed(0)
    plain = nn.Sequential(block(), nn.LayerNorm(WIDTH))
    model = apply_units(copy.deepcopy(plain), ["0", "1"])

    def loss(each: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = each(x).square().sum()
        return y

    batches = [features(0, 0), features(0, 1)[:0]]
    averaged_gradients(plain, batches, loss)
    backward(loss(model, batches[world.rank]))
    for each in (plain, model):
        sgd(each.parameters()).step()

    assert_same_training(model, plain, [], [], tolerance=1e-6)


@on_ranks(2)
def test_parameters_are_one_vector_inside_unshard_params(world: World) -> None:
    """What ``vector_to_parameters`` writes is trained on."""
    torch.manual_seed(0)
    plain = block()
    model = apply_units(copy.deepcopy(plain), ["0"])
    for each in (plain, model):
        with unshard_params(model) if each is model else nullcontext():
            vector = nn.utils.parameters_to_vector(each.parameters()).detach()
            nn.utils.vector_to_parameters(vector * 2, each.parameters())
        backward(loss_of(each, features(0, 0)))
        sgd(each.parameters()).step()

    assert_same_training(model, plain, [], [], tolerance=1e-6)


@on_ranks(2)
def test_models_and_optimizers_go_back_by_plain_state_dicts(world: World) -> None:
    """In one process: the same steps again give the same numbers, bit by bit."""
    torch.manual_seed(0)
    model = apply_units(block(), ["0"])
    optimizer = adamw(model.parameters())
    states: list[Any] = []
    for begin in (0, 2, 2):
        if len(states) == 3:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        for step in range(begin, begin + 2):
            backward(loss_of(model, features(step, world.rank)))
            optimizer.step()
            optimizer.zero_grad()
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        states += [whole, copy.deepcopy(optimizer.state_dict())][
            : 2 if not begin else 1
        ]

    assert differences(states[3], states[2]) == {}
    assert differences(states[2], states[0]) != {}
