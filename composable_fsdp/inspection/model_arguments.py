"""Arguments of the commands that take a model: ranks, batch, units and options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    RowBlock,
    ShardingStrategy,
)
from composable_fsdp.errors import FSDPError
from composable_fsdp.features.wires.formats import Float8Wire, Int8Wire
from composable_fsdp.inspection.plan_models import Model, UsageError, is_sharded
from composable_fsdp.inspection.sizes import byte_size, count
from composable_fsdp.planning import walk
from composable_fsdp.planning.policies import SizePolicy
from composable_fsdp.tools.model_units import guess_units

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_SHORT = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp64": "float64",
}
_WIRES = {
    "int8": Int8Wire(),
    "float8": Float8Wire(),
    "float8-tensor": Float8Wire("tensor"),
}
_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
_STRATEGIES = {
    strategy.name.lower().strip("_").replace("_", "-"): strategy
    for strategy in ShardingStrategy
}
_BLOCKS = {block.name.lower(): block for block in Block}


def dtype_name(text: str) -> str:
    """Return the name in ``DTYPES`` that ``text`` means.

    >>> dtype_name("bf16"), dtype_name("torch.float32")
    ('bfloat16', 'float32')
    """
    name = text.lower().removeprefix("torch.")
    return _SHORT.get(name, name)


def add_model_arguments(
    command: argparse.ArgumentParser, *, fits: str, no_batch: str
) -> None:
    """Add the ranks, the memory, the batch, the units and the options."""
    command.add_argument(
        "--world-size",
        type=count,
        default=8,
        metavar="N",
        help="number of ranks (GPUs) in all (default: 8)",
    )
    command.add_argument(
        "--tensor-parallel-size",
        type=count,
        metavar="N",
        help="ranks over which MODEL cuts matrices; its function gets the mesh "
        "('dp', 'tp') (default: no tensor parallelism)",
    )
    command.add_argument(
        "--gpu-memory",
        type=byte_size,
        metavar="SIZE",
        help=f"memory of a GPU, as 80GiB: says whether the {fits} fits",
    )
    command.add_argument(
        "--batch",
        type=_shape_of,
        metavar="BxT",
        help=f"batch per rank, as 4x2048 (default: {no_batch})",
    )
    _add_units(command.add_argument_group("units (default: found in the model)"))
    _add_options(command.add_argument_group("options of fully_shard"))


def _add_units(group: Any) -> None:
    """Add the arguments that choose units."""
    # Each of the three selects all units.
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--units",
        type=words,
        metavar="NAMES",
        help="names or patterns of modules, as 'blocks.*,head'",
    )
    choice.add_argument(
        "--unit-class", type=words, metavar="CLASSES", help="class names, as Block"
    )
    choice.add_argument(
        "--min-parameters",
        type=count,
        metavar="N",
        help="the smallest modules with at least N parameters",
    )
    group.add_argument(
        "--tied-params",
        choices=("error", "promote"),
        default="error",
        help="parameters tied across units: refuse, or give to the unit above",
    )


def _add_options(group: Any) -> None:
    """Add the arguments that are options of ``fully_shard``."""
    group.add_argument(
        "--strategy",
        type=_strategy,
        choices=_STRATEGIES,
        default="full-shard",
        help="what is sharded, and when (default: full-shard)",
    )
    group.add_argument(
        "--shard-world-size",
        type=count,
        metavar="N",
        help="ranks that share the parameters; other ranks hold copies (default: all)",
    )
    group.add_argument(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        help="dtype of the parameters and the optimizer (default: as the model is "
        "built, which is float32 for a config.json)",
    )
    for name, about in (
        ("--param-dtype", "all-gathers and compute (default: the parameters' dtype)"),
        ("--reduce-dtype", "reductions of gradients (default: --param-dtype)"),
    ):
        group.add_argument(
            name, type=dtype_name, choices=DTYPES, help=f"dtype of {about}"
        )
    group.add_argument(
        "--cpu-offload",
        action="store_true",
        help="keep parameters, gradients and optimizer state in host memory",
    )
    group.add_argument(
        "--backward-prefetch",
        choices=_PREFETCH,
        default="pre",
        help="when backward gathers the next unit (default: pre, the most overlap)",
    )
    group.add_argument(
        "--forward-prefetch",
        action="store_true",
        help="gather the next unit early in forward, too",
    )
    group.add_argument(
        "--block",
        type=_block,
        default=Block.ROW,
        metavar="|".join([*_BLOCKS, "rows:N"]),
        help="the piece that shards may not cut (default: row)",
    )
    group.add_argument(
        "--wire",
        choices=_WIRES,
        help="format of all-gathers with about one byte per element (default: none)",
    )


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Turn an error that the arguments cause into a UsageError with the same text."""
    try:
        yield
    except UsageError as error:
        # The rank is one of a job that the command made up.
        error.rank = None
        raise
    # Refusals of the planner and the runtime, wrong values of options, files that
    # cannot be written.
    except (FSDPError, OSError, TypeError, ValueError) as error:
        if isinstance(error, FSDPError):
            error.rank = None
        raise UsageError(error_text(error)) from error


