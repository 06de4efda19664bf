"""State dicts: names beside those of ``composable_fsdp``."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import public_names

if TYPE_CHECKING:
    from composable_fsdp.state_dict.settings import (
        get_state_dict_type as get_state_dict_type,
    )
    from composable_fsdp.state_dict.sharded import ShardedValue as ShardedValue

__all__ = public_names(__name__)
