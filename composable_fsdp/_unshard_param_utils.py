"""Unsharding of a module, under FSDP1's path ``fsdp._unshard_param_utils``."""

from composable_fsdp.access.manual import _unshard_params_recurse

__all__ = ["_unshard_params_recurse"]
