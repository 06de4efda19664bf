"""What a function does to a part of a parameter: right on rows, or on whole parameters.

A function is right on a shard if every row of the result comes from a row of the shard.
Mostly the shapes tell; names decide where shapes cannot::

    shard (3, 6) of (5, 6)    w * 2      (3, 6)   each element by itself
                              w.sum(1)   (3,)     each row by itself
                              w.sum(0)   (6,)     over rows: another sum on each rank
                              w[:2]      (2, 6)   other rows on each rank
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.runtime.meta_values import RANDOM


class Part(NamedTuple):
    """What a tensor is a part of."""

    name: str
    """The parameter, as messages print it."""
    shape: torch.Size
    """Shape of the sharded parameter on this rank."""
    unit: int
    """Id of the handle of the parameter's unit."""
    by_rows: bool = True
    """Whether dimension 0 of the tensor is the rows of the shard."""


class Call(NamedTuple):
    """A call of a torch function that takes parts of parameters."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[tuple[Tensor, Part]]


REDUCES = "takes elements together of"
MULTIPLIES = "computes with the matrix of"
CHOOSES = "chooses rows by number of"
DRAWS = "draws numbers for rows of"
DECIDES = "looks for infinities in rows of"

_MATRIX = re.compile(
    "_*r?matmul_*|(b|add|badd|addb)?b?mm|(add)?mv|linear|einsum|tensordot|bilinear|"
    "chain_matmul|cdist|embedding|kron|cov|corrcoef|linalg_(?!.*norm$).*"
)
_ACROSS = re.compile(
    "(log_)?softmax|cum(sum|prod)_?|(arg)?sort|flip|roll|normalize|"
    "index_(fill|add|copy)_?|scatter(_add)?_?"
)
"""Functions that keep the shape, and mix rows if their dimension is 0."""
_TURNS = re.compile(
    "t|T|mT|H|transpose|permute|swapaxes|movedim|moveaxis|"
    "cat|stack|concat|concatenate|[hv]stack"
)
_NEITHER = re.compile("new_.*|all|any")
"""``all`` and ``any`` of a comparison say what they say of this rank's elements."""
_SUMS = re.compile("sum|v?dot|inner")
_CHOICES = re.compile("select|narrow|__[gs]etitem__|index_.*|scatter.*")
_SCALER = "_amp_foreach_non_finite_check_and_unscale_"


def name_of(func: Any) -> str:
    """Return the name of a torch function; of a property, that of the attribute."""
    name: str = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", name) if name == "__get__" else name


def before(call: Call, tensor: Tensor, part: Part) -> str:
    """Return what the call does wrong with ``tensor`` by its name; empty if nothing."""
    name, args = call.name, call.args
    if name == _SCALER:
        return DECIDES
    if RANDOM.fullmatch(name):
        return DRAWS
    if _MATRIX.fullmatch(name):
        # Rows of a product come from rows of its first factor.
        is_first = len(args) == 2 and args[0] is tensor is not args[1]
        keeps = is_first and part.by_rows and name.strip("_") in ("matmul", "mm", "mv")
        return "" if keeps else MULTIPLIES
    if _ACROSS.fullmatch(name) and (not part.by_rows or _is_over_rows(call)):
        return CHOOSES if _CHOICES.fullmatch(name) else REDUCES
    if name.endswith("etitem__") and args[0] is tensor and part.by_rows:
        return "" if _keeps_rows(args[1], tensor) else CHOOSES
    return ""


def after(call: Call, tensor: Tensor, part: Part, result: Tensor) -> Part | str | None:
    """Return what ``result`` is a part of, or what the call does wrong, or None."""
    name = call.name
    rows = part.by_rows and result.shape[:1] == tensor.shape[:1]
    if _NEITHER.fullmatch(name):
        return None
    if _TURNS.fullmatch(name):
        return part._replace(by_rows=False)
    if result.shape == tensor.shape:
        return part
    if result.shape == part.shape:
        return part._replace(by_rows=True)
    if result.numel() == tensor.numel():
        return part._replace(by_rows=rows)
    if rows and tensor.dim() and not _is_over_rows(call):
        return part
    # The gradient of a sum over elements, as of an L2 penalty, is right on parts.
    is_sum = bool(_SUMS.fullmatch(name)) or call.kwargs.get("reduction") == "sum"
    if is_sum and result.requires_grad and not result.dim():
        return None
    return CHOOSES if _CHOICES.fullmatch(name) else REDUCES


def _is_over_rows(call: Call) -> bool:
    """Return whether the call names dimension 0, the rows of its first argument."""
    args, at = call.args, 2 if "norm" in call.name else 1
    named = call.kwargs.get("dim", call.kwargs.get("axis"))
    given = args[at] if named is None and len(args) > at else named
    dims = given if isinstance(given, (tuple, list)) else (given,)
    first = args[0] if args else None
    size = first.dim() if isinstance(first, Tensor) else 0
    return any(type(dim) is int and dim in (0, -size) for dim in dims)


def _keeps_rows(index: Any, tensor: Tensor) -> bool:
    """Return whether an index takes elements of all rows, whatever the rows are."""
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, Tensor) and first.dtype is torch.bool:
        return first.shape == tensor.shape
    return first is Ellipsis or first is None or first == slice(None)
