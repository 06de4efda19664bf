"""The strategies as rows of one table, and the ranks of a placement."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from composable_fsdp.config import HYBRID, Placement, ShardingStrategy
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import quoted

SHARD, REPLICATE = "shard", "replicate"
"""Names of the dims that shard and replicate, in every grid."""
REPLICATE_NAMES = (REPLICATE, "dp_replicate", "ddp")
"""Names of mesh dims over which parameters are replicated."""

_RANKS, _ALL = (SHARD,), (REPLICATE, SHARD)
_FULL = Placement(_RANKS, _RANKS, _RANKS, _RANKS)
_KEPT = Placement(_RANKS, (), _RANKS, _RANKS)

ROWS: dict[ShardingStrategy, Placement] = {
    ShardingStrategy.FULL_SHARD: _FULL,
    ShardingStrategy.SHARD_GRAD_OP: _KEPT,
    ShardingStrategy.NO_SHARD: Placement(),
    # The two differ from those above in what they require: a dim that replicates.
    ShardingStrategy.HYBRID_SHARD: _FULL,
    ShardingStrategy._HYBRID_SHARD_ZERO2: _KEPT,
    ShardingStrategy.ZERO1: Placement(states=_RANKS),
    ShardingStrategy.ZERO2: Placement(gradients=_RANKS, states=_RANKS),
    ShardingStrategy.HFSDP: Placement(_RANKS, _RANKS, _ALL, _ALL),
}
"""The placement of each strategy."""

Choice: TypeAlias = ShardingStrategy | Placement


class Ways(NamedTuple):
    """The numbers of ranks over which a unit divides, as the fields of its plan."""

    shard_world_size: int
    """Ranks that divide the states, and so the parameters that programs see."""
    replicas: int
    parameter_ranks: int
    between_ranks: int
    gradient_ranks: int


class Dims(NamedTuple):
    """A placement as dims of a grid, each tuple in the order of the ranks' numbers.

    The dims of ``between`` come first, then those that each further thing adds, so that
    each coarser piece is a slice of the flat buffer. Of ranks (outer, inner) = (0, 0),
    (0, 1), (1, 0), (1, 1) with ``between`` over the inner dim::

        number in the group of the states    0    2    1    3
        flat buffer    | 0: (0, 0) | 1: (1, 0) | 2: (0, 1) | 3: (1, 1) |
        between        | inner 0               | inner 1               |
    """

    sizes: dict[str, int]
    """Of all dims, outermost first; ``"name:n"`` is a part of the dim before it."""
    between: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    states: tuple[str, ...]

    def others(self, divided: tuple[str, ...]) -> tuple[str, ...]:
        """Return the dims that are not ``divided``, in the order of the grid."""
        return tuple(name for name in self.sizes if name not in divided)

    @property
    def steps(self) -> tuple[tuple[str, ...], ...]:
        """The dims over which a step scatters, sums, keeps pieces and fills these."""
        kept, spread = self.parameters, self.states[len(self.parameters) :]
        if not spread:
            kept = self.between if self.between != self.parameters else ()
        sums = self.others(self.gradients)
        return self.gradients, sums, kept, spread if kept else ()

    @property
    def ways(self) -> Ways:
        """The numbers of ranks over which a unit divides."""
        found = [self.states, self.others(self.states)]
        found += [self.parameters, self.between, self.gradients]
        return Ways(*(prod(self.sizes[name] for name in names) for names in found))


def placement_of(chosen: Choice) -> Placement:
    """Return the placement of a strategy, or the caller's own."""
    return ROWS[chosen] if isinstance(chosen, ShardingStrategy) else chosen


class Grid(NamedTuple):
    """The dims of the ranks of a unit, with their sizes, outermost first."""

    dims: tuple[tuple[str, int], ...]
    shard: tuple[str, ...]
    """The dims that ``"shard"`` names: (shard, context) are both."""
    replicate: tuple[str, ...]


def grid_of(dims: Mapping[str, int]) -> Grid:
    """Return the grid of dims: of two the last shards, of more the names tell."""
    *copies, _ = dims
    if len(dims) > 2:
        copies = [name for name in dims if name in REPLICATE_NAMES]
    shard = tuple(name for name in dims if name not in copies)
    return Grid(tuple(dims.items()), shard, tuple(copies))


@lru_cache(maxsize=64)  # asked for each unit
def place(grid: Grid, chosen: Choice) -> Dims:
    """Return the dims of a placement; PlanError, if the grid lacks a dim."""
    placement, sizes = placement_of(chosen), dict(grid.dims)
    found: tuple[str, ...] = ()
    rows = []
    for row in placement.rows:
        # Only the first row has parts of dims, which are put into ``sizes``.
        names = {dim for name in row for dim in _named(name, grid, sizes, placement)}
        own = [n for n in sizes if n in names or n.partition(":")[0] in names]
        found = (*found, *(name for name in own if name not in found))
        rows.append(found)
    return Dims(sizes, *rows)


def _named(
    name: str, grid: Grid, sizes: dict[str, int], placement: Placement
) -> tuple[str, ...]:
    """Return the dims that a name means; a part of a dim is put into ``sizes``."""
    base, is_part, ranks = name.partition(":")
    roles = {SHARD: grid.shard, REPLICATE: grid.replicate}
    known = roles.get(base, (base,) if base in dict(grid.dims) else None)
    if known is None:
        raise PlanError(
            f"{placement} expects a mesh with dim {quoted(base)}; the dims "
            f"are {', '.join(quoted(dim) for dim, _ in grid.dims)}. Pass device_mesh "
            "with mesh_dim_names, or the names 'shard' and 'replicate'."
        )
    if not is_part:
        return known
    dim = known[-1]
    number = int(ranks) if ranks.isdecimal() else 0
    if not number or sizes[dim] % number:
        raise PlanError(
            f"{placement} expects '{base}:n' with a divisor n of the "
            f"{sizes[dim]} ranks of the dim, got {name!r}."
        )
    # The part stands behind what is left of the dim.
    inner, before = f"{dim}:{ranks}", list(sizes.items())
    sizes.clear()
    for each, size in before:
        sizes |= {dim: size // number, inner: number} if each == dim else {each: size}
    return (inner,)


def group_sizes(
    chosen: Choice, *, world_size: int, shard_world_size: int | None = None
) -> Ways:
    """Return the numbers of ranks of a unit on a grid (replicate, shard)."""
    if shard_world_size is None and chosen in HYBRID:
        # The number of nodes is unknown here, so the plan cannot choose the groups that
        # a hybrid strategy chooses by itself.
        raise PlanError(
            f"A plan with {name_of(chosen)} expects shard_world_size, the ranks that "
            "share the parameters. Pass the size of the mesh's shard dim, or of a node."
        )
    size = shard_world_size or world_size
    return place(grid_of({REPLICATE: world_size // size, SHARD: size}), chosen).ways


def name_of(chosen: Choice) -> str:
    """Return how messages call a placement."""
    return chosen.name if isinstance(chosen, ShardingStrategy) else str(chosen)
