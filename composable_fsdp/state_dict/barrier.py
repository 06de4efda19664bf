"""State dict calls meet, so that no rank gathers or loads alone."""

from __future__ import annotations

from torch import nn

from composable_fsdp.comm.meeting import Call
from composable_fsdp.config import FullStateDictConfig, StateDictSettings, StateDictType
from composable_fsdp.tree.root import compare_models, meet_over
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states

_SAVE_EVERYWHERE = (
    "Full values are gathered from all ranks: call state_dict() on every rank, outside "
    "of any 'if rank == 0', and write the result on one. "
    "FullStateDictConfig(rank0_only=True) spares the others the memory."
)
_LOAD_EVERYWHERE = (
    "Each rank writes only the rank's own shards: call load_state_dict on every rank, "
    "with the same values."
)


def barrier_before_gather(
    state: _FSDPState, module: nn.Module, settings: StateDictSettings
) -> None:
    """Wait until all ranks call a full ``state_dict()``; compare models once."""
    # Sharded values and local shards are not gathered, so a rank may be alone.
    if (
        state.handle.groups.shard is None
        or settings.state_dict_type is not StateDictType.FULL_STATE_DICT
    ):
        return
    if state.context is not None and state.context.summoned is not None:
        return  # inside unshard_params values are shown or refused, not gathered
    # Lower units are gathered inside the same call; a lower unit that the user saves
    # alone does not wait.
    if state.parent is None:
        config = settings.state_dict_config
        first_only = isinstance(config, FullStateDictConfig) and config.rank0_only
        details = ("rank0_only=True",) if first_only else ()
        # The parts of tensor parallelism are gathered, too, by torch and unseen by the
        # watch: ranks that are still in a step there must not pair with this call.
        cut = [each for _, _, each in walk_states(module) if each.handle.layout.forms]
        call = Call("state_dict", state.title, details, _SAVE_EVERYWHERE)
        meet_over(dict.fromkeys([state, *cut]), call)
    compare_models(state, replicas=False)


_open: tuple[object, dict[int, list[str]]] = None, {}
"""torch's list of errors of the ``load_state_dict`` that runs now, or ran last, and by
identity of a unit the prefixes of the modules that have begun to load."""


def barrier_before_load(state: _FSDPState, prefix: str, error_msgs: list[str]) -> bool:
    """Wait until all ranks that hold the unit load the module at ``prefix``."""
    global _open
    # torch passes the same list to all hooks of a call, and a new list to those of the
    # next call. The reference keeps the list alive, so that its identity stays its own.
    if _open[0] is not error_msgs:
        _open = error_msgs, {}
    begun = _open[1].setdefault(id(state), [])
    if any(prefix.startswith(each) for each in begun):
        return False
    begun.append(prefix)
    # A unit below a unit loads in the same call.
    if state.parent is None or id(state.parent) not in _open[1]:
        call = Call("load_state_dict", state.title, way_out=_LOAD_EVERYWHERE)
        meet_over([state], call, replicas=True)
    return True
