"""The arguments of all commands, as one table of text, and what reads their values.

A line of the table names an option, the kind of its value (a flag without one) and its
default; the help is below. A title in brackets begins a group.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import torch

from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    Placement,
    RowBlock,
    ShardingStrategy,
)
from composable_fsdp.errors import PlanError
from composable_fsdp.features.wires.formats import Float8Wire, Int8Wire
from composable_fsdp.storage.opening import FORMATS
from composable_fsdp.tools.machine import MACHINES
from composable_fsdp.tools.memory import OPTIMIZERS

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
WIRES = {
    "int8": Int8Wire(),
    "float8": Float8Wire(),
    "float8-tensor": Float8Wire("tensor"),
}
PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
_BLOCKS = {block.name.lower(): block for block in Block}


def byte_size(text: str) -> int:
    """Return a size such as "5GB" (powers of 1000) or "80GiB" (of 1024) in bytes.

    >>> byte_size("5GB"), byte_size("80 GiB"), byte_size("1.5k")
    (5000000000, 85899345920, 1500)
    """
    text = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?))?(B?)", text, re.IGNORECASE)
    # "80" means 80 GiB to one reader and 80 bytes to another.
    if match and not match[2] and not match[4]:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no unit; write {text}GiB, or {text}B for bytes"
        )
    number = 0
    if match:
        base = 1024 if match[3] else 1000
        # The position in the string is the power; a space stands for no unit.
        number = int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; expected a number with KB, MB, GB or TB, or KiB, "
            "MiB, GiB or TiB, as 5GB or 80GiB"
        )
    return number


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


def _words(text: str) -> list[str]:
    """Return texts that are separated by commas, without spaces around them."""
    return [each for each in map(str.strip, text.split(",")) if each]


def _dtype(text: str) -> str:
    """Return the name in ``DTYPES`` that ``text`` means, as "bf16"."""
    name = text.lower().removeprefix("torch.")
    return _SHORT.get(name, name)


def _word(text: str) -> str:
    """Return how the command line writes a name of an enum; reports print the enum."""
    return text.lower().strip("_").replace("_", "-")


def _block(text: str) -> Block | RowBlock:
    """Return the block that ``--block`` names. Raises: ArgumentTypeError."""
    name, _, number = text.lower().partition(":")
    if name in _BLOCKS and not number:
        return _BLOCKS[name]
    if name != "rows" or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"expects {', '.join(_BLOCKS)} or rows:N such as rows:64, got {text!r}"
        )
    return Block.rows(int(number))


def _placement(text: str) -> Placement:
    """Return the placement that ``--placement`` describes."""
    # A comma without a name behind it is between dims.
    rows = (row.partition("=") for row in re.split(r",(?=\w+=)", text))
    try:
        return Placement(**{name: tuple(_words(dims)) for name, _, dims in rows})
    except (TypeError, PlanError) as error:
        raise argparse.ArgumentTypeError(
            "expects the dims of parameters, between, gradients and states, as "
            "parameters=shard,between=shard,gradients=shard,states=replicate,shard, "
            f"where what is left out is whole; got {text!r}: {error}"
        ) from None


STRATEGIES = {_word(strategy.name): strategy for strategy in ShardingStrategy}

_KINDS: dict[str, dict[str, Any]] = {
    "": {"action": "store_true"},
    "N": {"type": _count},
    "N,N": {"type": lambda text: tuple(map(_count, _words(text)))},
    "X": {"type": _number},
    "SIZE": {"type": byte_size},
    "BxT": {"type": _shape},
    "NAMES": {"type": _words},
    "FILE": {"type": Path},
    "DST": {"type": Path},
    "MODELS": {"nargs": "*", "metavar": "MODEL"},
    "BLOCK": {"type": _block, "metavar": "|".join([*_BLOCKS, "rows:N"])},
    "strategy": {"type": _word, "choices": STRATEGIES},
    "DIMS": {"type": _placement},
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

ARGUMENTS = {
    "plan": f"""\
models MODELS
    see below
--hf PATH
    a config.json of transformers, or its directory
--tensor-parallel-size N
    ranks over which MODEL cuts matrices; its function gets the mesh ('dp', 'tp')
    (default: no tensor parallelism)
--world-sizes N,N
    print a row for each of these world sizes, too
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
    "simulate": f"""\
model MODEL
    see below
--trace FILE
    write a trace for Perfetto
{_MODEL}--optimizer optimizer=adamw
    the optimizer (default: adamw)
--max-norm X
    clip gradients to this norm
""",
    "inspect": """\
path PATH
    the checkpoint; a path or URL
""",
    "verify": f"""\
path PATH
    the checkpoint; a path or URL
{_WEIGHTS_ONLY}""",
    "diff": f"""\
first A
    a checkpoint; a path or URL
second B
    the other checkpoint
{_WEIGHTS_ONLY}--tolerance X=0
    values that differ by X or less count as equal (default: 0)
""",
    "convert": f"""\
{_SOURCE}destination DST
    what to make
--to format
    format of DST
{_WEIGHTS_ONLY}""",
    "export": f"""\
{_SOURCE}destination DST
    directory to make, or one file if it ends in .safetensors
--dtype dtype
    dtype of the floating-point weights (default: as in SRC)
""",
    "env": "",
}
"""The arguments of each command."""

_JSON = """\
--json
    print one JSON object instead of text; false under "ok" says that the command failed
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Give ``parser`` the arguments of ``command``."""
    group: Any = parser
    rows = re.split(r"\n(?! )", _JSON + ARGUMENTS[command].rstrip())
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
