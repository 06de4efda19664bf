"""A checkpoint with its floating-point weights in another dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.source import Source, TensorInfo


def cast_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a weight that is written with ``dtype=wanted``.

    Integers, booleans and complex numbers keep their dtype; None keeps every dtype.

    >>> cast_dtype(torch.float32, torch.bfloat16), cast_dtype(torch.int64, torch.half)
    (torch.bfloat16, torch.int64)
    """
    return wanted if wanted is not None and own.is_floating_point else own


def cast_weight(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values of the weight ``name`` in ``dtype``.

    Raises: CheckpointError, if finite values become infinite.
    """
    made = values.to(dtype)
    # Float16 ends at 65504; bfloat16 has the range of float32.
    if made is not values and not torch.equal(made.isfinite(), values.isfinite()):
        largest = values[values.isfinite()].abs().max()
        raise CheckpointError(
            f"{name!r} holds {float(largest):.4g}, which {dtype} cannot hold. Write "
            "another dtype, such as torch.bfloat16."
        )
    return made


class CastWeights(Source):
    """A view of ``source`` with the weights, and nothing else, cast to ``dtype``."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source = source
        # The writers compute the size of the files from this table.
        self.model = {
            name: TensorInfo(cast_dtype(info.dtype, dtype), info.shape)
            for name, info in source.model.items()
        }
        self.aliases = source.aliases
        # Optimizer states stay out: a state in a smaller dtype is another state.
        self.optim: Mapping[str, Mapping[str, TensorInfo]] = {}
        self.param_groups: Sequence[Mapping[str, Any]] | None = None
        self.extra = None

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """Read from ``source`` and cast; see ``Source``."""
        values = self._source.read_model(name, start, stop)
        return cast_weight(name, values, self.model[name].dtype)

    def close(self) -> None:
        """Do nothing: the caller that opened ``source`` closes ``source``."""
