"""Ranks meet before they gather a full state dict.

``if rank == 0: torch.save(model.state_dict(), ..)`` gathers on one rank alone: what it
sends then pairs with the others' next forward, or waits for ever. So ranks say in the
key-value store that they have come, and one that is alone is told so in time.
"""

from __future__ import annotations

import warnings

from torch import nn

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.config import StateDictType
from composable_fsdp.errors import DesyncError
from composable_fsdp.state_dict.effective_settings import effective_settings
from composable_fsdp.tree.state import _FSDPState

_WAY_OUT = (
    "Full values are gathered from all ranks: call state_dict() on every rank, outside "
    "of any 'if rank == 0', and write the result on one. "
    "FullStateDictConfig(rank0_only=True) spares the others the memory."
)


def barrier_before_gather(
    state: _FSDPState, module: nn.Module, prefix: str, keep_vars: bool
) -> None:
    """Wait until all ranks of the shard group are in a full ``state_dict()``, too.

    Done by outermost units, once a call; a unit that is called alone goes without.
    Some round trips to the key-value store; warns when the wait gets long.

    Raises: DesyncError, if others do not come in time.
    """
    group = state.handle.groups.shard
    if state.parent is not None or group is None or not can_compare(group):
        return
    kind = effective_settings(state).state_dict_type
    if kind is not StateDictType.FULL_STATE_DICT:
        return
    if state.context is not None and state.context.summoned is not None:
        return  # inside unshard_params values are shown or refused, and not sent
    peers = Peers(group, "state_dict")
    peers.arrive("call")
    story = f"state_dict() of {state.title} was called on this rank"

    def notice(absent: list[int]) -> None:
        text = f"{story}, which waits for ranks {absent}. {_WAY_OUT}"
        warnings.warn(text, stacklevel=2)

    absent = peers.missing("call", notice)
    if absent:
        raise DesyncError(
            f"{story}, and ranks {absent} did not call it within {peers.timeout():g} "
            f"s. {_WAY_OUT}"
        )
    peers.leave("left", ["call"])
