"""A source as the dictionary that users save, its tensors still to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from composable_fsdp.storage.source import Source, TensorInfo

CHUNK_BYTES = 64 * 2**20
"""How much is read at once of what is passed on at once."""

Read = Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True)
class DeferredTensor:
    """A tensor that will be read; ``key`` is equal for names of one tensor."""

    key: tuple[str, ...]
    info: TensorInfo
    slices: Read

    def read(self) -> Tensor:
        """The tensor, in memory of its own that is no longer than it."""
        flat = self.slices(0, self.info.numel)
        if flat.untyped_storage().nbytes() != self.info.nbytes:
            flat = flat.clone()
        return flat.view(self.info.shape)


def nested_tree(source: Source) -> dict[str, Any]:
    """``{"model": ..., "optim": ..., "extra": ...}``, what is not there left out.

    Both names of tied parameters stand in the model, so that it loads strictly.
    """
    model = {
        name: DeferredTensor(("model", name), info, _model_read(source, name))
        for name, info in source.model.items()
    }
    for name, kept in source.aliases.items():
        model[name] = model[kept]
    tree: dict[str, Any] = {"model": {**model, **source.own_states}}
    if source.param_groups is not None:
        state: dict[str, dict[str, Any]] = {}
        for name in (*source.optim, *source.optim_values):
            state[name] = {
                key: DeferredTensor(
                    ("optim", name, key), info, _optim_read(source, name, key)
                )
                for key, info in source.optim.get(name, {}).items()
            }
            state[name].update(source.optim_values.get(name, {}))
        groups = [dict(group) for group in source.param_groups]
        tree["optim"] = {"state": state, "param_groups": groups}
    if source.extra is not None:
        tree["extra"] = source.extra
    return tree


def _model_read(source: Source, name: str) -> Read:
    return lambda start, stop: source.read_model(name, start, stop)


def _optim_read(source: Source, name: str, state: str) -> Read:
    return lambda start, stop: source.read_optim(name, state, start, stop)


def tensors_of(source: Source) -> Iterator[tuple[str, TensorInfo, Read]]:
    """All tensors of model and optimizer: what each is called, is, and reads like."""
    for name, info in source.model.items():
        yield name, info, _model_read(source, name)
    for name, states in source.optim.items():
        for key, info in states.items():
            yield f"{name}, {key}", info, _optim_read(source, name, key)


def pieces(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Intervals that cover the tensor's elements, none above ``CHUNK_BYTES``."""
    step = max(1, CHUNK_BYTES // info.dtype.itemsize)
    for start in range(0, info.numel, step):
        yield start, min(start + step, info.numel)
