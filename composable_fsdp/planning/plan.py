"""``ShardingPlan``: what will be sharded and what it costs, before a tensor moves."""

from __future__ import annotations

from dataclasses import dataclass

from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.options import UnitOptions


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one training step and their bytes, per rank.

    Regions issued together are one call. Bytes are those of the whole buffer that a
    collective fills or reduces (``padded_numel`` x item size): what a rank sends and
    receives on a ring is that times ``(world_size - 1) / world_size``, twice for an
    all-reduce.
    """

    all_gather_calls: int = 0
    all_gather_bytes: int = 0
    reduce_scatter_calls: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_calls: int = 0
    all_reduce_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.all_gather_calls + other.all_gather_calls,
            self.all_gather_bytes + other.all_gather_bytes,
            self.reduce_scatter_calls + other.reduce_scatter_calls,
            self.reduce_scatter_bytes + other.reduce_scatter_bytes,
            self.all_reduce_calls + other.all_reduce_calls,
            self.all_reduce_bytes + other.all_reduce_bytes,
        )


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """One fully sharded module: its name, its regions and its options.

    ``fqn`` is the module's name from the module that was planned. ``shard_world_size``
    is the number of ranks that share the parameters, ``replicas`` the number of such
    groups.
    """

    fqn: str
    class_name: str
    regions: tuple[RegionLayout, ...]
    options: UnitOptions
    shard_world_size: int
    replicas: int

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters that each rank keeps (its shards, padding included)."""
        return sum(r.shard_numel * r.dtype.itemsize for r in self.regions)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of reduced gradients that each rank keeps."""
        return sum(
            r.shard_numel * r.dtype.itemsize for r in self.regions if r.trainable
        )

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit's full parameters while it is unsharded."""
        return sum(r.nbytes for r in self.regions) if self.shard_world_size > 1 else 0

    @property
    def trainable(self) -> dict[str, int]:
        """Elements of each parameter that gets a gradient, by name from the unit."""
        return self._numels(trainable=True)

    @property
    def frozen(self) -> dict[str, int]:
        """Elements of each parameter that gets none, by name from the unit."""
        return self._numels(trainable=False)

    def _numels(self, *, trainable: bool) -> dict[str, int]:
        slots = [
            s for r in self.regions if r.trainable is trainable for s in r.parameters
        ]
        return {s.fqn: s.numel for s in sorted(slots, key=lambda slot: slot.index)}

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter of the unit gets a gradient."""
        return any(r.trainable and r.numel for r in self.regions)

    def traffic(self, *, is_root: bool, in_backward: bool) -> Traffic:
        """Collectives of one forward and backward in the steady state.

        ``in_backward`` tells whether gradients flow through the unit.
        """
        gathered = sum(r.nbytes for r in self.regions if r.numel)
        reduced = [r for r in self.regions if r.trainable and r.numel]
        dtypes = len({r.dtype for r in reduced})
        nbytes = sum(r.nbytes for r in reduced)
        total = Traffic()
        if self.shard_world_size > 1 and gathered:
            again = self.options.reshard_after_forward and not is_root and in_backward
            total += Traffic(1 + again, gathered * (1 + again), dtypes, nbytes)
        if self.replicas > 1:
            part = nbytes // self.shard_world_size
            total += Traffic(all_reduce_calls=len(reduced), all_reduce_bytes=part)
        return total


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Frozen result of planning, units in ``.modules()`` order; ``str()`` reports."""

    units: tuple[UnitPlan, ...]
    world_size: int
    warnings: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all parameters that the units hold, each counted once."""
        return sum(r.numel for u in self.units for r in u.regions)

    @property
    def padded_numel(self) -> int:
        """The same with padding."""
        return sum(r.padded_numel for u in self.units for r in u.regions)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters on each rank."""
        return sum(unit.parameter_bytes for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients on each rank after a backward."""
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def traffic(self) -> Traffic:
        """Collectives and bytes of one step; the first unit is the root."""
        total = Traffic()
        # Gradients flow back to the first trainable unit, through frozen ones as well.
        flows = False
        for i, unit in enumerate(self.units):
            flows = flows or unit.is_trainable
            total += unit.traffic(is_root=i == 0, in_backward=flows)
        return total

    @property
    def report(self) -> str:
        """The plan as text: a table of units, totals, then what deserves a look."""
        mixed = [
            _mixed_text(unit) for unit in self.units if unit.frozen and unit.trainable
        ]
        return "\n".join([_table(self.units), *_totals(self), *mixed, *self.warnings])

    def __str__(self) -> str:
        return self.report


def _table(units: tuple[UnitPlan, ...]) -> str:
    rows = [("unit", "class", "parameters", "per rank", "padding", "regions")]
    for unit in units:
        numel = sum(r.numel for r in unit.regions)
        padded = sum(r.padded_numel for r in unit.regions)
        rows.append(
            (
                unit.fqn or ROOT_NAME,
                unit.class_name,
                f"{numel:,}",
                size_text(unit.parameter_bytes),
                f"{(padded - numel) / numel:.2%}" if numel else "-",
                ", ".join(map(_region_text, unit.regions)) or "no parameters",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = (2, 3, 4)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _totals(plan: ShardingPlan) -> list[str]:
    traffic = plan.traffic
    strategies = {unit.options.strategy.name: None for unit in plan.units}
    sent = [
        f"{calls} {name}{'s' if calls > 1 else ''} of {size_text(nbytes)} in all"
        for calls, nbytes, name in (
            (traffic.all_gather_calls, traffic.all_gather_bytes, "all-gather"),
            (
                traffic.reduce_scatter_calls,
                traffic.reduce_scatter_bytes,
                "reduce-scatter",
            ),
            (traffic.all_reduce_calls, traffic.all_reduce_bytes, "all-reduce"),
        )
        if calls
    ]
    return [
        f"{len(plan.units)} units, {plan.numel:,} parameters, world size "
        f"{plan.world_size}, {', '.join(strategies)}",
        f"per rank: parameters {size_text(plan.parameter_bytes)}, gradients "
        f"{size_text(plan.gradient_bytes)}; the largest unit is "
        f"{size_text(max(u.full_bytes for u in plan.units))} while it is full",
        f"per step: {', '.join(sent) or 'no communication'}",
    ]


def _mixed_text(unit: UnitPlan) -> str:
    trainable, frozen = unit.trainable, unit.frozen
    shown = list(trainable)[:4]
    more = f" and {len(trainable) - 4} more" if len(trainable) > 4 else ""
    return (
        f"unit {unit.fqn or ROOT_NAME} trains {len(trainable)} of "
        f"{len(trainable) + len(frozen)} parameters ({sum(trainable.values()):,} "
        f"elements; {sum(frozen.values()):,} are frozen): {', '.join(shown)}{more}"
    )


def size_text(nbytes: int) -> str:
    """Bytes for a reader: the largest unit that gives a number of one or more.

    >>> size_text(512), size_text(1536), size_text(3 * 2**20)
    ('512 B', '1.50 KiB', '3.00 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"


def _region_text(region: RegionLayout) -> str:
    kind = str(region.dtype).removeprefix("torch.")
    frozen = "" if region.trainable else " frozen"
    return f"{kind}{frozen} x{len(region.parameters)}"


def padding_notes(unit: UnitPlan) -> list[str]:
    """Say where row blocks pad a region to more than twice its parameters."""
    notes = []
    for region in unit.regions:
        if region.padded_numel <= 2 * region.numel or not region.numel:
            continue
        few = [
            slot.fqn
            for slot in region.parameters
            if slot.block > 1 and slot.shape[0] < unit.shard_world_size
        ]
        if few:
            notes.append(
                f"unit {unit.fqn or ROOT_NAME}: {', '.join(few)} have fewer rows than "
                f"the {unit.shard_world_size} ranks, so padding is "
                f"{region.padded_numel / region.numel - 1:.0%}; block=Block.ELEMENT "
                "cuts inside rows and avoids it."
            )
    return notes
