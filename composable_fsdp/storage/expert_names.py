"""Names of experts that are plain parameters, other ones on each rank of a mesh.

Each rank stores its own experts by their names, and the checkpoint has all of them, as
that of the plain model. A load gives each rank the experts that its model holds, and
leaves those of the other ranks alone::

    rank 0    experts.0.weight, experts.1.weight --+--> experts.0 .. experts.3
    rank 1    experts.2.weight, experts.3.weight --+
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.contents import Contents, contents_of, units_in
from composable_fsdp.storage.manifest import Json
from composable_fsdp.storage.team import Team

Members = dict[int, list[str]]
"""Names of this rank's experts by the number of the optimizer's group."""


def experts_in(contents: Contents) -> dict[str, int]:
    """Return the names of this rank's experts, with the place in the ``expert_mesh``.

    Ranks with the same experts have the same place. Empty without an ``expert_mesh``.
    """
    found: dict[str, int] = {}
    for region in contents.regions:
        # The place and no rank: of a grid of ranks, only a row and a column are known.
        group = region.handle.groups.experts
        if group is not None:
            names = [param.names[0] for param in region.params]
            found.update(dict.fromkeys(names, group.rank()))
    return found


def require_own_names(ranks: Sequence[int], told: Sequence[dict[str, int]]) -> None:
    """Raise CheckpointError if ranks use a name for different experts."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, each in zip(ranks, told, strict=True):
        for name, place in each.items():
            first, expected = seen.setdefault(name, (rank, place))
            # The later would replace the earlier in the file.
            if place != expected:
                raise CheckpointError(
                    f"{quoted(name)} is an expert on rank {first} and another on rank "
                    f"{rank}, by their expert_mesh; a checkpoint expects another name "
                    "for each expert. Nothing was written. Keep the numbers of the "
                    "plain model: nn.ModuleList with None in the places of other "
                    "ranks' experts. Or stack the experts and pass DTensors of "
                    "distribute_tensor(weight, mesh['ep'], [Shard(0)])."
                )


def with_experts(
    groups: list[Json] | None, numbers: Sequence[int], told: Sequence[Members]
) -> list[Json] | None:
    """Return the options of rank 0 with the experts of all ranks as members.

    Raises: CheckpointError, for experts in a group that rank 0 lacks.
    """
    if groups is None or not any(told):
        return groups
    by_number = {n: dict(each) for n, each in zip(numbers, groups, strict=True)}
    for rank, members in enumerate(told):
        for number, names in members.items():
            # The options of such a group would be lost.
            if number not in by_number:
                raise CheckpointError(
                    f"Rank {rank} of the save has {quoted(names[0])} in group {number} "
                    "of the optimizer, and rank 0 has no such group. Nothing was "
                    "committed. Make groups of the same kind on all ranks."
                )
            # Rank 0 has its own experts in the list already.
            group = by_number[number]
            group["params"] = list(dict.fromkeys([*group["params"], *names]))
    return list(by_number.values())


def other_experts(team: Team, module: object) -> frozenset[str]:
    """Return the names of experts that other ranks hold, and this rank does not.

    Collective: an all-gather of objects over the team's group, if a unit has an
        ``expert_mesh``; else none. Meshes are alike on all ranks.
    Raises: the error of the first rank whose module cannot be loaded.
    """
    states = units_in(module) if isinstance(module, nn.Module) else []
    if all(state.handle.groups.experts_ref is None for state in states):
        return frozenset()
    own: list[str] = []
    error: Exception | None = None
    try:
        assert isinstance(module, nn.Module)
        contents = contents_of(module, "load", inner=True)
        # All names of a tied parameter: the file may have any.
        own = [name for held in contents.each() for name in held.names]
    except Exception as raised:
        error = raised
    # Also with an error, because the other ranks wait here.
    everyone = team.agree(error, own)
    return frozenset(name for each in everyone for name in each) - frozenset(own)
