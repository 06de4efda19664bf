"""Parameters frozen, and settings changed, since ``fully_shard``; who knows them.

The flags are part of the mode of a step. Ranks that hold other experts may freeze other
experts, so each order leaves out the units that some of its ranks lack.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from composable_fsdp.comm.groups import Groups
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import slot_path

Names = tuple[str, ...] | None
"""``Groups.expert_names`` of a unit."""


class ChangedFlag(NamedTuple):
    """A parameter that was frozen or unfrozen, or a setting that was changed."""

    name: str
    """The name of the parameter, or the setting in words."""
    trains: bool | None
    """Whether the parameter trains; None for a setting."""
    ranks: Names


def changed_flags(handle: FlatParamHandle) -> Iterator[ChangedFlag]:
    """Yield the parameters frozen or unfrozen since ``fully_shard``."""
    layout, ranks = handle.layout, handle.groups.expert_names
    # 0: the unit was never rebuilt, as most units.
    if not layout.structure:
        return
    trains = {
        slot.index: region.layout.trainable
        for region in layout.regions
        for slot in region.layout.parameters
    }
    for region in layout.origin:
        for slot in region.parameters:
            if trains[slot.index] is not region.trainable:
                yield ChangedFlag(slot_path(handle, slot), trains[slot.index], ranks)


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
    handles: Iterable[FlatParamHandle],
    flags: Sequence[ChangedFlag],
    groups: Groups,
) -> Hashable:
    """Return the mode of a backward, as all ranks of ``groups`` know the mode."""
    structures = tuple(
        [
            handle.layout.structure
            for handle in handles
            if _is_common(handle.groups.expert_names, groups)
        ]
    )
    mode = common_mode(forward, groups)
    return mode, syncs, structures, _common_flags(flags, groups)


def _is_common(ranks: Names, groups: Groups) -> bool:
    """Return whether all ranks of ``groups`` have the parameters of a unit."""
    return ranks is None or set(filter(None, groups.names[:2])) <= set(ranks)
