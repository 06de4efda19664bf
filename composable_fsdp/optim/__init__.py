"""Optimizer state: names beside those of ``composable_fsdp``."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import resolver

if TYPE_CHECKING:
    from composable_fsdp.optim.load import (
        get_full_optim_state as get_full_optim_state,
    )
    from composable_fsdp.optim.load import (
        set_full_optim_state as set_full_optim_state,
    )
    from composable_fsdp.optim.names import (
        rekey_optim_state_dict as rekey_optim_state_dict,
    )

_resolve, __all__ = resolver(
    {
        "optim.names": "rekey_optim_state_dict",
        "optim.load": "get_full_optim_state set_full_optim_state",
    }
)
if not TYPE_CHECKING:
    __getattr__ = _resolve
