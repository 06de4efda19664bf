"""The flat gradient of a region belongs to whoever has a part of it.

``.grad`` of the leaves are views of one flat gradient. When no leaf shows one any more,
after ``zero_grad``, it is let go: at the next forward, whose activations can have the
memory, at the latest at the next reduction, which makes another. So a gradient that
somebody kept keeps its values, as after autograd. It is let go, too, if the views do
not view it any more (``p.grad.data = ...``).
"""

from __future__ import annotations

from torch import Tensor

from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.parameter import FlatParameter, make_grad_shard


def ready_gradient(region: FlatParameter, *, rows: bool, settled: bool = True) -> None:
    """Make the flat gradient, if there is none that leaves show. Sends nothing.

    Not ``settled``: a reduction may be on its way into the one there is, so it stays.
    Values are undefined where no leaf shows any.
    """
    # In a steady state the forward has let it go, and nothing is looked at.
    may_go = region.grad_shard is not None and settled and region.in_flight is None
    if may_go and not (_is_shown(region) and is_whole(region)):
        _let_go(region)
    if region.grad_shard is None:
        make_grad_shard(region, rows=rows)


def is_whole(region: FlatParameter) -> bool:
    """Whether the views of the flat gradient, if there is one, view it still."""
    if region.grad_shard is None:
        return True
    parts = region.grad_shard, *region.grad_views
    return region.grad_places == (*map(Tensor.data_ptr, parts),)


def free_cleared(handle: FlatParamHandle) -> None:
    """Let go of flat gradients that no leaf shows. Sends nothing."""
    if handle.reduce_has_memory:
        return  # a reduction may be on its way into them
    for region in handle.trainable:
        # On the host it is in the way of no activation.
        if region.grad_shard is None or region.offload or _is_shown(region):
            continue
        _let_go(region)


def _is_shown(region: FlatParameter) -> bool:
    """Whether a gradient is there that may be a part of the flat one."""
    if region.flat is not None and region.flat.grad is not None:
        return True
    for leaf in region.leaves:  # noqa: SIM110  # a generator would take longer
        if leaf.grad is not None:
            return True
    return False


def _let_go(region: FlatParameter) -> None:
    region.grad_shard = None
    region.grad_views = region.grad_gaps = ()
    region.grad_places = ()
