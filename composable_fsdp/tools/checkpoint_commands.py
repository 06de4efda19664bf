"""``python -m composable_fsdp`` inspect, verify, convert, export, diff and env.

A command returns its report, as JSON has it, the report as text, and the exit status.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import collect_env

from composable_fsdp.errors import CheckpointError
from composable_fsdp.features.versions import untested
from composable_fsdp.naming import LISTED, listed, size_text
from composable_fsdp.storage.convert import check_readable, open_whole
from composable_fsdp.storage.convert import convert as write_as
from composable_fsdp.storage.export import CastWeights
from composable_fsdp.storage.manifest import dtype_name
from composable_fsdp.storage.opening import (
    DCP,
    NATIVE,
    SAFETENSORS,
    find_checkpoint,
    open_source,
)
from composable_fsdp.storage.opening import verify as verify_native
from composable_fsdp.storage.source import LazyTensor, Source
from composable_fsdp.tools.describe import describe
from composable_fsdp.tools.texts import counted, installed, printable, version

Answer = tuple[dict[str, Any], str, int]


@contextmanager
def _progress(
    label: str, given: argparse.Namespace, total: int = 0
) -> Iterator[Callable[..., None]]:
    """Show which part of ``total`` is done; yield a function that takes bytes."""
    # A log file must not receive a line per update.
    wanted = not given.json and sys.stderr.isatty()
    done = shown = 0.0

    def advance(more: int, every: int | None = None) -> None:
        nonlocal done, shown
        done = more if every else done + more
        # Writing to a terminal is slow, so limit the updates.
        if wanted and time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            # ``total`` may be an estimate, and smaller than ``done``.
            share = min(1.0, done / (every or total or 1))
            print(f"\r{label} {share:4.0%}", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        # Returns to the start of the line, and erases the line.
        if wanted:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def inspect(given: argparse.Namespace) -> Answer:
    """Return the description of the checkpoint."""
    found = describe(given.path)
    return found.as_dict(), str(found), 0


def verify(given: argparse.Namespace) -> Answer:
    """Read the whole checkpoint, and return the report."""
    path, kind = find_checkpoint(given.path)
    begin, weights = time.monotonic(), given.weights_only
    # The native format has checksums, whose reader tells a damaged manifest, too.
    if kind == NATIVE:
        with _progress("reading", given) as line:
            found = verify_native(path, progress=line)
        if not found:
            raise CheckpointError("\n".join(found.problems))
    with open_source(path) if kind == NATIVE else open_whole(path) as source:
        if kind == NATIVE:
            read = found.nbytes
        else:
            # For other formats, reading every tensor is the check.
            total = _nbytes(source, weights_only=weights)
            with _progress("reading", given, total) as line:
                read = check_readable(source, weights_only=weights, progress=line)
        report = {
            "path": path,
            "format": kind,
            **_summary(source, weights_only=weights),
            "bytes_read": read,
            "seconds": round(time.monotonic() - begin, 2),
        }
        return report, _text(report, "good"), 0


def convert(given: argparse.Namespace) -> Answer:
    """Write the checkpoint in the format ``--to``, and return the report."""
    with open_whole(given.source) as whole:
        # Without ``--dtype``, or with another command, all dtypes are kept.
        dtype = getattr(given, "dtype", None)
        source = CastWeights(whole, getattr(torch, dtype)) if dtype else whole
        # A safetensors file holds weights only.
        weights = given.weights_only or given.to == SAFETENSORS
        total = _nbytes(source, weights_only=weights)
        # DCP stores a tied parameter once per name.
        if given.to == DCP:
            total += sum(source.model[kept].nbytes for kept in source.aliases.values())
        with _progress("writing", given, total) as line:
            left_out = write_as(
                source,
                given.destination,
                given.to,
                weights_only=given.weights_only,
                max_shard_bytes=given.max_shard_size,
                progress=line,
            )
        report = {
            "path": str(given.destination),
            "format": given.to,
            **_summary(source, weights_only=weights),
            "left_out": left_out,
        }
        return report, _text(report, "written"), 0


def export(given: argparse.Namespace) -> Answer:
    """Write the weights as safetensors, and return the report."""
    given.to, given.weights_only = SAFETENSORS, True
    return convert(given)


def diff(given: argparse.Namespace) -> Answer:
    """Compare the two checkpoints, and return the differences."""
    weights = given.weights_only
    with open_whole(given.first) as first, open_whole(given.second) as second:
        total = _nbytes(first, weights_only=weights)
        with _progress("comparing", given, total) as line:
            found = compare(
                first,
                second,
                weights_only=weights,
                tolerance=given.tolerance,
                advance=line,
            )
    found = {"paths": [str(given.first), str(given.second)], **found}
    return found, _text_of_diff(found), int(not found["equal"])


def env(given: argparse.Namespace) -> Answer:
    """Return the facts about this installation and this machine."""
    # Never all variables: a report of a bug must not carry a password.
    shown = re.compile(
        "(COMPOSABLE_FSDP_|NCCL_|GLOO_|TORCH|PYTORCH_|OMP_|CUDA_).*"
        "|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    )
    packages = ("safetensors", "numpy", "transformers", "accelerate", "peft")
    report = {
        "versions": {
            "composable_fsdp": version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            # From the metadata: importing transformers takes seconds.
            **{name: installed(name) or "not installed" for name in packages},
            **({"not tested on": text} if (text := untested()) else {}),
        },
        "environment": {n: v for n, v in os.environ.items() if shown.fullmatch(n)},
    }
    lines = [
        f"{name} {value}" for each in report.values() for name, value in each.items()
    ]
    # GPUs and drivers, as torch's own reports have them.
    machine: Any = collect_env.get_env_info()  # type: ignore[no-untyped-call]
    lines += ["", collect_env.pretty_str(machine)]  # type: ignore[no-untyped-call]
    return {**report, "torch": machine._asdict()}, "\n".join(lines), 0


def _nbytes(source: Source, *, weights_only: bool) -> int:
    """Return the bytes of all tensors; of the model only, with ``weights_only``."""
    states = [] if weights_only else source.optim.values()
    tables = (source.model, *states)
    return sum(info.nbytes for each in tables for info in each.values())


def _summary(source: Source, *, weights_only: bool) -> dict[str, Any]:
    """Return the content of the checkpoint in numbers."""
    weights = _nbytes(source, weights_only=True)
    found: dict[str, Any] = {
        "model": {
            "tensors": len(source.model),
            "bytes": weights,
            "tied": len(source.aliases),
        }
    }
    if weights_only:
        return found
    if source.param_groups is not None:
        found["optimizer"] = {
            "groups": len(source.param_groups),
            "tensors": sum(map(len, source.optim.values())),
            "bytes": _nbytes(source, weights_only=False) - weights,
        }
    return {**found, "extra": source.extra is not None}


def _text(found: dict[str, Any], end: str) -> str:
    """Return a report as text."""
    lines = [f"{found['path']}: {found['format']} checkpoint, {end}"]
    for part in ("model", "optimizer"):
        if part in found:
            each = found[part]
            words = [counted(each["tensors"], "tensor"), size_text(each["bytes"])]
            words += [counted(each["tied"], "tied name")] if each.get("tied") else []
            words += [counted(each["groups"], "group")] if "groups" in each else []
            lines.append(f"  {part:10} {', '.join(words)}")
    if found.get("extra"):
        lines.append("  extra      yes")
    if "bytes_read" in found:
        lines.append(f"  read       {size_text(found['bytes_read'])}, every byte")
    if found.get("left_out"):
        lines.append(f"  left out   {', '.join(found['left_out'])}")
    return "\n".join(map(printable, lines))


def compare(
    first: Source,
    second: Source,
    *,
    weights_only: bool = False,
    tolerance: float = 0.0,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Return the differences of two checkpoints; memory holds two slices at a time."""
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


def _text_of_diff(found: dict[str, Any]) -> str:
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
