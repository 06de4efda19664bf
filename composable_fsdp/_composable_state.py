"""The state of a module, under torch's path ``distributed._composable_state``."""

from composable_fsdp.tree.state import _get_module_state

__all__ = ["_get_module_state"]
