"""Reductions by a communication hook of the user (``register_comm_hook``)."""

from __future__ import annotations

from itertools import chain

from composable_fsdp.errors import FSDPError
from composable_fsdp.flat.handle import FlatParamHandle


def reduce_by_hook(handle: FlatParamHandle) -> None:
    """Have the communication hook of the user reduce every region.

    Raises: FSDPError, if a result has not ``shard_numel`` elements.
    """
    rule = handle.rule
    assert rule.hook is not None
    for region in chain.from_iterable(handle.layout.reduce_groups):
        # Pass detached tensors: a hook may give them other memory through ``.data``.
        result = gradient = region.reduce.buffer.detach()
        if region.reduce.partial is not None:
            gradient.add_(region.reduce.partial)
        # A shard group of a single rank needs no scatter: the hook reduces in place.
        if region.layout.world_size == 1:
            rule.hook(rule.hook_state, gradient)
        else:
            assert region.reduce.temporary is not None
            result = region.reduce.temporary.detach()
            rule.hook(rule.hook_state, gradient, result)
        if result.numel() != region.layout.shard_numel:
            raise FSDPError(
                f"A communication hook left {result.numel()} elements; expected the "
                f"{region.layout.shard_numel} of this rank's shard. Write the reduced "
                "gradient into the last argument and keep its size."
            )
        region.reduce.temporary = result
        region.reduce.partial = None  # added already
