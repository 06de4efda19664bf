"""Read an optimizer's own state dict with this rank's parts as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.flat_state import originals, unflatten_state
from composable_fsdp.optim.keys import state_by_name
from composable_fsdp.optim.names import (
    Group,
    Table,
    given_names,
    is_absent,
    name_parameters,
)
from composable_fsdp.optim.scalars import is_wrapper
from composable_fsdp.state_dict.sharded import local_of

wants_parts: ContextVar[bool] = ContextVar("wants_parts", default=False)
"""True, in this thread, while the package calls ``optim.state_dict()``."""


def local_state_dict(optim: Optimizer) -> dict[str, Any]:
    """Return ``optim.state_dict()`` per original, with plain tensors of this rank."""
    token = wants_parts.set(True)
    try:
        found = optim.state_dict()
    finally:
        wants_parts.reset(token)
    plain = {
        key: plain_values(optim, values) if isinstance(values, dict) else values
        for key, values in found["state"].items()
    }
    found = unflatten_state(optim.param_groups, {**found, "state": plain})
    # State that an earlier load left of a parameter without elements is stale.
    state = dict(found["state"])
    parameters = [p for g in originals(optim.param_groups) for p in g["params"]]
    for number, parameter in enumerate(parameters):
        if is_absent(parameter) and is_empty(state.get(number, {})):
            state.pop(number, None)
    return {**found, "state": state}


def is_empty(values: Any) -> bool:
    """Return whether a state has no tensor with elements, apart from scalars."""
    return isinstance(values, dict) and not any(
        isinstance(value, Tensor) and value.ndim and value.numel()
        for value in values.values()
    )


def plain_values(optim: Optimizer, values: dict[str, Any]) -> dict[str, Any]:
    """Return the state ``values`` of a parameter with quantized tensors dequantized."""
    if not any(map(is_wrapper, values.values())):
        return values
    return {
        name: _dequantised(optim, name, value) if is_wrapper(value) else value
        for name, value in values.items()
    }


def _dequantised(optim: Optimizer, name: str, value: Any) -> Tensor:
    """Return ``value.dequantize()``, or raise CheckpointError without that method."""
    # ``Tensor.dequantize`` reads memory, which wrappers do not have.
    if type(value).dequantize is not Tensor.dequantize:
        plain: Tensor = value.dequantize()
        if type(plain) is Tensor and plain.shape == value.shape:
            return plain
    raise CheckpointError(
        f"{type(optim).__name__}'s state {name!r} is a {type(value).__name__}, which "
        "wraps other tensors; expected plain tensors, or a subclass whose dequantize() "
        "gives one of the same shape. Save it by torch.save(optim.state_dict()) on "
        "each rank, under StateDictType.SHARDED_STATE_DICT, or use an optimizer with "
        "plain state."
    )


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with every sharded value replaced by ``local``."""
    state = {
        key: {name: local_of(value) for name, value in values.items()}
        if isinstance(values, dict)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def joined_state(
    model: nn.Module,
    optims: Sequence[Optimizer],
    given: Sequence[dict[str, Any]],
    what: str,
) -> tuple[Table, dict[str, Any]]:
    """Merge the states of all optimizers, keyed by name."""
    tables: list[Table] = []
    state: dict[str, Any] = {}
    options: list[Any] = []
    for optim, saved in zip(optims, given, strict=True):
        table = name_parameters(model, optim.param_groups, given_names(optim))
        tables.append(table)
        # As FSDP1, which takes the state alone.
        is_alone = isinstance(saved, dict) and "param_groups" not in saved
        if is_alone and isinstance(saved.get("state"), dict):
            saved = {**saved, "param_groups": _numbered(optim, saved["state"])}
        saved = unwrapped(state_by_name(saved, table, what, partial=is_alone))
        # No name occurs twice, because ``optimizers_of`` refuses shared parameters.
        state.update(saved["state"])
        options += saved["param_groups"]
    return Table.joined(model, tables), {"state": state, "param_groups": options}


def _numbered(optim: Optimizer, state: dict[Any, Any]) -> list[Group]:
    """Return the groups of a state keyed by numbers; none for one keyed by names."""
    if any(isinstance(key, str) for key in state):
        return []
    numbers = count()
    return [
        {**group, "params": [next(numbers) for _ in group["params"]]}
        for group in originals(optim.param_groups)
    ]
