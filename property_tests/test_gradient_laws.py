"""Gradients that a user keeps, clears, swaps or sets behave as under autograd.

Whatever is done to ``.grad`` between backwards is done to the plain model, too, whose
backward averages over the ranks; then every gradient there is, and every tensor that
somebody kept of one, has the same values: of this rank's part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from composable_fsdp import CPUOffload, MixedPrecision, fully_shard
from property_tests.live import batches, examples
from tests.support.reference import backward, wide_input
from tests.support.sharded import own_parts
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
Action = tuple[str, int]
"""What to do, and to which parameter, or with which of them in the loss."""
Program = tuple[str, list[Action]]

COUNT = 6
NAMES = (
    "backward",
    "keep",
    "clear",
    "swap",
    "set",
    "share",
    "replace data",
    "multiply",
    "zero",
    "clear all",
)
KINDS = ("plain", "offloaded", "reduced in float64")
PROGRAMS = st.tuples(
    st.sampled_from(KINDS),
    st.lists(
        st.one_of(
            st.tuples(st.just("backward"), st.sampled_from([63, 63, 7, 10, 32])),
            st.tuples(st.sampled_from(NAMES[1:]), st.integers(0, COUNT - 1)),
        ),
        max_size=12,
    ),
)


class Weights(nn.Module):
    """Six vectors of one shape, three on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(COUNT):
            self.register_parameter(f"p{i}", nn.Parameter(torch.full((4,), i + 1.0)))

    def forward(self, x: Tensor, mask: int) -> Tensor:
        """A sum over the parameters whose bits are in ``mask``."""
        total = x.new_zeros(())
        for i, p in enumerate(self.parameters()):
            if mask >> i & 1:
                total = total + ((i + 1) * p * x[0]).sin().sum()
        return total


class Held:
    """A model's parameters, and gradients of them that somebody kept."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.kept: list[tuple[int, Tensor]] = []

    def do(self, name: str, which: int) -> None:
        """Carry out one action of ``NAMES`` but the first."""
        p = self.parameters[which]
        other = self.parameters[which // 3 * 3 + (which + 1) % 3]  # on the same rank
        if name == "keep":
            if p.grad is not None:
                self.kept.append((which, p.grad))
        elif name == "clear":
            p.grad = None
        elif name == "swap":
            p.grad, other.grad = other.grad, p.grad
        elif name == "set":
            p.grad = torch.full_like(p, 0.5)
            self.kept.append((which, p.grad))
        elif name == "share":
            p.grad = other.grad
        elif name == "replace data":
            if p.grad is not None:
                p.grad.data = p.grad.data * 2
        elif name == "multiply":
            if p.grad is not None:
                p.grad.mul_(3)
        else:
            for each in self.parameters:
                if name == "clear all":
                    each.grad = None
                elif each.grad is not None:
                    each.grad.zero_()


def run(world: World, program: Program) -> Iterator[str]:
    """Yield what differs from the plain model, after each action."""
    kind, actions = program
    plain = Weights()
    model = fully_shard(
        copy.deepcopy(plain),
        cpu_offload=CPUOffload(offload_params=True) if kind == "offloaded" else None,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float64)
        if kind == "reduced in float64"
        else None,
    )
    theirs, ours = Held(plain), Held(model)
    model(wide_input(4)(0, 0), 63)
    for step, (name, which) in enumerate(actions):
        if name != "backward":
            if name == "share" and kind == "offloaded":
                continue
            theirs.do(name, which)
            ours.do(name, which)
        else:
            inputs = [wide_input(4)(step, rank) for rank in range(world.world_size)]
            losses = [plain(x, which) for x in inputs]
            backward(torch.stack(losses).mean())
            backward(model(inputs[world.rank], which))
        for i, (p, q) in enumerate(
            zip(theirs.parameters, ours.parameters, strict=True)
        ):
            if not q.numel():
                continue  # of no element here: None, or what the user has set
            if p.grad is None or q.grad is None:
                if (p.grad is None) != (q.grad is None):
                    yield f"action {step} {name}: .grad of p{i} is {q.grad}"
            elif not same(model, f"p{i}", p.grad, q.grad):
                yield f"action {step} {name}: .grad of p{i} is {q.grad}"
        held = {i for i, q in enumerate(ours.parameters) if q.numel()}
        kept = [
            [each for each in side.kept if each[0] in held] for side in (theirs, ours)
        ]
        for (i, a), (_, b) in zip(*kept, strict=True):
            if not same(model, f"p{i}", a, b):
                yield f"action {step} {name}: kept of p{i} is {b}, expected {a}"


def same(model: nn.Module, name: str, full: Tensor, part: Tensor) -> bool:
    """Whether ``part`` is this rank's of ``full``."""
    _, expected = own_parts(model, {f"p{i}": full for i in range(COUNT)})[name]
    return torch.allclose(part, expected, rtol=1e-5, atol=1e-6)


def check_programs(world: World, programs: list[Program]) -> None:
    """Each program ends with the plain model's gradients."""
    for program in programs:
        assert list(run(world, program)) == [], program


def case(*actions: Action) -> list[Program]:
    """The same program in every kind."""
    return [(kind, list(actions)) for kind in KINDS]


ALL = ("backward", 63)


@pytest.mark.req("P-08")
@examples(8)
@example(case(ALL, ("keep", 0), ("clear", 0), ALL, ("keep", 2), ("clear", 2), ALL))
@example(case(ALL, ("swap", 0), ALL, ("swap", 2), ALL))
@example(case(ALL, ("keep", 1), ALL, ("clear all", 0), ALL, ALL))
@example(case(("backward", 3), ("keep", 0), ALL, ("clear", 0), ("backward", 10), ALL))
@example(case(("set", 0), ("set", 3), ALL, ("share", 1), ALL, ("zero", 0), ALL))
@example(case(ALL, ("replace data", 0), ALL, ("multiply", 3), ALL))
@given(programs=batches(PROGRAMS))
def test_gradients_that_are_kept_cleared_and_set_are_those_of_autograd(
    ranks: RankCount, programs: list[Program]
) -> None:
    """Values of every ``.grad``, and of every tensor that was one."""
    ranks(2).run(check_programs, programs)
