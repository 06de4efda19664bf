"""Combinations: what single tests show feature by feature holds when they meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from property_tests.combination_recipes import (
    HYBRID,
    Action,
    Combination,
    Micro,
    Step,
    Unit,
)
from property_tests.combinations import run_on_both_paths
from property_tests.live import examples
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import RankPool

INDEX = st.integers(0, 4)
MIXED = ["none", "none", "none", "compute", "low", "reduce", "kept", "inputs", "output"]
CHECKPOINTS = ["plain", "reentrant", "wrapper", "reentrant wrapper"]


def units(world_size: int) -> st.SearchStrategy[Unit]:
    """Draw the options of one unit."""
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if world_size % 2 == 0:
        strategies += HYBRID
    return st.builds(
        Unit,
        strategy=st.sampled_from(strategies),
        block=st.sampled_from(["ROW", "ELEMENT", "TENSOR", "rows(3)"]),
        mixed=st.sampled_from(MIXED),
        offload=st.sampled_from([False, False, True]),
        prefetch=st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", None]),
        forward_prefetch=st.booleans(),
    )


def micros() -> st.SearchStrategy[Micro]:
    """Draw one microbatch."""
    return st.builds(
        Micro,
        mode=st.sampled_from(["sync", "no_sync", "local"]),
        forwards=st.sampled_from([1, 1, 2]),
        backward=st.sampled_from(["joint", "each", "reversed", "twice"]),
        keep=st.booleans(),
        bypass=st.one_of(st.none(), INDEX),
        inside=st.booleans(),
        by_rank=st.sampled_from([False, False, True]),
    )


def actions() -> st.SearchStrategy[Action]:
    """Draw something that a script may do between steps."""
    return st.one_of(
        st.tuples(st.just("evaluate"), st.sampled_from(["no_grad", "inference"])),
        st.tuples(st.just("drop")),
        st.tuples(st.just("unshard_unit"), INDEX, st.booleans()),
        st.tuples(st.just("reshard_unit"), INDEX),
        st.tuples(st.just("look"), INDEX),
        st.tuples(st.just("write"), INDEX, st.booleans()),
        st.tuples(st.just("freeze"), st.integers(0, 9)),
        st.tuples(st.just("copy_models")),
        st.tuples(st.just("save_and_load")),
        st.tuples(st.just("break_forward"), INDEX),
        st.tuples(st.just("reshard_after_forward"), INDEX, st.booleans()),
        st.tuples(st.just("fill"), st.booleans()),
        st.tuples(st.just("divide"), INDEX, st.sampled_from([1.0, 3.0])),
        st.tuples(
            st.just("prefetch"),
            st.sampled_from(["forward", "backward"]),
            INDEX,
            st.lists(INDEX, max_size=3).map(tuple),
        ),
    )


def steps() -> st.SearchStrategy[Step]:
    """Draw one step; its last microbatch reduces."""

    def ended(micro: list[Micro]) -> tuple[Micro, ...]:
        return (*micro[:-1], replace(micro[-1], mode="sync", keep=False))

    return st.builds(
        Step,
        actions=st.lists(actions(), max_size=3).map(tuple),
        micro=st.lists(micros(), min_size=1, max_size=3).map(ended),
        zero=st.sampled_from(["none", "none", "zeros", "keep"]),
    )


def combinations(world_size: int) -> st.SearchStrategy[Combination]:
    """Draw a combination that makes sense on so many ranks."""
    plain = model_recipes(2, 3, FEATURES - {"replicate"}, max_width=3)
    mixed = model_recipes(2, 3, FEATURES, max_width=3)
    checkpoints = st.tuples(INDEX, st.sampled_from(CHECKPOINTS))
    options = st.builds(
        Combination,
        model=st.one_of(plain, plain, mixed),
        style=st.sampled_from(["manual", "auto"]),
        units=st.lists(units(world_size), min_size=1, max_size=4).map(tuple),
        limit=st.booleans(),
        pairs=st.booleans(),
        promote=st.booleans(),
        checkpoints=st.lists(checkpoints, max_size=2).map(tuple),
        late=st.booleans(),
        outside=st.booleans(),
        hook=st.sampled_from(["none", "none", "none", "default", "bf16"]),
        input_grad=st.booleans(),
        steps=st.lists(steps(), min_size=1, max_size=3).map(tuple),
    )
    return options.map(lambda combination: legal(combination, world_size))


def legal(combination: Combination, world_size: int) -> Combination:
    """The nearest combination that the documents allow, and that can be compared."""
    made = combination
    if made.reentrant:
        # One that a rank does not use hides the units inside.
        made = replace(made, steps=tuple(map(_without_filling, made.steps)))
    if made.model.replicated_paths():
        # No backward comes by a replicated tree that was not used.
        made = replace(made, steps=tuple(map(_without_bypass, made.steps)))
    if not made.is_exact(world_size):
        # Then in float64, and a cast makes a step of the last bit.
        made = replace(
            made,
            units=tuple(replace(unit, mixed="none") for unit in made.units),
            hook="default" if made.hook == "bf16" else made.hook,
        )
    if made.hook != "none":
        made = replace(made, units=tuple(map(_without_replicas, made.units)))
    return made


def _without_replicas(unit: Unit) -> Unit:
    return replace(unit, strategy="FULL_SHARD") if unit.strategy in HYBRID else unit


def _without_filling(step: Step) -> Step:
    micro = tuple(replace(m, by_rank=False) for m in step.micro)
    kept = tuple(a for a in step.actions if a[0] != "fill")
    return replace(step, micro=micro, actions=kept)


def _without_bypass(step: Step) -> Step:
    micro = tuple(replace(m, by_rank=False, bypass=None) for m in step.micro)
    return replace(step, micro=micro)


RankCount = Callable[[int], RankPool]


@pytest.mark.req("X-28", "D-13", "D-08", "B-03", "S1-10", "S1-31", "S1-34", "S1-36")
@pytest.mark.parametrize("world_size", [1, 2, 4])
@examples(10)
@given(data=st.data())
def test_whatever_is_combined_training_equals_the_plain_model(
    ranks: RankCount, world_size: int, data: st.DataObject
) -> None:
    """Losses, gradients and weights, with nothing left full, summoned or counted."""
    combination = data.draw(combinations(world_size))

    refused = ranks(world_size).run(run_on_both_paths, combination, timeout=60)

    event(refused[0].partition(":")[0] or "ran")


TWICE = ModelRecipe(
    root=ModuleRecipe(
        children=(ModuleRecipe(), ModuleRecipe(children=(ModuleRecipe(kind="again"),)))
    ),
    width=1,
    sharded=("block", "block_1"),
)
PAIR = ModelRecipe(root=ModuleRecipe(children=(ModuleRecipe(),)), sharded=("block",))
FOUND = {
    # The inner block's unit, below two others, was shown twice and freed once.
    "a unit in two places is shown": Combination(
        TWICE, steps=(Step(actions=(("write", 2, False),)),)
    ),
    # The record of reductions was read by the regions of after the change.
    "freezing after a recorded step": Combination(
        PAIR,
        units=(Unit(strategy="NO_SHARD"),),
        steps=(Step(), Step(actions=(("freeze", 0),))),
    ),
    # Full parameters that were kept became others after the first of two backwards.
    "two backwards after an unshard by hand": Combination(
        PAIR,
        steps=(
            Step(
                actions=(("unshard_unit", 1, False),),
                micro=(Micro(forwards=2, backward="twice"),),
            ),
            Step(actions=(("unshard_unit", 0, True),)),
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_combinations_that_failed_once(ranks: RankCount, name: str) -> None:
    """Each was found by a machine of rules, and is here in the place of an example."""
    ranks(2).run(run_on_both_paths, FOUND[name])
