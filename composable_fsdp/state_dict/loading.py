"""Load values into a unit: write this rank's part of each entry of a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.param_ref import ParamRef, param_refs
from composable_fsdp.naming import listed, quoted, strip_wrapper
from composable_fsdp.state_dict.effective_settings import effective_settings
from composable_fsdp.state_dict.local import LocalValue
from composable_fsdp.state_dict.sharded import ShardedValue, mismatch
from composable_fsdp.tree.state import _FSDPState

_ON_META = (
    "the parameter is on meta and cannot be copied into. Call model.to_empty("
    "device=...) first, or load_state_dict(..., assign=True)."
)
"""The reason in the error of ``load_state_dict`` for a parameter on meta."""

# Weak values: a part that torch did not assign must not stay in memory.
_PARTS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Parts that a hook of this package made for torch to assign, by identity."""


def is_local(state: _FSDPState) -> bool:
    """Return whether the unit loads local shards."""
    kind = effective_settings(state).state_dict_type
    return kind is StateDictType.LOCAL_STATE_DICT


def is_loadable(value: Tensor) -> bool:
    """Return whether ``value`` is this rank's part already, for torch to assign."""
    return _PARTS.get(id(value)) is value


def require_values(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str
) -> None:
    """Refuse values on meta for tensors of ``module`` that have values.

    Args:
        module: The module that loads.
        state_dict: The state dict.
        prefix: The prefix of the module's keys.

    Collective: none.
    Raises: CheckpointError, naming the tensors. If ``module`` is the module on which
        ``load_state_dict`` was called, no value has been written.
    """
    empty = {
        strip_wrapper(key)
        for key, value in state_dict.items()
        if isinstance(value, Tensor) and value.is_meta and key.startswith(prefix)
    }
    # Most state dicts have no tensor on meta: skip the walk over the module.
    if not empty:
        return
    named = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    names = [strip_wrapper(prefix + name) for name, own in named if not own.is_meta]
    found = [quoted(name) for name in names if name in empty]
    if found:
        raise CheckpointError(
            "load_state_dict expects values, and got tensors on meta for "
            f"{listed(found)}; nothing was loaded. Pass the state dict "
            "of a model that has values (a model on meta gets them by to_empty or "
            "param_init_fn)."
        )


def take_values(
    state: _FSDPState,
    slots: Mapping[str, int],
    state_dict: dict[str, Any],
    local_metadata: Mapping[str, Any],
    error_msgs: list[str],
) -> None:
    """Write this rank's part of each value under the keys of ``slots`` into the shard.

    Args:
        state: The unit.
        slots: The keys of the unit's parameters, with their slot indices.
        state_dict: The state dict. An entry is replaced by the sharded parameter, or,
            for ``assign=True`` and a parameter on meta, by this rank's part.
        local_metadata: torch's metadata, which says whether torch assigns.
        error_msgs: torch's list of errors; values that do not fit are added.

    Collective: none.
    """
    local = is_local(state)
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    places = {ref.slot.index: ref for ref in param_refs(state.handle)}
    for key, index in slots.items():
        value = state_dict.get(key)
        # torch itself reports missing keys and values of a wrong type.
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, LocalValue):
            value = value.plain()
        ref = places[index]
        leaf, problem = ref.leaf, _take(ref, value, local=local, assign=assign)
        if leaf.is_meta and not problem:
            if assign:
                part = value
                if isinstance(value, ShardedValue):
                    part = value.local
                elif not local:
                    part = ref.part_of(value)
                # torch makes a parameter of the part and assigns this parameter, which
                # the unit adopts later. Note the value, because a hook of a part of the
                # unit must not cut the value again.
                part = part.clone()
                state_dict[key] = _PARTS[id(part)] = part
                continue
            # torch ignores a copy into a tensor on meta with a mere warning, so report
            # an error.
            problem = _ON_META
        if problem:
            error_msgs.append(f"{quoted(strip_wrapper(key))}: {problem}")
        # torch copies the parameter onto itself, which changes nothing, and
        # ``assign=True`` keeps the parameter object.
        state_dict[key] = leaf


@torch.no_grad()
def _take(ref: ParamRef, value: Tensor, *, local: bool, assign: bool) -> str:
    """Copy this rank's part of ``value`` into the shard, or return the problem.

    The result is empty if ``value`` fits.
    """
    leaf = ref.leaf
    if isinstance(value, ShardedValue):
        problem = mismatch(ref, value)
        if not problem:
            _write(leaf, value.local, assign=assign)
        return problem
    # torch accepts a tensor of shape (1,) for a 0-d parameter (files from before torch
    # 0.4).
    if value.shape == (1,) and ref.shape == () and not local:
        value = value[0]
    expected = tuple(leaf.shape) if local else ref.shape
    if tuple(value.shape) == expected:
        _write(leaf, value if local else ref.part_of(value), assign=assign)
        return ""
    got = f"{expected}, got {tuple(value.shape)}"
    if local:
        return f"expected this rank's shard of shape {got}. Pass what this rank saved."
    return (
        f"expected the full parameter of shape {got}. Load a state dict of the plain "
        "model's shapes, on every rank."
    )


def _write(leaf: Tensor, part: Tensor, *, assign: bool) -> None:
    """Copy ``part`` into ``leaf``; with ``assign`` into new memory, in its dtype."""
    # A user may hold the old memory. All ranks adopt the change at the next use, also
    # ranks with an empty part (``flat.user_memory``).
    if assign and not leaf.is_meta:
        leaf.data = torch.empty_like(leaf, dtype=part.dtype)
    leaf.copy_(part)
