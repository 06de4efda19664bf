"""``python -m composable_fsdp diff``: how two checkpoints differ, of any formats."""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.naming import LISTED, listed
from composable_fsdp.storage.convert import open_whole
from composable_fsdp.storage.manifest import dtype_name
from composable_fsdp.storage.source import Read, Source, TensorInfo
from composable_fsdp.tools.command import BAD, USAGE, Command, Progress, Report
from composable_fsdp.tools.texts import counted, printable


class _Saved(NamedTuple):
    """A tensor of a checkpoint; ``own`` is equal for the names of a tied tensor."""

    info: TensorInfo
    read: Read
    own: object


def nbytes_of(source: Source, *, weights_only: bool) -> int:
    """Return the bytes of all tensors; of the model only, with ``weights_only``."""
    states = [] if weights_only else source.optim.values()
    tables = (source.model, *states)
    return sum(info.nbytes for each in tables for info in each.values())


def _run(given: argparse.Namespace) -> Report:
    """Compare the two checkpoints, and return the differences."""
    weights = given.weights_only
    with open_whole(given.first) as first, open_whole(given.second) as second:
        total = nbytes_of(first, weights_only=weights)
        with Progress("comparing", total, wanted=not given.json) as line:
            found = compare(
                first,
                second,
                weights_only=weights,
                tolerance=given.tolerance,
                advance=line.advance,
            )
    return {"paths": [str(given.first), str(given.second)], **found}


