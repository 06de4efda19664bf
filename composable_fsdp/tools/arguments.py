"""The commands, as ``--help`` shows them, and what reads the values of arguments.

Nothing here imports torch, so help and wrong usage are told at once. The arguments of a
command are a table of text: a line names an option, the kind of its value (a flag
without one) and its default; the help is below. A title in brackets begins a group.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from composable_fsdp.tools.machine import MACHINES
from composable_fsdp.tools.texts import SHORT_DTYPES, byte_size

DTYPES = ("float32", "bfloat16", "float16", "float64")
WIRES = ("int8", "float8")
PREFETCH = ("pre", "post", "none")
FORMATS = ("native", "dcp", "safetensors", "torch")
STRATEGIES = (
    *("full-shard", "shard-grad-op", "no-shard", "hybrid-shard"),
    *("hybrid-shard-zero2", "zero1", "zero2", "hfsdp"),
)
OPTIMIZERS = (
    *("adamw", "adamw-fused", "adam", "adam-fused"),
    *("sgd", "sgd-momentum", "none"),
)


def _size(text: str) -> int:
    """Return a size in bytes, as ``byte_size``."""
    try:
        return byte_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str, *, whole: bool = False) -> float:
    """Return a finite number of 0 or above; "1e9" and "70_000" are numbers, too."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    # A comparison with NaN is always false, so NaN would accept everything.
    if not 0 <= found < math.inf or (whole and (found < 1 or not found.is_integer())):
        what = "positive whole number" if whole else "number of 0 or above"
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return found


def _count(text: str) -> int:
    """Return a positive whole number."""
    return int(_number(text, whole=True))


