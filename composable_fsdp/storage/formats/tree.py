"""Presents a source as the dictionary that users save, with tensors read on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composable_fsdp.storage.source import LazyTensor, Read, Source, TensorInfo

CHUNK_BYTES = 64 * 2**20
"""The number of bytes of a tensor that are read and passed on at a time."""


def nested_tree(source: Source) -> dict[str, Any]:
    """Return ``{"model": ..., "optim": ..., "extra": ...}``, without missing parts."""
    model = {
        name: LazyTensor(info, _model_read(source, name), ("model", name))
        for name, info in source.model.items()
    }
    # All names of tied parameters are in the model, so a strict load succeeds.
    for name, kept in source.aliases.items():
        model[name] = model[kept]
    tree: dict[str, Any] = {"model": {**model, **source.own_states}}
    # Without groups, the checkpoint has no optimizer.
    if source.param_groups is not None:
        state: dict[str, dict[str, Any]] = {}
        # A parameter may have values without any element-wise state.
        for name in (*source.optim, *source.optim_values):
            state[name] = {
                key: LazyTensor(
                    info, _optim_read(source, name, key), ("optim", name, key)
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
    """Return a function that reads elements of a parameter or buffer."""
    return lambda start, stop: source.read_model(name, start, stop)


def _optim_read(source: Source, name: str, state: str) -> Read:
    """Return a function that reads elements of an optimizer state."""
    return lambda start, stop: source.read_optim(name, state, start, stop)


def tensors_of(source: Source) -> Iterator[tuple[str, TensorInfo, Read]]:
    """Yield the name, the info and the reader of all tensors of model and optimizer."""
    for name, info in source.model.items():
        yield name, info, _model_read(source, name)
    for name, states in source.optim.items():
        for key, info in states.items():
            yield f"{name}, {key}", info, _optim_read(source, name, key)


def pieces(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Yield intervals of at most ``CHUNK_BYTES`` that cover the tensor's elements."""
    # Whole elements, so a slice can be read as a tensor.
    step = max(1, CHUNK_BYTES // info.dtype.itemsize)
    for start in range(0, info.numel, step):
        yield start, min(start + step, info.numel)
