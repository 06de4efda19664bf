"""Recipes of combinations: a model, how each unit is sharded, and what a script does.

Everything here is frozen and printable, so a failure can be pasted into an ``@example``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import strategies as st

from composable_fsdp.testing.recipes import ModelRecipe, _Short
from composable_fsdp.testing.strategies import FEATURES, model_recipes

Strategy = Literal[
    "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
]
Mixed = Literal["none", "compute", "low", "reduce", "kept", "inputs", "output"]
Mode = Literal["sync", "no_sync", "local"]
Backward = Literal["joint", "each", "reversed", "twice"]
Checkpointed = Literal["plain", "reentrant", "wrapper", "reentrant wrapper"]
Action = tuple[Any, ...]
"""Name of a method of ``Pair``, and its arguments."""


@dataclass(frozen=True, repr=False)
class Unit(_Short):
    """The options of one unit."""

    strategy: Strategy = "FULL_SHARD"
    block: Literal["ROW", "ELEMENT"] = "ROW"
    mixed: Mixed = "none"
    offload: bool = False
    prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = False


@dataclass(frozen=True, repr=False)
class Micro(_Short):
    """One or two forwards and their backward, and what is reduced after it.

    ``local``: without the replicas (``set_requires_all_reduce``). ``keep``: units stay
    full afterwards. ``bypass``: the module at this place (counted round, the root left
    out) gets no gradient: ``inside`` its unit, or outside. ``by_rank``: only where the
    rank is odd; all units then fill.
    """

    mode: Mode = "sync"
    forwards: int = 1
    backward: Backward = "joint"
    keep: bool = False
    bypass: int | None = None
    inside: bool = True
    by_rank: bool = False


@dataclass(frozen=True, repr=False)
class Step(_Short):
    """What happens between two steps, then the step."""

    actions: tuple[Action, ...] = ()
    micro: tuple[Micro, ...] = (Micro(),)
    zero: Literal["none", "zeros", "keep"] = "none"


@dataclass(frozen=True, repr=False)
class Combination(_Short):
    """A model, sharded in one way, in one script.

    ``units``: options of the root, then of the others, counted round. ``pairs``:
    sibling units become lists of two. ``promote``: tied parameters may be in several
    units. ``checkpoints``: places (counted round, the root left out) and kinds;
    ``late``: applied after sharding; ``outside``: units contain the wrappers.
    """

    model: ModelRecipe = ModelRecipe()
    path: Literal["composable", "wrapper"] = "composable"
    style: Literal["manual", "auto"] = "manual"
    units: tuple[Unit, ...] = (Unit(),)
    limit: bool = True
    pairs: bool = False
    promote: bool = False
    checkpoints: tuple[tuple[int, Checkpointed], ...] = ()
    late: bool = False
    outside: bool = False
    hook: Literal["none", "default", "bf16"] = "none"
    compiled: bool = False
    input_grad: bool = False
    steps: tuple[Step, ...] = (Step(), Step())

    @property
    def needs_input_grad(self) -> bool:
        """Whether reentrant checkpoints or unused modules need an input's gradient."""
        reentrant = any("reentrant" in kind for _, kind in self.checkpoints)
        bypass = any(m.bypass is not None for s in self.steps for m in s.micro)
        return self.input_grad or reentrant or bypass


HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
INDEX = st.integers(0, 4)


def units(world_size: int) -> st.SearchStrategy[Unit]:
    """Draw the options of one unit."""
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if world_size % 2 == 0:
        strategies += HYBRID
    return st.builds(
        Unit,
        strategy=st.sampled_from(strategies),
        block=st.sampled_from(["ROW", "ELEMENT"]),
        mixed=st.one_of(
            st.just("none"),
            st.sampled_from(["compute", "low", "reduce", "kept", "inputs", "output"]),
        ),
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
        st.tuples(st.just("unshard"), INDEX, st.booleans()),
        st.tuples(st.just("reshard"), INDEX),
        st.tuples(st.just("look"), INDEX),
        st.tuples(st.just("write"), INDEX),
        st.tuples(st.just("freeze"), st.integers(0, 9)),
        st.tuples(st.just("copy")),
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
    options = st.builds(
        Combination,
        model=st.one_of(plain, plain, mixed),
        path=st.sampled_from(["composable", "wrapper"]),
        style=st.sampled_from(["manual", "auto"]),
        units=st.lists(units(world_size), min_size=1, max_size=4).map(tuple),
        limit=st.booleans(),
        pairs=st.booleans(),
        promote=st.booleans(),
        checkpoints=st.one_of(
            st.just(()),
            st.lists(
                st.tuples(
                    INDEX,
                    st.sampled_from(
                        ["plain", "reentrant", "wrapper", "reentrant wrapper"]
                    ),
                ),
                max_size=2,
            ).map(tuple),
        ),
        late=st.booleans(),
        outside=st.booleans(),
        hook=st.sampled_from(["none", "none", "none", "default", "bf16"]),
        input_grad=st.booleans(),
        steps=st.lists(steps(), min_size=1, max_size=3).map(tuple),
    )
    return options.map(legal)


def legal(combination: Combination) -> Combination:
    """The nearest combination that the documents allow."""
    recipe, made = combination.model, combination
    if made.hook != "none":
        full = [
            replace(u, strategy="FULL_SHARD") if u.strategy in HYBRID else u
            for u in made.units
        ]
        made = replace(made, units=tuple(full))
    reentrant = any("reentrant" in kind for _, kind in made.checkpoints)
    if reentrant:
        # One that a rank does not use hides the units inside.
        made = replace(made, steps=tuple(map(_without_filling, made.steps)))
    if recipe.replicated_paths():
        # No backward comes by a replicated tree that was not used.
        made = replace(made, steps=tuple(map(_without_bypass, made.steps)))
    return made


def _without_filling(step: Step) -> Step:
    micro = tuple(replace(m, by_rank=False) for m in step.micro)
    kept = tuple(a for a in step.actions if a[0] != "fill")
    return replace(step, micro=micro, actions=kept)


def _without_bypass(step: Step) -> Step:
    micro = tuple(replace(m, by_rank=False, bypass=None) for m in step.micro)
    return replace(step, micro=micro)
