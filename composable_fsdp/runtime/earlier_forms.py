"""Backward through a forward that ran before parameters were frozen or unfrozen.

The next forward after such a change gives the unit other regions, while the graph of
the earlier forward holds full leaves of the former regions. If backward reaches that
graph, the unit gets the former regions again, over the same full leaves::

    loss = model(x)              full form A
    model.requires_grad_(False)
    other = model(x)             full form B
    loss.backward()              full form A again
    other.backward()             full form B again

A graph keeps its full form alive, which has no memory while the unit is sharded.
"""

from __future__ import annotations

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.external_changes import rebuild_for_form
from composable_fsdp.flat.handle import FullForm
from composable_fsdp.runtime.graph_task import reset_failed_graph_tasks
from composable_fsdp.runtime.offload import finish_d2h_grad_copies
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.runtime.unshard import release
from composable_fsdp.tree.state import ForwardRecord, _FSDPState


def take_earlier_form(state: _FSDPState, form: FullForm, tape: ForwardRecord) -> None:
    """Give the unit the regions of ``form``, and make ``form`` the current form.

    The full leaves need hooks afterwards (``install_grad_hooks``). The next forward
    follows ``requires_grad`` again.

    Raises: PhaseError, if the parameters were replaced, cast or moved since, or if
        gradients of the unit wait.
    Collective: as ``reduce_gradients``, if gradients of a backward wait.
    """
    handle, context = state.handle, state.context
    assert context is not None
    if context.dead:
        reset_failed_graph_tasks(context)
    # The engine runs the nodes of the later forward first, so if the backward is of
    # both forwards, the unit has no further part in the backward of the later one.
    if handle.reduction.due and state.settings.sync_gradients:
        tape.reduce(context, handle)
    finish_reduction(context)
    finish_d2h_grad_copies(context)
    busy = (
        handle.backward.pending
        or handle.running.calls
        or handle.reduction.due
        or handle.reduction.held is not None
        or context.summoned is not None
    )
    if not busy:
        release(context, handle)
    if busy or not rebuild_for_form(handle, form):
        raise PhaseError(through_earlier_forward(f"unit {state.name}"))
    # The gather stream must read the new shards after the copy.
    context.streams.wait_for_caller()


def through_earlier_forward(what: str) -> str:
    """Return the message for a backward that reaches ``what`` by a graph of before."""
    return (
        f"Backward reached {what} through a forward that ran before the unit's "
        "parameters were cast, moved or replaced (or frozen or unfrozen, and now "
        "gradients of no_sync wait). Run backward before the next forward, or change "
        "parameters between steps."
    )
