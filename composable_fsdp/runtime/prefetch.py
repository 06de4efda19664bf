"""Issuing the next all-gather before it is needed."""

from __future__ import annotations

from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.runtime.unshard import unshard
from composable_fsdp.tree.state import RuntimeContext, Tape


def prefetch_backward(context: RuntimeContext, tape: Tape, index: int) -> None:
    """Unshard the unit whose backward comes next: the one used before ``index``.

    One unit ahead; none if that unit is full already. Every rank walks the same record,
    so all decide alike.

    Collective: that unit's all-gather, or none.
    """
    handle: FlatParamHandle | None = tape.order.before(index)
    if handle is not None and not handle.gathered:
        unshard(context, handle)
