"""Remove the wrapper's component from the keys of state dicts and of reports.

::

    state_dict        a._fsdp_wrapped_module.weight   ->  a.weight
    load_state_dict   a.weight                        ->  a._fsdp_wrapped_module.weight
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from composable_fsdp.naming import WRAPPED_MODULE, strip_wrapper


def install_wrapper_hooks(wrapper: nn.Module, component: str = WRAPPED_MODULE) -> None:
    """Install hooks: remove ``component`` on save, insert ``component`` on load."""
    hooks: Any = wrapper  # torch does not annotate these methods
    hooks._register_state_dict_hook(partial(_strip_keys, component))
    hooks.register_load_state_dict_pre_hook(partial(_add_component, component))
    hooks.register_load_state_dict_post_hook(_strip_reports)


def _strip_keys(
    component: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Rename the wrapped module's keys and metadata to the wrapper's names."""
    inner = f"{prefix}{component}"
    # The wrapped module's entries were added last, so the order stays.
    _rename(state_dict, inner + ".", prefix)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # The wrapped module's metadata (its version) moves to the wrapper's path.
        metadata[prefix[:-1]] = metadata.pop(inner, metadata.get(prefix[:-1]))
        _rename(metadata, inner + ".", prefix)


def _rename(table: dict[str, Any], old: str, new: str) -> None:
    """Replace the prefix ``old`` of keys by ``new``, in place."""
    for key in [key for key in table if key.startswith(old)]:
        table[new + key[len(old) :]] = table.pop(key)


def _add_component(
    component: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Insert the component into the keys below the wrapper, before torch loads them."""
    _rename(state_dict, prefix, f"{prefix}{component}.")


def _strip_reports(module: nn.Module, incompatible_keys: Any) -> None:
    """Remove components from the reported missing and unexpected keys."""
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = [strip_wrapper(key) for key in keys]
