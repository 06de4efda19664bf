"""Takes up changes that were made to a unit's parameters outside the step.

The next use of a unit detects the change. Seam: ``tree.moments.Changes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.comm.operations import leave
from composable_fsdp.errors import PhaseError, PlanError
from composable_fsdp.features.changes.new_leaves import (
    rebuild_for_requires_grad,
    require_leaves,
    requires_grad_changed,
)
from composable_fsdp.features.changes.user_memory import (
    follow_user_memory,
    leaves_view_shards,
    take_memory,
    write_to_user_memory,
)
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.residency import shards_are_unchanged
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.runtime.grad_hooks import install_grad_hooks
from composable_fsdp.runtime.meta_values import end_watch
from composable_fsdp.runtime.offload import (
    finish_d2h_grad_copies,
    synchronize_copy_stream,
)
from composable_fsdp.runtime.precision import own_buffers
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.runtime.unshard import free_oldest, release
from composable_fsdp.tree.root import ensure_root, set_streams, unit_paths
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, root_of


class UserChanges:
    """The ``Changes`` of every program."""

    __slots__ = ()

    def adopt(self, state: _FSDPState, *, values_required: bool = True) -> None:
        """Make the shards of the sharded unit hold what the modules show.

        Raises: PlanError, as ``require_leaves``, or if the parameters got values and a
            buffer is still on meta.
        Collective: none, except as ``finish_reduction``.
        """
        handle = state.handle
        shown = [parameters.get(name) for parameters, name, _, _ in handle.swaps]
        if (
            values_required
            or not handle.layout.on_meta
            or any(p is None or not p.is_meta for p in shown)
        ):
            with _told_to_all(state):
                _adopt(state)

    def follow_flags(self, state: _FSDPState) -> bool:
        """Move parameters that were frozen or unfrozen to regions of their kind.

        Raises: PhaseError, while gradients of the unit wait to be reduced.
        Collective: none, except as ``finish_reduction``.
        """
        changed = requires_grad_changed(state.handle)
        if changed:
            with _told_to_all(state):
                _follow_requires_grad(ensure_root(state), state)
        return changed

    def is_in_shards(self, handle: FlatParamHandle) -> bool:
        """Return whether the leaves lie in the shards; if not, they do afterwards."""
        if leaves_view_shards(handle):
            return True
        take_memory(handle)
        return False

    def shards_written(self, handle: FlatParamHandle) -> None:
        """Copy the shard into leaves that lie in memory of the user."""
        write_to_user_memory(handle)


@contextmanager
def _told_to_all(state: _FSDPState) -> Iterator[None]:
    """Tell the ranks that wait for this one in its tree, if the block raises."""
    try:
        yield
    except (PhaseError, PlanError) as error:
        # Another rank may have changed nothing, and be in the forward already.
        context = state.context
        handles = (state.handle,) if context is None else context.handles
        for group in dict.fromkeys(g for h in handles for g in h.groups.present):
            leave(group, str(error.args[0]))
        raise


@outside_transforms
def _adopt(state: _FSDPState) -> None:
    """Make the shards of the unit hold the parameters that the modules show."""
    handle, context = state.handle, state.context
    if shards_are_unchanged(handle):
        return
    if context is not None:
        synchronize_copy_stream(context)
    if follow_user_memory(handle):
        return
    if context is not None:
        # The old buffers are freed below, so no stream may still read them.
        _finish_reduction(context, handle)
        free_oldest(context, keep=0)
    device, was_on_meta = handle.layout.device, handle.layout.on_meta
    if was_on_meta:
        end_watch(state)
    if not require_leaves(handle):
        return
    # The rebuilt regions have new full parameters, which have no hooks yet.
    install_grad_hooks(state)
    if was_on_meta:
        _place_buffers(state)
    if handle.layout.device != device:
        _move_unit(state, context)


def _finish_reduction(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Finish the reductions in flight.

    Raises: PlanError, if parameters of a reduction were cast since.
    """
    in_flight = (context.reducing, context.replicating)
    if any(each is not None and each.handle is handle for each in in_flight):
        for region in handle.layout.trainable:
            if any(leaf.dtype != region.layout.dtype for leaf in region.leaves):
                raise PlanError(
                    f"Parameters of unit {handle.name} were cast while its gradients "
                    "are being reduced (set_is_last_backward(False)). Cast them after "
                    "the backward that is the last."
                )
    finish_reduction(context)


def _place_buffers(state: _FSDPState) -> None:
    """Move buffers that got values together with the parameters to the compute device.

    Raises: PlanError, if a buffer is still on meta.
    """
    meta = []
    for number, name, buffer in own_buffers(state):
        if buffer.is_meta:
            meta.append(quoted(join_name(unit_paths(state)[number], name)))
        # Buffers move in place, so that modules that share a buffer keep sharing.
        elif buffer.device != state.handle.layout.device:
            buffer.data = buffer.to(state.handle.layout.device)
    if meta:
        raise PlanError(
            f"Parameters of unit {state.name} got values, and buffers "
            f"{', '.join(meta)} are still on meta. A state dict has persistent buffers "
            "only: call model.to_empty(device=...) and set the others."
        )


def _move_unit(state: _FSDPState, context: RuntimeContext | None) -> None:
    """Follow a unit to its compute device: a root without regions, and streams."""
    device: torch.device = state.handle.layout.device
    if context is None:
        return
    root = root_of(context)
    # A root without parameters has no device of its own and follows the first moved
    # unit.
    if root.device != device and not root.handle.layout.regions:
        root.handle.layout = replace(root.handle.layout, device=device)
    # Streams exist only on CUDA: a tree that moved there from the CPU has none yet.
    if root.device == device and context.streams.host_waits:
        set_streams(context, device)


@outside_transforms
def _follow_requires_grad(context: RuntimeContext, state: _FSDPState) -> None:
    """Move parameters that were frozen or unfrozen to regions of their kind."""
    handle = state.handle
    finish_reduction(context)
    finish_d2h_grad_copies(context)
    if handle.reduction.due or handle.reduction.held is not None:
        raise PhaseError(
            f"requires_grad of parameters of unit {handle.name} was changed while its "
            "gradients wait to be reduced (no_sync, set_requires_gradient_sync or "
            "set_requires_all_reduce). Freeze and unfreeze after the backward that "
            "reduces."
        )
    # Free the full buffers first: the regions are rebuilt below.
    release(context, handle)
    rebuild_for_requires_grad(handle)
    # The new regions have new full parameters without hooks.
    install_grad_hooks(state)
