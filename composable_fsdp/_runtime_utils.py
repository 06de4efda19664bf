"""The root states of a tree, under torch FSDP1's path ``fsdp._runtime_utils``."""

from composable_fsdp.tree.traversal import _get_fsdp_root_states

__all__ = ["_get_fsdp_root_states"]
