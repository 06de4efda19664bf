"""Options as frozen values, each checked by its constructor; the names are FSDP1's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from composable_fsdp.errors import PlanError

Report = Literal["warn", "error", "off"]
"""What a check does with what it finds."""
TiedParams = Literal["error", "promote"]
"""What becomes of a parameter that several units share."""


class ShardingStrategy(Enum):
    """Selects the tensors that are sharded, and when (names of torch's FSDP1).

    * ``FULL_SHARD``: parameters, gradients and optimizer state are sharded (ZeRO-3).
    * ``SHARD_GRAD_OP``: as FULL_SHARD, but parameters stay unsharded from forward to
      the end of backward (ZeRO-2).
    * ``NO_SHARD``: every rank holds full parameters; gradients are all-reduced (DDP).
    * ``HYBRID_SHARD``: FULL_SHARD within a shard group, replicated across groups.
    * ``_HYBRID_SHARD_ZERO2``: SHARD_GRAD_OP within a shard group, replicated across
      groups.
    * ``ZERO1``: every rank holds full parameters; gradients are all-reduced; optimizer
      states are sharded, and updated values are gathered after the step.
    * ``ZERO2``: as ZERO1, with gradients that are sharded, too.
    * ``HFSDP``: parameters are sharded within a group, gradients and optimizer states
      over all ranks.

    Each is a ``Placement`` with a name (``comm.placements.ROWS``).

    >>> model = fully_shard(nn.Linear(4, 4), strategy=ShardingStrategy.SHARD_GRAD_OP)
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    # The leading underscore is FSDP1's.
    _HYBRID_SHARD_ZERO2 = auto()
    ZERO1 = auto()
    ZERO2 = auto()
    HFSDP = auto()


def require_bool(value: object, what: str) -> None:
    """Raise TypeError, naming ``what``: a string has a truth value by accident."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} expects True or False, got {value!r}.")


HYBRID = (
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
    ShardingStrategy.HFSDP,
)
"""Strategies that require a grid of ranks (replicate, shard)."""
FULL_SHARD = ShardingStrategy.FULL_SHARD
NO_SHARD = ShardingStrategy.NO_SHARD
"""The strategy of ``replicate``."""


@dataclass(frozen=True)
class Placement:
    """Says over which dims of the mesh each of four things is divided.

    Each is a tuple of names of mesh dims; with an empty tuple the thing is whole on
    every rank. ``between`` names the fewest dims, and ``parameters``, ``gradients`` and
    ``states`` each at least those of the one before. ``"shard"`` and ``"replicate"``
    always name the dims that shard and replicate, and ``"shard:2"`` the groups of 2
    consecutive ranks in a dim.

    Args:
        parameters: parameters at rest. Default: whole.
        between: parameters between forward and backward. Default: whole.
        gradients: gradients after the reduction; each rank keeps the part whose values
            the rank updates. Default: whole.
        states: states of the optimizer, and the values that the optimizer updates,
            which are the parameters that programs see between steps. Default: whole.

    Raises: TypeError, for other values than tuples of names; PlanError, for a placement
    with no legal step, with the reason.

    >>> zero1 = Placement(states=("shard",))
    >>> model = fully_shard(nn.Linear(4, 4), placement=zero1)
    """

    parameters: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if not isinstance(row, tuple) or not all(
                isinstance(name, str) and name for name in row
            ):
                raise TypeError(
                    "Placement expects tuples of names of mesh dims, such as "
                    f"('shard',), got {row!r}."
                )
        for is_illegal, reason in ILLEGAL_PLACEMENTS:
            if is_illegal(self):
                raise PlanError(f"{self} is no placement: {reason}.")

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """What is divided least first; a legal row has the dims of the one before."""
        return self.between, self.parameters, self.gradients, self.states

    def nests(self, at: int) -> bool:
        """Return whether a row has the dims of the one before."""
        before = {name.partition(":")[0] for name in self.rows[at - 1]}
        return before <= set(self.rows[at])


ILLEGAL_PLACEMENTS: tuple[tuple[Callable[[Placement], bool], str], ...] = (
    (
        lambda p: any(len(set(row)) < len(row) for row in p.rows),
        "a dim divides a thing once",
    ),
    (
        lambda p: any(":" in name for row in p.rows[1:] for name in row),
        "only what lies between forward and backward is over a part of a dim",
    ),
    (
        lambda p: not p.nests(1),
        "parameters that are whole at rest over a dim would be divided over it between "
        "forward and backward, and the memory at rest is there in any case",
    ),
    (
        lambda p: not p.nests(2),
        "a rank would hold gradients of parameters that it does not hold, which need "
        "more memory than it saved",
    ),
    (
        lambda p: not p.nests(3),
        "the optimizer of a rank would update elements without their gradients",
    ),
    (
        lambda p: (
            bool(p.between) and set(p.between) != set(p.parameters) != set(p.states)
        ),
        "parameters would be kept in two pieces, one at rest and a larger one between "
        "forward and backward; let between be empty, or equal parameters",
    ),
)
"""Which placements are refused, and why; in this order."""


class BackwardPrefetch(Enum):
    """Selects when backward issues the all-gather of the next unit.

    * ``BACKWARD_PRE``: before the gradients of the current unit are computed (most
      overlap).
    * ``BACKWARD_POST``: after the gradients of the current unit are computed (the
      memory of one full unit less).
    * ``None`` instead of a member: when the unit's backward begins; no other collective
      is in flight then (least memory).
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class Block(Enum):
    """Selects the run of elements that no shard boundary may cut.

    * ``ROW``: one index of dim 0 of a parameter with at least two dims, so that a
      sharded parameter has shape ``(k, *trailing)``.
    * ``ELEMENT``: a single element, for the least padding; a sharded parameter is
      one-dimensional.
    * ``TENSOR``: a whole parameter, which then lies on a single rank, for optimizers
      of whole matrices. A parameter that is larger than a rank's share of its unit (all
      elements of its dtype divided by the ranks) is cut by rows. The plan prints the
      padding.
    * ``Block.rows(n)``: ``n`` indices of dim 0, such as the rows of an attention head,
      or a block of 32 rows that a quantizer scales together.
    """

    ROW = auto()
    ELEMENT = auto()
    TENSOR = auto()

    @staticmethod
    def rows(n: int) -> RowBlock:
        """Return the block of ``n`` indices of dim 0.

        Of a one-dimensional parameter these are ``n`` elements. Rows behind the last
        whole block are a block, too.

        Raises: ValueError, if ``n`` is no positive int.

        >>> Block.rows(64)
        Block.rows(64)
        """
        return RowBlock(n)


@dataclass(frozen=True)
class RowBlock:
    """The value of ``Block.rows(n)``."""

    n: int

    def __post_init__(self) -> None:
        # A bool is an int in Python, and says no number of rows.
        if type(self.n) is not int or self.n < 1:
            raise ValueError(
                f"Block.rows(n) expects a number of rows from 1, got {self.n!r}."
            )

    def __repr__(self) -> str:
        return f"Block.rows({self.n})"

    __str__ = __repr__


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes for compute, reduction and buffers; names and order as in torch's FSDP1.

    Args:
        param_dtype: dtype of the all-gather and of compute. Sharded parameters, and so
            the optimizer, keep the original dtype. Default None: the original dtype.
        reduce_dtype: dtype in which gradients are accumulated and reduced. Default
            None: ``param_dtype``.
        buffer_dtype: dtype to which the first forward casts buffers. Default None: no
            cast.
        keep_low_precision_grads: keep ``.grad`` in the reduce dtype, for an optimizer
            that accepts this dtype. Default False: ``.grad`` has the parameter's dtype.
        cast_forward_inputs: cast floating point inputs of every unit to
            ``param_dtype``. Default False.
        cast_root_forward_inputs: cast floating point inputs of the root to
            ``param_dtype``, and without a wrapper those of the root of each call of
            ``fully_shard``. Default True.
        _module_classes_to_ignore: if a policy is passed, modules of these classes
            become units without mixed precision. Default: batch norms.
        output_dtype: dtype to which floating point outputs are cast; this field is
            FSDP2's. Default None: no cast.

    Raises: TypeError, if a dtype is not a floating point dtype; PlanError, if
    ``FSDP_USE_FULL_PREC_IN_EVAL`` is "1" (of FSDP1; no equal here).

    >>> half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    >>> model = fully_shard(nn.Linear(4, 4), mixed_precision=half)
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
        if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
            raise PlanError(
                "FSDP_USE_FULL_PREC_IN_EVAL=1 of FSDP1 has no equal here: a unit with "
                "mixed_precision computes in its param_dtype, also in evaluation. "
                "Unset it; for full precision evaluate a model that is sharded without "
                "mixed_precision."
            )
        # Options are compared and hashed, so a list or a set becomes a tuple.
        ignored = tuple(self._module_classes_to_ignore)
        # The dataclass is frozen: only object.__setattr__ can normalize a field here.
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
    """Selects what lives in host memory.

    Args:
        offload_params: sharded parameters and sharded gradients, and with them the
            optimizer's states. Default False.
        offload_states: the optimizer's states alone, as by ``features.offload_states``.
            Default False.

    Raises: TypeError, if a field is not a bool.
    """

    offload_params: bool = False
    offload_states: bool = False

    def __post_init__(self) -> None:
        for name in ("offload_params", "offload_states"):
            require_bool(getattr(self, name), f"CPUOffload({name}=...)")


@dataclass(frozen=True)
class Arena:
    """Selects memory with stable addresses for the full parameters.

    Full parameters lie in slots, whose memory is kept from step to step.

    Args:
        shared: units that are never full at the same time, by the plan, use the same
            slot. False: each unit has a slot of its own, which needs the memory of the
            unsharded model, and leaves the order of the units free. Default True.
        poison: fill a slot when a unit gives the slot back: floating point numbers
            become NaN, so that a read of parameters behind their use shows; bits of
            other dtypes are 1. Default False.

    Raises: TypeError, if ``shared`` or ``poison`` is not a bool.
    """

    shared: bool = True
    poison: bool = False

    def __post_init__(self) -> None:
        for name in ("shared", "poison"):
            require_bool(getattr(self, name), f"Arena({name}=...)")


class StateDictType(Enum):
    """Selects the values in model and optimizer state dicts (names of torch's FSDP1).

    * ``FULL_STATE_DICT``: full tensors, as of the unsharded model.
    * ``SHARDED_STATE_DICT``: this rank's parts as ``ShardedValue``, which knows the
      part's place in the full tensor.
    * ``LOCAL_STATE_DICT``: as sharded, without any exchange between ranks.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """Selects the keys of an optimizer state dict: names or numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True)
