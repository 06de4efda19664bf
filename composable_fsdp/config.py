"""Options as frozen values: each is checked when it is made, so a bad one cannot exist.

Names, fields and their order follow torch's FSDP1, whose users this package serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class ShardingStrategy(Enum):
    """What is kept sharded, and when (torch FSDP1's names).

    ``FULL_SHARD``: parameters, gradients and optimizer state (ZeRO-3).
    ``SHARD_GRAD_OP``: parameters stay whole from forward to the end of backward
    (ZeRO-2).
    ``NO_SHARD``: every rank holds everything and gradients are all-reduced (DDP).
    ``HYBRID_SHARD`` and ``_HYBRID_SHARD_ZERO2``: the first two within a shard group,
    replicated across groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When the next unit's all-gather is issued in backward.

    ``BACKWARD_PRE``: before the current unit's gradients are computed (most overlap).
    ``BACKWARD_POST``: after them (one full unit less in memory).
    ``None`` in place of both: when it is needed, and nothing else is in flight then
    (least memory).
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class Block(Enum):
    """What a shard boundary may not cut.

    ``ROW``: one index of dim 0 of a parameter with two or more dims, so that a sharded
    leaf is ``(k, *trailing)``. ``ELEMENT``: one element, least padding; a sharded leaf
    is one-dimensional.
    """

    ROW = auto()
    ELEMENT = auto()


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes for compute, reduction and buffers; ``None`` keeps the original.

    ``param_dtype``: what is gathered and computed with; the shards, and so the
    optimizer, keep the parameters' own dtype. ``reduce_dtype``: gradients are
    accumulated and reduced in it; ``param_dtype`` if ``None``. ``buffer_dtype``:
    buffers are cast to it at the first forward. ``keep_low_precision_grads``: ``.grad``
    stays in the reduce dtype, for an optimizer that takes it. ``cast_forward_inputs``,
    ``cast_root_forward_inputs``: floating point inputs of every unit, or of the root,
    are cast to ``param_dtype``. ``_module_classes_to_ignore``: with a policy, modules
    of these classes become units without mixed precision. ``output_dtype``: floating
    point outputs are cast to it.

    Field names and order are torch FSDP1's; ``output_dtype`` is FSDP2's.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        # A tuple, because options are compared and hashed.
        ignored = tuple(self._module_classes_to_ignore)
        object.__setattr__(self, "_module_classes_to_ignore", ignored)
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise TypeError(
                    f"MixedPrecision({name}=...) expects a floating point torch.dtype "
                    f"or None, got {dtype!r}. Leave it out to keep the parameters' own "
                    "dtype."
                )


@dataclass(frozen=True)
class CPUOffload:
    """Whether sharded parameters and their gradients live in host memory."""

    offload_params: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.offload_params, bool):
            raise TypeError(
                "CPUOffload(offload_params=...) expects True or False, got "
                f"{self.offload_params!r}."
            )


class StateDictType(Enum):
    """What ``module.state_dict()`` and ``optim_state_dict`` hold (FSDP1's names).

    ``FULL_STATE_DICT``: whole tensors of the plain model. ``LOCAL_STATE_DICT``: this
    rank's shards as plain tensors, for the same plan only. ``SHARDED_STATE_DICT``:
    tensors that know which part of the whole they are.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """What the keys of an optimizer's state dict are: parameter names, or numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True)
class StateDictConfig:
    """How ``module.state_dict()`` answers; use the class of the type that is set.

    ``offload_to_cpu``: tensors come in host memory, else on the model's device.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: the first rank gets everything, the others an empty dict."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """For this rank's shards; nothing besides ``offload_to_cpu``."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """For sharded values. ``_use_dtensor`` is here because FSDP1 has it: only False."""

    _use_dtensor: bool = False


@dataclass(frozen=True)
class OptimStateDictConfig:
    """How ``optim_state_dict`` answers; use the class of the type that is set.

    ``offload_to_cpu``: tensors come in host memory, else on the model's device.
    """

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: the first rank gets everything, the others an empty dict.

    ``optim_state_dict_to_load`` then reads what the first rank passes, and sends it.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For this rank's shards; they stay on the model's device unless asked for."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For sharded values. ``_use_dtensor`` is here because FSDP1 has it: only False."""

    _use_dtensor: bool = False


@dataclass(frozen=True)
class StateDictSettings:
    """The type that is set on a model, and the configurations that go with it."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


FULL_BY_DEFAULT = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
)
