"""``python -m composable_fsdp``: plan a model; verify and convert checkpoints.

The arguments of a command are a table of text: a line names an option, the kind of its
value (a flag without one) and its default; the help is below. A title in brackets
begins a group. Torch, whose import takes seconds, is imported when a command runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from composable_fsdp.naming import did_you_mean
from composable_fsdp.tools.machine import MACHINES
from composable_fsdp.tools.texts import SHORT_DTYPES, byte_size, printable, version

BAD, USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses beside 0: a bad checkpoint or no fit; wrong usage; 128 + SIGINT."""

STRATEGIES = (
    *("full-shard", "shard-grad-op", "no-shard", "hybrid-shard"),
    *("hybrid-shard-zero2", "zero1", "zero2", "hfsdp"),
)
OPTIMIZERS = (
    *("adamw", "adamw-fused", "adam", "adam-fused"),
    *("sgd", "sgd-momentum", "none"),
)
FORMATS = ("native", "dcp", "safetensors", "torch")


def _size(text: str) -> int:
    """Return a size in bytes, as ``byte_size``."""
    try:
        return byte_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str) -> float:
    """Return a finite number of 0 or above; "1e9" and "70_000" are numbers, too."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    # A comparison with NaN is always false, so NaN would accept everything.
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or above")
    return found


def _count(text: str) -> int:
    """Return a positive whole number."""
    found = _number(text)
    if found < 1 or not found.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(found)


def _shape(text: str) -> tuple[int, ...]:
    """Return a shape such as "4x2048"."""
    return tuple(map(_count, text.lower().split("x")))


def split_words(text: str) -> list[str]:
    """Return texts that are separated by commas, without spaces around them."""
    return [each for each in map(str.strip, text.split(",")) if each]


def _dtype(text: str) -> str:
    """Return the name of a dtype that ``text`` means, as "bf16"."""
    name = text.lower().removeprefix("torch.")
    return SHORT_DTYPES.get(name, name)


_KINDS: dict[str, dict[str, Any]] = {
    "": {"action": "store_true"},
    "N": {"type": _count},
    "X": {"type": _number},
    "SIZE": {"type": _size},
    "BxT": {"type": _shape},
    "NAMES": {"type": split_words},
    "FILE": {"type": Path},
    "DST": {"type": Path},
    "MODEL?": {"nargs": "?", "metavar": "MODEL"},
    "strategy": {"choices": STRATEGIES},
    "dtype": {"type": _dtype, "choices": tuple(SHORT_DTYPES.values())},
    "prefetch": {"choices": ("pre", "post", "none")},
    "block": {"choices": ("row", "element", "tensor")},
    "machine": {"choices": MACHINES},
    "format": {"choices": FORMATS, "required": True},
}
"""Words for argparse by the kind of a value; kinds in capitals name it in the help."""

_JSON = """\
--json
    print one JSON object instead of text; false under "ok" says that the command failed
"""
_OPTIONS = """\
[units (default: found in the model)]
--units NAMES
    names or patterns of modules, as 'blocks.*,head'
--unit-class NAMES
    class names, as Block
[options of fully_shard; plan() in Python has all]
--strategy strategy=full-shard
    what is sharded, and when (default: full-shard)
--placement DIMS
    the same by dims, as gradients=shard,states=shard for zero2
--shard-world-size N
    ranks that share the parameters; others hold copies (default: all)
--dtype dtype
    dtype of the parameters and the optimizer (default: as the model is built, which is
    float32 for a config.json)
