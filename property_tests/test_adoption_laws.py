"""Memory that a user gives to parameters, or holds of them, is as on the plain model.

Programs assign, exchange, flatten, cast, load and swap parameters, keep their data, and
write to what they kept. After each action the sharded model has the values of the plain
one, and every tensor that the program kept has the values of its counterpart, unless
that is a parameter of the plain model, with which memory of a user goes on to change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy, unshard_params
from composable_fsdp.naming import strip_wrapper
from property_tests.live import batches, examples
from tests.support.on_ranks import on_ranks
from tests.support.reference import apply_units, backward
from tests.support.sharded import own_parts
from tests.support.world import RankPool, World

Action = tuple[str, int]
"""What to do, and to which parameter."""
Program = tuple[str, ShardingStrategy, list[Action]]
NAMES = (
    *("keep", "new", "restore", "write kept", "exchange", "exchange units", "flatten"),
    *("drop", "step", "accumulate", "inference", "meta device", "double", "float"),
    *("load", "assign", "empty", "swap", "unshard"),
)
PROGRAMS = st.tuples(
    st.sampled_from(["composable", "wrapper"]),
    st.sampled_from(
        [
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        ]
    ),
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=12),
)


class Weights(nn.Module):
    """A matrix and four vectors, of which two ranks hold one and three."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        for i in range(4):
            made = torch.linspace(i, i + 1, numel)
            self.register_parameter(f"v{i}", nn.Parameter(made))
        self.m = nn.Parameter(torch.linspace(-1, 1, 3 * numel).view(3, numel))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.sum(), *((p * 0.5).sum() for p in self.parameters())])


