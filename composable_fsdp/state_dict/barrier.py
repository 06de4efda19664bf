"""State dict calls meet, so that no rank gathers or loads alone."""

from __future__ import annotations

from torch import nn

from composable_fsdp.comm.meeting import Call
from composable_fsdp.config import FullStateDictConfig, StateDictType
from composable_fsdp.state_dict.effective_settings import effective_settings
from composable_fsdp.tree.meeting import meet_over
from composable_fsdp.tree.same_models import compare_models
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states

_WAY_OUT = (
    "Full values are gathered from all ranks: call state_dict() on every rank, outside "
    "of any 'if rank == 0', and write the result on one. "
    "FullStateDictConfig(rank0_only=True) spares the others the memory."
)
"""The end of the warning and of the error of ``state_dict``."""

_LOAD_EVERYWHERE = (
    "Each rank writes only the rank's own shards: call load_state_dict on every rank, "
    "with the same values."
)
"""The end of the warning and of the error of ``load_state_dict``."""


def barrier_before_gather(
    state: _FSDPState, module: nn.Module, prefix: str, keep_vars: bool
) -> None:
    """Wait until all ranks of the shard group have called a full ``state_dict()``, too.

    Called once per ``state_dict()`` by outermost units, and by the hook of a part of a
    unit.

    Args:
        state: The unit.
        module: The module whose ``state_dict()`` runs.
        prefix: The prefix of the keys; unused.
        keep_vars: torch's argument; unused.

    Collective: before the first gather of a tree as ``compare_models``; else none, as
        ``meet``.
    Raises: DesyncError, if other ranks do not call within the timeout, or as
        ``compare_models``.
    """
    if state.handle.groups.shard is None:
        return
    settings = effective_settings(state)
    # Sharded values and local shards are not gathered, so a rank may be alone.
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
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
        call = Call("state_dict", state.title, details, _WAY_OUT)
        meet_over(dict.fromkeys([state, *cut]), call)
    compare_models(state, replicas=False)


class _OpenLoad:
    """The ``load_state_dict`` that runs now, or ran last, on this rank."""

    __slots__ = ("errors", "units")

    def __init__(self) -> None:
        self.errors: object = None
        """torch's list of errors, the same list in all hooks of a call."""
        self.units: set[int] = set()
        """Identities of the units whose hooks have run."""


_open_load = _OpenLoad()


def barrier_before_load(state: _FSDPState, error_msgs: list[str]) -> None:
    """Wait until all ranks that hold the unit load.

    The outermost units of a call do so for the units below. ``error_msgs`` is torch's
    list of errors, which identifies the call.

    Raises: DesyncError, before any value is written.
    """
    # torch passes the same list to all hooks of a call, and a new list to those of the
    # next call. The reference keeps the list alive, so that its identity stays its own.
    if _open_load.errors is not error_msgs:
        _open_load.errors, _open_load.units = error_msgs, set()
    units, parent = _open_load.units, state.parent
    # A unit below a unit loads in the same call. A unit of several modules has a hook
    # per module.
    is_inner = (parent is not None and id(parent) in units) or id(state) in units
    units.add(id(state))
    if not is_inner:
        meet_to_load(state)


def meet_to_load(state: _FSDPState) -> None:
    """Wait until all ranks that hold the unit load.

    Raises: DesyncError, before any value is written.
    """
    call = Call("load_state_dict", state.title, way_out=_LOAD_EVERYWHERE)
    meet_over([state], call, replicas=True)