def _shape(text: str) -> tuple[int, ...]:
    """Return a shape such as "4x2048"."""
    try:
        return tuple(map(_count, text.lower().split("x")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; expected numbers with x between them, as 4x2048"
        ) from None


def split_words(text: str) -> list[str]:
    """Return texts that are separated by commas, without spaces around them."""
    return [each for each in map(str.strip, text.split(",")) if each]


def _dtype(text: str) -> str:
    """Return the name in ``DTYPES`` that ``text`` means, as "bf16"."""
    name = text.lower().removeprefix("torch.")
    return SHORT_DTYPES.get(name, name)


def word_of(text: str) -> str:
    """Return how the command line writes a name of an enum; reports print the enum."""
    return text.lower().strip("_").replace("_", "-")


def _block(text: str) -> str:
    """Return what ``--block`` names, in small letters. Raises: ArgumentTypeError."""
    if not re.fullmatch(r"row|element|tensor|rows:0*[1-9]\d*", text.lower()):
        raise argparse.ArgumentTypeError(
            f"expects row, element, tensor or rows:N such as rows:64, got {text!r}"
        )
    return text.lower()


_KINDS: dict[str, dict[str, Any]] = {
    "": {"action": "store_true"},
    "N": {"type": _count},
    "X": {"type": _number},
    "SIZE": {"type": _size},
    "BxT": {"type": _shape},
    "NAMES": {"type": split_words},
    "FILE": {"type": Path},
    "DST": {"type": Path},
    "MODELS": {"nargs": "*", "metavar": "MODEL"},
    "BLOCK": {"type": _block, "metavar": "row|element|tensor|rows:N"},
    "strategy": {"type": word_of, "choices": STRATEGIES},
    "DIMS": {},
    "dtype": {"type": _dtype, "choices": DTYPES},
    "prefetch": {"choices": PREFETCH},
    "wire": {"choices": WIRES},
    "tied": {"choices": ("error", "promote")},
    "optimizer": {"choices": OPTIMIZERS},
    "machine": {"choices": MACHINES},
    "format": {"choices": FORMATS, "required": True},
}
"""Words for argparse by the kind of a value; kinds in capitals name it in the help."""
_MODEL = """\
--world-size N=8
    ranks (GPUs) in all (default: 8)
--gpu-memory SIZE
    memory of a GPU, as 80GiB: says whether the step fits
--batch BxT
    shape of the input of a rank, as 4x2048 for 4 texts of 2048 tokens (default: the
    inputs that the function of MODEL returns)
[units (default: found in the model)]
--units NAMES
    names or patterns of modules, as 'blocks.*,head'
--unit-class NAMES
    class names, as Block
--min-parameters N
    the smallest modules with at least N parameters
--tied-params tied=error
    parameters tied across units: refuse, or give to the unit above
[options of fully_shard]
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
--forward-prefetch
    gather the next unit early in forward, too
--block BLOCK=row
    the piece that shards may not cut (default: row)
--wire wire
    format of all-gathers with about one byte per element (default: none)
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
"""


_FORMATS_HELP = """\
formats, told apart by what lies at the path:
  native       a directory that composable_fsdp.save wrote
  dcp          a directory of torch.distributed.checkpoint
  safetensors  a file, or a directory with Hugging Face's names; weights only
  torch        a file that torch.save wrote: a state dict, or {"model": ..}

exit status: 0 good, 1 bad checkpoint or nothing written, 2 wrong usage
"""

_MODEL_HELP = """\
MODEL is one of:
  train:build_model     a function without arguments (or a class, or a module) of a
                        module; it is called with torch.device("meta"), so no weight
                        takes memory. It may return (model, inputs of its forward),
                        or (model, inputs, function from the output to the loss)
  train.py:build_model  the same, in a file
  config.json           a configuration of transformers, or its directory
"""


class Help(NamedTuple):
    """A command in the help: what it does, examples and more, and its arguments."""

    about: str
    end: str
    arguments: str = ""


COMMANDS = {
    "plan": Help(
        "tell whether a model fits on your GPUs",
        f"""\
examples:
  python -m composable_fsdp plan train:build_model --world-size 64 --gpu-memory 80GiB
  python -m composable_fsdp plan --hf config.json --world-size 64 --batch 1x4096 \\
      --param-dtype bfloat16 --checkpointing --gpu-memory 80GiB

Without --batch the activations are not counted, and "fits" does not include them.
With --tensor-parallel-size the argument of the function is the mesh of the job,
("dp", "tp") or ("replicate", "shard", "tp"), and it calls
parallelize_module(model, mesh["tp"], {{...}}).

{_MODEL_HELP}
exit status: 0 fits, or --gpu-memory is not given; 1 does not fit; 2 no plan could be
made, such as a wrong path or option
""",
        f"""\
models MODELS
    see below
--hf PATH
    a config.json of transformers, or its directory
--tensor-parallel-size N
    ranks over which MODEL cuts matrices; its function gets the mesh ('dp', 'tp')
    (default: no tensor parallelism)
--plot FILE
    draw the memory over one step, as plan.png, .svg or .pdf
--time machine
    estimate seconds of a step and tokens per second on nodes of eight such GPUs (pcie:
    L40S), without host time; needs --batch, and --param-dtype bf16 to mean anything
--compile
    with --time: torch.compile fuses what is between matrix products
--float8
    with --time: matrix products below the root are in float8
{_MODEL}--optimizer NAME=adamw
    {", ".join(OPTIMIZERS)}, or bytes per parameter, as 2 (default: adamw)
--checkpointing
    activation checkpointing of each unit; needs --batch
""",
    ),
    "simulate": Help(
        "show memory, collectives and times of a training step, without GPUs",
        f"""\
examples:
  python -m composable_fsdp simulate train:build_model --batch 4x2048 --world-size 64
  python -m composable_fsdp simulate config.json --batch 1x4096 --trace step.json

The step runs on tensors that have shapes and no values. https://ui.perfetto.dev opens
the file of --trace: a row of compute, a row of communication, and live bytes by kind.
Times are those of an assumed machine; composable_fsdp.simulate takes another.

{_MODEL_HELP}
exit status: 0 simulated; 1 the step needs more than --gpu-memory; 2 no step could be
simulated, such as a wrong path or option
""",
        f"""\
model MODEL
    see below
--trace FILE
    write a trace for Perfetto
{_MODEL}--optimizer optimizer=adamw
    the optimizer (default: adamw)
--max-norm X
    clip gradients to this norm
""",
    ),
    "inspect": Help(
        "show what is in a checkpoint, and which rank wrote it",
        f"""\
examples:
  python -m composable_fsdp inspect runs/step_100
  python -m composable_fsdp inspect runs/step_100 --json

In a program, composable_fsdp.describe(model) shows the same of a sharded model.

{_FORMATS_HELP}""",
        """\
path PATH
    the checkpoint; a path or URL
""",
    ),
    "verify": Help(
        "read all of a checkpoint, check it",
        f"""\
examples:
  python -m composable_fsdp verify runs/step_100
  python -m composable_fsdp verify model.pt --weights-only

{_FORMATS_HELP}""",
        f"""\
path PATH
    the checkpoint; a path or URL
{_WEIGHTS_ONLY}""",
    ),
    "diff": Help(
        "compare two checkpoints: names, shapes, dtypes and values",
        """\
examples:
  python -m composable_fsdp diff runs/step_100 runs/step_200
  python -m composable_fsdp diff before after --tolerance 1e-6 --json

exit status: 0 equal, 1 different, 2 wrong usage, or a checkpoint cannot be read
""",
        f"""\
first A
    a checkpoint; a path or URL
second B
    the other checkpoint
{_WEIGHTS_ONLY}--tolerance X=0
    values that differ by X or less count as equal (default: 0)
""",
    ),
    "convert": Help(
        "write a checkpoint in another format",
        f"""\
examples:
  python -m composable_fsdp convert step_100 step_100.pt --to torch
  python -m composable_fsdp convert old.pt weights --to dcp --weights-only

{_FORMATS_HELP}""",
        f"""\
{_SOURCE}destination DST
    what to make
--to format
    format of DST
{_WEIGHTS_ONLY}""",
    ),
    "export": Help(
        "write the weights as safetensors, for inference",
        f"""\
examples:
  python -m composable_fsdp export runs/step_100 my-model --dtype bfloat16
  python -m composable_fsdp export runs/step_100 my-model.safetensors

{_FORMATS_HELP}""",
        f"""\
{_SOURCE}destination DST
    directory to make, or one file if it ends in .safetensors
--dtype dtype
    dtype of the floating-point weights (default: as in SRC)
""",
    ),
    "env": Help(
        "print versions, GPUs and settings, for a report of a bug",
        """\
examples:
  python -m composable_fsdp env
  torchrun --nproc-per-node 2 -m composable_fsdp env
""",
    ),
}
"""Commands by name, in the order of the help."""

_JSON = """\
--json
    print one JSON object instead of text; false under "ok" says that the command failed
"""


def add_arguments(parser: argparse.ArgumentParser, arguments: str) -> None:
    """Give ``parser`` the arguments of a command."""
    group: Any = parser
    rows = re.split(r"\n(?! )", _JSON + arguments.rstrip())
    for head, *about in (row.split("\n    ") for row in rows if row):
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
