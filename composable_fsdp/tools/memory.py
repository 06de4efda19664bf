"""The bytes of a rank by kind, of activations and optimizers; and what a step sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Any, Literal, NamedTuple

import torch

from composable_fsdp.errors import PlanError
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.machine import Cost

ALIGNMENT = 256
"""Regions in a slot begin at multiples of these bytes, which suit every dtype."""
DeviceType = Literal["cpu", "cuda"]
"""The device whose order of allocations a forecast follows."""


class Memory(NamedTuple):
    """Bytes of a rank at a moment of a step, by kind."""

    # A step on tensors (``simulate``) counts ``ahead`` as ``full``, and ``in_flight``,
    # gradients that are in no reduce buffer yet, as ``temporaries``; a plan has no
    # ``buffers``.
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    full: int = 0
    ahead: int = 0
    reduce: int = 0
    in_flight: int = 0
    activations: int = 0
    temporaries: int = 0
    host: int = 0
    when: str = "between steps"

    @property
    def total(self) -> int:
        """Sum of all bytes on the device."""
        return sum(self[:10])

    def by_kind(self) -> dict[str, int]:
        """Return the bytes by the name of the field."""
        return dict(zip(self._fields[:11], self[:11], strict=True))


class StepMoment(NamedTuple):
    """A moment of a step, with the event of a plan or the seconds of a simulation."""

    memory: Memory
    event: Any = None
    seconds: float = 0.0

    @property
    def when(self) -> str:
        """The part of the step, as "backward of blocks.3"."""
        return self.memory.when


@dataclass(frozen=True)
class Activations:
    """Tensors of a step beside parameters, their gradients and the optimizer.

    Args:
        batch: the inputs as text, for a reader.
        windows: bytes per window: at its start, the most, and at its end.
        order: names of the units in the order in which their forwards began.
        checkpointed: whether each unit directly below the root runs under activation
            checkpointing.
        measure: measures the same step for another plan, or with checkpointing.
        work: how often which operation runs, per window, for ``step_time``.
        tokens: ids of the batch; rows of a batch of real numbers.
    """

    batch: str
    windows: Mapping[Any, tuple[int, int, int]] = field(repr=False)
    order: tuple[str, ...] = field(repr=False)
    checkpointed: bool
    measure: Callable[..., Activations] = field(repr=False, compare=False)
    work: Mapping[Any, Counter[Cost]] = field(default_factory=dict, repr=False)
    tokens: int = 1

    def with_checkpointing(self) -> Activations:
        """Measure again, with checkpointing of each unit directly below the root."""
        return self.measure(checkpointing=True)

    def beside(self, moments: Sequence[StepMoment]) -> tuple[StepMoment, ...]:
        """Return the moments of a plan with the bytes of the activations.

        While a unit computes: those kept for backward, and temporaries beside them. At
        the last moment, the optimizer's step, none are left.
        """
        found, level = [], 0
        for memory, event, _ in moments[:-1]:
            saved = most = level
            if event in self.windows:
                start, most, level = self.windows[event]
                # What forward allocates is kept, and backward frees what was kept,
                # while gradients of parameters come.
                saved = level if event.phase == "forward" else start
            now = memory._replace(
                activations=min(saved, most), temporaries=max(0, most - saved)
            )
            found.append(StepMoment(now, event))
        return (*found, moments[-1])


class OptimizerMemory(NamedTuple):
    """Tensors per parameter that an optimizer keeps or allocates; bytes per element."""

    name: str
    states: int = 0
    temporaries: int = 0
    bytes_per_element: float = 0
    make: Callable[..., torch.optim.Optimizer] | None = None

    def state_bytes(self, unit: UnitPlan) -> int:
        """Return the bytes of the states of this rank's shards, padding included."""
        return _bytes(unit.regions, self.states, self.bytes_per_element)

    def temporary_bytes(self, unit: UnitPlan) -> int:
        """Return the bytes that the step allocates beside the states."""
        return _bytes(unit.regions, self.temporaries)

    def buffer_bytes(self, units: Iterable[UnitPlan]) -> int:
        """Return the bytes of the two buffers through which states on the host pass."""
        parts = (
            _bytes([region], self.states, self.bytes_per_element)
            for unit in units
            if unit.has_host_states
            for region in unit.regions
        )
        return 2 * max(parts, default=0)


