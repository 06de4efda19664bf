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

    def traffic(self, *, is_root: bool) -> Traffic:
        """Collectives of one forward and backward in the steady state."""
        gathered = sum(r.nbytes for r in self.regions if r.numel)
        reduced = [r for r in self.regions if r.trainable and r.numel]
        dtypes = len({r.dtype for r in reduced})
        nbytes = sum(r.nbytes for r in reduced)
        total = Traffic()
        if self.shard_world_size > 1 and gathered:
            again = self.options.reshard_after_forward and not is_root and bool(reduced)
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
        for i, unit in enumerate(self.units):
            total += unit.traffic(is_root=i == 0)
        return total

    @property
    def report(self) -> str:
        """The plan as text: a table of units, totals, then what deserves a look."""
        rows = [("unit", "class", "parameters", "MiB per rank", "padding", "regions")]
        for unit in self.units:
            numel = sum(r.numel for r in unit.regions)
            padded = sum(r.padded_numel for r in unit.regions)
            padding = f"{(padded - numel) / numel:.2%}" if numel else "-"
            rows.append(
                (
                    unit.fqn or ROOT_NAME,
                    unit.class_name,
                    f"{numel:,}",
                    f"{unit.parameter_bytes / 2**20:.3f}",
                    padding,
                    ", ".join(map(_region_text, unit.regions)) or "no parameters",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        right = (2, 3, 4)
        table = "\n".join(
            "  ".join(
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )
        traffic = self.traffic
        totals = (
            f"{len(self.units)} units, {self.numel:,} parameters, world size "
            f"{self.world_size}\n"
            f"per rank: parameters {self.parameter_bytes / 2**20:.3f} MiB, gradients "
            f"{self.gradient_bytes / 2**20:.3f} MiB\n"
            f"per step: {traffic.all_gather_calls} all-gathers of "
            f"{traffic.all_gather_bytes / 2**20:.3f} MiB, "
            f"{traffic.reduce_scatter_calls} reduce-scatters of "
            f"{traffic.reduce_scatter_bytes / 2**20:.3f} MiB, "
            f"{traffic.all_reduce_calls} all-reduces of "
            f"{traffic.all_reduce_bytes / 2**20:.3f} MiB"
        )
        notes = "".join(f"\nnote: {text}" for text in self.warnings)
        return f"{table}\n{totals}{notes}"

    def __str__(self) -> str:
        return self.report


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
