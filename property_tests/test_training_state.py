"""The two-level training state, as a machine that mixes everything a script may do.

The machine runs in the parent and knows only what is legal when; what it did goes to
the ranks as one program at the end of each example, so that all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from composable_fsdp import ShardingStrategy
from property_tests.live import examples
from property_tests.training_state import Action, Options, run_program
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.reference import STRATEGIES
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankPool

RankCount = Callable[[int], RankPool]

RECIPES = model_recipes(2, 2, FEATURES - {"replicate", "dtypes"})
ACTIONS = 24
"""Actions in one program."""
BATCHES = st.integers(0, 3)
UNITS = st.integers(0, 5)


class TrainingState(RuleBasedStateMachine):
    """What a training script may do next, given what it did."""

    def __init__(self, ranks: RankCount, world_size: int) -> None:
        super().__init__()
        self.pool, self.world_size = ranks(world_size), world_size
        self.program: list[Action] = []
        self.graphs = 0
        self.unreduced = self.saved = False

    @initialize(
        recipe=RECIPES,
        options=st.builds(
            Options, st.sampled_from(STRATEGIES), st.booleans(), st.booleans()
        ),
    )
    def start(self, recipe: ModelRecipe, options: Options) -> None:
        if self.world_size > 2:
            # Compared in float64; a cast would make a step of the last bit.
            options = replace(options, low=False)
        self.recipe, self.options = recipe, options

    @rule(batch=BATCHES, micro_batches=st.integers(0, 2))
    def train(self, batch: int, micro_batches: int) -> None:
        """A step as scripts have it, so that programs get somewhere."""
        for i in range(micro_batches):
            self.forward(batch + i)
            self.backward(-1, False)
        self.forward(batch)
        self.backward(-1, True)
        self.step()

    @rule(batch=BATCHES)
    def train_and_zero(self, batch: int) -> None:
        self.train(batch, 0)
        self.zero_grad(True)

    @precondition(lambda self: self.graphs < 3)
    @rule(batch=BATCHES)
    def forward(self, batch: int) -> None:
        self.program.append(("forward", batch))
        self.graphs += 1

    @precondition(lambda self: self.graphs)
    @rule(which=st.integers(0, 2), sync=st.booleans())
    def backward(self, which: int, sync: bool) -> None:
        self.program.append(("backward", which, sync))
        self.graphs -= 1
        self.unreduced = not sync

    @precondition(lambda self: not self.unreduced)
    @rule()
    def step(self) -> None:
        self.program.append(("step",))
        self.graphs = 0

    @precondition(lambda self: not self.unreduced)
    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.program.append(("zero_grad", set_to_none))

    # Clipped gradients differ by rounding, which a cast makes larger.
    @precondition(lambda self: not self.unreduced and not self.options.low)
    @rule(norm_type=st.sampled_from([2.0, 1.0, float("inf")]))
    def clip(self, norm_type: float) -> None:
        self.program.append(("clip", norm_type))

    @rule(inference=st.booleans())
    def evaluate(self, inference: bool) -> None:
        self.program.append(("evaluate", inference))

    @rule(unit=UNITS)
    def break_forward(self, unit: int) -> None:
        self.program.append(("break_forward", unit))

    @precondition(lambda self: not self.unreduced and not self.graphs)
    @rule(which=st.integers(0, 7))
    def freeze(self, which: int) -> None:
        self.program.append(("freeze", which))

    @rule(rank0_only=st.booleans())
    def look(self, rank0_only: bool) -> None:
        self.program.append(("look", rank0_only))

    @rule(unit=UNITS, rank0_only=st.booleans())
    def write(self, unit: int, rank0_only: bool) -> None:
        self.program.append(("write", unit, rank0_only))
        self.graphs = 0

    @precondition(lambda self: not self.unreduced)
    @rule()
    def copy(self) -> None:
        self.program.append(("copy",))
        self.graphs = 0

    @precondition(lambda self: not self.graphs)
    @rule(unit=UNITS)
    def unshard(self, unit: int) -> None:
        self.program.append(("unshard", unit))

    @rule()
    def intrude(self) -> None:
        self.program.append(("intrude",))

    @rule()
    def save(self) -> None:
        self.program.append(("save",))
        self.saved = True

    @precondition(lambda self: self.saved)
    @rule()
    def load(self) -> None:
        self.program.append(("load",))
        self.graphs = 0

    def teardown(self) -> None:
        if self.program:
            self.pool.run(run_program, self.recipe, self.options, self.program)


@pytest.mark.few(2)
@pytest.mark.req("S1-42", "S1-36")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whatever_a_script_does_the_three_models_agree(
    ranks: RankCount, world_size: int
) -> None:
    """Losses, gradients, weights and phases after every action of a random program."""

    def machine() -> TrainingState:
        return TrainingState(ranks, world_size)

    run_state_machine_as_test(
        cast("Any", machine),  # a class or a function, though it is typed as a class
        settings=settings(examples(20), stateful_step_count=ACTIONS),
    )


def step(batch: int) -> list[Action]:
    """What ``train`` puts into a program."""
    return [("forward", batch), ("backward", -1, True), ("step",)]


PAIR = ModelRecipe(root=ModuleRecipe(children=(ModuleRecipe(),)), sharded=("block",))
TWICE = ModelRecipe(
    root=ModuleRecipe(
        children=(ModuleRecipe(), ModuleRecipe(children=(ModuleRecipe(kind="again"),)))
    ),
    width=1,
    sharded=("block", "block_1"),
)
FOUND: dict[str, tuple[ModelRecipe, Options, list[Action]]] = {
    # The inner block's unit, below two others, was shown twice and freed once.
    "a unit in two places is shown": (
        TWICE,
        Options(ShardingStrategy.FULL_SHARD),
        [("write", 2, False)],
    ),
    # The record of reductions was read by the regions of after the change.
    "freezing after a recorded step": (
        PAIR,
        Options(ShardingStrategy.NO_SHARD),
        [*step(0), ("zero_grad", True), ("freeze", 0), *step(0)],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once(ranks: RankCount, name: str) -> None:
    """Each was found by the machine, and is here in the place of an example."""
    ranks(2).run(run_program, *FOUND[name])
