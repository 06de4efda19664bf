"""Casts of buffers, of units with ``mixed_precision``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from composable_fsdp.naming import TRANSPARENT, join_name
from composable_fsdp.planning.walk import named
from composable_fsdp.tree.state import OWNERS, _FSDPState


def cast_buffers(state: _FSDPState) -> None:
    """Cast the unit's floating point buffers to ``buffer_dtype``, in place."""
    precision = state.precision
    assert precision is not None
    dtype, known = precision.buffer_dtype, precision.buffer_dtypes
    # By id, because a shared buffer is cast under the first of its names.
    just_cast: dict[int, torch.dtype] = {}
    for number, fqn, buffer in own_buffers(state):
        if not buffer.is_floating_point():
            continue
        if buffer.dtype != dtype:
            just_cast[id(buffer)] = buffer.dtype
            # ``.data``: the buffer object stays the same.
            buffer.data = buffer.to(dtype)
        if just_cast and id(buffer) in just_cast:
            # Two modules of the unit may have buffers of the same name.
            known[number, fqn] = just_cast[id(buffer)]


def own_buffers(state: _FSDPState) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the unit's module, by number, the name from there, and the buffer."""

    def enter(module: nn.Module) -> bool:
        owner = OWNERS.get(module)
        # An activation checkpoint wrapper that was inserted after ``fully_shard`` has
        # no owner; the wrapped module may belong to this unit.
        return owner is state or (
            owner is None and any(name in module._modules for name in TRANSPARENT)
        )

    for number, root in enumerate(state.modules):
        for fqn, module in named(root, enter=enter, every_path=True):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield number, join_name(fqn, name), buffer
