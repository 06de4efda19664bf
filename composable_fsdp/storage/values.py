"""Writes nested values as strict JSON: the user's ``extra``, and optimizer values.

What JSON lacks is a dict with a single key that starts with ``$``::

    tensor    {"$tensor": 3}                  the manifest's third loose tensor
    number    {"$number": ["float32", 1.0]}   a 0-d tensor, with python_values
    float     {"$float": "nan"}
    bytes     {"$bytes": {"$tensor": 3}}
    tuple     {"$tuple": [..]}
    dict      {"$map": [[1, ..], ..]}         a key that is no string, or like a mark
    numpy     {"$array": ["<f4", [2, 3], {"$tensor": 3}]}
              {"$scalar": ["<f4", "0000803f"]}

Decoding accepts only values that encoding writes.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.manifest import DAMAGED, DTYPES, dtype_name, excerpt
from composable_fsdp.storage.writer import bytes_of, require_memory

Put = Callable[[Tensor, str], int]
"""A function that stores a tensor, given its path, and returns the tensor's number."""
Get = Callable[[int], Any]

MAX_DEPTH = 100
"""The deepest nesting that is written and read; programs change Python's own limit."""
# Numbers, bytes, text, dates: a byte order and the size of an element.
_NUMPY = re.compile(r"[<>|=]?[biufcSUMm]\d{1,6}(\[\d{0,9}[a-zA-Z]{1,2}\])?\Z")


