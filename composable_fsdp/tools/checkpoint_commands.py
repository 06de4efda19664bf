"""``python -m composable_fsdp`` inspect, verify, convert and export: checkpoints."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import size_text
from composable_fsdp.storage.convert import check_readable, convert, open_whole
from composable_fsdp.storage.export import CastWeights
from composable_fsdp.storage.opening import (
    DCP,
    NATIVE,
    SAFETENSORS,
    find_checkpoint,
    open_source,
    verify,
)
from composable_fsdp.storage.source import Source
from composable_fsdp.tools.checkpoint_diff import nbytes_of
from composable_fsdp.tools.command import Command, Progress, Report
from composable_fsdp.tools.describe import describe
from composable_fsdp.tools.texts import counted, printable


def _inspect(given: argparse.Namespace) -> Report:
    """Return the description of the checkpoint."""
    found = describe(given.path)
    # JSON has no use for the text.
    return found.as_dict() if given.json else {"text": str(found)}


def _verify(given: argparse.Namespace) -> Report:
    """Read the whole checkpoint, and return the report."""
    path, kind = find_checkpoint(given.path)
    begin, weights = time.monotonic(), given.weights_only
    wanted = not given.json
    # The native format has checksums, whose reader tells a damaged manifest, too.
    if kind == NATIVE:
        with Progress("reading", wanted=wanted) as line:
            found = verify(path, progress=line.show)
        if not found:
            raise CheckpointError("\n".join(found.problems))
    with open_source(path) if kind == NATIVE else open_whole(path) as source:
        if kind == NATIVE:
            read = found.nbytes
        else:
            # For other formats, reading every tensor is the check.
            total = nbytes_of(source, weights_only=weights)
            with Progress("reading", total, wanted=wanted) as line:
                read = check_readable(
                    source, weights_only=weights, progress=line.advance
                )
        return {
            "path": path,
            "format": kind,
            **_summary(source, weights_only=weights),
            "bytes_read": read,
            "seconds": round(time.monotonic() - begin, 2),
        }


def _write(given: argparse.Namespace) -> Report:
    """Write the checkpoint in the format ``--to``, and return the report."""
    with open_whole(given.source) as whole:
        # Without ``--dtype``, or with another command, all dtypes are kept.
        dtype = getattr(given, "dtype", None)
        source = CastWeights(whole, getattr(torch, dtype)) if dtype else whole
        # A safetensors file holds weights only.
        weights = given.weights_only or given.to == SAFETENSORS
        total = nbytes_of(source, weights_only=weights)
        # DCP stores a tied parameter once per name.
        if given.to == DCP:
            total += sum(source.model[kept].nbytes for kept in source.aliases.values())
        with Progress("writing", total, wanted=not given.json) as line:
            left_out = convert(
                source,
                given.destination,
                given.to,
                weights_only=given.weights_only,
                max_shard_bytes=given.max_shard_size,
                progress=line.advance,
            )
        return {
            "path": str(given.destination),
            "format": given.to,
            **_summary(source, weights_only=given.weights_only),
            "left_out": left_out,
        }


def _export(given: argparse.Namespace) -> Report:
    """Write the weights as safetensors, and return the report."""
    return _write(argparse.Namespace(**vars(given), to=SAFETENSORS, weights_only=True))


def _summary(source: Source, *, weights_only: bool) -> dict[str, Any]:
    """Return the content of the checkpoint in numbers."""
    weights = nbytes_of(source, weights_only=True)
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
            "bytes": nbytes_of(source, weights_only=False) - weights,
        }
    return {**found, "extra": source.extra is not None}


def _show(found: Report) -> None:
    """Print a report as text."""
    is_check = "bytes_read" in found
    end = "good" if is_check else "written"
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
    if is_check:
        lines.append(f"  read       {size_text(found['bytes_read'])}, every byte")
    if found.get("left_out"):
        lines.append(f"  left out   {', '.join(found['left_out'])}")
    print("\n".join(map(printable, lines)))


INSPECT = Command(_inspect, lambda found: print(found["text"]))
VERIFY = Command(_verify, _show)
CONVERT = Command(_write, _show)
EXPORT = Command(_export, _show)
