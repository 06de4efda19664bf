"""The order of uses that a unit's collectives are held against.

In a steady step the core compares a use with the expected one inline, and calls
nothing. ``features.guard`` has the implementation.

Parameters frozen and settings changed since ``fully_shard`` are part of the mode of a
round. Ranks that hold other experts may freeze other experts, so each order leaves out
the units that some of its ranks lack.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from composable_fsdp.comm.groups import Groups

UseOrder = Any
"""A ``features.guard.order_log.OrderLog``, of which the core uses ``expected``, the
recorded uses of this round, ``position``, the index of the next, ``is_open``,
``depart``, ``end`` and ``drop``."""


class UnitLogs(NamedTuple):
    """The order logs of a unit; ``None`` if the unit sends no such collective."""

    forward: UseOrder | None = None
    """Order of the unit's all-gathers in forward."""
    backward: UseOrder | None = None
    """Order of the unit's all-gathers in backward."""
    reduce: UseOrder | None = None
    """Order of the unit's reductions."""


NO_LOGS = UnitLogs()

Names = tuple[str, ...] | None
"""``Groups.expert_names`` of a unit."""


class ChangedFlag(NamedTuple):
    """A parameter that was frozen or unfrozen, or a setting that was changed."""

    name: str
    """The name of the parameter, or the setting in words."""
    trains: bool | None
    """Whether the parameter trains; None for a setting."""
    ranks: Names


def _common_flags(
    flags: Sequence[ChangedFlag], groups: Groups
) -> tuple[tuple[str, bool | None], ...]:
    """Return name and flag of the parameters that all ranks of ``groups`` have."""
    return tuple(
        (name, trains) for name, trains, ranks in flags if _is_common(ranks, groups)
    )


def common_mode(mode: Any, groups: Groups) -> Hashable:
    """Return the mode of a forward as all ranks of ``groups`` know the mode."""
    if not mode or not mode[-1]:
        return cast("Hashable", mode)
    return (*mode[:-1], _common_flags(mode[-1], groups))


def backward_mode(
    forward: Hashable,
    syncs: tuple[bool, ...],
    structures: Iterable[tuple[int, Names]],
    flags: Sequence[ChangedFlag],
    groups: Groups,
) -> Hashable:
    """Return the mode of a backward, as all ranks of ``groups`` know the mode."""
    common = tuple([each for each, names in structures if _is_common(names, groups)])
    mode = common_mode(forward, groups)
    return mode, syncs, common, _common_flags(flags, groups)


def _is_common(ranks: Names, groups: Groups) -> bool:
    """Return whether all ranks of ``groups`` have the parameters of a unit."""
    return ranks is None or set(filter(None, groups.names[:2])) <= set(ranks)
