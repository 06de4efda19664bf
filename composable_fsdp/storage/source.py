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
from typing import Any

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

    def check_model(self, name: str, start: int, stop: int) -> None:
        """Verify what ``read_model`` would give, before anything is changed by it.

        Here by reading it; a format with checksums may do less.

        Raises: CheckpointError, as ``read_model``.
        """
        self.read_model(name, start, stop)

    def check_optim(self, name: str, state: str, start: int, stop: int) -> None:
        """The same of ``read_optim``."""
        self.read_optim(name, state, start, stop)

    def rng(self, rank: int, world_size: int) -> dict[str, Any] | None:
        """The random state that ``rank`` of ``world_size`` goes on from, if any."""
        return None

    def copy_model(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """Write elements ``[start, stop)`` into ``into``, converted to its dtype.

        ``into`` may have any shape of that many elements, and be anywhere.
        """
        into.copy_(self.read_model(name, start, stop).view(into.shape))

    def copy_optim(
        self, name: str, state: str, start: int, stop: int, into: Tensor
    ) -> None:
        """The same of one state of parameter ``name``."""
        into.copy_(self.read_optim(name, state, start, stop).view(into.shape))

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