class StateDictConfig:
    """Configures ``module.state_dict()``; pass the subclass for the type in force.

    Args:
        offload_to_cpu: return tensors in host memory; otherwise on the model's device.
            Default False.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """Configures ``FULL_STATE_DICT``; ``offload_to_cpu`` as in ``StateDictConfig``.

    Args:
        rank0_only: give the first rank the full state dict and other ranks an empty
            dict. Default False.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Configures ``LOCAL_STATE_DICT``; the only option is ``offload_to_cpu``."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """Configures ``SHARDED_STATE_DICT``; FSDP1's ``_use_dtensor`` must be False."""

    # FSDP1 has this field. A DTensor has equal numbers of rows per rank, but a flat
    # buffer is cut elsewhere, so ``set_state_dict_type`` refuses True.
    _use_dtensor: bool = False


@dataclass(frozen=True)
class OptimStateDictConfig:
    """Configures ``optim_state_dict``; pass the subclass for the type in force.

    Args:
        offload_to_cpu: return tensors in host memory; otherwise on the model's device.
            Default True.
    """

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Configures ``FULL_STATE_DICT`` for optimizer state.

    Args:
        rank0_only: give the first rank the full state and other ranks an empty dict;
            ``optim_state_dict_to_load`` then reads the first rank's argument and
            broadcasts the state. Default False.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Configures ``LOCAL_STATE_DICT`` for optimizer state; no host copy by default."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Configures ``SHARDED_STATE_DICT``; FSDP1's ``_use_dtensor`` must be False."""

    # As in ``ShardedStateDictConfig``.
    _use_dtensor: bool = False


@dataclass(frozen=True)
class StateDictSettings:
    """The state dict type in force on a model, with the configurations of that type."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


FULL_BY_DEFAULT = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
)
"""The default settings of a model: full state dicts on all ranks."""
