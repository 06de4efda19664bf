"""The policy classes of FSDP2's ``fully_shard``, and their meaning in this package.

Names, fields, field order and defaults are those of torch's FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_fsdp.config import CPUOffload, MixedPrecision
from composable_fsdp.errors import PlanError
from composable_fsdp.planning.options import by_fields

HOME = "composable_fsdp.fsdp2"
"""The module that users import the names of FSDP2 from."""


# Frozen and not frozen as in FSDP2, so scripts can hash and change the same policies.
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes for compute and reduction, with the names of FSDP2.

    Args:
        param_dtype: dtype of the all-gather and of compute. Default None: the dtype of
            the parameters.
        reduce_dtype: dtype in which gradients are accumulated and reduced. Default
            None: ``param_dtype``.
        output_dtype: dtype to which floating point outputs are cast. Default None: no
            cast.
        cast_forward_inputs: cast floating point inputs of each unit to ``param_dtype``.
            Default True.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """The base class of offload policies; an instance of this class offloads nothing.

    >>> OffloadPolicy()
    OffloadPolicy()
    """


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state live in host memory.

    Args:
        pin_memory: Pin the host memory, so that copies overlap with compute. False is
            refused for a GPU, because gradients are copied while a backward runs.
            Without a GPU nothing is pinned. Default True.
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """Names of the dims of a full mesh over which DTensor parameters are sharded.

    ``fully_shard`` refuses this class, because parameters are plain tensors here.

    Args:
        shard: The dim, or the dims, that shard. Default None.
        replicate: The dim, or the dims, that replicate. Default None.

    Raises: ValueError, if both are None.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "DataParallelMeshDims expects shard or replicate, got neither. Name "
                "the dim of the mesh that shards."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Return ``shard`` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Return ``replicate`` as a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    # A string would be a sequence of letters.
    return (given,) if isinstance(given, str) else tuple(given or ())


def mixed_precision_of(policy: object) -> MixedPrecision | None:
    """Return the ``MixedPrecision`` that equals FSDP2's ``policy``."""
    own = by_fields(MixedPrecisionPolicy, policy, argument="mp_policy", home=HOME)
    # Without a dtype nothing is cast, whatever ``cast_forward_inputs`` says.
    if own.param_dtype is own.reduce_dtype is own.output_dtype is None:
        return None
    return MixedPrecision(
        param_dtype=own.param_dtype,
        reduce_dtype=own.reduce_dtype,
        output_dtype=own.output_dtype,
        # FSDP2 knows no root in this point: each unit casts its inputs, or none does.
        cast_forward_inputs=own.cast_forward_inputs,
        cast_root_forward_inputs=own.cast_forward_inputs,
    )


def cpu_offload_of(policy: object, device_type: str) -> CPUOffload | None:
    """Return the ``CPUOffload`` that equals FSDP2's ``policy``.

    Raises: TypeError, for another ``policy``; PlanError, for pageable memory.
    """
    by_fields(OffloadPolicy, policy, argument="offload_policy", home=HOME)
    # By name, because a script may still import the class from torch.
    if "CPUOffloadPolicy" not in [base.__name__ for base in type(policy).__mro__]:
        return None
    # Memory is pinned only beside a GPU, so on a CPU both values mean the same.
    if not getattr(policy, "pin_memory", True) and device_type != "cpu":
        raise PlanError(
            "offload_policy expects CPUOffloadPolicy(pin_memory=True) for a "
            f"{device_type} device, got pin_memory=False. Shards and gradients are "
            "copied beside compute here, which pageable memory does not allow. Leave "
            "pin_memory out, or train without offload."
        )
    return CPUOffload(offload_params=True)
