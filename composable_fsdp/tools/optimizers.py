"""``OptimizerMemory``: what an optimizer keeps per parameter, and needs in its step."""

from __future__ import annotations

from typing import NamedTuple

from composable_fsdp.errors import PlanError
from composable_fsdp.planning.unit_plan import UnitPlan


class OptimizerMemory(NamedTuple):
    """Bytes of an optimizer, for this rank's shards.

    Args:
        name: the name, for a reader.
        states: tensors that the optimizer keeps per trainable parameter, in the
            parameter's dtype. Default 0.
        temporaries: tensors of the parameter's dtype and size that the step allocates
            for all parameters together, as the ``foreach`` form of AdamW does. Default
            0.
        bytes_per_element: bytes that the optimizer keeps per element of a trainable
            parameter, besides ``states``. Default 0.
    """

    name: str
    states: int = 0
    temporaries: int = 0
    bytes_per_element: float = 0

    def state_bytes(self, unit: UnitPlan) -> int:
        """Return the bytes of the states of this rank's shards, padding included."""
        return self._bytes(unit, self.states, self.bytes_per_element)

    def temporary_bytes(self, unit: UnitPlan) -> int:
        """Return the bytes that the step allocates beside the states."""
        return self._bytes(unit, self.temporaries)

    def _bytes(self, unit: UnitPlan, tensors: int, each: float = 0) -> int:
        """Return the bytes of tensors per trainable parameter, and per element."""
        trainable = [region for region in unit.regions if region.trainable]
        return sum(
            tensors * r.shard_numel * r.dtype.itemsize + round(each * r.shard_numel)
            for r in trainable
        )


OPTIMIZERS = {
    # The default of torch on CUDA is the ``foreach`` form, whose step holds the square
    # roots of all second moments at once.
    "adamw": OptimizerMemory("AdamW", states=2, temporaries=1),
    "adamw-fused": OptimizerMemory("AdamW(fused=True)", states=2),
    "adam": OptimizerMemory("Adam", states=2, temporaries=1),
    "adam-fused": OptimizerMemory("Adam(fused=True)", states=2),
    "sgd": OptimizerMemory("SGD"),
    "sgd-momentum": OptimizerMemory("SGD with momentum", states=1),
    "none": OptimizerMemory("no optimizer"),
}
"""Optimizers of torch by the names that ``optimizer_memory`` accepts."""


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