def _bytes(regions: Iterable[RegionLayout], tensors: int, each: float = 0) -> int:
    """Return the bytes of tensors per trainable parameter, and per element."""
    return sum(
        tensors * r.shard_numel * r.dtype.itemsize + round(each * r.shard_numel)
        for r in regions
        if r.trainable
    )


_AdamW, _Adam, _SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD
_FUSED = {"fused": True}
# The default of torch on CUDA is the ``foreach`` form, whose step holds the square
# roots of all second moments at once.
OPTIMIZERS = {
    key: OptimizerMemory(name, states, temporaries, make=partial(make, **options))
    for key, name, states, temporaries, make, options in (
        ("adamw", "AdamW", 2, 1, _AdamW, {}),
        ("adamw-fused", "AdamW(fused=True)", 2, 0, _AdamW, _FUSED),
        ("adam", "Adam", 2, 1, _Adam, {}),
        ("adam-fused", "Adam(fused=True)", 2, 0, _Adam, _FUSED),
        ("sgd", "SGD", 0, 0, _SGD, {}),
        ("sgd-momentum", "SGD with momentum", 1, 0, _SGD, {"momentum": 0.9}),
    )
} | {"none": OptimizerMemory("no optimizer")}
"""Optimizers of torch by the names that ``forecast`` and ``simulate`` accept."""


def optimizer_memory(given: str | float | OptimizerMemory) -> OptimizerMemory:
    """Return the memory of an optimizer, by name or bytes per element, and as text."""
    if isinstance(given, OptimizerMemory):
        return given
    if isinstance(given, str) and given.lower() in OPTIMIZERS:
        return OPTIMIZERS[given.lower()]
    # The command line passes numbers as text.
    try:
        size = float(given)
    except (TypeError, ValueError):
        size = -1.0
    # Neither NaN nor infinity is a size.
    if not 0 <= size < 1e6:
        raise PlanError(
            f"optimizer expects one of {', '.join(OPTIMIZERS)}, or the bytes that the "
            f"optimizer keeps per element of a parameter, such as 2; got {given!r}."
        )
    return OptimizerMemory(f"{size:g} bytes per element", bytes_per_element=size)


class Traffic(NamedTuple):
    """Collectives of a training step per rank, and the bytes of their whole buffers."""

    all_gather_calls: int = 0
    all_gather_bytes: int = 0
    reduce_scatter_calls: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_calls: int = 0
    all_reduce_bytes: int = 0

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]
        """Return the sum by field, where a tuple would be appended."""
        return Traffic(*map(add, self, other))

    def by_op(self) -> dict[str, dict[str, int]]:
        """Return "calls" and "bytes" by kind of collective."""
        return {
            name.removesuffix("_calls"): {"calls": calls, "bytes": nbytes}
            for name, calls, nbytes in zip(
                self._fields[::2], self[::2], self[1::2], strict=True
            )
        }


def gathered_bytes(unit: UnitPlan) -> int:
    """Return the bytes that the all-gathers of an unsharding fill."""
    # The compute dtype, to which shards are cast before, or those of a wire format.
    return sum(
        r.wire_nbytes or r.padded_numel * d.compute.itemsize
        for r, d in unit.with_dtypes
        if r.numel
    )


def traffic_of(unit: UnitPlan, *, is_root: bool, in_backward: bool) -> Traffic:
    """Return the collectives of a forward and a backward in the steady state."""
    gathered = gathered_bytes(unit)
    # Regions with equal reduce dtype share a reduce-scatter and an all-reduce.
    dtypes = len({d.reduce for _, d in unit.reduced})
    nbytes = unit.reduce_bytes
    total = Traffic()
    if unit.shard_world_size > 1 and gathered:
        # A resharded unit is gathered a second time in backward. The root stays
        # unsharded between forward and backward.
        again = unit.reshards and not is_root and in_backward
        times = 1 + again
        total += Traffic(times, gathered * times)
        # Pieces at rest are filled once, with the values of the optimizer's step.
        if unit.has_rest:
            total += Traffic(1, gathered // unit.piece_ranks)
    if unit.gradient_ranks > 1 and gathered:
        total += Traffic(reduce_scatter_calls=dtypes, reduce_scatter_bytes=nbytes)
    if unit.sum_ranks > 1:
        # The all-reduce follows the reduce-scatter, on this rank's part.
        part = nbytes // unit.gradient_ranks
        total += Traffic(all_reduce_calls=dtypes, all_reduce_bytes=part)
    return total


def slot_bytes(regions: Iterable[int]) -> int:
    """Return the bytes of a slot for regions of the given bytes, one after another."""
    return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in regions)
