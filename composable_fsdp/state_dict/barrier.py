"""A barrier before a full state dict is gathered, so that no rank gathers alone.

``if rank == 0: torch.save(model.state_dict(), ..)`` gathers on rank 0 only: its
collective then pairs with the next forward of the other ranks, or waits without end. So
each rank first announces itself in the key-value store, and a rank that stays alone
raises within a bounded time.
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
"""The end of the warning and of the error."""


def barrier_before_gather(
    state: _FSDPState, module: nn.Module, prefix: str, keep_vars: bool
) -> None:
    """Wait until all ranks of the shard group have called a full ``state_dict()``, too.

    Called once per ``state_dict()`` by outermost units, and by the hook of a part of a
    unit. The function uses a few round trips to the key-value store and warns if the
    wait becomes long.

    Args:
        state: The unit.
        module: The module whose ``state_dict()`` runs; unused.
        prefix: The prefix of the keys; unused.
        keep_vars: torch's argument; unused.

    Collective: none.
    Raises: DesyncError, if other ranks do not call within the timeout.
    """
    group = state.handle.groups.shard
    # Lower units are gathered inside the same call; a lower unit that the user saves
    # alone is not checked.
    if state.parent is not None or group is None or not can_compare(group):
        return
    kind = effective_settings(state).state_dict_type
    # Sharded values and local shards are not gathered, so a rank may be alone.
    if kind is not StateDictType.FULL_STATE_DICT:
        return
    if state.context is not None and state.context.summoned is not None:
        return  # inside unshard_params values are shown or refused, not gathered
    # Keys in the store instead of a collective: a collective would wait without end for
    # a rank that never enters.
    peers = Peers(group, "state_dict")
    peers.arrive("call")
    story = f"state_dict() of {state.title} was called on this rank"

    # A slow rank is no error: warn first, and raise only after the timeout.
    def notice(absent: list[int]) -> None:
        text = f"{story}, which waits for ranks {absent}. {_WAY_OUT}"
        warnings.warn(text, stacklevel=2)

    absent = peers.missing("call", notice)
    if absent:
        raise DesyncError(
            f"{story}, and ranks {absent} did not call it within {peers.timeout():g} "
            f"s. {_WAY_OUT}"
        )
    # The last rank removes the keys, so that the next state dict starts with none.
    peers.leave("left", ["call"])
