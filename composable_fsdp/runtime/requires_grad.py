"""Changes of ``requires_grad`` of sharded parameters, applied at the root's forward."""

from __future__ import annotations

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.rebuild_trainable import rebuild_for_requires_grad
from composable_fsdp.runtime.backward import install_grad_hooks
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.runtime.unshard import release
from composable_fsdp.tree.state import RuntimeContext, root_of


@outside_transforms
def follow_requires_grad(context: RuntimeContext, handle: FlatParamHandle) -> None:
    """Move parameters that were frozen or unfrozen to regions of their kind.

    All ranks must have changed the same parameters.

    Raises: PhaseError, while gradients of the unit wait to be reduced.
    Collective: none, except as ``finish_reduction``.
    """
    finish_reduction(context)
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
    state = next(s for s in root_of(context)._all_fsdp_states if s.handle is handle)
    # The new regions have new full parameters without hooks.
    install_grad_hooks(state)
