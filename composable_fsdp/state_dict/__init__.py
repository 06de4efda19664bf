"""State dicts: names beside those of ``composable_fsdp``."""

from typing import TYPE_CHECKING

from composable_fsdp.lazy import resolver

if TYPE_CHECKING:
    from composable_fsdp.state_dict.settings import (
        get_state_dict_type as get_state_dict_type,
    )
    from composable_fsdp.state_dict.sharded import ShardedValue as ShardedValue

_resolve, __all__ = resolver(
    {"state_dict.settings": "get_state_dict_type", "state_dict.sharded": "ShardedValue"}
)
if not TYPE_CHECKING:
    __getattr__ = _resolve
