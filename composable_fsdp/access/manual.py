"""Making one unit full and sharded again by hand, outside or inside a step."""

from __future__ import annotations

import torch
from torch import nn

from composable_fsdp.access.schedule import state_of_unit
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.external_changes import (
    requires_grad_changed,
    shards_are_unchanged,
)
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.runtime import unshard as verbs
from composable_fsdp.runtime.external_changes import adopt_external_changes_unless_meta
from composable_fsdp.runtime.graph_task import current_task
from composable_fsdp.runtime.recover import is_live, recover
from composable_fsdp.runtime.requires_grad import follow_requires_grad
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import RuntimeContext, _FSDPState


class UnshardHandle:
    """An all-gather on its way; returned by ``unshard(module, async_op=True)``."""

    __slots__ = ("_handle",)

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle: FlatParamHandle | None = handle

    def wait(self) -> None:
        """Show the full parameters, behind the all-gather. Sends nothing.

        Does nothing the second time, or if the unit was used or resharded since: the
        unit's own forward waits as well.
        """
        handle, self._handle = self._handle, None
        if handle is not None and handle.full_since is not None:
            verbs.wait_unsharded(handle)


def unshard(module: nn.Module, async_op: bool = False) -> UnshardHandle | None:
    """Gather the full parameters of the unit that ``module`` is, and show them.

    They stay until the unit reshards after its next forward or backward, or until
    ``reshard``. Units below are left alone. A unit that is full already sends nothing.
    What is written into full parameters or set on them (``requires_grad``) is lost, see
    ``unshard_params``. What anything but ``load_state_dict`` or ``set_full_param`` has
    written into the shards meanwhile, optimizers included, the next forward refuses; a
    write through ``.data`` it cannot notice. Make no optimizer now:
    ``module.parameters()`` are the full ones, which nobody trains, and its first step
    raises.

    With ``async_op`` returns at once; ``wait()`` of what it returns shows the
    parameters, as the unit's forward does.

    Collective: the unit's all-gather over its shard group, if it is sharded.
    Raises: CompositionError, if ``module`` is no fully sharded module; PhaseError,
    inside ``unshard_params``.

    >>> pending = unshard(model.head, async_op=True)
    >>> hidden = model.body(x)
    >>> pending.wait()
    """
    state = state_of_unit(module, "unshard")
    context = _context(state, "unshard")
    handle = state.handle
    if not handle.gathered or handle.retiring:
        if context.outermost is None and not shards_are_unchanged(handle):
            # ``p.data = ...``, a cast, a freeze: the next forward would find it later.
            adopt_external_changes_unless_meta(state)
            if requires_grad_changed(handle):
                follow_requires_grad(context, handle)
        if context.streams is not None and context.outermost is None:
            # The optimizer wrote the shards on the caller's stream. Inside a forward,
            # which has waited for it, a wait would end the overlap.
            current = torch.cuda.current_stream(handle.device)
            context.streams.gather.wait_stream(current)
        verbs.unshard(context, handle)
    if handle.full_since is None:
        handle.full_since = verbs.shard_versions(handle)
    pending = UnshardHandle(handle)
    if async_op:
        return pending
    pending.wait()
    return None


def reshard(module: nn.Module) -> None:
    """Show the sharded parameters of the unit that ``module`` is; free the full ones.

    Units below are left alone. A unit that is sharded already stays as it is.

    Collective: none; what was freed between forward and backward is gathered again.
    Raises: CompositionError, if ``module`` is no fully sharded module; PhaseError,
    inside its own forward or backward, or inside ``unshard_params``.
    """
    state = state_of_unit(module, "reshard")
    context = _context(state, "reshard")
    handle = state.handle
    if handle.calls or handle.task != NO_TASK:
        raise PhaseError(
            f"reshard was called on {state.name} while its "
            f"{'forward' if handle.calls else 'backward'} is running, which needs the "
            "full parameters. Call it before or after."
        )
    verbs.reshard(context, handle)
    verbs.free_oldest(context, keep=0)


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module``, a fully sharded module, shows its sharded parameters now.

    Also True between forward and backward of a unit that keeps the memory of the full
    ones: what a caller finds in ``module`` are the sharded ones. Sends nothing.

    Raises: CompositionError, if ``module`` is no fully sharded module.
    """
    return not state_of_unit(module, "is_sharded").handle.is_full


def _context(state: _FSDPState, what: str) -> RuntimeContext:
    """The context of a unit's tree, cleared of a step that broke."""
    context = ensure_root(state)
    if context.summoned is not None:
        raise PhaseError(
            f"{what} was called on {state.name} inside unshard_params of "
            f"{context.summoned.name}, where the parameters are yours to change. Call "
            "it after the block."
        )
    if context.tasks and current_task() == NO_TASK:
        recover(context, drop_gradients=True)
    elif context.outermost is not None and not is_live(context):
        recover(context, drop_gradients=False)
    return context
