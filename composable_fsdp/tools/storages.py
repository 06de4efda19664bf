"""``StorageLog``: follows the storages that operations meet; ``MemoryLog``: of a step.

A storage may be allocated before its kind is known (a gradient is any tensor until a
parameter shows it), so changes refer to blocks, and blocks are named later. Memory that
a kernel allocates and frees itself is not seen.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp.comm.operations import running_unit
from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.tools.fake_world import is_wrapper
from composable_fsdp.tools.machine import ATTENTION, MEMORY, PRODUCT, Cost
from composable_fsdp.tools.memory import Memory, StepMoment
from composable_fsdp.tools.simulated_world import Clock, replaced, tensors_of

Log = TypeVar("Log", bound="StorageLog")

_FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::detach",
    "aten::_local",
    "prim::",
    "profiler::",
    "_c10d_functional::",
)
"""Beginnings of the names of operations that take no time on the device; collectives
take the time of a link."""


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with memory that a wrapper holds; other tensors themselves."""
    if not is_wrapper(type(tensor)):
        return [tensor]
    wrapper: Any = tensor
    # The protocol by which torch takes wrappers apart. A DTensor names its mesh, too.
    names, _ = wrapper.__tensor_flatten__()
    found = [getattr(wrapper, name) for name in names]
    return [p for each in found if isinstance(each, Tensor) for p in parts_of(each)]


def _cost_of(func: Any, args: Any, kwargs: Any, result: Any, nbytes: int) -> Cost:
    """Return what an operation computes and moves; a causal attention half of a whole.

    torch counts matrix products, convolutions and attention.
    """
    # Imported here: the module loads others that training does not need.
    from torch.utils import flop_counter

    name: str = func._schema.name
    kind = ATTENTION if "attention" in name else PRODUCT
    count = flop_counter.flop_registry.get(func._overloadpacket)
    if count is not None:
        operations = float(count(*args, **kwargs, out_val=result))
    # The kernels of CPUs have no counts.
    elif "flash_attention_for_cpu" in name:
        back = name.endswith("backward")
        forms: Any = flop_counter.sdpa_flop_count, flop_counter.sdpa_backward_flop_count
        operations = forms[back](*(tensor.shape for tensor in args[: 3 + back]))
    else:
        return Cost(MEMORY, 0.0, nbytes)
    named = zip([each.name for each in func._schema.arguments], args, strict=False)
    causal = {**dict(named), **kwargs}.get("is_causal", False)
    return Cost(kind, operations / (2 if causal else 1), nbytes)


class Block:
    """A storage."""

    __slots__ = ("__weakref__", "kind", "link", "nbytes")

    def __init__(self, kind: str) -> None:
        self.kind, self.nbytes = kind, 0
        self.link: weakref.ref[torch.UntypedStorage] | None = None