def compare(
    first: Source,
    second: Source,
    *,
    weights_only: bool = False,
    tolerance: float = 0.0,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Return the differences of two checkpoints. Memory holds two slices at a time.

    Raises: CheckpointError, for damaged or missing data.
    """
    found: dict[str, dict[str, Any]] = {
        part: {"tensors": 0, "only_first": [], "only_second": [], "different": {}}
        for part in ("model", "optimizer")[: 2 - weights_only]
    }
    others: list[str] = []
    # First the tensors that all ranks share, and then those of each rank.
    for rank in (None, *range(max(first.local_ranks, second.local_ranks))):
        first.on_rank(rank)
        second.on_rank(rank)
        for part, entries in found.items():
            a, b = (dict(_tensors(each, part, rank)) for each in (first, second))
            # In the order of the first checkpoint, which is usually that of the model.
            both = [name for name in a if name in b]
            entries["tensors"] += len(both)
            entries["only_first"] += [name for name in a if name not in b]
            entries["only_second"] += [name for name in b if name not in a]
            # The names of a tie lead to the same pair of tensors, which is read once.
            known: dict[tuple[object, object], dict[str, Any]] = {}
            for name in both:
                key = a[name].own, b[name].own
                if key not in known:
                    known[key] = _difference(a[name], b[name], tolerance, advance)
                if known[key]:
                    entries["different"][name] = known[key]
        # Not even touched with ``weights_only``: the other parts may be unreadable.
        if not weights_only:
            others += [w for w in _others(first, second, rank) if w not in others]
    keys = ("only_first", "only_second", "different")
    equal = not others and not any(part[key] for part in found.values() for key in keys)
    return {"equal": equal, **found, "others": others}


def _others(first: Source, second: Source, rank: int | None) -> list[str]:
    """Return words for the parts beside tensors that differ, as ``rank`` has them."""
    parts: dict[str, Callable[[Source], Any]] = {
        "optimizer's values that are not tensors": lambda source: source.optim_values,
        "parameter groups": lambda source: source.param_groups,
        "modules' own states": lambda source: source.own_states,
    }
    if rank is None:
        parts["extra state"] = lambda source: source.extra
        parts["values of single ranks (per_rank)"] = lambda source: [
            source.rank_values(each) for each in range(source.saved_ranks)
        ]
    return [w for w, read in parts.items() if not _same(read(first), read(second))]


def _tensors(
    source: Source, part: str, rank: int | None
) -> Iterator[tuple[str, _Saved]]:
    """Yield each tensor with its name, or those of a rank alone; with tied names."""
    found: dict[str, tuple[str, _Saved]] = {}
    if part == "optimizer":
        for name, states in source.optim.items():
            for key, info in states.items():
                read = partial(source.read_optim, name, key)
                found[f"{name}, {key}"] = name, _Saved(info, read, (name, key))
    else:
        # The other names of a tie lead to the tensor under the kept name.
        kept = {**{name: name for name in source.model}, **source.aliases}
        for name, own in kept.items():
            read = partial(source.read_model, own)
            found[name] = name, _Saved(source.model[own], read, own)
    for text, (name, saved) in found.items():
        if rank is None:
            yield text, saved
        elif name in source.local_tensors:
            yield f"{text} (rank {rank})", saved


def _difference(
    first: _Saved,
    second: _Saved,
    tolerance: float,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Return how two tensors differ; empty if they are equal."""
    info, other = first.info, second.info
    if info.shape != other.shape:
        return {"shapes": [list(info.shape), list(other.shape)]}
    found: dict[str, Any] = {}
    # Tensors of different dtypes may still hold equal values, so go on.
    if info.dtype != other.dtype:
        found["dtypes"] = [dtype_name(info.dtype), dtype_name(other.dtype)]
    count, most = 0, 0.0
    # Slices, so that a tensor larger than the memory can be compared.
    for start, stop in info.slices():
        a, b = first.read(start, stop), second.read(start, stop)
        more, largest = _distance(a, b, tolerance)
        # NaN is larger than any number: a value became NaN, or ceased to be.
        most = largest if math.isnan(largest) else max(most, largest)
        count += more
        advance((stop - start) * info.dtype.itemsize)
    if count:
        # JSON has no NaN and no infinity.
        told = most if math.isfinite(most) else str(most)
        found |= {"elements": count, "of": info.numel, "max_difference": told}
    return found


def _distance(a: Tensor, b: Tensor, tolerance: float) -> tuple[int, float]:
    """Return how many elements differ, and the largest distance."""
    # Most tensors of equal checkpoints are equal bit by bit, NaN included.
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return 0, 0.0
    complex_ = a.is_complex() or b.is_complex()
    wide = torch.complex128 if complex_ else torch.float64
    # Both dtypes may be small, and a difference in a small dtype would be rounded.
    x, y = a.to(wide), b.to(wide)
    # Equal infinities have no distance, and two NaN are equal here.
    same = (x == y) | (x.isnan() & y.isnan())
    # int64 has more digits than float64.
    if a.dtype == b.dtype and not (a.is_floating_point() or complex_):
        same = a == b
    # The distance of NaN to a number is NaN, which no tolerance accepts.
    far = torch.where(same, 0.0, (x - y).abs())
    differs = ~same & ~(far <= tolerance)
    # ``max`` of no element is an error.
    if not differs.any():
        return 0, 0.0
    return int(differs.sum()), float(far[differs].max())


def _same(first: Any, second: Any) -> bool:
    """Return whether two nested values are equal; NaN equals NaN."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            _same(value, second[key]) for key, value in first.items()
        )
    for kinds in ((list, tuple), deque):
        # Formats keep tuples or make them lists.
        if isinstance(first, kinds) and isinstance(second, kinds):
            limits = getattr(first, "maxlen", 0), getattr(second, "maxlen", 0)
            equal = limits[0] == limits[1] and len(first) == len(second)
            return equal and all(map(_same, first, second))
    if isinstance(first, Tensor) != isinstance(second, Tensor):
        return False
    # Tensors, and arrays of numpy, compare to arrays, which have no truth.
    if hasattr(first, "dtype") and hasattr(second, "dtype"):
        return _same_array(first, second)
    # Only NaN differs from itself.
    return bool(first == second) or (first != first and second != second)


def _same_array(first: Any, second: Any) -> bool:
    """Return whether two tensors, or two arrays of numpy, are equal."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if isinstance(first, Tensor):
        return _distance(first.reshape(-1), second.reshape(-1), 0.0)[0] == 0
    return bool(first.tobytes() == second.tobytes())


def _show(found: Report) -> None:
    """Print the differences as text."""
    first, second = map(printable, found["paths"])
    print(f"{first} and {second} {'are equal' if found['equal'] else 'differ'}")
    for part in ("model", "optimizer"):
        if part not in found:
            continue
        entries = found[part]
        different = list(entries["different"].items())
        tensors = counted(entries["tensors"], "tensor")
        print(f"  {part:10} {tensors} in both, {len(different)} differ")
        for path, key in ((first, "only_first"), (second, "only_second")):
            if entries[key]:
                print(f"    only in {path}: {listed(map(printable, entries[key]))}")
        # After a step of training every tensor differs.
        for name, each in different[:LISTED]:
            print(f"    {printable(name)}: {_words(each)}")
        if len(different) > LISTED:
            print(f"    and {len(different) - LISTED} more; --json lists all")
    if found["others"]:
        print(f"  also differ: {', '.join(map(printable, found['others']))}")


def _words(difference: dict[str, Any]) -> str:
    """Return the difference of two tensors in words."""
    words = []
    if "shapes" in difference:
        words.append("shape {} and {}".format(*map(tuple, difference["shapes"])))
    if "dtypes" in difference:
        words.append("{} and {}".format(*difference["dtypes"]))
    if "elements" in difference:
        words.append(
            f"{difference['elements']:,} of {difference['of']:,} elements differ, by "
            f"at most {float(difference['max_difference']):.3g}"
        )
    return "; ".join(words)


DIFF = Command(
    _run,
    _show,
    lambda found: 0 if found["equal"] else BAD,
    # The status 1 says that two checkpoints differ.
    bad=USAGE,
)
