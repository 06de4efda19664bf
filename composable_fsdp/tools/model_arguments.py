"""Arguments of the commands that take a model: ranks, batch, units and options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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
from composable_fsdp.planning import walk
from composable_fsdp.planning.policies import SizePolicy
from composable_fsdp.tools.command import byte_size, count, words
from composable_fsdp.tools.model_units import guess_units
from composable_fsdp.tools.plan_models import Model, UsageError
from composable_fsdp.tools.simulate import is_sharded
from composable_fsdp.tools.simulated_meshes import simulated_meshes
from composable_fsdp.tools.simulated_world import Machine, simulated_world
from composable_fsdp.tools.tensor_parallel import check_sizes, job_mesh
from composable_fsdp.tools.timetable import Timetable

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

MODEL_HELP = """\
MODEL is one of:
  train:build_model     a function without arguments (or a class, or a module) of a
                        module; it is called with torch.device("meta"), so no weight
                        takes memory. It may return (model, inputs of its forward),
                        or (model, inputs, function from the output to the loss).
                        With --tensor-parallel-size its argument is the mesh of the
                        job, ("dp", "tp") or ("replicate", "shard", "tp"), and it
                        calls parallelize_module(model, mesh["tp"], {...})
  train.py:build_model  the same, in a file
  config.json           a configuration of transformers, or its directory
"""


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
        help="shape of the input of a rank, as 4x2048 for 4 texts of 2048 tokens "
        f"(default: {no_batch})",
    )
    # Each of the three selects all units.
    units = command.add_argument_group("units (default: found in the model)")
    choice = units.add_mutually_exclusive_group()
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
    units.add_argument(
        "--tied-params",
        choices=("error", "promote"),
        default="error",
        help="parameters tied across units: refuse, or give to the unit above",
    )
    options = command.add_argument_group("options of fully_shard")
    for name, about, more in _option_arguments():
        options.add_argument(f"--{name}", help=about, **more)


def _option_arguments() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield names, helps and further settings of the options of ``fully_shard``."""
    strategy = {"type": _strategy, "choices": _STRATEGIES, "default": "full-shard"}
    dtype = {"type": dtype_name, "choices": DTYPES}
    flag = {"action": "store_true"}
    yield "strategy", "what is sharded, and when (default: full-shard)", strategy
    about = "ranks that share the parameters; other ranks hold copies (default: all)"
    yield "shard-world-size", about, {"type": count, "metavar": "N"}
    about = (
        "dtype of the parameters and the optimizer (default: as the model is built, "
        "which is float32 for a config.json)"
    )
    yield "dtype", about, dtype
    about = "dtype of all-gathers and compute (default: the parameters' dtype)"
    yield "param-dtype", about, dtype
    about = "dtype of reductions of gradients (default: --param-dtype)"
    yield "reduce-dtype", about, dtype
    about = "keep parameters, gradients and optimizer state in host memory"
    yield "cpu-offload", about, flag
    about = "when backward gathers the next unit (default: pre, the most overlap)"
    yield "backward-prefetch", about, {"choices": _PREFETCH, "default": "pre"}
    yield "forward-prefetch", "gather the next unit early in forward, too", flag
    about = "the piece that shards may not cut (default: row)"
    blocks = "|".join([*_BLOCKS, "rows:N"])
    yield "block", about, {"type": _block, "default": Block.ROW, "metavar": blocks}
    about = "format of all-gathers with about one byte per element (default: none)"
    yield "wire", about, {"choices": _WIRES}


@contextmanager
def job(given: argparse.Namespace) -> Iterator[DeviceMesh | None]:
    """Be a rank of the job that the arguments describe, in this block.

    A function that cuts its model needs the process groups of the job, which here are
    those of a simulated world, and send nothing. Yields the mesh of the job; None
    without ``--tensor-parallel-size``.

    Raises: PlanError, if the sizes do not multiply to ``--world-size``.
    """
    if given.tensor_parallel_size is None:
        yield None
        return
    sizes = (given.world_size, given.shard_world_size, given.tensor_parallel_size)
    check_sizes(*sizes)
    # No step runs, so nobody reads the times.
    world = simulated_world(given.world_size, Timetable(), Machine(), streams=False)
    with world, simulated_meshes():
        yield job_mesh(*sizes)


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
