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
from composable_fsdp.storage.source import LazyTensor, Source
from composable_fsdp.tools.texts import counted, printable


def compare(
    first: Source,
    second: Source,
    *,
    weights_only: bool = False,
    tolerance: float = 0.0,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Return the differences of two checkpoints; memory holds two slices at a time.

    Raises: CheckpointError, for damaged or missing data.
    """
    found: dict[str, dict[str, Any]] = {
        part: {"tensors": 0, "only_first": [], "only_second": [], "different": {}}
        for part in ("model", "optimizer")[: 2 - weights_only]
    }
    others: dict[str, None] = {}
    # First the tensors that all ranks share, and then those of each rank.
    for rank in (None, *range(max(first.local_ranks, second.local_ranks))):
        first.on_rank(rank)
        second.on_rank(rank)
        for part, entries in found.items():
            a, b = (dict(_tensors(each, part, rank)) for each in (first, second))
            both = [name for name in a if name in b]
            entries["tensors"] += len(both)
            entries["only_first"] += [name for name in a if name not in b]
            entries["only_second"] += [name for name in b if name not in a]
            for name in both:
                if differs := _difference(a[name], b[name], tolerance, advance):
                    entries["different"][name] = differs
        # Not even touched with ``weights_only``: the other parts may be unreadable.
        if not weights_only:
            a, b = (dict(_others(each, rank)) for each in (first, second))
            others |= dict.fromkeys(words for words in a if a[words] != b[words])
    keys = ("only_first", "only_second", "different")
    equal = not others and not any(part[key] for part in found.values() for key in keys)
    return {"equal": equal, **found, "others": [*others]}


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
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield each tensor with its name, or those of a rank alone; with tied names."""
    if part == "model":
        owners = {**{name: name for name in source.model}, **source.aliases}
        found = [
            (n, n, LazyTensor(source.model[own], partial(source.read_model, own)))
            for n, own in owners.items()
        ]
    else:
        found = [
            (n, f"{n}, {key}", LazyTensor(info, partial(source.read_optim, n, key)))
            for n, states in source.optim.items()
            for key, info in states.items()
        ]
    for name, text, tensor in found:
        if rank is None:
            yield text, tensor
        elif name in source.local_tensors:
            yield f"{text} (rank {rank})", tensor


def _difference(
    a: LazyTensor, b: LazyTensor, tolerance: float, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Return how two tensors differ; empty if they are equal."""
    if a.info.shape != b.info.shape:
        return {"shapes": [list(a.info.shape), list(b.info.shape)]}
    dtypes = a.info.dtype, b.info.dtype
    found: dict[str, Any] = {}
    # Tensors of different dtypes may still hold equal values, so go on.
    if dtypes[0] != dtypes[1]:
        found["dtypes"] = [*map(dtype_name, dtypes)]
    # Both dtypes may be small, and a difference in a small dtype would be rounded;
    # int64 has more digits than float64.
    is_whole = dtypes[0] == dtypes[1] and not (
        dtypes[0].is_floating_point or dtypes[0].is_complex
    )
    has_complex = any(dtype.is_complex for dtype in dtypes)
    wide = torch.complex128 if has_complex else torch.float64
    count, most = 0, 0.0
    # Slices, so that a tensor larger than the memory can be compared.
    for start, stop in a.info.slices():
        pair = a.read(start, stop), b.read(start, stop)
        x, y = pair[0].to(wide), pair[1].to(wide)
        near = torch.isclose(
            *(pair if is_whole else (x, y)), rtol=0.0, atol=tolerance, equal_nan=True
        )
        far = (x - y)[~near].abs().double()
        count += far.numel()
        # NaN, where a value became NaN or ceased to be, stays the largest.
        most = torch.cat([far, far.new_tensor([most])]).max().item()
        advance((stop - start) * dtypes[0].itemsize)
    if count:
        # JSON has no NaN and no infinity.
        told = most if math.isfinite(most) else str(most)
        found |= {"elements": count, "of": a.info.numel, "max_difference": told}
    return found


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