--param-dtype dtype
    dtype of all-gathers and compute (default: the parameters' dtype)
--reduce-dtype dtype
    dtype of reductions of gradients (default: --param-dtype)
--cpu-offload
    keep parameters, gradients and optimizer state in host memory
--backward-prefetch prefetch=pre
    when backward gathers the next unit (default: pre, the most overlap)
--block block=row
    the piece that shards may not cut (default: row)
[training]
"""
_WEIGHTS_ONLY = """\
--weights-only
    leave optimizer and extra state alone, unread
"""
_SOURCE = """\
source SRC
    the checkpoint; a path or URL
--max-shard-size SIZE=5GB
    largest safetensors file, as 5GB or 500MB (default: 5GB)
destination DST
"""
_PATH = """\
path PATH
    the checkpoint; a path or URL
"""

_CHECKPOINT = """
formats, told apart by what lies at the path:
  native       a directory that composable_fsdp.save wrote
  dcp          a directory of torch.distributed.checkpoint
  safetensors  a file, or a directory with Hugging Face's names; weights only
  torch        a file that torch.save wrote: a state dict, or {"model": ..}

exit status: 0 good, 1 bad checkpoint or nothing written, 2 wrong usage
"""
_MODEL_HELP = """
MODEL is one of:
  train:build_model     a function without arguments (or a class, or a module) of a
                        module; it is called with torch.device("meta"), so no weight
                        takes memory. It may return (model, inputs of its forward),
                        or (model, inputs, function from the output to the loss)
  train.py:build_model  the same, in a file
  config.json           a configuration of transformers, or its directory

exit status: 0 fits, or --gpu-memory is not given; 1 does not fit; 2 no answer, for
example for a wrong path or option
"""

# What a command does, its arguments, examples, and what else the help says.
COMMANDS = {
    "plan": (
        "tell whether a model fits on your GPUs",
        f"""\
model MODEL?
    see below
--hf PATH
    a config.json of transformers, or its directory
--plot FILE
    draw the memory over one step, as plan.png, .svg or .pdf
--time machine
    estimate seconds of a step and tokens per second on nodes of eight such GPUs (pcie:
    L40S), without host time; needs --batch, and --param-dtype bf16 to mean anything
--compile
    with --time: torch.compile fuses what is between matrix products
--float8
    with --time: matrix products below the root are in float8
--world-size N=8
    ranks (GPUs) in all (default: 8)
--gpu-memory SIZE
    memory of a GPU, as 80GiB: says whether the step fits
--batch BxT
    shape of the input of a rank, as 4x2048 for 4 texts of 2048 tokens (default: the
    inputs that the function of MODEL returns)
{_OPTIONS}--optimizer NAME=adamw
    {", ".join(OPTIMIZERS)}, or bytes per parameter, as 2 (default: adamw)
--checkpointing
    activation checkpointing of each unit; needs --batch
""",
        ["train:build_model --world-size 64 --gpu-memory 80GiB"],
        _MODEL_HELP,
    ),
    "inspect": (
        "show what is in a checkpoint, and which rank wrote it",
        _PATH,
        ["runs/step_100"],
        _CHECKPOINT,
    ),
    "verify": (
        "read all of a checkpoint, check it",
        _PATH + _WEIGHTS_ONLY,
        ["runs/step_100", "model.pt --weights-only"],
        _CHECKPOINT,
    ),
    "diff": (
        "compare two checkpoints: names, shapes, dtypes and values",
        f"""\
first A
    a checkpoint; a path or URL
second B
    the other checkpoint
{_WEIGHTS_ONLY}--tolerance X=0
    values that differ by X or less count as equal (default: 0)
""",
        ["runs/step_100 runs/step_200", "before after --tolerance 1e-6 --json"],
        "\nexit status: 0 equal, 1 different, 2 wrong usage, or not readable\n",
    ),
    "convert": (
        "write a checkpoint in another format",
        f"""\
{_SOURCE}    what to make
--to format
    format of DST
{_WEIGHTS_ONLY}""",
        ["old.pt weights --to dcp --weights-only"],
        _CHECKPOINT,
    ),
    "export": (
        "write the weights as safetensors, for inference",
        f"""\
{_SOURCE}    directory to make, or one file if it ends in .safetensors
--dtype dtype
    dtype of the floating-point weights (default: as in SRC)
""",
        ["runs/step_100 my-model --dtype bfloat16"],
        _CHECKPOINT,
    ),
    "env": (
        "print versions, GPUs and settings, for a report of a bug",
        "",
        [""],
        "",
    ),
}
"""Commands by name, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    # argparse ends the program by itself after ``--help`` and for wrong usage.
    given, unknown = _parser().parse_known_args(arguments)
    # By the parser of the command, which knows its options.
    if unknown:
        given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # What ``import composable_fsdp`` leaves to this function.
    import_module("composable_fsdp.features.defaults")
    errors = import_module("composable_fsdp.errors")
    of_model = given.command == "plan"
    home = "model_commands" if of_model else "checkpoint_commands"
    command = getattr(import_module(f"composable_fsdp.tools.{home}"), given.command)
    # A model and its arguments may raise more than a checkpoint.
    more = (TypeError, ValueError) if of_model else ()
    try:
        found, text, status = command(given)
    except (errors.FSDPError, OSError, *more) as error:
        told = _text_of(error)
        # Standard output is always a JSON object with ``--json``, so a script can
        # parse failures, too.
        if given.json:
            print(json.dumps({"ok": False, "error": told}))
        # A message may have several lines, and hold names from a file.
        lines = "\n".join(map(printable, told.split("\n")))
        print(f"error: {lines}", file=sys.stderr)
        # The status 1 of the others says that the answer is no.
        return USAGE if of_model or given.command == "diff" else BAD
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    try:
        print(json.dumps({"ok": True, **found}) if given.json else text)
    # ``| head`` has read enough. Python would fail once more when it flushes.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(status)


def _text_of(error: Exception) -> str:
    """Return the text of an error for people.

    >>> _text_of(FileNotFoundError(2, "No such file or directory", "a/plan.png"))
    'a/plan.png: No such file or directory.'
    """
    # The rank is that of a job which the command made up.
    if hasattr(error, "rank"):
        error.rank = None
    # "[Errno 2]" says nothing to most readers.
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error)


