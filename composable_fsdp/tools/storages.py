"""``StorageMode``: follows the storages that operations meet, from first use to end.

A storage may be allocated before its kind is known (a gradient is any tensor until a
parameter shows it), so changes refer to blocks, and blocks are named later::

    operation --> block, +bytes          the storage died --> block, -bytes
    mark(tensors, "gradients") --> block.kind

Memory that a kernel allocates and frees itself is not seen.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of the class ``kind`` wrap others, as a DTensor does."""
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with memory that a wrapper holds; other tensors themselves."""
    if not is_wrapper(type(tensor)):
        return [tensor]
    wrapper: Any = tensor
    # The protocol by which torch takes wrappers apart.
    names, _ = wrapper.__tensor_flatten__()
    found = [getattr(wrapper, name) for name in names]
    # A DTensor names its mesh, too.
    return [p for each in found if isinstance(each, Tensor) for p in parts_of(each)]


class Block:
    """A storage."""

    __slots__ = ("__weakref__", "kind", "link", "nbytes")

    def __init__(self, kind: str) -> None:
        self.kind, self.nbytes = kind, 0
        self.link: weakref.ref[torch.UntypedStorage] | None = None


class StorageMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Follows the storages of all operations in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks: dict[int, Block] = {}

    @abstractmethod
    def _new_kind(self) -> str:
        """Return the kind of a block that is met first now."""

    @abstractmethod
    def _note(self, block: Block, more: int) -> None:
        """Note that ``block`` has ``more`` bytes than before."""

    def _ran(
        self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]
    ) -> None:
        """Take note of an operation, before its storages are met; default: nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and follow the storages that it meets."""
        # A wrapper, such as a DTensor, runs operations on what it wraps: those are met.
        if any(map(is_wrapper, types)):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [
            each
            for each in pytree.tree_leaves((args, kwargs, result))
            # A wrapper has no memory of its own.
            if isinstance(each, Tensor) and not is_wrapper(type(each))
        ]
        self._ran(func, args, kwargs, result, tensors)
        # A tensor on meta has no memory on any device.
        for tensor in tensors:
            if tensor.device.type != "meta":
                self._meet(tensor)
        return result

    def _meet(self, tensor: Tensor) -> Block:
        """Return the block of a tensor, with the storage's size of now."""
        storage = tensor.untyped_storage()
        # An address may be used again by a later storage; the link tells.
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None or block.link is None or block.link() is None:
            block = Block(self._new_kind())
            block.link = weakref.ref(storage, partial(self._forget, key, block))
            self._blocks[key] = block
        self._change(block, storage.nbytes())
        return block

    def _forget(self, key: int, block: Block, gone: object) -> None:
        """Note that a storage is freed."""
        self._change(block, 0)
        # A later storage may be at the same address already.
        if self._blocks.get(key) is block:
            del self._blocks[key]

    def _change(self, block: Block, nbytes: int) -> None:
        """Note the size of a block, if it has changed."""
        more = nbytes - block.nbytes
        # Most operations meet storages that are known, and change none.
        if more:
            block.nbytes = nbytes
            self._note(block, more)

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Say of which kind the storages of ``tensors`` are, also in hindsight."""
        for tensor in tensors:
            for part in () if tensor is None else parts_of(tensor):
                # Changes refer to the block, so earlier changes get the kind, too.
                self._meet(part).kind = kind
