"""``ShardingPlan``: what will be sharded and what it costs, before a tensor moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_

from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.memory import (
    RETIRING_LIMIT,
    RETIRING_UNLIMITED,
    PeakMemory,
    UnitMemory,
    peak_of_step,
)
from composable_fsdp.planning.options import Dtypes, UnitOptions


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
        return sum(r.shard_numel * d.gradient.itemsize for r, d in self._reduced)

    @property
    def is_offloaded(self) -> bool:
        """Whether parameters and reduced gradients are kept in host memory."""
        offload = self.options.cpu_offload
        return offload is not None and offload.offload_params

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit's full parameters while it is unsharded.

        In the compute dtype; none where the parameters are computed with as they lie.
        """
        return sum(
            r.padded_numel * d.compute.itemsize
            for r, d in self._with_dtypes
            if self.shard_world_size > 1 or d.compute != r.dtype or self.is_offloaded
        )

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the buffers that the unit's gradients arrive in."""
        return sum(r.padded_numel * d.reduce.itemsize for r, d in self._reduced)

    @property
    def _with_dtypes(self) -> tuple[tuple[RegionLayout, Dtypes], ...]:
        return tuple([(r, self.options.dtypes(r.dtype)) for r in self.regions])

    @property
    def _reduced(self) -> tuple[tuple[RegionLayout, Dtypes], ...]:
        return tuple([(r, d) for r, d in self._with_dtypes if r.trainable and r.numel])

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
        gathered = sum(
            r.padded_numel * d.compute.itemsize for r, d in self._with_dtypes if r.numel
        )
        dtypes = len({d.reduce for _, d in self._reduced})
        nbytes = self.reduce_bytes
        total = Traffic()
        if self.shard_world_size > 1 and gathered:
            again = self.options.reshard_after_forward and not is_root and in_backward
            total += Traffic(1 + again, gathered * (1 + again), dtypes, nbytes)
        if self.replicas > 1:
            part = nbytes // self.shard_world_size
            total += Traffic(all_reduce_calls=len(self._reduced), all_reduce_bytes=part)
        return total

    def memory(self, *, parent: int, in_backward: bool, on_host: bool) -> UnitMemory:
        """The bytes of this unit's buffers, for ``peak_of_step``.

        ``parent`` is the index of the unit around it (-1 for the root), ``on_host``
        tells whether its shards are elsewhere than its full parameters.
        """
        gradients = {
            slot.index: slot.numel * d.compute.itemsize
            for r, d in self._reduced
            for slot in r.parameters
        }
        tied = {s.index for r in self.regions for s in r.parameters if s.fqns[1:]}
        options = self.options
        limited = options.limit_all_gathers
        return UnitMemory(
            name=self.fqn or ROOT_NAME,
            parent=parent,
            full=self.full_bytes,
            reduce=self.reduce_bytes,
            temporary=sum(
                r.shard_numel * d.reduce.itemsize
                for r, d in self._reduced
                if d.reduce != d.gradient or on_host
            ),
            gradient=max(gradients.values(), default=0),
            last=gradients[min(gradients)] if gradients else 0,
            tied=sum(nbytes for i, nbytes in gradients.items() if i in tied),
            sends=self.shard_world_size * self.replicas > 1,
            in_backward=in_backward,
            reshards=options.reshard_after_forward and parent >= 0,
            prefetch=options.backward_prefetch,
            retiring_limit=RETIRING_LIMIT if limited else RETIRING_UNLIMITED,
        )


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
        """Bytes of parameters on each rank, those kept on the host included."""
        return sum(unit.parameter_bytes for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients on each rank after a backward, the host's included."""
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def host_bytes(self) -> int:
        """Bytes of parameters and gradients that offloading keeps on the host."""
        return sum(
            unit.parameter_bytes + unit.gradient_bytes
            for unit in self.units
            if unit.is_offloaded
        )

    @property
    def traffic(self) -> Traffic:
        """Collectives and bytes of one step; the first unit is the root."""
        total = Traffic()
        for i, (unit, flows) in enumerate(self._with_flow()):
            total += unit.traffic(is_root=i == 0, in_backward=flows)
        return total

    def _with_flow(self) -> list[tuple[UnitPlan, bool]]:
        """Units, and whether gradients flow through them.

        They flow back to the first trainable unit, through frozen ones as well.
        """
        trainable = accumulate((unit.is_trainable for unit in self.units), or_)
        return list(zip(self.units, trainable, strict=True))

    def peak(
        self, *, device_type: str = "cuda", optimizer_states: int = 0
    ) -> PeakMemory:
        """The most that a step takes of each rank's device, activations left out.

        ``optimizer_states``: tensors that the optimizer keeps per trainable parameter,
        in its dtype (2 for AdamW). Of offloaded units only what visits the device is
        counted, unless ``device_type`` is "cpu". ``planning.memory`` says what is
        assumed of the step.
        """
        streams = device_type == "cuda"
        parents = _parents(self.units)
        kept = [u for u in self.units if not (u.is_offloaded and streams)]
        moment = peak_of_step(
            [
                unit.memory(
                    parent=parents[i], in_backward=flows, on_host=unit.is_offloaded
                )
                for i, (unit, flows) in enumerate(self._with_flow())
            ],
            streams=streams,
        )
        states = sum(
            r.shard_numel * r.dtype.itemsize
            for unit in kept
            for r in unit.regions
            if r.trainable
        )
        return PeakMemory(
            parameters=sum(unit.parameter_bytes for unit in kept),
            gradients=sum(unit.gradient_bytes for unit in kept),
            full=moment.full,
            reduce=moment.reduce,
            in_flight=moment.in_flight,
            optimizer=optimizer_states * states,
            when=moment.when,
        )

    @property
    def report(self) -> str:
        """The plan as text: a table of units, totals, then what deserves a look."""
        mixed = [
            _mixed_text(unit) for unit in self.units if unit.frozen and unit.trainable
        ]
        return "\n".join([_table(self.units), *_totals(self), *mixed, *self.warnings])

    def __str__(self) -> str:
        return self.report


def _parents(units: Sequence[UnitPlan]) -> list[int]:
    """Index of the unit around each; -1 for the root."""
    parents: list[int] = []
    inside: list[int] = []
    for index, unit in enumerate(units):
        while inside and not _is_inside(unit.fqn, units[inside[-1]].fqn):
            inside.pop()
        parents.append(inside[-1] if inside else -1)
        inside.append(index)
    return parents


def _is_inside(fqn: str, outer: str) -> bool:
    return not outer or fqn.startswith(f"{outer}.")


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
    traffic, peak = plan.traffic, plan.peak()
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
        f"at the peak {size_text(peak.total)} on the device, in {peak.when}: full "
        f"parameters {size_text(peak.full)}, reduction {size_text(peak.reduce)}, "
        f"gradients in flight {size_text(peak.in_flight)}; without activations and "
        "optimizer",
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
