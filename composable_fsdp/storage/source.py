"""A checkpoint of any format, as named tensors that can be read slice by slice.

Whoever loads, converts or exports asks a ``Source``: what there is by the plain
model's names, and elements ``[start, stop)`` of one tensor in row-major order. So a
rank reads its shard and nothing else, and one loader serves every format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

OWN_STATE = "_extra_state"
"""What a state dict calls a module's own state, below the module's name."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint says of one tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


class Copy(NamedTuple):
    """Elements ``[start, stop)`` of a saved tensor, and where they go, converted.

    ``state`` is one of the optimizer's states of parameter ``name``; None: the
    parameter or buffer itself. ``into`` may have any shape of that many elements, and
    be anywhere. ``is_new``: nothing uses it yet, so it may be filled at any time.
    """

    name: str
    state: str | None
    start: int
    stop: int
    into: Tensor
    is_new: bool = False


class Source(ABC):
    """One checkpoint, open for reading; a context that closes it.

    Opening reads and checks what describes the tensors, never the tensors. No process
    group is needed and nothing is sent: each rank opens and reads for itself.
    """

    model: Mapping[str, TensorInfo]
    """Parameters and buffers by the plain model's names, each storage once."""
    aliases: Mapping[str, str]
    """Other names of tied parameters, and the name in ``model`` that each is tied to.

    Empty where the format does not tell tied from equal.
    """
    optim: Mapping[str, Mapping[str, TensorInfo]]
    """Optimizer state by parameter name, then by the name of the state."""
    param_groups: Sequence[Mapping[str, Any]] | None
    """Options of the optimizer's groups, ``params`` by name; None without optimizer."""
    extra: Any
    """What the user added: nested dicts and lists of JSON scalars and tensors."""
    optim_values: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Optimizer state that is no tensor, or a number in one, as it was saved.

    By parameter name, then by the name of the state; none of it stands in ``optim``.
    """

    fingerprint: str = ""
    """Differs if the content does; empty if the format has nothing for it."""

    own_states: Mapping[str, Any] = MappingProxyType({})
    """What modules' ``get_extra_state`` gave, by its name in a state dict."""

    @abstractmethod
    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the flattened tensor, ``(stop - start,)``.

        ``name`` is a key of ``model``. On CPU, in the checkpoint's dtype, verified as
        far as the format has checksums.

        Raises: CheckpointError, naming the tensor and the file, for bytes that are
        missing or damaged.
        """

    @abstractmethod
    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """The same of one state of parameter ``name``; scalars have one element."""

    def prepare(self, copies: Sequence[Copy]) -> None:
        """Verify what ``copies`` read, before anything is changed; fill what is new.

        Here by reading it; a format with checksums may do less.

        Raises: CheckpointError, as ``read_model``.
        """
        for copy in copies:
            value = self.read(copy)
            if copy.is_new:
                copy.into.copy_(value.view(copy.into.shape))

    def finish(self, copies: Sequence[Copy]) -> None:
        """Fill the others, once ``prepare`` has verified all."""
        for copy in copies:
            if not copy.is_new:
                copy.into.copy_(self.read(copy).view(copy.into.shape))

    def read(self, copy: Copy) -> Tensor:
        """What ``copy`` wants: ``read_model`` or ``read_optim``."""
        if copy.state is None:
            return self.read_model(copy.name, copy.start, copy.stop)
        return self.read_optim(copy.name, copy.state, copy.start, copy.stop)

    def rng(self, rank: int, world_size: int) -> dict[str, Any] | None:
        """The random state that ``rank`` of ``world_size`` goes on from, if any."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give files back. Tensors that were read stay good."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
