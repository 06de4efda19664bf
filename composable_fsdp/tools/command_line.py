"""``python -m composable_fsdp``: plan a model; verify and convert checkpoints.

Commands on checkpoints need no process group and no device, and execute no code from a
checkpoint.
Results go to standard output, as text or as a JSON object; errors go to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from composable_fsdp.errors import CheckpointError, FSDPError
from composable_fsdp.naming import printable
from composable_fsdp.storage.convert import (
    MAX_SHARD_BYTES,
    check_readable,
    convert,
    open_whole,
)
from composable_fsdp.storage.export import CastWeights
from composable_fsdp.storage.native import read_manifest
from composable_fsdp.storage.opening import (
    DCP,
    FORMATS,
    NATIVE,
    SAFETENSORS,
    find_checkpoint,
    open_source,
    verify,
)
from composable_fsdp.storage.source import Source
from composable_fsdp.tools import (
    checkpoint_diff,
    environment,
    plan_command,
    simulate_command,
)
from composable_fsdp.tools.checkpoint_diff import add_weights_only, nbytes_of
from composable_fsdp.tools.command import (
    USAGE,
    Command,
    Report,
    byte_size,
    counted,
    progress,
)
from composable_fsdp.tools.describe import describe
from composable_fsdp.tools.model_arguments import DTYPES, dtype_name, error_text
from composable_fsdp.tools.plan_models import UsageError

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, the shells' convention."""

_FORMATS_HELP = """\
formats, told apart by what lies at the path:
  native       a directory that composable_fsdp.save wrote
  dcp          a directory of torch.distributed.checkpoint
  safetensors  a file, or a directory with Hugging Face's names; weights only
  torch        a file that torch.save wrote: a state dict, or {"model": ..}

exit status: 0 good, 1 bad checkpoint or nothing written, 2 wrong usage
"""

_EXAMPLES = """\
examples:
  python -m composable_fsdp plan --hf config.json --world-size 64 --batch 1x4096 \\
      --param-dtype bfloat16 --checkpointing --gpu-memory 80GiB
  python -m composable_fsdp simulate train:build_model --batch 4x2048 --trace s.json
  python -m composable_fsdp inspect runs/step_100
  python -m composable_fsdp verify runs/step_100
  python -m composable_fsdp diff runs/step_100 runs/step_200
  python -m composable_fsdp convert runs/step_100 step_100.pt --to torch
  python -m composable_fsdp export runs/step_100 my-model --dtype bfloat16

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    ``arguments`` default to ``sys.argv[1:]``. An error of a checkpoint or of the file
    system becomes a message and status 1.

    Raises: SystemExit, for ``--help`` (status 0) and wrong usage (status 2).
    """
    # argparse ends the program by itself after ``--help`` and for wrong usage.
    given = _parser().parse_args(arguments)
    command: Command = given.command
    try:
        found = command.run(given)
    except UsageError as error:
        return _failed(error, given, USAGE)
    except (FSDPError, OSError) as error:
        return _failed(error, given, command.bad)
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    if given.json:
        print(json.dumps({"ok": True, **found}))
    else:
        try:
            command.show(found)
        # ``| head`` has read enough. Python would fail once more when it flushes.
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return command.status(found)


def _failed(error: Exception, given: argparse.Namespace, status: int) -> int:
    """Print the error, and return the exit status."""
    text = error_text(error)
    # Standard output is always a JSON object with ``--json``, so a script can parse
    # failures, too.
    if given.json:
        print(json.dumps({"ok": False, "error": text}))
    # A message may have several lines, and hold names from a file.
    lines = "\n".join(map(printable, text.split("\n")))
    print(f"error: {lines}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    # ``sys.argv`` is that of the test runner in a test, and of ``__main__`` with -m.
    name = Path(sys.argv[0]).name
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=name if name == "composable-fsdp" else "python -m composable_fsdp",
        description="Plan the sharding of a model; check, compare, convert and export\n"
        "checkpoints. COMMAND --help shows how.",
        epilog=_EXAMPLES + _FORMATS_HELP,
        formatter_class=raw,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"composable_fsdp {environment.version()}",
        help="print the version",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        about = command.about
        each = commands.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog=command.epilog,
            formatter_class=raw,
        )
        each.add_argument(
            "--json",
            action="store_true",
            help='print one JSON object instead of text; false under "ok" says that '
            "the command failed",
        )
        command.add_arguments(each)
        each.set_defaults(command=command)
    return parser


