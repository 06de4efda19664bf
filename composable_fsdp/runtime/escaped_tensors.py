"""Tensors that leave a unit's forward by another way than its output.

Backward may reach the unit through any of them, and has to find it gathered:

* an input that the unit wrote to in place (``x.add_(...)``): its new node, or that of
  the tensor it views;
* the tensor that an output views: a caller that changes the view in place drops the
  view's own node and keeps that one;
* a tensor that the unit put into a list, a dict or an object that it was given;
* a tensor kept on an attribute or buffer of a module in the unit (an auxiliary loss).
  Looking through them takes longer than a step may, so the first forwards look, and
  those that they find are looked at in every forward after.

A tensor that leaves by yet another way (a closure, a global list) is refused when
backward reads the weights outside their window (``flat.shard_versions``).

``torch._C._autograd._get_sequence_nr`` and ``Node._sequence_nr`` are private; used only
here, checked on torch 2.13 and 2.11. Nodes are numbered in the order they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.compose.registry import REGISTRY_KEY
from composable_fsdp.runtime.nested_tensors import tensors_in
from composable_fsdp.tree.state import _FSDPState

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of this thread gets."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {REGISTRY_KEY}
"""The registry leads to the states, and they to the whole tree: no walk per unit."""
_HOLDERS = frozenset({Tensor, list, tuple, dict})


def grad_fns_of(tensors: Iterable[Tensor], since: int) -> list[Any]:
    """The nodes at which backward may enter through ``tensors``, each once.

    Of a tensor that a caller changes in place one stays: its own, or that of its base.
    Those of a base count if they were made ``since``; an older one is no unit's.
    """
    found: dict[int, Any] = {}
    for tensor in tensors:
        node = tensor.grad_fn
        if node is None:
            continue
        found[id(node)] = node
        if tensor._base is not None:
            base = tensor._base.grad_fn
            if base is not None and base._sequence_nr() >= since:
                found[id(base)] = base
    return list(found.values())


def written_in_place(inputs: Iterable[tuple[Tensor, int]], since: int) -> list[Tensor]:
    """Those of ``inputs`` that have another version now, and a node made ``since``."""
    found = []
    for tensor, version in inputs:
        if tensor._version != version:
            kept = tensor if tensor._base is None else tensor._base
            if kept.grad_fn is not None and kept.grad_fn._sequence_nr() >= since:
                found.append(kept)
    return found


def tensors_on_attributes(state: _FSDPState, since: int) -> list[Tensor]:
    """Tensors made ``since`` that the unit's modules keep as attributes."""
    if state.scans:
        state.scans -= 1
        known = {(id(table), key) for table, key in state.kept_at}
        state.kept_at += tuple(
            (table, key)
            for table, key, tensor in _attributes(state)
            if _is_since(tensor, since) and (id(table), key) not in known
        )
    found = (
        each for table, key in state.kept_at for each in tensors_in(table.get(key))
    )
    return made_since(found, since)


def made_since(tensors: Iterable[Tensor], since: int) -> list[Tensor]:
    """Those of ``tensors`` whose node was made ``since``."""
    return [tensor for tensor in tensors if _is_since(tensor, since)]


def _is_since(tensor: Tensor, since: int) -> bool:
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since


def _attributes(state: _FSDPState) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Every tensor on attributes of this unit and those below: table, key, tensor.

    What a unit below keeps was computed from what this one gave it, and may be all that
    leads back to this one.
    """
    stack: list[nn.Module | None] = list(state.modules)
    seen = set()
    while stack:
        module = stack.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        for table in (vars(module), module._buffers):
            for key in table.keys() - _OF_EVERY_MODULE:
                if type(table[key]) in _HOLDERS:
                    for tensor in tensors_in(table[key]):
                        yield table, key, tensor
                        if tensor.grad_fn is not None:
                            break
        stack += module._modules.values()
