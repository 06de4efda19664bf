"""Optimizer state: names beside those of ``composable_fsdp``."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import public_names

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

__all__ = public_names(__name__)
