"""Hooks and AccumulateGrad nodes of full parameters, and the streams of the nodes.

The engine runs a node on the stream that was current when it was made, which a capture
on another stream could not wait for. So a forward on another stream makes them again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.comm import device
from composable_fsdp.comm.device import NO_EVENTS, outside_transforms
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.runtime.backward import make_grad_hook
from composable_fsdp.runtime.graph_task import FSDP_HOOK_KEY
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

_AccumulateGradFeeder: Any = torch._C._functions.DelayedError
_STREAM = "composable_fsdp.stream"
"""Key of the stream in the ``metadata`` of an AccumulateGrad node."""


def install_grad_hooks(state: _FSDPState) -> None:
    """Register the hooks on the full parameters of the current form, once per form."""
    handle = state.handle
    # An AccumulateGrad node exists only with gradients enabled; leaving inference mode
    # enables gradients.
    grads = torch.is_grad_enabled()
    with nullcontext() if grads else torch.inference_mode(False):
        for region in handle.layout.trainable:
            # Weak references: the garbage collector does not look into the hooks of a
            # tensor (torch 2.13), so a strong reference would keep the model and the
            # shards alive for ever.
            region.reduce.owner, link = weakref.ref(state), weakref.ref(region)
            for index, leaf in enumerate(region.full.leaves):
                # The effect of ``register_post_accumulate_grad_hook`` without the
                # checks and the handle, which took most of the time. Torch numbers
                # hooks from 0 up, so the key -1 is free.
                leaf._post_accumulate_grad_hooks = hooks = OrderedDict()
                hooks[FSDP_HOOK_KEY] = MethodType(make_grad_hook(index), link)
        if handle.layout.forms:
            _hook_forms(handle)
        make_nodes(handle)


def _hook_forms(handle: FlatParamHandle) -> None:
    """Let the hooks of parameters with a form take plain gradients from the form."""
    for region in handle.layout.trainable:
        link = weakref.ref(region)
        for index, (slot, leaf) in enumerate(
            zip(region.layout.parameters, region.full.leaves, strict=True)
        ):
            # Not through the cache, which would keep the mesh of the form alive.
            arrive = make_grad_hook.__wrapped__(index, handle.layout.forms[slot.index])
            hooks: Any = leaf._post_accumulate_grad_hooks
            hooks[FSDP_HOOK_KEY] = MethodType(arrive, link)


def accumulators_of(leaves: Sequence[nn.Parameter]) -> tuple[Any, ...]:
    """Return the AccumulateGrad nodes of ``leaves``. Gradients must be enabled."""
    if not leaves:
        return ()
    # A single ``DelayedError`` node takes all parameters as inputs, so
    # ``next_functions`` of the node are their AccumulateGrad nodes. The node reads no
    # memory, and raises if the engine runs the node.
    fed = _AccumulateGradFeeder("never run", len(leaves))(*leaves)
    feeder: Any = (fed if isinstance(fed, Tensor) else fed[0]).grad_fn
    return tuple([node for node, _ in feeder.next_functions])


def make_nodes(handle: FlatParamHandle) -> None:
    """Keep the AccumulateGrad nodes of the unit's full leaves, which may be new."""
    # Keep strong references to the nodes: a parameter holds the node only weakly, and
    # ``_will_engine_execute_node`` must be asked about the node that will run.
    handle.form.accumulators = tuple(
        chain.from_iterable(
            [accumulators_of(region.full.leaves) for region in handle.layout.trainable]
        )
    )
    if handle.events is not NO_EVENTS:
        _note_streams(handle)


def _note_streams(handle: FlatParamHandle) -> None:
    """Note the streams of the unit's AccumulateGrad nodes; new ones get the current."""
    current = device.current_stream(handle.layout.device)
    # The node itself keeps its stream: a graph that is still alive, or an earlier
    # layout, brings nodes back that were made on another stream than the last ones.
    streams = [
        node.metadata.setdefault(_STREAM, current) for node in handle.form.accumulators
    ]
    # Equal streams are few, and a stream need not be hashable.
    found: list[torch.cuda.Stream] = []
    for stream in streams:
        if stream not in found:
            found.append(stream)
    handle.events.leaf_streams = tuple(found)


@outside_transforms
def make_nodes_on_current_stream(context: RuntimeContext) -> None:
    """Make the AccumulateGrad nodes of all units again, on the caller's stream."""
    # Evaluation on a stream of its own must not move the nodes of training.
    if not torch.is_grad_enabled():
        return
    current, stay = context.streams.compute, False
    for handle in context.handles:
        if _is_elsewhere(handle, current):
            # No reference may be left: a parameter holds its node only weakly, and
            # gives the old node back as long as the node lives.
            handle.form.accumulators = ()
            make_nodes(handle)
            stay = stay or _is_elsewhere(handle, current)
    # The next forward tries again if a graph held nodes.
    context.streams.armed = None if stay else current


def _is_elsewhere(handle: FlatParamHandle, current: torch.cuda.Stream) -> bool:
    """Return whether any node of the unit belongs to another stream."""
    return any(stream != current for stream in handle.events.leaf_streams)