class Change(NamedTuple):
    """A block has ``more`` bytes than before, at a place of the step."""

    block: Block
    more: int
    at: Any


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Follows the storages of all operations in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change] = []
        self.blocks: dict[int, Block] = {}

    @abstractmethod
    def new_kind(self) -> str:
        """Return the kind of a block that is met first now."""

    @abstractmethod
    def here(self) -> Any:
        """Return the place of the step, for a change."""

    def ran(self, cost: Cost, read: list[Tensor], written: list[Tensor]) -> None:
        """Take note of an operation with a cost; default: nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and follow the storages that it meets."""
        # A wrapper, such as a DTensor, runs operations on what it wraps: those are met.
        if any(map(is_wrapper, types)):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, written = (
            [each for each in tensors_of(values) if not is_wrapper(type(each))]
            for values in ((args, kwargs), result)
        )
        nbytes = sum(t.nbytes for t in (*read, *written))
        # Views move nothing, and allocations write nothing.
        if nbytes and not (func.is_view or func._schema.name.startswith(_FREE)):
            self.ran(_cost_of(func, args, kwargs, result, nbytes), read, written)
        # A tensor on meta has no memory on any device.
        for tensor in (*read, *written):
            if tensor.device.type != "meta":
                self.meet(tensor)
        return result

    def meet(self, tensor: Tensor) -> Block:
        """Return the block of a tensor, with the storage's size of now."""
        storage = tensor.untyped_storage()
        # An address may be used again by a later storage; the link tells.
        key = storage._cdata
        block = self.blocks.get(key)
        if block is None or block.link is None or block.link() is None:
            block = self.blocks[key] = Block(self.new_kind())
            block.link = weakref.ref(storage, partial(self._forget, key, block))
        self._change(block, storage.nbytes())
        return block

    def _forget(self, key: int, block: Block, gone: object) -> None:
        """Note that a storage is freed."""
        self._change(block, 0)
        # A later storage may be at the same address already.
        if self.blocks.get(key) is block:
            del self.blocks[key]

    def _change(self, block: Block, nbytes: int) -> None:
        """Note the size of a block, if it has changed."""
        more = nbytes - block.nbytes
        if more:
            block.nbytes = nbytes
            self.changes.append(Change(block, more, self.here()))

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Say of which kind the storages of ``tensors`` are, also in hindsight."""
        for tensor in tensors:
            for part in () if tensor is None else parts_of(tensor):
                self.meet(part).kind = kind

    def __enter__(self: Log) -> Log:
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = plain(storage, nbytes)
            # A storage that no operation has met is none of the step.
            block = self.blocks.get(storage._cdata)
            if block is not None:
                self._change(block, nbytes)
            return result

        # A resize is no operation of torch's dispatcher.
        self._resizes = replaced(torch.UntypedStorage, "resize_", resize_, here=True)
        self._resizes.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._resizes.__exit__(*exc)


class MemoryLog(StorageLog):  # type: ignore[no-untyped-call]  # torch has no types
    """Follows storages and costs of all operations in the block."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._before = Memory()

    def ran(self, cost: Cost, read: list[Tensor], written: list[Tensor]) -> None:
        unit = running_unit(self._clock.stage)
        self._clock.compute(unit, self._clock.machine.seconds(cost))

    def new_kind(self) -> str:
        # Operations of a forward record a graph, also those that checkpointing repeats
        # in backward; other operations do not.
        recorded = torch.is_grad_enabled() and self._clock.stage != "optimizer step"
        return "activations" if recorded else "temporaries"

    def here(self) -> tuple[float, str]:
        stage = self._clock.stage
        unit = running_unit(stage)
        # The stage alone names moments between units.
        when = stage if unit is None else f"{stage} of {unit or ROOT_NAME}"
        return self._clock.seconds, when

    def place(self) -> str:
        """Return the part of the step that changed memory last, for a message."""
        return self.changes[-1].at[1] if self.changes else self._clock.stage

    def restart(self) -> None:
        """Forget all changes so far; live storages are there from the start."""
        self.changes.clear()
        # The first step has made the storages that stay.
        before = Memory().by_kind()
        for block in self.blocks.values():
            before[block.kind] += block.nbytes
        self._before = Memory(**before, when="start")

    def timeline(self) -> Iterator[StepMoment]:
        """Yield the memory at the start and behind the changes since ``restart``."""
        # Kinds are read here, after the last call of ``mark``.
        now = self._before.by_kind()
        yield StepMoment(self._before)
        latest = 0.0
        following = [*((c.at, c.more > 0) for c in self.changes[1:]), None]
        for (block, more, at), later in zip(self.changes, following, strict=True):
            now[block.kind] += more
            # Of changes at the same time, those that end a row of allocations or of
            # frees: no maximum is left out.
            if later == (at, more > 0):
                continue
            # The host runs ahead of streams: its order is kept where times go back.
            latest = max(latest, at[0])
            yield StepMoment(Memory(**now, when=at[1]), seconds=latest)
