"""Writes nested values as strict JSON: the user's ``extra``, and optimizer values.

JSON has no tensors, tuples or infinities. They are written as a dict with a single key
that starts with ``$``; a user's dict with such a key is written as pairs.

::

    tensor    {"$tensor": 3}                  the manifest's third loose tensor
    number    {"$number": ["float32", 1.0]}   a 0-d tensor, with python_values
    float     {"$float": "nan"}
    tuple     {"$tuple": [..]}                with python_values
    dict      {"$dict": [["$key", ..], ..]}

Decoding accepts only values that encoding writes, so no part of a manifest is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.manifest import DTYPES, dtype_name
from composable_fsdp.storage.parse import excerpt

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
        value: nested dicts and lists of strings, numbers, booleans, None and tensors.
        where: the name of the value in error messages.
        put: stores a tensor and returns a number.
        python_values: also accept tuples, and write 0-d tensors as numbers, as needed
            for the values of optimizers and modules. Default False.

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
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, list) or (self.python_values and isinstance(value, tuple)):
            items = [
                self.encode(item, f"{where}[{i}]", depth + 1)
                for i, item in enumerate(value)
            ]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, dict):
            return self._dict(value, where, depth)
        raise _refused(value, where)

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        """Return a dict as JSON."""
        pairs = []
        for key, item in value.items():
            # JSON turns other keys into strings, so a load would return other keys.
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r} of type {type(key).__name__}; a "
                    "checkpoint holds dicts whose keys are strings. Save it under "
                    f"{str(key)!r}, or as a list of pairs, or leave it out."
                )
            path = f"{where}[{key!r}]"
            pairs.append([_text(key), self.encode(item, path, depth + 1)])
        # A reader would take such a key for a mark.
        if any(key.startswith("$") for key, _ in pairs):
            return {"$dict": pairs}
        return dict(pairs)

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
        # As a number: optimizer steps and the like need no entry in a file.
        if self.python_values and value.ndim == 0 and not value.is_complex():
            number = value.item()
            if isinstance(number, float):
                number = _float(number)
            return {"$number": [dtype_name(value.dtype), number]}
        return {"$tensor": self.put(value, where)}


def _refused(value: Any, where: str) -> TypeError:
    """Return the error for a type that a checkpoint cannot hold."""
    kind = type(value)
    return TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds "
        "nested dicts and lists of strings, numbers, booleans, None and plain tensors, "
        "and no pickled objects. Convert it, or save its state_dict()."
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
    if mark == "$tuple" and isinstance(value, list):
        return tuple(decode(value, where, get, depth))
    if mark == "$number":
        return _number(value, where)
    if mark == "$dict" and isinstance(value, list):
        # Only with a ``$`` key does ``encode`` write pairs; duplicate keys are damage.
        keys = [pair[0] for pair in value if isinstance(pair, list) and len(pair) == 2]
        texts = {key for key in keys if isinstance(key, str)}
        if len(texts) == len(value) and any(key.startswith("$") for key in texts):
            return {
                key: decode(v, f"{where}[{key!r}]", get, depth + 1) for key, v in value
            }
    raise _damaged(where, {mark: value})


def _number(value: Any, where: str) -> Tensor:
    """Return the 0-d tensor of ``[dtype name, number]``."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        dtype, number = DTYPES.get(value[0]), value[1]
        if isinstance(number, dict):
            number = decode(number, where, lambda _: None)
        # An exact type: ``True`` is no number of an int64 tensor.
        if dtype is not None and type(number) is _python_type(dtype):
            try:
                made = torch.tensor(number, dtype=dtype)
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
