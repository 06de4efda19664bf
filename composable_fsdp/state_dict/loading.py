"""Loading into one unit: each rank's part of what ``load_state_dict`` was given."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import quoted, strip_wrapper
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.state_dict.effective_settings import effective_settings
from composable_fsdp.state_dict.full import part_of
from composable_fsdp.state_dict.local import LocalValue
from composable_fsdp.state_dict.sharded import ShardedValue, mismatch
from composable_fsdp.tree.state import _FSDPState

_ON_META = (
    "the parameter is on meta and cannot be copied into. Call model.to_empty("
    "device=...) first, or load_state_dict(..., assign=True)."
)

_PARTS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Values that torch is to assign, by identity: cut by a hook of ours already."""


def is_local(state: _FSDPState) -> bool:
    """Whether the unit is set to take local shards."""
    kind = effective_settings(state).state_dict_type
    return kind is StateDictType.LOCAL_STATE_DICT


def is_loadable(value: Tensor) -> bool:
    """Whether ``value`` is this rank's part, for torch to assign."""
    return _PARTS.get(id(value)) is value


def require_values(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str
) -> None:
    """Refuse values on meta for tensors below ``module`` that have values.

    Nothing was written by then, if ``module`` is the one that is loaded.

    Raises: CheckpointError, naming them.
    """
    empty = {
        strip_wrapper(key)
        for key, value in state_dict.items()
        if isinstance(value, Tensor) and value.is_meta and key.startswith(prefix)
    }
    if not empty:
        return
    named = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    names = [strip_wrapper(prefix + name) for name, own in named if not own.is_meta]
    found = [quoted(name) for name in names if name in empty]
    if found:
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise CheckpointError(
            "load_state_dict expects values, and got tensors on meta for "
            f"{', '.join(found[:8])}{more}; nothing was loaded. Pass the state dict "
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
    """Write this rank's part of each value under the keys of ``slots`` into its shard.

    In its place comes the leaf, so that torch has nothing to copy, or for a leaf on
    meta the part, if it is to be assigned. Sends nothing.
    """
    handle, local = state.handle, is_local(state)
    places = {
        slot.index: (region, slot, leaf)
        for region in handle.regions
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
    }
    for key, index in slots.items():
        value = state_dict.get(key)
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, LocalValue):
            value = value.plain()
        region, slot, leaf = places[index]
        problem = _take(handle, region, slot, leaf, value, local=local)
        if leaf.is_meta and not problem:
            if local_metadata.get("assign_to_params_buffers", False):
                part = value
                if isinstance(value, ShardedValue):
                    part = value.local
                elif not local:
                    part = part_of(region, slot, value, like=leaf)
                # Torch makes a parameter of it, and the unit takes it up.
                part = part.to(leaf.dtype, copy=True)
                state_dict[key] = _PARTS[id(part)] = part
                continue
            problem = _ON_META
        if problem:
            error_msgs.append(f"{quoted(strip_wrapper(key))}: {problem}")
        # The leaf itself: copying it is nothing, and assign=True keeps it.
        state_dict[key] = leaf


@torch.no_grad()
def _take(
    handle: FlatParamHandle,
    region: FlatParameter,
    slot: ParameterSlot,
    leaf: Tensor,
    value: Tensor,
    *,
    local: bool,
) -> str:
    """Copy into this rank's shard what is its part; say why ``value`` does not fit."""
    if isinstance(value, ShardedValue):
        problem = mismatch(handle, region, slot, value)
        if not problem:
            leaf.copy_(value.local)
        return problem
    if value.shape == (1,) and slot.shape == () and not local:
        value = value[0]
    expected = tuple(leaf.shape) if local else slot.shape
    if tuple(value.shape) == expected:
        leaf.copy_(value if local else part_of(region, slot, value, like=leaf))
        return ""
    got = f"{expected}, got {tuple(value.shape)}"
    if local:
        return f"expected this rank's shard of shape {got}. Pass what this rank saved."
    return (
        f"expected the full parameter of shape {got}. Load a state dict of the plain "
        "model's shapes, on every rank."
    )
