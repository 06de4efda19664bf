"""Writes nested values as strict JSON: the user's ``extra``, and optimizer values.

JSON has no tensors, tuples or infinities. They are written as a dict with a single key
that starts with ``$``; a user's dict with such a key is written as pairs.

::

    tensor    {"$tensor": 3}                  the manifest's third loose tensor
    number    {"$number": ["float32", 1.0]}   a 0-d tensor, with python_values
    float     {"$float": "nan"}
    complex   {"$complex": [1.0, -2.0]}
    bytes     {"$bytes": {"$tensor": 3}}
    tuple     {"$tuple": [..]}                also $set, $frozenset
    deque     {"$deque": [[..], 5]}           items and maxlen
    dict      {"$dict": [["$key", ..], ..]}   a key that looks like a mark
              {"$map": [[1, ..], ..]}         a key that is no string
    Counter   {"$counter": [["a", 2], ..]}
    array     {"$array": ["<f4", [2, 3], {"$tensor": 3}]}
    scalar    {"$scalar": ["<f4", "0000803f"]}

Decoding accepts only values that encoding writes, so no part of a manifest is ignored.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage import numpy_values
from composable_fsdp.storage.manifest import DTYPES, dtype_name
from composable_fsdp.storage.parse import excerpt
from composable_fsdp.storage.readable import require_memory
from composable_fsdp.storage.writer import bytes_of

Put = Callable[[Tensor, str], int]
"""A function that stores a tensor, given its path, and returns the tensor's number."""
Get = Callable[[int], Any]
"""A function that returns the tensor of a number."""

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_DEPTH = 100
"""The deepest nesting that is written and read. By a number, and not by the recursion
limit of Python, which programs change."""


def encode(value: Any, where: str, put: Put, *, python_values: bool = False) -> Any:
    """Return ``value`` as JSON; tensors are passed to ``put``.

    Args:
        value: nested containers (dict, list, tuple, set, frozenset, deque, Counter) of
            strings, bytes, numbers, booleans, None, tensors, and numpy's arrays and
            scalars.
        where: the name of the value in error messages.
        put: stores a tensor and returns a number.
        python_values: write 0-d tensors as numbers, as needed for the values of
            optimizers and modules. Default False.

    Returns: a value for ``json.dumps``.
    Raises: TypeError, naming the path (``extra['a'][2]``), for any other type.
    Collective: none.
    """
    return _Encoder(put, python_values).encode(value, where, 0)


class _Encoder:
    """Encodes values; holds the options of ``encode``."""

    def __init__(self, put: Put, python_values: bool) -> None:
        self.put, self.python_values = put, python_values

    def encode(self, value: Any, where: str, depth: int) -> Any:
        """Return ``value`` as JSON.

        Args:
            value: the value.
            where: the path of the value, for messages.
            depth: the number of containers around the value.

        Raises: TypeError, as the function ``encode``.
        """
        # A container that holds itself would never end.
        if depth > _MAX_DEPTH:
            raise TypeError(
                f"{where[:80]}... is nested more than {_MAX_DEPTH} levels deep, or "
                "holds itself. Save something flatter."
            )
        # Before ``int``: in Python, a bool is an int.
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return _text(value)
        # ``int`` and ``float`` remove subclasses, such as enums and numpy's float64.
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return _float(float(value))
        if isinstance(value, complex):
            return {"$complex": [_float(value.real), _float(value.imag)]}
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, bytes | bytearray):
            mark = "$bytes" if isinstance(value, bytes) else "$bytearray"
            data = numpy_values.bytes_tensor(bytes(value))
            return {mark: {"$tensor": self.put(data, where)}}
        if isinstance(value, dict):
            return self._dict(value, where, depth)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return self._items(value, where, depth)
        # Bytes of an array go to the payload: a manifest is read whole by every rank.
        if numpy_values.is_array(value):
            data = numpy_values.array_bytes(value)
            place = {"$tensor": self.put(data, where)}
            return {"$array": [value.dtype.str, list(value.shape), place]}
        if numpy_values.is_scalar(value):
            return {"$scalar": numpy_values.scalar_text(value)}
        raise _refused(value, where)

    def _items(self, value: Any, where: str, depth: int) -> Any:
        """Return a container of items as JSON."""
        # Items of a set have no number, and no order that is the same on all ranks.
        if isinstance(value, set | frozenset):
            found = [self.encode(each, f"{where}{{..}}", depth + 1) for each in value]
            mark = "$set" if isinstance(value, set) else "$frozenset"
            return {mark: sorted(found, key=json.dumps)}
        items = [
            self.encode(item, f"{where}[{i}]", depth + 1)
            for i, item in enumerate(value)
        ]
        if isinstance(value, deque):
            return {"$deque": [items, value.maxlen]}
        return items if isinstance(value, list) else {"$tuple": items}

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        """Return a dict as JSON."""
        pairs: list[Any] = []
        for key, item in value.items():
            path = f"{where}[{key!r}]"
            name = self._key(key, where, depth)
            pairs.append([name, self.encode(item, path, depth + 1)])
        # ``MultiStepLR`` counts milestones, and asks for ``elements`` of the Counter.
        if isinstance(value, Counter):
            return {"$counter": pairs}
        # JSON turns other keys into strings, so a load would return other keys.
        if not all(isinstance(name, str) for name, _ in pairs):
            return {"$map": pairs}
        # A reader would take such a key for a mark.
        if any(name.startswith("$") for name, _ in pairs):
            return {"$dict": pairs}
        return dict(pairs)

    def _key(self, key: Any, where: str, depth: int) -> Any:
        """Return the key of a dict as JSON."""
        if isinstance(key, str):
            return _text(key)
        # Other keys are equal only to themselves, so nobody would find the value again.
        if not _is_key(key):
            raise TypeError(
                f"{where} has the key {key!r} of type {type(key).__name__}; a "
                "checkpoint holds dicts whose keys are strings, numbers, bytes, or "
                f"tuples of them. Save it under {str(key)!r}, or as a list of pairs, "
                "or leave it out."
            )
        return self.encode(key, f"a key of {where}", depth + 1)

    def _tensor(self, value: Tensor, where: str) -> Any:
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
        if self.python_values and value.ndim == 0 and not value.is_complex():
            number = value.item()
            if isinstance(number, float):
                number = _float(number)
            return {"$number": [dtype_name(value.dtype), number]}
        return {"$tensor": self.put(value, where)}


