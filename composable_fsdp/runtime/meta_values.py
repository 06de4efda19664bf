"""Detection of values that were on meta and were not filled, or drawn on shards, since.

Tensors on meta have classes that mark new memory: NaN, or the smallest integer. A shard
with memory is a ``WatchedShard`` until the unit adopts it, and records random numbers
that were drawn into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import PlanError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import in_model_order
from composable_fsdp.flat.value_hash import digest_of_start
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.runtime.recover import own_buffers
from composable_fsdp.tree.root import unit_paths
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import walk_states


class _Unfilled:
    """What tensors on meta do: operations make plain tensors, and memory is marked."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            # ``to_empty`` allocates by ``torch.empty_like``.
            if func is torch.empty_like and not made.is_meta:
                _mark(made)
                if issubclass(cls, nn.Parameter):
                    made.__class__ = WatchedShard
                    # Other memory may have had this address.
                    _drawn.discard(made.untyped_storage()._cdata)
        return made


class UnfilledBuffer(_Unfilled, Tensor):
    """A buffer on meta."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = as_unfilled(torch.empty_like(self))
        return made


class UnfilledParameter(_Unfilled, nn.Parameter):
    """A sharded parameter on meta. Memory made from it is a ``WatchedShard``."""


RANDOM = re.compile(
    "(kaiming_|trunc_|log_)?normal_|(kaiming_)?uniform_|random_|bernoulli_|"
    "exponential_|cauchy_|geometric_"
)
"""Functions that draw numbers into a tensor."""
_OVERWRITES = frozenset(("copy_", "fill_", "zero_", "constant_"))
_drawn: set[int] = set()
"""The memory of watched shards that holds random numbers, as the last full write."""


class WatchedShard(Tensor):
    """A shard with memory, or a view of it, until the unit adopts the parameter."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            for each in given:
                if type(each) is not cls:
                    continue
                memory = each.untyped_storage()
                if RANDOM.fullmatch(name):
                    _drawn.add(memory._cdata)
                elif name in _OVERWRITES and each.nbytes == memory.nbytes():
                    _drawn.discard(memory._cdata)
                # Writes through ``.data`` or a row are writes into the shard.
                if type(made) is Tensor and _has_memory(made, memory):
                    made.__class__ = cls
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # Before adoption torch copies the parameters of a module first, then its unit.
        with torch._C.DisableTorchFunctionSubclass():
            made: Tensor = self.detach().clone()
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made
        return made


def _has_memory(tensor: Tensor, memory: torch.UntypedStorage) -> bool:
    return bool(tensor.untyped_storage()._cdata == memory._cdata)


def watch_shards(handle: FlatParamHandle) -> None:
    """Watch the parameters of a unit on meta from the time when they get memory."""
    # The class changes and not the object, which optimizers and ties refer to.
    for leaf in handle.leaves:
        if type(leaf) is nn.Parameter and leaf.is_meta:
            leaf.__class__ = UnfilledParameter


def end_watch(state: _FSDPState) -> None:
    """Make the parameters that the modules show plain ones; keep their draws."""
    layout = state.handle.layout
    for place, table, key in zip(
        layout.places, layout.tables, layout.keys, strict=True
    ):
        shown: Any = table.get(key)
        kind = type(shown)
        if kind is WatchedShard:
            shown.__class__ = nn.Parameter
            del shown._is_param
            memory = shown.untyped_storage()._cdata
            # Only now: ``trunc_normal_`` and a zero row for padding change numbers.
            if memory in _drawn and (digest := digest_of_start(shown.detach())):
                state.initial.drawn[place.slot_index] = digest
            _drawn.discard(memory)
        elif kind is UnfilledParameter and not shown.is_meta:
            shown.__class__ = nn.Parameter


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
    if type(buffer) not in (Tensor, nn.Parameter, UnfilledBuffer, WatchedShard):
        return False
    # An empty buffer has no values to fill, and bool has no mark.
    if not buffer.numel() or buffer.is_meta or buffer.dtype is torch.bool:
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        # First a single number: most tensors have values. 8 bits: torch has no isnan.
        if buffer.itemsize == 1 or not buffer.reshape(-1)[0].isnan():
            return False
        return bool(buffer.isnan().all())
    info = torch.iinfo(buffer.dtype)
    return bool((buffer == (info.min or info.max)).all())


def _unfilled(states: Iterable[tuple[str, _FSDPState]]) -> Iterator[str]:
    """Yield the FQNs of buffers that hold only marks."""
    for fqn, state in states:
        if state.initial.awaits_buffers:
            paths = [fqn, *unit_paths(state)[1:]]
            for number, name, buffer in own_buffers(state):
                if _is_marked(buffer):
                    yield join_name(paths[number], name)


def unfilled_buffers(module: nn.Module) -> list[str]:
    """Return FQNs of buffers that were on meta and got memory but no values."""
    return list(_unfilled((fqn, state) for fqn, _, state in walk_states(module)))


def unfilled_parameters(state: _FSDPState) -> list[str]:
    """Return names of sharded parameters that got memory but no values on this rank."""
    # -1: the shards were on meta at build.
    if state.handle.writes.at_build != -1:
        return []
    return [ref.name for ref in in_model_order(state.handle) if _is_marked(ref.leaf)]


def require_filled(states: Sequence[_FSDPState]) -> None:
    """Raise if a buffer that was on meta got memory but no values."""
    names = list(_unfilled((state.fqn, state) for state in states))
    if names:
        raise PlanError(
            f"Buffers {listed(map(quoted, names))} were on meta "
            "and nothing has filled them since they got memory (to_empty); a forward "
            "would compute with garbage. A checkpoint has persistent buffers only: "
            "set the others, or pass a param_init_fn that does, on every rank."
        )
    for state in states:
        state.initial.awaits_buffers = False
