"""Defines ``Source``: a checkpoint of any format, whose tensors are read by slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.storage.manifest import Span

CHUNK_BYTES = 64 * 2**20
"""The number of bytes of a tensor that are read and passed on at a time."""
OWN_STATE = "_extra_state"
"""The last part of the state dict key of a module's extra state."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The dtype and the shape of a tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements."""
        return self.numel * self.dtype.itemsize

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield intervals of at most ``CHUNK_BYTES`` that cover the elements."""
        # Whole elements, so a slice can be read as a tensor.
        step = max(1, CHUNK_BYTES // self.dtype.itemsize)
        for start in range(0, self.numel, step):
            yield start, min(start + step, self.numel)


Read = Callable[[int, int], Tensor]
"""Returns elements ``[start, stop)`` of a flattened tensor."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of a checkpoint that is read on demand."""

    info: TensorInfo
    read: Read
    storage: Hashable = None

    def whole(self) -> Tensor:
        """Return the whole tensor, in a storage of exactly the same size."""
        flat = self.read(0, self.info.numel)
        # ``torch.save`` writes the whole storage of a tensor, not only the view.
        if flat.untyped_storage().nbytes() != self.info.nbytes:
            flat = flat.clone()
        return flat.view(self.info.shape)


class Copy(NamedTuple):
    """A read of elements of a saved tensor, or of one of its states; where they go."""

    name: str
    state: str | None
    span: Span
    into: Tensor
    is_new: bool = False


class Source(ABC):
    """A checkpoint, open for reading; as a context manager, closes at the end.

    Tensors are described at once and read when asked for, without a process group.
    """

    path: str = "(an open Source)"
    """Where it lies, for messages."""
    model: Mapping[str, TensorInfo]
    """Parameters and buffers by the plain model's names; each storage appears once."""
    aliases: Mapping[str, str]
    """Other names of tied parameters -> the name in ``model``, if the format tells."""
    optim: Mapping[str, Mapping[str, TensorInfo]]
    """Optimizer state by parameter name, then by the name of the state."""
    param_groups: Sequence[Mapping[str, Any]] | None
    """Options of the optimizer's groups; ``params`` lists names. None: no optimizer."""
    extra: Any
    """The user's additional values: nested dicts and lists of scalars and tensors."""
    # Defaults for formats without such values; all instances share them.
    optim_values: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Optimizer state that is no tensor, or a scalar; no state is also in ``optim``."""
    fingerprint: str = ""
    """A text that differs if the content differs; empty if a format has no checksum."""
    own_states: Mapping[str, Any] = MappingProxyType({})
    """Results of modules' ``get_extra_state``, by the name in a state dict."""
    wrappers: Mapping[str, str] = MappingProxyType({})
    """The facts of tensors that wrap others, by name; ``model`` has the inner ones."""
    local_ranks: int = 0
    """The number of ranks that have saved tensors or options for themselves."""
    local_tensors: frozenset[str] = frozenset()
    """Names of tensors in no unit, and of extra states, that belong to single ranks."""
    saved_ranks: int = 0
    """The number of ranks that have saved values of their own (``per_rank``)."""

    @abstractmethod
    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of a flattened tensor of ``model``.

        On the CPU, in the checkpoint's dtype, verified as far as the format has
        checksums.

        Raises: CheckpointError, naming the tensor and the file, for missing or damaged
        bytes.
        """

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """Return elements of a key of ``optim[name]``, as ``read_model``."""
        raise KeyError((name, state))

    def require_checksums(self) -> None:  # noqa: B027  # most formats need none
        """Verify, on rank 0, checksums that ``prepare`` cannot compare for slices."""

    def prepare(self, copies: Sequence[Copy]) -> None:
        """Verify the bytes that ``copies`` read; fill destinations that are new."""
        for copy in copies:
            # Verified by reading; a format with checksums per block can do less.
            value = self.read(copy)
            if copy.is_new:
                copy.into.copy_(value.view(copy.into.shape))

    def finish(self, copies: Sequence[Copy]) -> None:
        """Fill destinations that are not new; ``prepare`` has verified the bytes."""
        for copy in copies:
            # Read again: kept values would need memory for a second copy of the shards.
            if not copy.is_new:
                copy.into.copy_(self.read(copy).view(copy.into.shape))

    def read(self, copy: Copy) -> Tensor:
        """Return the elements of ``copy``, from ``read_model`` or ``read_optim``."""
        # Of a rectangle, a read for each run: rows of the whole tensor may be large.
        parts = [
            self.read_model(copy.name, start, stop)
            if copy.state is None
            else self.read_optim(copy.name, copy.state, start, stop)
            for start, stop in list(copy.span.runs()) or [(0, 0)]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rng(self, rank: int, world_size: int) -> dict[str, Any] | None:
        """Return the random state for ``rank`` of ``world_size``, or None."""
        return None

    def rank_values(self, rank: int) -> Any:
        """Return the ``per_rank`` that ``rank`` has saved; see ``saved_ranks``."""
        raise KeyError(rank)

    def on_rank(self, rank: int | None) -> None:  # noqa: B027  # a default, not forgotten
        """Show in ``model`` and the others also values of ``rank`` alone, if any."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Tensors that have been read stay valid."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
