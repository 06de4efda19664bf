"""``python -m composable_fsdp`` inspect, verify, convert, export, diff and env.

A command returns its report, as JSON has it, the report as text, and the exit status.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import collect_env

from composable_fsdp.errors import CheckpointError
from composable_fsdp.features.versions import untested
from composable_fsdp.naming import size_text
from composable_fsdp.storage.convert import check_readable, open_whole
from composable_fsdp.storage.convert import convert as write_as
from composable_fsdp.storage.export import CastWeights
from composable_fsdp.storage.opening import (
    DCP,
    NATIVE,
    SAFETENSORS,
    find_checkpoint,
    open_source,
)
from composable_fsdp.storage.opening import verify as verify_native
from composable_fsdp.storage.source import Source
from composable_fsdp.tools import checkpoint_diff
from composable_fsdp.tools.describe import describe
from composable_fsdp.tools.texts import counted, installed, printable, version

Answer = tuple[dict[str, Any], str, int]


@contextmanager
def _progress(
    label: str, given: argparse.Namespace, total: int = 0
) -> Iterator[Callable[..., None]]:
    """Show on a terminal which part of ``total`` bytes is done, until the block ends.

    Yields a function that takes the bytes since the last call, or those done and all.
    """
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
            found = checkpoint_diff.compare(
                first,
                second,
                weights_only=weights,
                tolerance=given.tolerance,
                advance=line,
            )
    found = {"paths": [str(given.first), str(given.second)], **found}
    return found, checkpoint_diff.text_of(found), int(not found["equal"])


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
