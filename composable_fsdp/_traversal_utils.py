"""Traversal of states and handles, under FSDP1's path ``fsdp._traversal_utils``."""

from composable_fsdp.tree.traversal import (
    _get_fsdp_handles,
    _get_fsdp_root_states,
    _get_fsdp_states,
    _get_fsdp_states_with_modules,
)

__all__ = [
    "_get_fsdp_handles",
    "_get_fsdp_root_states",
    "_get_fsdp_states",
    "_get_fsdp_states_with_modules",
]