def _path_argument(command: argparse.ArgumentParser) -> None:
    """Add the path of a checkpoint."""
    command.add_argument("path", metavar="PATH", help="the checkpoint; a path or URL")


def _verify_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    _path_argument(command)
    add_weights_only(command)


def _write_arguments(command: argparse.ArgumentParser, destination: str) -> None:
    """Add the arguments of a command that writes a checkpoint."""
    command.add_argument("source", metavar="SRC", help="the checkpoint; a path or URL")
    command.add_argument("destination", type=Path, metavar="DST", help=destination)
    command.add_argument(
        "--max-shard-size",
        type=byte_size,
        metavar="SIZE",
        default=MAX_SHARD_BYTES,
        help="largest safetensors file, as 5GB or 500MB (default: 5GB)",
    )


def _convert_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``."""
    _write_arguments(command, "what to make; must not exist")
    command.add_argument("--to", choices=FORMATS, required=True, help="format of DST")
    add_weights_only(command)


def _export_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    _write_arguments(
        command, "directory to make, or one file if it ends in .safetensors"
    )
    command.add_argument(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        help="dtype of the floating-point weights (default: as in SRC)",
    )


def _inspect(given: argparse.Namespace) -> Report:
    """Describe the checkpoint; only the manifest, or the tables of the files, are read.

    Raises: CheckpointError, if the checkpoint cannot be read.
    """
    described = describe(given.path)
    # JSON has no use for the text, which is made only if it is printed.
    return described.as_dict() | ({} if given.json else {"text": str(described)})


def _verify(given: argparse.Namespace) -> Report:
    """Read the whole checkpoint, and return the report."""
    path, kind = find_checkpoint(given.path)
    begin = time.monotonic()
    # The native format has checksums. For other formats, reading every tensor is the
    # check.
    read = _verify_native(path, given) if kind == NATIVE else 0
    with open_source(path) if kind == NATIVE else open_whole(path) as source:
        if kind != NATIVE:
            total = nbytes_of(source, weights_only=given.weights_only)
            with progress("reading", total, wanted=not given.json) as advance:
                read = check_readable(
                    source, weights_only=given.weights_only, progress=advance
                )
        return {
            "path": path,
            "format": kind,
            **_summary(source, weights_only=given.weights_only),
            "bytes_read": read,
            "seconds": round(time.monotonic() - begin, 2),
        }


def _verify_native(path: str, given: argparse.Namespace) -> int:
    """Verify every checksum, and return the bytes that were read.

    Raises: CheckpointError, listing all damage.
    """
    # The manifest has the sizes, wherever the files lie; a damaged one has none.
    try:
        total = sum(file.payload_nbytes for file in read_manifest(path)[0].files)
    except CheckpointError:
        total = 0
    with progress("reading", total, wanted=not given.json) as advance:
        before = 0

        # ``verify`` reports the total so far; ``advance`` takes the increment.
        def tell(done: int, _: int) -> None:
            nonlocal before
            advance(done - before)
            before = done

        found = verify(path, progress=tell)
    if not found:
        raise CheckpointError("\n".join(found.problems))
    return found.nbytes


def _convert(given: argparse.Namespace) -> Report:
    """Write the checkpoint in the format ``--to``, and return the report."""
    return _write(given, given.to, weights_only=given.weights_only)


def _export(given: argparse.Namespace) -> Report:
    """Write the weights as safetensors, and return the report."""
    # ``get``: no ``--dtype`` keeps all dtypes.
    dtype = DTYPES.get(given.dtype)
    return _write(given, SAFETENSORS, weights_only=True, dtype=dtype)


def _write(
    given: argparse.Namespace,
    to: str,
    *,
    weights_only: bool,
    dtype: torch.dtype | None = None,
) -> Report:
    """Convert the checkpoint, and return the report."""
    with open_whole(given.source) as whole:
        source = whole if dtype is None else CastWeights(whole, dtype)
        # A safetensors file holds weights only.
        weights = weights_only or to == SAFETENSORS
        total = nbytes_of(source, weights_only=weights)
        # DCP stores a tied parameter once per name.
        if to == DCP:
            total += sum(source.model[kept].nbytes for kept in source.aliases.values())
        with progress("writing", total, wanted=not given.json) as advance:
            left_out = convert(
                source,
                given.destination,
                to,
                weights_only=weights_only,
                max_shard_bytes=given.max_shard_size,
                progress=advance,
            )
        return {
            "path": str(given.destination),
            "format": to,
            **_summary(source, weights_only=weights),
            "left_out": left_out,
        }


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
    model, optim = found["model"], found.get("optimizer")
    is_check = "bytes_read" in found
    end = "good" if is_check else "written"
    lines = [f"{found['path']}: {found['format']} checkpoint, {end}"]
    tied = f", {counted(model['tied'], 'tied name')}" if model["tied"] else ""
    size = _bytes(model["bytes"])
    lines.append(f"  model      {counted(model['tensors'], 'tensor')}, {size}{tied}")
    if optim is not None:
        lines.append(
            f"  optimizer  {counted(optim['tensors'], 'tensor')}, "
            f"{_bytes(optim['bytes'])}, {counted(optim['groups'], 'group')}"
        )
    if found.get("extra"):
        lines.append("  extra      yes")
    if is_check:
        lines.append(f"  read       {_bytes(found['bytes_read'])}, every byte")
    if found.get("left_out"):
        lines.append(f"  left out   {', '.join(found['left_out'])}")
    print("\n".join(map(printable, lines)))


def _bytes(number: int) -> str:
    """Return bytes as text, in units of powers of 1000."""
    size, unit = float(number), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{number} B"


COMMANDS = {
    "plan": plan_command.COMMAND,
    "simulate": simulate_command.COMMAND,
    "inspect": Command(
        "show what is in a checkpoint, and which rank wrote it",
        """\
