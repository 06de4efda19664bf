"""Sameness: whatever a program does to parameters, all ranks send the same.

Some ranks hold nothing of a parameter, of a unit, or of several: units of one element,
0-d parameters, fewer rows than ranks. What decides on a collective must not see it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import (
    ShardingStrategy,
    clip_grad_norm_,
    no_sync,
    optim_state_dict,
    reshard,
    set_reshard_after_backward,
    unshard,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import FSDPError
from property_tests.live import batches, examples
from tests.support.models import build, legal_units
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.reference import apply_units, backward, loss_of, sgd, wide_input
from tests.support.strategies import model_recipes
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
Action = tuple[str, int]
"""What to do, and to which parameter (counted round)."""
Program = tuple[ModelRecipe, ShardingStrategy, str, list[Action]]

NAMES = (
    *("step", "no_sync step", "optimizer step", "other data", "same address", "write"),
    *("freeze", "double", "float", "assign", "clear gradient", "keep", "give up"),
    *("unshard", "reshard", "unshard_params", "state dict", "clip"),
)
PROGRAMS = st.tuples(
    model_recipes(2, 3, {"odd_shapes", "frozen", "containers"}),
    st.sampled_from([ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD]),
    st.sampled_from(["composable", "wrapper"]),
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 7)), max_size=10),
)


class Actor:
    """One model, and what a rank does to it."""

    def __init__(self, world: World, program: Program) -> None:
        recipe, strategy, path, _ = program
        plain = build(recipe)
        units = legal_units(plain, recipe.sharded)
        self.model = apply_units(plain, units, path=path, strategy=strategy)
        self.rank, self.width, self.steps = world.rank, recipe.width, 0
        self.optimizer = sgd(self.model.parameters())

    def do(self, name: str, which: int) -> None:
        """Carry out one action of ``NAMES``."""
        model = self.model
        parameters = list(model.parameters())
        p = parameters[which % len(parameters)] if parameters else nn.Parameter()
        if name in ("step", "no_sync step"):
            with no_sync(model) if name == "no_sync step" else nullcontext():
                self.step()
        elif name == "optimizer step":
            reshard(model)
            self.optimizer = sgd(parameters)
            self.optimizer.step()
        elif name == "other data":
            p.data = p.data.clone()
        elif name == "same address":
            p.data = torch.from_numpy(p.data.numpy())
        elif name == "write":
            with torch.no_grad():
                p.mul_(1)
        elif name == "freeze":
            p.requires_grad_(not p.requires_grad)
        elif name in ("double", "float"):
            model.to(torch.float64 if name == "double" else torch.float32)
        elif name == "assign":
            model.load_state_dict(model.state_dict(), assign=True)
        elif name == "clear gradient":
            p.grad = None
        elif name in ("keep", "give up"):
            set_reshard_after_backward(model, name == "give up")
        elif name in ("unshard", "reshard"):
            (unshard if name == "unshard" else reshard)(model)
        elif name == "unshard_params":
            with unshard_params(model, with_grads=which % 2 == 1):
                pass
        elif name == "state dict":
            model.state_dict()
            optim_state_dict(model, self.optimizer)
        else:
            self.step()
            clip_grad_norm_(model, 1.0)

    def step(self) -> None:
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        loss = loss_of(
            self.model, wide_input(self.width)(self.steps, self.rank).to(dtype)
        )
        self.steps += 1
        if loss.requires_grad:
            backward(loss)


def history(world: World, program: Program) -> list[Any]:
    """Per action, what this rank sent and which error it met."""
    actor = Actor(world, program)
    seen: list[Any] = []
    for name, which in [("step", 0), *program[3], ("step", 0)]:
        problem = ""
        with record() as calls, warnings.catch_warnings():
            # An optimizer may step on what a step under no_sync has not reduced.
            warnings.filterwarnings("ignore", ".* wait for a reduction ")
            try:
                actor.do(name, which)
            except FSDPError as error:
                problem = type(error).__name__
                reshard(actor.model)
        seen.append((name, which, problem, [str(call) for call in calls]))
    return seen


def check_sameness(world: World, programs: list[Program]) -> None:
    """Each program sends the same on all ranks, and meets the same errors."""
    for program in programs:
        mine = history(world, program)

        everyone = world.gather(mine)
        same = [len(set(map(str, steps))) == 1 for steps in zip(*everyone, strict=True)]
        assert all(same), (program, everyone)


ONE = ModuleRecipe("tiny", children=(ModuleRecipe("scalar"), ModuleRecipe("tiny")))
HEAD = ModelRecipe(
    ModuleRecipe("linear", children=(ONE,)), sharded=("block", "block.block")
)
KEPT = ShardingStrategy.SHARD_GRAD_OP


def case(*actions: Action) -> list[Program]:
    """A model with a unit of two parameters of one element and one of one."""
    return [(HEAD, KEPT, path, list(actions)) for path in ("composable", "wrapper")]


@pytest.mark.few(1)
@pytest.mark.req("P-03")
@pytest.mark.parametrize("world_size", [2, 3])
@examples(5)
@example(case(("double", 0), ("step", 0), ("float", 0)))
@example(case(*[("no_sync step", 0), ("other data", 2)] * 2))
@example(case(("keep", 0), ("step", 0), ("other data", 3), ("step", 0)))
@example(case(("keep", 0), ("step", 0), ("same address", 3), ("step", 0)))
@example(case(("keep", 0), ("step", 0), ("write", 3), ("step", 0)))
@example(case(("assign", 0), ("step", 0), ("optimizer step", 0), ("state dict", 0)))
@example(case(("no_sync step", 0), ("optimizer step", 0)))
@given(programs=batches(PROGRAMS))
def test_all_ranks_send_the_same_whatever_is_done_to_parameters(
    ranks: RankCount, world_size: int, programs: list[Program]
) -> None:
    """Recorded calls and errors of every action are equal on all ranks."""
    ranks(world_size).run(check_sameness, programs)
