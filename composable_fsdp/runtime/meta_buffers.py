"""Detection of buffers that were on meta and were not filled since.

``to_empty`` gives a buffer memory and no values, and a checkpoint has no values for
buffers that are not persistent (the frequencies of rotary embeddings). Until then the
buffer on meta is an ``UnfilledBuffer``, which fills new memory with a mark::

    meta buffer --to_empty--> all NaN (integers: the smallest) --fill--> values

A buffer that holds only marks at the first forward was never written. An object that
the user assigned in place of the buffer has values. Buffers of another class of tensor,
such as DTensors, keep that class and are not watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.runtime.precision import own_buffers
from composable_fsdp.tree.root import unit_paths
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states


class UnfilledBuffer(Tensor):
    """A buffer on meta. The result of an operation on such a buffer is a plain tensor.

    ``DisableTorchFunctionSubclass`` checked on torch 2.13 and 2.11.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Results are plain tensors: only the buffer on meta itself needs the mark.
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            # ``to_empty`` allocates by ``torch.empty_like``.
            if func is torch.empty_like and not made.is_meta:
                _mark(made)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = as_unfilled(torch.empty_like(self))
        return made


def as_unfilled(buffer: Tensor) -> Tensor:
    """Return ``buffer`` on meta as an ``UnfilledBuffer``, if it is a plain tensor."""
    # A tensor has one Python class: a DTensor cannot become another subclass.
    plain = type(buffer) in (Tensor, UnfilledBuffer)
    return buffer.as_subclass(UnfilledBuffer) if plain else buffer


def mark_meta_buffers(modules: Iterable[nn.Module]) -> bool:
    """Replace buffers on meta by ``UnfilledBuffer``; return whether any was on meta."""
    made: dict[int, Tensor] = {}
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                # A buffer that several modules hold stays a single object.
                made.setdefault(id(buffer), as_unfilled(buffer))
                module._buffers[key] = made[id(buffer)]
    return bool(made)


@torch.no_grad()
def _mark(buffer: Tensor) -> None:
    """Fill the buffer with NaN, or with the smallest integer; bool has no mark."""
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(torch.nan)
    # The smallest integer of an unsigned dtype is 0, a common value; use the largest.
    elif buffer.dtype is not torch.bool:
        buffer.fill_(torch.iinfo(buffer.dtype).min or torch.iinfo(buffer.dtype).max)


def _is_marked(buffer: Tensor) -> bool:
    """Return whether the buffer holds only marks."""
    if type(buffer) not in (Tensor, UnfilledBuffer):
        return False
    # An empty buffer has no values to fill, and bool has no mark.
    if not buffer.numel() or buffer.is_meta or buffer.dtype is torch.bool:
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().all())
    info = torch.iinfo(buffer.dtype)
    return bool((buffer == (info.min or info.max)).all())


def _unfilled(states: Iterable[tuple[str, _FSDPState]]) -> Iterator[str]:
    """Yield the FQNs of buffers that hold only marks."""
    for fqn, state in states:
        if state.searches.awaits_buffers:
            paths = [fqn, *unit_paths(state)[1:]]
            for number, name, buffer in own_buffers(state):
                if _is_marked(buffer):
                    yield join_name(paths[number], name)


def unfilled_buffers(module: nn.Module) -> list[str]:
    """Return FQNs of buffers that were on meta and got memory but no values."""
    return list(_unfilled((fqn, state) for fqn, _, state in walk_states(module)))


def require_filled(states: Sequence[_FSDPState]) -> None:
    """Raise if a buffer that was on meta got memory but no values.

    Raises: PlanError, with the FQNs.
    Collective: none.
    """
    names = list(_unfilled((state.fqn, state) for state in states))
    if names:
        raise PlanError(
            f"Buffers {listed(map(quoted, names))} were on meta "
            "and nothing has filled them since they got memory (to_empty); a forward "
            "would compute with garbage. A checkpoint has persistent buffers only: "
            "set the others, or pass a param_init_fn that does, on every rank."
        )
    for state in states:
        state.searches.awaits_buffers = False
