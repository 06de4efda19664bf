"""``python -m composable_fsdp``: plan a model; verify and convert checkpoints.

Commands on checkpoints need no process group and no device, and execute no code from a
checkpoint. Results go to standard output, as text or as a JSON object; errors go to
standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import printable, size_text
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
from composable_fsdp.tools import checkpoint_diff, model_commands
from composable_fsdp.tools.arguments import DTYPES, add_arguments
from composable_fsdp.tools.checkpoint_diff import nbytes_of
from composable_fsdp.tools.command import (
    ENV,
    Command,
    Progress,
    Report,
    error_text,
    examples,
    version,
)
from composable_fsdp.tools.describe import describe
from composable_fsdp.tools.texts import counted, did_you_mean

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status.

    Raises: SystemExit, for ``--help`` (status 0) and wrong usage (status 2).
    """
    # argparse ends the program by itself after ``--help`` and for wrong usage.
    given, unknown = _parser().parse_known_args(arguments)
    command: Command = given.command
    # By the parser of the command, which knows its options.
    if unknown:
        given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        found = command.run(given)
    except command.errors as error:
        text = error_text(error)
        # Standard output is always a JSON object with ``--json``, so a script can
        # parse failures, too.
        if given.json:
            print(json.dumps({"ok": False, "error": text}))
        # A message may have several lines, and hold names from a file.
        lines = "\n".join(map(printable, text.split("\n")))
        print(f"error: {lines}", file=sys.stderr)
        return command.bad
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    try:
        if given.json:
            print(json.dumps({"ok": True, **found}))
        else:
            command.show(found)
    # ``| head`` has read enough. Python would fail once more when it flushes.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return command.status(found)


class _Parser(argparse.ArgumentParser):
    """A parser that says which command, option or value was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"(?:choice: '|arguments: )([\w-]+)", message)
        _, _, choices = message.partition("(choose from ")
        known = re.findall(r"[\w-]+", choices) or re.findall(
            r"--[\w-]+", self.format_help()
        )
        super().error(message + (did_you_mean(wrong[1], known) if wrong else ""))


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    # ``sys.argv`` is that of the test runner in a test, and of ``__main__`` with -m.
    name = Path(sys.argv[0]).name
    raw = argparse.RawDescriptionHelpFormatter
    shown = [
        next(line for line in each.epilog.splitlines() if line.startswith("  python"))
        for each in COMMANDS.values()
    ]
    parser = _Parser(
        prog=name if name == "composable-fsdp" else "python -m composable_fsdp",
        description="Plan the sharding of a model; check, compare, convert and export\n"
        "checkpoints. COMMAND --help shows how.",
        epilog="\n".join(["examples:", *shown, "", _FORMATS_HELP]),
        formatter_class=raw,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"composable_fsdp {version()}",
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
        add_arguments(each, name)
        each.set_defaults(command=command, parser=each)
    return parser


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
        dtype = DTYPES.get(getattr(given, "dtype", None) or "")
        source = whole if dtype is None else CastWeights(whole, dtype)
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


COMMANDS = {
    "plan": model_commands.PLAN,
    "simulate": model_commands.SIMULATE,
    "inspect": Command(
        "show what is in a checkpoint, and which rank wrote it",
        examples(
            "inspect runs/step_100",
            "inspect runs/step_100 --json",
            more="In a program, composable_fsdp.describe(model) shows the same of a "
            f"sharded model.\n\n{_FORMATS_HELP}",
        ),
        # JSON has no use for the text.
        lambda given: (
            describe(given.path).as_dict()
            if given.json
            else {"text": str(describe(given.path))}
        ),
        lambda found: print(found["text"]),
    ),
    "verify": Command(
        "read all of a checkpoint, check it",
        examples(
            "verify runs/step_100", "verify model.pt --weights-only", more=_FORMATS_HELP
        ),
        _verify,
        _show,
    ),
    "diff": checkpoint_diff.COMMAND,
    "convert": Command(
        "write a checkpoint in another format",
        examples(
            "convert step_100 step_100.pt --to torch",
            "convert old.pt weights --to dcp --weights-only",
            more=_FORMATS_HELP,
        ),
        _write,
        _show,
    ),
    "export": Command(
        "write the weights as safetensors, for inference",
        examples(
            "export runs/step_100 my-model --dtype bfloat16",
            "export runs/step_100 my-model.safetensors",
            more=_FORMATS_HELP,
        ),
        _export,
        _show,
    ),
    "env": ENV,
}
"""Commands by name, in the order of the help."""
