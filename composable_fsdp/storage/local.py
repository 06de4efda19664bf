"""Values that each rank saves for itself: tensors in no unit that differ by design.

Experts of a rank, stages of a pipeline and norms of a rank have the same names on all
ranks, or names that other ranks lack. A save that is told so (``local=``) stores them
per rank::

    local[0]   experts.weight, its optimizer state and options    as rank 0 has them
    local[1]   experts.weight, ..                                 as rank 1 has them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.manifest import Json, Local, Manifest, Single


@dataclass(slots=True)
class LocalPart:
    """The values that this rank saves for itself; see ``Local``."""

    singles: list[Any] = field(default_factory=list)
    """A ``SinglePart`` for each tensor in no unit."""
    own_states: dict[str, Json] = field(default_factory=dict)
    values: dict[str, dict[str, Json]] = field(default_factory=dict)
    param_groups: list[Json] | None = None

    def is_empty(self) -> bool:
        """Return whether the rank has nothing of its own."""
        return not (self.singles or self.own_states or self.values or self.param_groups)


def merge_local(
    parts: Sequence[LocalPart],
    single: Callable[[int, Any], Single],
    shifted: Callable[[Json, int], Json],
) -> tuple[Local, ...]:
    """Return the own values of each rank; empty if no rank has any."""
    # Most checkpoints: a tuple per rank would only make the manifest longer.
    if all(part.is_empty() for part in parts):
        return ()
    return tuple(
        Local(
            tuple(single(rank, each) for each in part.singles),
            shifted(part.own_states, rank),
            shifted(part.values, rank),
            shifted(part.param_groups, rank),
        )
        for rank, part in enumerate(parts)
    )


class LocalNames:
    """The names of a checkpoint's manifest whose values belong to single ranks."""

    def __init__(self, manifest: Manifest) -> None:
        self._all = manifest.local
        tensors: set[str] = set()
        states: set[str] = set()
        for own in manifest.local:
            tensors.update(name for single in own.singles for name in single.fqns)
            tensors.update(own.own_states)
            groups = own.param_groups or ()
            states.update(own.values, *(group["params"] for group in groups))
        self.tensors = frozenset(tensors)
        """Names of tensors in no unit, and of extra states."""
        self.states = frozenset(states - tensors)
        """Names of parameters of units with values or options per rank."""

    def of_rank(self, rank: int | None) -> Local:
        """Return the values of ``rank``, and for units those of any rank.

        None stands for no rank: only values of units, from the first rank with them.
        """
        ranks = range(len(self._all))
        own = self._all[rank] if rank is not None and rank in ranks else None
        # A rank that had no elements of a parameter has no scalars of it.
        values: dict[str, dict[str, Json]] = {}
        for each in (own, *self._all):
            for name, found in each.values.items() if each is not None else ():
                values.setdefault(name, found)
        groups = list(own.param_groups or ()) if own is not None else self._shared()
        if own is None:
            return Local((), {}, values, groups)
        return Local(own.singles, own.own_states, values, groups)

    # Without a rank, an optimizer of sharded parameters must still have options.
    def _shared(self) -> list[Json]:
        """Return the options of parameters of units, as the first rank has them."""
        groups = (self._all[0].param_groups or ()) if self._all else ()
        kept = [
            {**group, "params": [n for n in group["params"] if n in self.states]}
            for group in groups
        ]
        return [group for group in kept if group["params"]]


def other_ranks_text(names: Sequence[str], saved: int, loading: int) -> str:
    """Return the difference of a load of single ranks' values at another world size."""
    return (
        f"{listed(map(quoted, names))} were saved per rank (local=) by {saved} ranks, "
        f"and {loading} load: pass load(.., local=[..]) with their names, if rank r is "
        "to get what rank r saved, and ranks beyond the saved ones are to keep their "
        "own"
    )