class Side:
    """A model, and what a program holds of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: list[tuple[str, Tensor]] = []
        self.last: dict[str, Tensor] = {}
        self.output = torch.zeros(())

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(strip_wrapper(n), p) for n, p in self.model.named_parameters()]

    def run(self) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        made: Tensor = self.model(torch.ones(2, dtype=dtype, device="cpu"))
        # A graph that is alive forbids ``swap_tensors``.
        self.output = made.detach()
        return made

    @torch.no_grad()
    def do(self, name: str, which: int) -> None:
        """Carry out one action of ``NAMES``."""
        every = self.parameters
        key, p = every[which]
        if name == "keep":
            self.kept.append((key, p.data))
        elif name == "new":
            p.data = p.data * 0.5
        elif name == "restore":
            found = [t for k, t in self.kept if k == key and t.dtype == p.dtype]
            if found:
                p.data = found[-1]
        elif name == "write kept":
            for _, tensor in self.kept[which:]:
                tensor.mul_(2)
        elif name == "exchange":
            (_, p), (_, q) = every[which - which % 5 :][1:3]
            p.data, q.data = q.data, p.data
        elif name == "exchange units":
            q = every[(which + 5) % 10][1]
            p.data, q.data = q.data, p.data
        elif name == "flatten":
            buffer = torch.cat([p.data.reshape(-1) for _, p in every])
            views = torch.split(buffer, [p.numel() for _, p in every])
            for (key, p), view in zip(every, views, strict=True):
                p.data = view.view(p.shape)
                self.kept.append((key, p.data))
        elif name == "drop":
            self.kept.clear()
        elif name in ("step", "accumulate"):
            with torch.enable_grad():
                backward(self.run().sum())
            if name == "step":
                torch.optim.SGD(self.model.parameters(), lr=0.5).step()
                self.model.zero_grad()
        elif name == "inference":
            with torch.inference_mode():
                self.run()
        elif name == "meta device":
            with torch.device("meta"):
                self.run()
        elif name in ("double", "float"):
            self.model.to(torch.float64 if name == "double" else torch.float32)
            # The rebuilt shard takes all parameters, also those that views of a buffer
            # have become since.
            self.run()
        elif name == "swap":
            torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 2))  # type: ignore[no-untyped-call]  # untyped in torch
        elif name in ("load", "assign", "empty"):
            # ``to_empty`` gives gradients no values, either.
            self.model.zero_grad()
            values = {k: v * 0.5 for k, v in self.model.state_dict().items()}
            if name == "empty":
                self.model.to_empty(device="cpu")
            self.model.load_state_dict(values, assign=name == "assign")


def unshard(plain: nn.Module, ours: nn.Module) -> None:
    """Write into full parameters."""
    with torch.no_grad(), unshard_params(ours):
        for each in (*plain.parameters(), *ours.parameters()):
            each.mul_(2)


def run(program: Program, numel: int = 4) -> Iterator[str]:
    """Yield what differs from the plain model, after each action."""
    path, strategy, actions = program
    plain = nn.Sequential(Weights(numel), Weights(numel))
    model = apply_units(copy.deepcopy(plain), ("0", "1"), path=path, strategy=strategy)
    theirs, ours = Side(plain), Side(model)
    theirs.run()
    ours.run()
    for step, (name, which) in enumerate([*actions, ("inference", 0), ("step", 0)]):
        if name not in ("keep", "new", "assign", "swap", "restore"):
            shown = {key: p.data_ptr() for key, p in theirs.parameters}
            kept = zip(theirs.kept, ours.kept, strict=True)
            pairs = [x for x in kept if x[0][1].data_ptr() != shown[x[0][0]]]
            theirs.kept, ours.kept = [a for a, _ in pairs], [b for _, b in pairs]
        if name == "unshard":
            unshard(plain, model)
        else:
            theirs.do(name, which)
            ours.do(name, which)
        where = f"after {name} {which} ({step})"
        if not torch.equal(theirs.output, ours.output):
            yield f"{where}: the output"
        # Not always: the block adopts changes, too, as the next forward does.
        looks = which % 2 == 0
        with unshard_params(model, writeback=False) if looks else nullcontext():
            for (key, p), (_, q) in zip(
                theirs.parameters, ours.parameters, strict=True
            ):
                if looks and not torch.equal(p, q):
                    yield f"{where}: {key} is {q}, expected {p}"
        for (key, a), (_, b) in zip(theirs.kept, ours.kept, strict=True):
            _, part = own_parts(model, {**dict(theirs.parameters), key: a})[key]
            if not torch.equal(part, b):
                yield f"{where}: kept of {key} is {b}, expected {part}"
        if any(p.is_inference() for p in model.parameters()):
            yield f"{where}: a parameter is an inference tensor for ever"


def check_programs(world: World, programs: list[Program]) -> None:
    for program in programs:
        assert list(run(program)) == [], program


def case(*actions: Action) -> list[Program]:
    full, half = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    return [("composable", full, list(actions)), ("wrapper", half, list(actions))]


SWAP = [("keep", i) for i in range(10)] + [("new", i) for i in range(10)]
RESTORE = [("restore", i) for i in range(10)]


@pytest.mark.req("B-07", "R-02")
@pytest.mark.parametrize("world_size", [1, 2])
@examples(4)
@example(case(*SWAP, ("step", 0), *RESTORE, ("step", 0), ("drop", 0), ("step", 0)))
@example(case(("flatten", 0), ("step", 0), ("write kept", 0), ("unshard", 0)))
@example(case(("flatten", 0), ("load", 0), ("drop", 0), ("inference", 0), ("step", 0)))
@example(case(("exchange", 1), ("step", 0), ("exchange units", 0), ("step", 0)))
@example(case(("accumulate", 0), ("new", 0), ("accumulate", 0), ("inference", 0)))
@given(programs=batches(PROGRAMS))
def test_after_any_change_of_memory_model_and_kept_tensors_are_those_of_the_plain(
    ranks: Callable[[int], RankPool], world_size: int, programs: list[Program]
) -> None:
    """No action writes to memory that the plain model would not write."""
    ranks(world_size).run(check_programs, programs)


@pytest.mark.req("B-07", "R-02")
@on_ranks(2)
def test_large_weights_are_swapped_and_flattened(world: World) -> None:
    """The law holds for parameters of many pages."""
    middle = [("step", 0), ("write kept", 0), ("exchange", 1), ("step", 0)]
    for program in case(*SWAP[:2], ("new", 4), *middle, ("restore", 0), ("flatten", 0)):
        assert list(run(program, numel=70_001)) == []