examples:
  python -m composable_fsdp inspect runs/step_100
  python -m composable_fsdp inspect runs/step_100 --json

In a program, composable_fsdp.describe(model) shows the same of a sharded model.

"""
        + _FORMATS_HELP,
        _path_argument,
        _inspect,
        lambda found: print(found["text"]),
    ),
    "verify": Command(
        "read all of a checkpoint, check it",
        """\
examples:
  python -m composable_fsdp verify runs/step_100
  python -m composable_fsdp verify model.pt --weights-only
  python -m composable_fsdp verify runs/step_100 --json

"""
        + _FORMATS_HELP,
        _verify_arguments,
        _verify,
        _show,
    ),
    "diff": checkpoint_diff.COMMAND,
    "convert": Command(
        "write a checkpoint in another format",
        """\
examples:
  python -m composable_fsdp convert old.pt step_100 --to dcp
  python -m composable_fsdp convert step_100 step_100.pt --to torch
  python -m composable_fsdp convert old.pt weights --to dcp --weights-only

"""
        + _FORMATS_HELP,
        _convert_arguments,
        _convert,
        _show,
    ),
    "export": Command(
        "write the weights as safetensors, for inference",
        """\
examples:
  python -m composable_fsdp export runs/step_100 my-model
  python -m composable_fsdp export runs/step_100 my-model.safetensors
  python -m composable_fsdp export runs/step_100 my-model --dtype bfloat16
  python -m composable_fsdp export runs/step_100 my-model --max-shard-size 500MB

"""
        + _FORMATS_HELP,
        _export_arguments,
        _export,
        _show,
    ),
    "env": environment.COMMAND,
}
"""Commands by name, in the order of the help."""
