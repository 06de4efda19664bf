"""Writes numpy arrays and scalars as a dtype, a shape and bytes, and reads them.

A package without numpy can still save and load: numpy is used only if the value is
numpy's. Objects and records are refused, because their bytes are pointers, or need
pickle.
"""

from __future__ import annotations

import re
import sys
from math import prod
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError

# Boolean, integers, floats, complex numbers, bytes, text, dates and durations, each
# with a byte order and the size of an element.
_DTYPE = re.compile(r"[<>|=]?[biufcSUMm]\d{1,6}(\[\d{0,9}[a-zA-Z]{1,2}\])?\Z")


def is_array(value: object) -> bool:
    """Return whether ``value`` is a numpy array that can be saved."""
    numpy: Any = sys.modules.get("numpy")
    # No subclass: a masked array or a matrix holds more than its bytes.
    return numpy is not None and type(value) is numpy.ndarray and _is_plain(value)


def is_scalar(value: object) -> bool:
    """Return whether ``value`` is a numpy scalar that can be saved."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Return whether an element is its bytes."""
    return _DTYPE.match(value.dtype.str) is not None


def array_bytes(value: Any) -> Tensor:
    """Return the bytes of an array in row-major order, as a tensor of ``uint8``."""
    return bytes_tensor(value.tobytes())


def bytes_tensor(value: bytes) -> Tensor:
    """Return ``value`` as a tensor of ``uint8``."""
    # ``frombuffer`` refuses no bytes, and warns of bytes that cannot be written to.
    if not value:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def dtype_of(text: object, where: str) -> Any:
    """Return the numpy dtype of ``text``; None for a text that no save writes.

    Raises: CheckpointError, naming ``where``, if numpy is not installed.
    """
    # The text comes from a file: the pattern leaves out objects and records.
    if not isinstance(text, str) or not _DTYPE.match(text):
        return None
    try:
        import numpy
    except ImportError:
        raise CheckpointError(
            f"{where} is a value of numpy, which is not installed. Install numpy."
        ) from None
    try:
        return numpy.dtype(text)
    except TypeError:  # a size that this machine does not have
        return None


def array_of(data: Tensor, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return the array of ``shape`` with the bytes of ``data``.

    Args:
        data: the bytes, a tensor of ``uint8``.
        dtype: the result of ``dtype_of``.
        shape: the shape, of as many bytes as ``data``.
    """
    import numpy

    # ``frombuffer`` of a bytearray: the array can be written to, as the saved one.
    memory = bytearray(data.numpy().tobytes())
    # ``frombuffer`` refuses no bytes.
    if not memory:
        return numpy.empty(shape, dtype)
    return numpy.frombuffer(memory, dtype).reshape(shape)


def nbytes_of(dtype: Any, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of an array."""
    return int(dtype.itemsize) * prod(shape)


def scalar_text(value: Any) -> list[str]:
    """Return the dtype and the bytes of a scalar as text."""
    # As bytes, and not as a number: exact for each dtype, dates and texts included.
    return [value.dtype.str, value.tobytes().hex()]


def scalar_of(dtype: Any, text: object) -> Any:
    """Return the scalar with the bytes ``text``; None if ``text`` is no such bytes."""
    import numpy

    # The length first: ``fromhex`` and numpy allocate as much as the text claims.
    if not isinstance(text, str) or len(text) != 2 * dtype.itemsize or not text:
        return None
    try:
        return numpy.frombuffer(bytes.fromhex(text), dtype)[0]
    except ValueError:
        return None
