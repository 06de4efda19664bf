"""One state of a parameter as a sharded value, out and in."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import quoted
from composable_fsdp.optim.names import Named
from composable_fsdp.optim.scalars import SCALARS
from composable_fsdp.state_dict.full import part_of
from composable_fsdp.state_dict.sharded import ShardedValue, mismatch, sharded_value
from composable_fsdp.tree.state import _get_module_fsdp_state


def as_sharded(named: Named, value: Any) -> Any:
    """This rank's ``value`` as part of the whole; scalars as they are."""
    if named.handle is None or named.region is None or named.slot is None:
        return value
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.shape != named.parameter.shape:
        return value  # not element-wise, of a parameter that is whole here
    return sharded_value(named.handle, named.region, named.slot, value)


def mark_partial(handle: FlatParamHandle, values: dict[str, Any], name: str) -> None:
    """Have parts of the state of ``name`` not be pickled, unless the type says parts.

    ``optimizer.state_dict()`` shows parts whatever type is set, and frameworks write
    what the first rank's returns.
    """
    unit = _get_module_fsdp_state(handle.owners[0])
    if unit is None or unit.state_dict_settings.state_dict_type is not _FULL:
        return
    for key, value in values.items():
        if isinstance(value, ShardedValue) and value.world_size > 1:
            value.not_alone = f"state {key!r} of {name}"


_FULL = StateDictType.FULL_STATE_DICT


def require_own_parts(
    members: list[Named], saved: dict[str, Any], *, from_first: bool
) -> None:
    """Refuse sharded values that ranks cannot gather, and of the first rank for all.

    Raises: CheckpointError, naming one; on all ranks alike.
    """
    for named in members:
        for key, value in saved["state"].get(named.fqn, {}).items():
            if isinstance(value, ShardedValue) or getattr(value, "part", False):
                problem = _FROM_FIRST if from_first else _mismatch(named, value)
                if problem and (from_first or not _is_gathered(named, value)):
                    raise CheckpointError(
                        f"Optimizer state {key!r} of {quoted(named.fqn)}: {problem}"
                    )


_FROM_FIRST = (
    "expected a whole tensor on the first rank, which gives it to all, got a "
    "ShardedValue. Load sharded values on every rank, with rank0_only=False."
)


def _is_gathered(named: Named, value: ShardedValue) -> bool:
    """Whether a value of another plan is of this run, so that ranks can gather it."""
    known = value.home is not None and value.home.group is not None
    return tuple(value.shape) == named.shape and (known or value.world_size == 1)


def own_part(named: Named, value: ShardedValue) -> Tensor:
    """This rank's part of a value that ``require_own_parts`` let pass; no copy.

    Collective: ``ShardedValue.full_tensor`` if it is of another plan, which is so on
    all ranks or on none.
    """
    if not _mismatch(named, value):
        return value.local
    whole = value.full_tensor()
    if named.region is None or named.slot is None:
        return whole
    return part_of(named.region, named.slot, whole, like=named.parameter)


def _mismatch(named: Named, value: ShardedValue) -> str:
    if named.handle is None or named.region is None or named.slot is None:
        return "expected a whole tensor, because the parameter is not sharded."
    return mismatch(named.handle, named.region, named.slot, value)


def part_for(named: Named, key: str, value: Any) -> Any:
    """This rank's part of ``value``: sharded, full, or the part itself.

    Raises: CheckpointError, for a sharded value of another plan.
    """
    if isinstance(value, ShardedValue):
        problem = _mismatch(named, value)
        if problem:
            raise CheckpointError(
                f"Optimizer state {key!r} of {quoted(named.fqn)}: {problem}"
            )
        return value.local
    if not isinstance(value, Tensor) or is_number(named, key, value):
        return value
    if value.shape == named.parameter.shape:
        return value
    if tuple(value.shape) == named.shape:
        assert named.region is not None
        assert named.slot is not None
        return part_of(named.region, named.slot, value, like=named.parameter)
    if not named.is_cut:
        return value  # not element-wise, of a parameter that is whole here
    raise CheckpointError(
        f"Optimizer state {key!r} of {quoted(named.fqn)} has shape "
        f"{tuple(value.shape)}; expected this rank's part, "
        f"{tuple(named.parameter.shape)}, the full shape, {named.shape}, or a scalar. "
        "Load what this rank saved under an equal plan, or what "
        "optim_state_dict_to_load(model, optim, state) returns."
    )


def is_number(named: Named, key: str, value: Tensor) -> bool:
    """Whether a state is one number for the parameter, the same on every rank."""
    return value.ndim == 0 and (named.shape != () or key in SCALARS)