def _is_key(key: Any) -> bool:
    """Return whether a key of a dict can be saved."""
    if isinstance(key, tuple | frozenset):
        return all(map(_is_key, key))
    plain = key is None or isinstance(key, str | bytes | int | float | complex)
    return plain or numpy_values.is_scalar(key)


def _refused(value: Any, where: str) -> TypeError:
    """Return the error for a type that a checkpoint cannot hold."""
    kind = type(value)
    # Arrays of numbers are saved; of objects and records they are not.
    dtype = f" of dtype {value.dtype}" if kind.__module__ == "numpy" else ""
    return TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}{dtype}; a checkpoint "
        "holds dicts, lists, tuples, sets and deques of strings, bytes, numbers, "
        "booleans, None, plain tensors and numpy arrays, and no pickled objects. "
        "Convert it, or save its state_dict()."
    )


def _text(value: str) -> str:
    """Return the characters of ``value`` as a plain string."""
    # Not ``str(value)``, which an enum overrides. And not ``value`` itself: an object
    # of a class that other ranks cannot unpickle would end the save on those ranks
    # alone.
    return str.__str__(value)


def _float(value: float) -> Any:
    """Return ``value``, or a marked dict for a float that JSON lacks."""
    if math.isfinite(value):
        return value
    return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def decode(value: Any, where: str, get: Get, depth: int = 0) -> Any:
    """Return the value that ``encode`` was given.

    Args:
        value: the JSON value.
        where: the start of error messages: the file, and the path in the document.
        get: returns the tensor of a number.
        depth: the number of containers around the value. Default 0.

    Returns: the decoded value.
    Raises: CheckpointError, for a value that ``encode`` never writes.
    Collective: none.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"{where[:_MAX_DEPTH]}... is nested deeper than any checkpoint is "
            f"({_MAX_DEPTH} levels). The file is damaged or was edited; use another "
            "checkpoint."
        )
    if value is None or isinstance(value, (bool, int, str)):
        return value
    # Python's JSON parser accepts NaN and Infinity, although JSON lacks them.
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _damaged(where, value)
        return value
    within = depth + 1
    if isinstance(value, list):
        return [decode(v, f"{where}[{i}]", get, within) for i, v in enumerate(value)]
    if isinstance(value, dict):
        if len(value) == 1 and next(iter(value)).startswith("$"):
            return _decode_marked(*next(iter(value.items())), where, get, depth)
        if not any(key.startswith("$") for key in value):
            return {
                k: decode(v, f"{where}[{k!r}]", get, within) for k, v in value.items()
            }
    raise _damaged(where, value)


def _decode_marked(mark: str, value: Any, where: str, get: Get, depth: int) -> Any:
    """Decode the value of a dict with a single key that starts with ``$``."""
    if mark == "$tensor" and type(value) is int:
        return get(value)
    if mark == "$float" and isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    if mark == "$number":
        return _number(value, where)
    if mark == "$scalar" and isinstance(value, list) and len(value) == 2:
        dtype = numpy_values.dtype_of(value[0], where)
        found = None if dtype is None else numpy_values.scalar_of(dtype, value[1])
        if found is not None:
            return found
    decoder = _DECODERS.get(mark)
    if decoder is not None:
        try:
            return decoder(value, where, get, depth)
        # Items that no set or dict takes, or that stand there twice.
        except (TypeError, ValueError):
            pass
    raise _damaged(where, {mark: value})


def _list(value: Any, where: str, get: Get, depth: int) -> list[Any]:
    """Decode items. Raises: ValueError, if ``value`` is no list."""
    if not isinstance(value, list):
        raise ValueError
    found: list[Any] = decode(value, where, get, depth)
    return found


def _tuple(value: Any, where: str, get: Get, depth: int) -> Any:
    return tuple(_list(value, where, get, depth))


def _set(value: Any, where: str, get: Get, depth: int) -> set[Any]:
    items = _list(value, where, get, depth)
    found: set[Any] = _whole(set(items), items)
    return found


def _whole(made: Any, given: Sequence[object]) -> Any:
    """Return ``made``. Raises: ValueError, if two of ``given`` are the same."""
    if len(made) != len(given):
        raise ValueError
    return made


def _deque(value: Any, where: str, get: Get, depth: int) -> deque[Any]:
    items, maxlen = value
    # More items than ``maxlen`` would be dropped without a word.
    if maxlen is not None and (type(maxlen) is not int or not maxlen >= len(items)):
        raise ValueError
    return deque(_list(items, where, get, depth), maxlen)


def _complex(value: Any, where: str, get: Get, depth: int) -> complex:
    # Two floats, not a text: infinities and the sign of zero stay.
    real, imaginary = (decode(part, where, get, depth) for part in value)
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError
    return complex(real, imaginary)


def _dict(value: Any, where: str, get: Get, depth: int) -> dict[Any, Any]:
    """Decode a dict with a string key that looks like a mark."""
    if not all(isinstance(key, str) for key, _ in value):
        raise ValueError
    if not any(key.startswith("$") for key, _ in value):
        raise ValueError
    return _map_of(value, where, get, depth)


def _map(value: Any, where: str, get: Get, depth: int) -> dict[Any, Any]:
    """Decode a dict with a key that is no string."""
    if all(isinstance(key, str) for key, _ in value):
        raise ValueError
    return _map_of(value, where, get, depth)


def _map_of(value: Any, where: str, get: Get, depth: int) -> dict[Any, Any]:
    """Decode the pairs of a dict. Raises: ValueError, if a key stands there twice."""
    # Duplicate keys are damage: one of the values would be ignored.
    pairs = [
        (decode(key, where, get, depth + 1), decode(item, where, get, depth + 1))
        for key, item in value
    ]
    return dict(_whole(dict(pairs), pairs))


def _counter(value: Any, where: str, get: Get, depth: int) -> Counter[Any]:
    return Counter(_map_of(value, where, get, depth))


def _bytes(value: Any, where: str, get: Get, depth: int) -> Any:
    data = _data(value, where, get, depth)
    return bytes(bytes_of(data)) if isinstance(data, Tensor) else data


def _bytearray(value: Any, where: str, get: Get, depth: int) -> Any:
    data = _data(value, where, get, depth)
    return bytearray(bytes_of(data)) if isinstance(data, Tensor) else data


def _array(value: Any, where: str, get: Get, depth: int) -> Any:
    text, shape, place = value
    dtype = numpy_values.dtype_of(text, where)
    sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    data = _data(place, where, get, depth)
    if dtype is None or not sizes:
        raise ValueError
    # The claim is compared with the bytes before anything is allocated.
    if data.shape[0] != numpy_values.nbytes_of(dtype, tuple(shape)):
        raise ValueError
    if isinstance(data, Tensor):
        return numpy_values.array_of(data, dtype, tuple(shape))
    return data


def _data(value: Any, where: str, get: Get, depth: int) -> Any:
    """Return the tensor of bytes that ``value`` refers to; see ``check_values``."""
    # A check of the manifest alone has the place of the tensor, and no values.
    found = decode(value, where, get, depth)
    if getattr(found, "dtype", None) is not torch.uint8 or len(found.shape) != 1:
        raise ValueError
    return found


_DECODERS: dict[str, Callable[[Any, str, Get, int], Any]] = {
    "$tuple": _tuple,
    "$set": _set,
    "$frozenset": lambda *told: frozenset(_set(*told)),
    "$deque": _deque,
    "$complex": _complex,
    "$dict": _dict,
    "$map": _map,
    "$counter": _counter,
    "$bytes": _bytes,
    "$bytearray": _bytearray,
    "$array": _array,
}
"""How each mark is decoded; TypeError and ValueError stand for a damaged value."""


def _number(value: Any, where: str) -> Tensor:
    """Return the 0-d tensor of ``[dtype name, number]``."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        dtype, number = DTYPES.get(value[0]), value[1]
        if isinstance(number, dict):
            number = decode(number, where, lambda _: None)
        # An exact type: ``True`` is no number of an int64 tensor.
        if dtype is not None and type(number) is _python_type(dtype):
            try:
                made = torch.tensor(number, dtype=dtype, device="cpu")
            except (RuntimeError, OverflowError, ValueError):
                raise _damaged(where, value) from None
            back = made.item()
            # The dtype must represent the number exactly; NaN differs from itself.
            if back == number or back != back:
                return made
    raise _damaged(where, value)


def _python_type(dtype: torch.dtype) -> type:
    """Return the Python type of a number of ``dtype``."""
    if dtype is torch.bool:
        return bool
    return float if dtype.is_floating_point else int


def _damaged(where: str, value: Any) -> CheckpointError:
    """Return the error for a value that ``encode`` never writes."""
    return CheckpointError(
        f"{where}: {excerpt(value)} is nothing that a checkpoint writes. The file is "
        "damaged or "
        "was edited; use another checkpoint."
    )