def error_text(error: Exception) -> str:
    """Return the text of an error for people.

    >>> error_text(FileNotFoundError(2, "No such file or directory", "a/plan.png"))
    'a/plan.png: No such file or directory.'
    """
    # "[Errno 2]" says nothing to most readers.
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error)


def cast_model(model: Model, given: argparse.Namespace) -> None:
    """Cast the model to ``--dtype``, if there is a ``--dtype``."""
    # On meta a cast changes dtypes and copies nothing.
    if given.dtype:
        model.module.to(DTYPES[given.dtype])


def chosen_of(
    model: Model, given: argparse.Namespace
) -> tuple[object, Sequence[nn.Module | str] | None, str]:
    """Return the policy or the units that the arguments select.

    The text says how the units were chosen. A function of MODEL that shards has chosen
    its units itself, if the arguments select none.
    """
    policy: object = None
    units: Sequence[nn.Module | str] | None = None
    if given.min_parameters:
        policy = SizePolicy(given.min_parameters)
        units_from = f"the smallest modules of {given.min_parameters:,} parameters"
    elif given.unit_class:
        units = _of_classes(model.module, given.unit_class)
        units_from = f"modules of class {', '.join(given.unit_class)}"
    elif given.units:
        units, units_from = given.units, ", ".join(given.units)
    elif is_sharded(model.module):
        units_from = f"those that {model.source} shards"
    else:
        units, units_from = guess_units(model.module)
    return policy, units, units_from


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``fully_shard`` that the arguments select."""
    # Without a dtype there is no mixed precision, as in ``fully_shard``.
    mixed = None
    if given.param_dtype or given.reduce_dtype:
        mixed = MixedPrecision(
            param_dtype=DTYPES.get(given.param_dtype),
            reduce_dtype=DTYPES.get(given.reduce_dtype),
        )
    return {
        "strategy": _STRATEGIES[given.strategy],
        "mixed_precision": mixed,
        "cpu_offload": CPUOffload(offload_params=True) if given.cpu_offload else None,
        "backward_prefetch": _PREFETCH[given.backward_prefetch],
        "forward_prefetch": given.forward_prefetch,
        "block": given.block,
        # ``get``: None without ``--wire``.
        "wire": _WIRES.get(given.wire),
        "tied_params": given.tied_params,
    }


def _strategy(text: str) -> str:
    """Return the name in ``_STRATEGIES``; reports print it as the enum does."""
    name = text.lower().strip("_").replace("_", "-")
    if name not in _STRATEGIES:
        near = difflib.get_close_matches(name, _STRATEGIES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentTypeError(
            f"expects {', '.join(_STRATEGIES)}, got {text!r}.{hint}"
        )
    return name


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


def _of_classes(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules below ``module`` whose class has one of ``names``."""
    # By name: the command line has no classes.
    below = [each for each in walk.modules(module) if each is not module]
    known = {type(each).__name__ for each in below}
    for name in names:
        if name not in known:
            listed = ", ".join(sorted(known)[:8])
            raise UsageError(
                f"--unit-class names {name}, which no module of the model has as class."
                f" Its classes are {listed}{', ...' if len(known) > 8 else ''}."
            )
    return [each for each in below if type(each).__name__ in names]


def _shape_of(text: str) -> tuple[int, ...]:
    """Return a shape such as "4x2048"."""
    try:
        return tuple(count(each) for each in text.lower().split("x"))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; expected numbers with x between them, as 4x2048"
        ) from None


def words(text: str) -> list[str]:
    """Return texts that are separated by commas, without spaces around them."""
    return [each for each in map(str.strip, text.split(",")) if each]
