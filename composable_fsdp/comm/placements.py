"""The strategies as rows of one table, and the ranks of a placement.

A placement names dims of a grid of ranks, of which a plan knows the sizes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple, TypeAlias

from composable_fsdp.config import Placement, ShardingStrategy
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
"""A strategy, or the caller's own placement."""


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

    between: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    states: tuple[str, ...]
    sums: tuple[str, ...]
    """The dims that do not divide gradients, in the order of the grid."""
    others: tuple[str, ...]
    """The dims that divide nothing."""

    @property
    def steps(self) -> tuple[tuple[str, ...], ...]:
        """The dims over which a step scatters, sums, keeps pieces and fills these."""
        kept, spread = self.parameters, self.states[len(self.parameters) :]
        if not spread:
            kept = self.between if self.between != self.parameters else ()
        return self.gradients, self.sums, kept, spread if kept else ()


def placement_of(chosen: Choice) -> Placement:
    """Return the placement of a strategy, or the caller's own."""
    return ROWS[chosen] if isinstance(chosen, ShardingStrategy) else chosen


class Grid(NamedTuple):
    """The dims of the ranks of a unit, by name, outermost first, with their sizes."""

    sizes: Mapping[str, int]
    roles: Mapping[str, tuple[str, ...]]
    """The dims that ``"shard"`` and ``"replicate"`` name."""

    def place(self, chosen: Choice) -> tuple[Dims, dict[str, int]]:
        """Return the dims of a placement, and the sizes of all dims, parts included.

        Raises: PlanError, for a dim that the grid does not have.
        """
        placement = placement_of(chosen)
        sizes = dict(self.sizes)
        rows = [
            [each for name in row for each in self._dims_of(name, sizes, placement)]
            for row in placement.rows
        ]
        found: tuple[str, ...] = ()
        dims = []
        for names in rows:
            own = [n for n in sizes if n in names or n.partition(":")[0] in names]
            found = (*found, *(name for name in own if name not in found))
            dims.append(found)
        between, parameters, gradients, states = dims
        sums, others = (
            tuple(name for name in sizes if name not in divided)
            for divided in (gradients, states)
        )
        return Dims(between, parameters, gradients, states, sums, others), sizes

    def _dims_of(
        self, name: str, sizes: dict[str, int], placement: Placement
    ) -> tuple[str, ...]:
        """Return the dims that a name means; a part of a dim is put into ``sizes``."""
        base, is_part, ranks = name.partition(":")
        # A mesh (shard, context) shards over both, also if a strategy says "shard".
        known = self.roles.get(base, (base,) if base in self.sizes else None)
        if known is None:
            raise PlanError(
                f"{placement} expects a mesh with dim {quoted(base)}; the dims "
                f"are {', '.join(map(quoted, self.sizes))}. Pass device_mesh "
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
        inner = f"{dim}:{ranks}"
        split = {dim: sizes[dim] // number, inner: number}
        pairs = [split if n == dim else {n: size} for n, size in sizes.items()]
        sizes.clear()
        sizes |= {n: size for pair in pairs for n, size in pair.items()}
        return (inner,)

    def ways(self, chosen: Choice) -> Ways:
        """Return the numbers of ranks over which a unit divides."""
        dims, sizes = self.place(chosen)
        between, parameters, gradients, states, _, others = (
            prod(sizes[dim] for dim in each) for each in dims
        )
        return Ways(states, others, parameters, between, gradients)


def grid_of(sizes: Mapping[str, int]) -> Grid:
    """Return the grid of dims: of two the last shards, of more the names tell."""
    *copies, shard = sizes
    if len(sizes) < 3:
        return Grid(sizes, {SHARD: (shard,), REPLICATE: tuple(copies)})
    copies = [name for name in sizes if name in REPLICATE_NAMES]
    rest = tuple(name for name in sizes if name not in copies)
    return Grid(sizes, {SHARD: rest, REPLICATE: tuple(copies)})


def name_of(chosen: Choice) -> str:
    """Return how messages call a placement."""
    return chosen.name if isinstance(chosen, ShardingStrategy) else str(chosen)
