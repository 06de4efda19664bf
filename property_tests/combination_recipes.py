"""Recipes of combinations: a model, how each unit is sharded, and what a script does.

Everything here is frozen and printable, so a failure can be pasted into an example.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.recipes import ModelRecipe, _Short

Strategy = Literal[
    "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
]
Mixed = Literal["none", "compute", "low", "reduce", "kept", "inputs", "output"]
Mode = Literal["sync", "no_sync", "local"]
Backward = Literal["joint", "each", "reversed", "twice"]
Checkpointed = Literal["plain", "reentrant", "wrapper", "reentrant wrapper"]
Action = tuple[Any, ...]
"""Name of a function of ``combination_actions``, and its arguments."""

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclass(frozen=True, repr=False)
class Unit(_Short):
    """The options of one unit; ``mixed`` names one of ``combination_models.MIXED``."""

    strategy: Strategy = "FULL_SHARD"
    block: Literal["ROW", "ELEMENT", "TENSOR", "rows(3)"] = "ROW"
    mixed: Mixed = "none"
    offload: bool = False
    prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE"
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

    model: ModelRecipe = field(default_factory=ModelRecipe)
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
    input_grad: bool = False
    steps: tuple[Step, ...] = (Step(), Step())

    @property
    def micro(self) -> list[Micro]:
        """All microbatches."""
        return [micro for step in self.steps for micro in step.micro]

    @property
    def reentrant(self) -> bool:
        """Whether modules are recomputed in a backward of their own."""
        return any("reentrant" in kind for _, kind in self.checkpoints)

    @property
    def by_rank(self) -> bool:
        """Whether ranks train different parts."""
        return any(micro.by_rank for micro in self.micro)

    @property
    def needs_input_grad(self) -> bool:
        """Whether reentrant checkpoints or unused modules need an input's gradient."""
        bypass = any(micro.bypass is not None for micro in self.micro)
        return self.input_grad or self.reentrant or bypass

    def is_exact(self, world_size: int) -> bool:
        """Whether every sum has an order that the plain model's sums can have, too.

        Sums over more than two ranks have the backend's. A reentrant checkpoint
        reduces each time that it computes, so a parameter must get one gradient.
        """
        if world_size > 2 or not self.reentrant:
            return world_size <= 2
        shared = any(n.kind == "again" or n.tied for _, n in self.model.places())
        return not shared and all(
            micro.mode == "sync" and micro.forwards == 1 for micro in self.micro
        )
