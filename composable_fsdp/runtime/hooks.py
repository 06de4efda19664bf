"""Attaching the functions of ``forward`` and ``backward`` to modules and leaves, once.

Forward hooks are taken out of torch.compile's sight as a whole, so that a compiled
block stays one graph (``torch._disable_dynamo`` is lazy: unlike
``torch.compiler.disable`` it does not import dynamo). That name and
``Tensor._post_accumulate_grad_hooks`` are private; checked on torch 2.13.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.runtime.backward import make_arrivals
from composable_fsdp.runtime.forward import post_forward, pre_forward
from composable_fsdp.tree.state import _FSDPState

_disable_dynamo: Any = vars(torch)["_disable_dynamo"]
_pre_forward = _disable_dynamo(pre_forward)
_post_forward = _disable_dynamo(post_forward)

OURS = -1
"""Key of the arrival hook among the hooks of a full leaf."""


def install_hooks(state: _FSDPState) -> None:
    """Arm the unit: hooks on its modules' forward and on its full leaves' gradients."""
    for module in state.modules:
        # Ours comes first: pre-hooks of the user see full parameters.
        module.register_forward_pre_hook(
            partial(_pre_forward, state), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(partial(_post_forward, state), always_call=True)
    leaves: list[nn.Parameter] = []
    for region in state.handle.trainable:
        arrivals = make_arrivals(state, region)
        for leaf, arrive in zip(region.full_leaves, arrivals, strict=True):
            # What register_post_accumulate_grad_hook sets, without its checks and its
            # handle, which cost as much as all else here. Torch numbers from 0 up.
            leaf._post_accumulate_grad_hooks = OrderedDict({OURS: arrive})
        leaves += region.full_leaves
    # A leaf keeps its node only weakly: the handle does, so that the node we ask the
    # engine about is the node it runs.
    state.handle.accumulators = _accumulators(leaves) if leaves else ()


class _Users(torch.autograd.Function):
    """A node that all of its inputs feed: what feeds it are their accumulators."""

    @staticmethod
    def forward(ctx: object, *leaves: Tensor) -> Tensor:
        """Read nothing: the leaves have no memory now."""
        return torch.empty(0)


def _accumulators(leaves: Sequence[nn.Parameter]) -> tuple[object, ...]:
    """The nodes that accumulate into ``leaves``."""
    with torch.enable_grad():
        used: Tensor = _Users.apply(*leaves)  # type: ignore[no-untyped-call]  # as above
    assert used.grad_fn is not None
    return tuple([node for node, _ in used.grad_fn.next_functions])
