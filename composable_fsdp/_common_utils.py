"""The state of a module, under torch FSDP1's path ``fsdp._common_utils``."""

from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state

__all__ = ["_FSDPState", "_get_module_fsdp_state"]
