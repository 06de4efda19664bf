"""The wrapper's component stays out of the keys that it gives, takes and reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from composable_fsdp.naming import WRAPPED_MODULE, join_name, strip_wrapper
from composable_fsdp.state_dict.local import PLAN


def install_wrapper_hooks(wrapper: nn.Module, component: str = WRAPPED_MODULE) -> None:
    """Keep the wrapper's component out of the keys that it gives, takes and reports."""
    hooks: Any = wrapper  # torch has no types for these
    hooks._register_state_dict_hook(partial(_strip_keys, component))
    hooks.register_load_state_dict_pre_hook(partial(_add_component, component))
    hooks.register_load_state_dict_post_hook(_strip_reports)


def _strip_keys(
    component: str,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    inner = f"{prefix}{component}"
    # Everything below was added last, so re-inserting keeps the order.
    _rename(state_dict, lambda key: key.startswith(inner + "."), inner + ".", prefix)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        metadata[prefix[:-1]] = metadata.pop(inner, metadata.get(prefix[:-1]))
        _rename(metadata, lambda key: key.startswith(inner + "."), inner + ".", prefix)


def _rename(
    table: dict[str, Any], chosen: Callable[[str], bool], old: str, new: str
) -> None:
    for key in [key for key in table if chosen(key)]:
        table[new + key[len(old) :]] = table.pop(key)


def _add_component(
    component: str,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    # From here on metadata is not found: plans go with the values they belong to, and
    # get each wrapper's component as those do.
    for name, plan in local_metadata.get(PLAN, {}).items():
        state_dict[prefix + join_name(name, PLAN)] = plan
    inner = f"{prefix}{component}."
    _rename(state_dict, lambda key: key.startswith(prefix), prefix, inner)


def _strip_reports(module: nn.Module, incompatible_keys: Any) -> None:
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = [strip_wrapper(key) for key in keys]