def encode(
    value: Any, where: str, put: Put, *, python_values: bool = False, depth: int = 0
) -> Any:
    """Return ``value`` as JSON; tensors are passed to ``put``."""
    # A container that holds itself would never end.
    if depth > MAX_DEPTH:
        raise TypeError(
            f"{where[:80]}... is nested more than {MAX_DEPTH} levels deep, or holds "
            "itself. Save something flatter."
        )

    def inner(value: Any, where: str) -> Any:
        within = depth + 1
        return encode(value, where, put, python_values=python_values, depth=within)

    # Before ``int``: in Python, a bool is an int.
    if value is None or isinstance(value, bool):
        return value
    # Not ``str(value)``, which an enum overrides, nor a class that others lack.
    if isinstance(value, str):
        return str.__str__(value)
    # ``int`` and ``float`` remove subclasses, such as enums and numpy's float64.
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else _float(float(value))
    if isinstance(value, Tensor):
        return _tensor(value, where, put, python_values=python_values)
    if isinstance(value, bytes):
        return {"$bytes": {"$tensor": put(_tensor_of(value), where)}}
    # Another class would come back as a dict.
    if isinstance(value, dict) and not isinstance(value, Counter):
        return _dict(value, where, inner)
    if isinstance(value, list | tuple):
        items = [inner(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    return _of_numpy(value, where, put)


def _of_numpy(value: Any, where: str, put: Put) -> Any:
    """Return an array or a scalar of numpy as JSON. Raises: TypeError."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        dtype = value.dtype.str
        # No subclass: a masked array holds more. Bytes go to the payload.
        if type(value) is numpy.ndarray and _NUMPY.match(dtype):
            place = {"$tensor": put(_tensor_of(value.tobytes()), where)}
            return {"$array": [dtype, list(value.shape), place]}
        # As bytes, and not as a number: exact for each dtype, dates included.
        if isinstance(value, numpy.generic) and _NUMPY.match(dtype):
            return {"$scalar": [dtype, value.tobytes().hex()]}
    raise _refused(value, where)


def _dict(value: dict[Any, Any], where: str, inner: Callable[[Any, str], Any]) -> Any:
    """Return a dict as JSON."""
    pairs: list[Any] = []
    for key, item in value.items():
        # Other keys are equal only to themselves, or are no JSON.
        if key is not None and not isinstance(key, str | int | float):
            raise TypeError(
                f"{where} has the key {key!r} of type {type(key).__name__}; a "
                "checkpoint holds dicts whose keys are strings or numbers. Save it "
                f"under {str(key)!r}, or as a list of pairs, or leave it out."
            )
        pairs.append([inner(key, where), inner(item, f"{where}[{key!r}]")])
    # JSON turns other keys into strings, and a reader would take "$.." for a mark.
    return dict(pairs) if _is_plain(name for name, _ in pairs) else {"$map": pairs}


def _is_plain(names: Iterable[Any]) -> bool:
    """Return whether a dict with these keys is written as it is."""
    return all(isinstance(key, str) and not key.startswith("$") for key in names)


def _tensor(value: Tensor, where: str, put: Put, *, python_values: bool) -> Any:
    """Return a tensor as JSON, as a number or through ``put``."""
    # Other subclasses may have values elsewhere than in their own memory.
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise _refused(value, where)
    if value.is_meta or value.layout is not torch.strided:
        kind = "on meta" if value.is_meta else f"of layout {value.layout}"
        raise TypeError(
            f"{where} is a tensor {kind}; a checkpoint holds dense tensors with "
            "values. Convert it (to_dense()), or leave it out."
        )
    require_memory(value, where, "save")
    # As a number: optimizer steps and the like need no entry in a file.
    if python_values and value.ndim == 0 and not value.is_complex():
        number = value.item()
        number = _float(number) if isinstance(number, float) else number
        return {"$number": [dtype_name(value.dtype), number]}
    return {"$tensor": put(value, where)}


def _refused(value: Any, where: str) -> TypeError:
    """Return the error for a type that a checkpoint cannot hold."""
    kind = type(value)
    # Arrays of numbers are saved; of objects and records they are not.
    dtype = f" of dtype {value.dtype}" if kind.__module__ == "numpy" else ""
    return TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}{dtype}; a checkpoint "
        "holds dicts, lists and tuples of strings, bytes, numbers, booleans, None, "
        "plain tensors and numpy arrays, and no pickled objects. Convert it (a set or "
        "deque to a list, a Counter to a dict, a complex number to a tensor), or save "
        "its state_dict()."
    )


def _float(value: float) -> Any:
    """Return ``value``, or a marked dict for a float that JSON lacks."""
    return value if math.isfinite(value) else {"$float": repr(value)}


def _tensor_of(value: bytes) -> Tensor:
    """Return ``value`` as a tensor of ``uint8``."""
    # ``frombuffer`` refuses no bytes, and warns of bytes that cannot be written to.
    if not value:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def decode(value: Any, where: str, get: Get, depth: int = 0) -> Any:
    """Return the value that ``encode`` was given."""
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{where[:MAX_DEPTH]}... is nested deeper than any checkpoint is "
            f"({MAX_DEPTH} levels). {DAMAGED}"
        )
    if value is None or isinstance(value, (bool, int, str)):
        return value
    # Python's JSON parser accepts NaN and Infinity, although JSON lacks them.
    if isinstance(value, float) and math.isfinite(value):
        return value
    within = depth + 1
    if isinstance(value, list):
        return [decode(v, f"{where}[{i}]", get, within) for i, v in enumerate(value)]
    if isinstance(value, dict) and not any(key.startswith("$") for key in value):
        return {k: decode(v, f"{where}[{k!r}]", get, within) for k, v in value.items()}
    if isinstance(value, dict) and len(value) == 1:
        ((mark, inner),) = value.items()
        # A value of another form, or a key that stands there twice.
        with suppress(KeyError, TypeError, ValueError):
            return _marked(mark, inner, where, get, within)
    raise CheckpointError(
        f"{where}: {excerpt(value)} is nothing that a checkpoint writes. {DAMAGED}"
    )


def _marked(mark: str, inner: Any, where: str, get: Get, depth: int) -> Any:
    """Return the value of a mark."""
    match mark, inner:
        case "$tensor", int() if type(inner) is int:
            return get(inner)
        case "$float", "nan" | "inf" | "-inf":
            return float(inner)
        case "$tuple", list():
            return tuple(decode(each, where, get, depth) for each in inner)
        case "$map", list():
            made = dict(pairs := [decode(each, where, get, depth) for each in inner])
            # Of two equal keys, one of the values would be ignored.
            if len(made) == len(pairs) and not _is_plain(made):
                return made
        case "$number", [str(), number]:
            return _number(DTYPES[inner[0]], decode(number, where, get, depth))
        case "$bytes", _:
            data = _data(inner, where, get, depth)
            return bytes(bytes_of(data)) if isinstance(data, Tensor) else data
        case "$array", [text, list(shape), place]:
            data = _data(place, where, get, depth)
            return _array(_numpy_dtype(text, where), shape, data)
        case "$scalar", [text, str(digits)]:
            dtype = _numpy_dtype(text, where)
            # The length first: ``fromhex`` allocates as much as the text claims.
            if digits and len(digits) == 2 * dtype.itemsize:
                return sys.modules["numpy"].frombuffer(bytes.fromhex(digits), dtype)[0]
    raise ValueError


def _number(dtype: torch.dtype, number: Any) -> Tensor:
    """Return a tensor of no dims, of exactly ``number``."""
    kind = float if dtype.is_floating_point else bool if dtype is torch.bool else int
    # An exact type: ``True`` is no number of an int64 tensor.
    if type(number) is not kind:
        raise ValueError
    try:
        made = torch.tensor(number, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError):
        raise ValueError from None
    back = made.item()
    # The dtype must represent the number exactly; NaN differs from itself.
    if back != number and back == back:
        raise ValueError
    return made


def _array(dtype: Any, shape: list[Any], data: Any) -> Any:
    """Return an array; without values, what stands for the bytes."""
    # The claim is compared with the bytes before anything is allocated.
    is_shape = all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or data.shape[0] != int(dtype.itemsize) * prod(shape):
        raise ValueError
    if not isinstance(data, Tensor):
        return data
    import numpy

    # A bytearray can be written to. ``frombuffer`` refuses no bytes.
    memory = bytearray(data.numpy().tobytes())
    if not memory:
        return numpy.empty(shape, dtype)
    return numpy.frombuffer(memory, dtype).reshape(shape)


def _numpy_dtype(text: object, where: str) -> Any:
    """Return the numpy dtype of ``text``. Raises: CheckpointError, without numpy."""
    # The text comes from a file: the pattern leaves out objects and records.
    if not isinstance(text, str) or not _NUMPY.match(text):
        raise ValueError
    try:
        import numpy
    except ImportError:
        raise CheckpointError(
            f"{where} is a value of numpy, which is not installed. Install numpy."
        ) from None
    return numpy.dtype(text)


def _data(value: Any, where: str, get: Get, depth: int) -> Any:
    """Return the tensor of bytes that ``value`` refers to."""
    # A check of the manifest alone has the place of the tensor, and no values.
    found = decode(value, where, get, depth)
    if getattr(found, "dtype", None) is not torch.uint8 or len(found.shape) != 1:
        raise ValueError
    return found
