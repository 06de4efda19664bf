"""The bytes of a rank by kind, and moments of a step; of activations and optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from composable_fsdp.errors import PlanError
from composable_fsdp.planning.layout import RegionLayout
from composable_fsdp.planning.unit_plan import UnitPlan
from composable_fsdp.tools.machine import Cost

DeviceType = Literal["cpu", "cuda"]
"""The device whose order of allocations a forecast follows."""


class Memory(NamedTuple):
    """Bytes of a rank at a moment of a step, by kind; ``total`` leaves ``host`` out.

    A step on tensors (``simulate``) counts ``ahead`` as ``full``, and ``in_flight``,
    gradients that are in no reduce buffer yet, as ``temporaries``; a plan has no
    ``buffers``.
    """

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
    """Bytes of an optimizer, for this rank's shards.

    Tensors per trainable parameter that stay (``states``) and that a step allocates
    (``temporaries``, as the ``foreach`` form of AdamW does), and bytes per element.
    """

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
        # A buffer for the states of the largest region.
        regions = [r for unit in units if unit.has_host_states for r in unit.regions]
        parts = (_bytes([r], self.states, self.bytes_per_element) for r in regions)
        return 2 * max(parts, default=0)


def _bytes(regions: Iterable[RegionLayout], tensors: int, each: float = 0) -> int:
    """Return the bytes of tensors per trainable parameter, and per element."""
    return sum(
        tensors * r.shard_numel * r.dtype.itemsize + round(each * r.shard_numel)
        for r in regions
        if r.trainable
    )


_AdamW, _Adam, _SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD

# The default of torch on CUDA is the ``foreach`` form, whose step holds the square
# roots of all second moments at once.
OPTIMIZERS = {
    "adamw": OptimizerMemory("AdamW", 2, 1, make=_AdamW),
    "adamw-fused": OptimizerMemory(
        "AdamW(fused=True)", 2, make=partial(_AdamW, fused=True)
    ),
    "adam": OptimizerMemory("Adam", 2, 1, make=_Adam),
    "adam-fused": OptimizerMemory(
        "Adam(fused=True)", 2, make=partial(_Adam, fused=True)
    ),
    "sgd": OptimizerMemory("SGD", make=_SGD),
    "sgd-momentum": OptimizerMemory(
        "SGD with momentum", 1, make=partial(_SGD, momentum=0.9)
    ),
    "none": OptimizerMemory("no optimizer"),
}
"""Optimizers of torch by the names that ``forecast`` and ``simulate`` accept."""


def optimizer_memory(given: str | float | OptimizerMemory) -> OptimizerMemory:
    """Return the memory of an optimizer by name, or by bytes per element, as text too.

    Raises: PlanError, if ``given`` is neither.

    >>> optimizer_memory("adamw").states, optimizer_memory(2.5).bytes_per_element
    (2, 2.5)
    """
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
