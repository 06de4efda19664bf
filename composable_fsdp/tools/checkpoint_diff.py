"""How two checkpoints differ, of any formats; for the command ``diff``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.naming import LISTED, listed
from composable_fsdp.storage.manifest import dtype_name
from composable_fsdp.storage.source import Read, Source, TensorInfo
from composable_fsdp.tools.texts import counted, printable

_Saved = tuple[TensorInfo, Read, str]
"""A tensor of a checkpoint; the text is equal for the names of a tied tensor."""


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
            _compare(entries, a, b, tolerance, advance)
        # Not even touched with ``weights_only``: the other parts may be unreadable.
        if not weights_only:
            a, b = (dict(_others(each, rank)) for each in (first, second))
            others += [words for words in a if a[words] != b[words]]
    # Of several ranks each kind of part is told once.
    others = [*dict.fromkeys(others)]
    keys = ("only_first", "only_second", "different")
    equal = not others and not any(part[key] for part in found.values() for key in keys)
    return {"equal": equal, **found, "others": others}


def _compare(
    entries: dict[str, Any],
    a: dict[str, _Saved],
    b: dict[str, _Saved],
    tolerance: float,
    advance: Callable[[int], None],
) -> None:
    """Add the differences of the tensors of two checkpoints to ``entries``."""
    # In the order of the first checkpoint, which is usually that of the model.
    both = [name for name in a if name in b]
    entries["tensors"] += len(both)
    entries["only_first"] += [name for name in a if name not in b]
    entries["only_second"] += [name for name in b if name not in a]
    # The names of a tie lead to the same pair of tensors, which is read once.
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for name in both:
        key = a[name][2], b[name][2]
        if key not in known:
            known[key] = _difference(a[name], b[name], tolerance, advance)
        if known[key]:
            entries["different"][name] = known[key]


def _others(source: Source, rank: int | None) -> Iterator[tuple[str, Any]]:
    """Yield the parts beside tensors, as ``rank`` has them, in words and in values."""
    yield "optimizer's values that are not tensors", _plain(source.optim_values)
    yield "parameter groups", _plain(source.param_groups)
    yield "modules' own states", _plain(source.own_states)
    if rank is None:
        yield "extra state", _plain(source.extra)
        values = [source.rank_values(each) for each in range(source.saved_ranks)]
        yield "values of single ranks (per_rank)", _plain(values)


def _plain(value: Any) -> Any:
    """Return a nested value in a form that ``==`` compares; NaN equals NaN."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    # Formats keep tuples or make them lists; a deque may have a length.
    if isinstance(value, (list, tuple)) or hasattr(value, "maxlen"):
        return [getattr(value, "maxlen", None), *map(_plain, value)]
    if isinstance(value, Tensor):
        data = value.detach().reshape(-1).view(torch.uint8).tolist()
        return str(value.dtype), tuple(value.shape), bytes(data)
    # An array of numpy.
    if hasattr(value, "tobytes"):
        return str(value.dtype), value.shape, value.tobytes()
    # Only NaN differs from itself.
    return "nan" if value != value else value


def _tensors(
    source: Source, part: str, rank: int | None
) -> Iterator[tuple[str, _Saved]]:
    """Yield each tensor with its name, or those of a rank alone; with tied names."""
    found: list[tuple[str, str, _Saved]] = []
    if part == "optimizer":
        for name, states in source.optim.items():
            for key, info in states.items():
                text = f"{name}, {key}"
                read = partial(source.read_optim, name, key)
                found.append((text, name, (info, read, text)))
    else:
        # The other names of a tie lead to the tensor under the kept name.
        for name, own in {**{n: n for n in source.model}, **source.aliases}.items():
            info, read = source.model[own], partial(source.read_model, own)
            found.append((name, name, (info, read, own)))
    for text, name, saved in found:
        if rank is None:
            yield text, saved
        elif name in source.local_tensors:
            yield f"{text} (rank {rank})", saved


def _difference(
    first: _Saved, second: _Saved, tolerance: float, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Return how two tensors differ; empty if they are equal."""
    (info, read, _), (other, read_other, _) = first, second
    if info.shape != other.shape:
        return {"shapes": [list(info.shape), list(other.shape)]}
    found: dict[str, Any] = {}
    # Tensors of different dtypes may still hold equal values, so go on.
    if info.dtype != other.dtype:
        found["dtypes"] = [dtype_name(info.dtype), dtype_name(other.dtype)]
    count, most = 0, 0.0
    # Slices, so that a tensor larger than the memory can be compared.
    for start, stop in info.slices():
        far = _distances(read(start, stop), read_other(start, stop), tolerance)
        largest = far.max().item() if far.numel() else 0.0
        # NaN is larger than any number: a value became NaN, or ceased to be.
        most = largest if math.isnan(largest) or largest > most else most
        count += far.numel()
        advance((stop - start) * info.dtype.itemsize)
    if count:
        # JSON has no NaN and no infinity.
        told = most if math.isfinite(most) else str(most)
        found |= {"elements": count, "of": info.numel, "max_difference": told}
    return found


def _distances(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """Return the distances of the elements that differ; two NaN are equal."""
    # Both dtypes may be small, and a difference in a small dtype would be rounded;
    # int64 has more digits than float64.
    is_whole = a.dtype == b.dtype and not (a.is_floating_point() or a.is_complex())
    complex_ = a.is_complex() or b.is_complex()
    wide = torch.complex128 if complex_ else torch.float64
    x, y = a.to(wide), b.to(wide)
    pair = (a, b) if is_whole else (x, y)
    near = torch.isclose(*pair, rtol=0.0, atol=tolerance, equal_nan=True)
    return (x - y)[~near].abs().double()


def text_of(found: dict[str, Any]) -> str:
    """Return the differences as text."""
    first, second = map(printable, found["paths"])
    lines = [f"{first} and {second} {'are equal' if found['equal'] else 'differ'}"]
    for part in ("model", "optimizer"):
        if part not in found:
            continue
        entries = found[part]
        different = list(entries["different"].items())
        tensors = counted(entries["tensors"], "tensor")
        lines.append(f"  {part:10} {tensors} in both, {len(different)} differ")
        for path, key in ((first, "only_first"), (second, "only_second")):
            if entries[key]:
                names = listed(map(printable, entries[key]))
                lines.append(f"    only in {path}: {names}")
        # After a step of training every tensor differs.
        for name, each in different[:LISTED]:
            words = (
                f"{key} {' and '.join(map(str, v)) if isinstance(v, list) else v}"
                for key, v in each.items()
            )
            lines.append(f"    {printable(name)}: {', '.join(words)}")
        if len(different) > LISTED:
            rest = len(different) - LISTED
            lines.append(f"    and {rest} more; --json lists all")
    if found["others"]:
        lines.append(f"  also differ: {', '.join(found['others'])}")
    return "\n".join(lines)