class _Parser(argparse.ArgumentParser):
    """A parser that says which command, option or value was meant."""

    def error(self, message: str) -> NoReturn:
        if "choice: 'simulate'" in message:
            message = "call composable_fsdp.simulate(build, world_size=...) in Python"
        wrong = re.search(r"(?:choice: '|arguments: )([\w-]+)", message)
        _, _, choices = message.partition("(choose from ")
        known = re.findall(r"[\w-]+", choices) or re.findall(
            r"--[\w-]+", self.format_help()
        )
        super().error(message + (did_you_mean(wrong[1], known) if wrong else ""))


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    # ``sys.argv`` is that of the test runner in a test, and of ``__main__`` with -m.
    program = "python -m composable_fsdp"
    if Path(sys.argv[0]).name == "composable-fsdp":
        program = "composable-fsdp"
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog=program,
        description="Plan the sharding of a model; check, compare, convert and export\n"
        "checkpoints. COMMAND --help shows how.",
        epilog=_CHECKPOINT,
        formatter_class=raw,
    )
    about = f"composable_fsdp {version()}"
    words = {"action": "version", "version": about, "help": "print the version"}
    parser.add_argument("--version", **words)  # type: ignore[arg-type]
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (about, arguments, examples, more) in COMMANDS.items():
        shown = [f"  python -m composable_fsdp {name} {each}" for each in examples]
        each = commands.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog="\n".join(["examples:", *shown, more]),
            formatter_class=raw,
        )
        _add_arguments(each, _JSON + arguments)
        each.set_defaults(command=name, parser=each)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, arguments: str) -> None:
    """Give ``parser`` the arguments of a command."""
    group: Any = parser
    for head, *about in (
        row.split("\n    ") for row in re.split(r"\n(?! )", arguments.rstrip())
    ):
        if head.startswith("["):
            group = parser.add_argument_group(head[1:-1])
            continue
        name, _, value = head.partition(" ")
        kind, _, default = value.partition("=")
        words = {"metavar": kind} if kind[:1].isupper() else {}
        words |= _KINDS.get(kind, {})
        # argparse reads a default that is a text like a value of the command line.
        if default:
            words["default"] = default
        group.add_argument(name, help=" ".join(about), **words)
