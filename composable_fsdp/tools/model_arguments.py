"""Options of the commands that take a model: ranks, batch, units, ``fully_shard``."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
from composable_fsdp.planning.policies import SizePolicy
from composable_fsdp.tools.command import (
    DTYPES,
    UsageError,
    byte_size,
    count,
    dtype_name,
    error_text,
    option,
    shape_of,
    words,
)
from composable_fsdp.tools.fake_world import simulated_meshes
from composable_fsdp.tools.model_units import NoSplitPolicy, guess_units
from composable_fsdp.tools.plan_models import Model, is_sharded
from composable_fsdp.tools.simulated_clock import Clock, Machine
from composable_fsdp.tools.simulated_world import simulated_world
from composable_fsdp.tools.tensor_parallel import check_sizes, job_mesh

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


_FLAG: dict[str, Any] = {"action": "store_true"}
_NUMBER: dict[str, Any] = {"type": count, "metavar": "N"}
_DTYPE: dict[str, Any] = {"type": dtype_name, "choices": DTYPES}

_ROWS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "": {
        "world-size": ("ranks (GPUs) in all (default: 8)", {"default": 8, **_NUMBER}),
        "tensor-parallel-size": (
            "ranks over which MODEL cuts matrices; its function gets the mesh "
            "('dp', 'tp') (default: no tensor parallelism)",
            _NUMBER,
        ),
        "gpu-memory": (
            "memory of a GPU, as 80GiB: says whether the step fits",
            {"type": byte_size, "metavar": "SIZE"},
        ),
        "batch": (
            "shape of the input of a rank, as 4x2048 for 4 texts of 2048 tokens "
            "(default: the inputs that the function of MODEL returns)",
            {"type": shape_of, "metavar": "BxT"},
        ),
    },
    "units (default: found in the model)": {
        "units": (
            "names or patterns of modules, as 'blocks.*,head'",
            {"type": words, "metavar": "NAMES"},
        ),
        "unit-class": ("class names, as Block", {"type": words, "metavar": "CLASSES"}),
        "min-parameters": ("the smallest modules with at least N parameters", _NUMBER),
        "tied-params": (
            "parameters tied across units: refuse, or give to the unit above",
            {"choices": ("error", "promote"), "default": "error"},
        ),
    },
    "options of fully_shard": {
        "strategy": (
            "what is sharded, and when (default: full-shard)",
            {"type": _strategy, "choices": _STRATEGIES, "default": "full-shard"},
        ),
        "shard-world-size": (
            "ranks that share the parameters; others hold copies (default: all)",
            _NUMBER,
        ),
        "dtype": (
            "dtype of the parameters and the optimizer (default: as the model is "
            "built, which is float32 for a config.json)",
            _DTYPE,
        ),
        "param-dtype": (
            "dtype of all-gathers and compute (default: the parameters' dtype)",
            _DTYPE,
        ),
        "reduce-dtype": (
            "dtype of reductions of gradients (default: --param-dtype)",
            _DTYPE,
        ),
        "cpu-offload": (
            "keep parameters, gradients and optimizer state in host memory",
            _FLAG,
        ),
        "backward-prefetch": (
            "when backward gathers the next unit (default: pre, the most overlap)",
            {"choices": _PREFETCH, "default": "pre"},
        ),
        "forward-prefetch": ("gather the next unit early in forward, too", _FLAG),
        "block": (
            "the piece that shards may not cut (default: row)",
            {
                "type": _block,
                "default": Block.ROW,
                "metavar": "|".join([*_BLOCKS, "rows:N"]),
            },
        ),
        "wire": (
            "format of all-gathers with about one byte per element (default: none)",
            {"choices": _WIRES},
        ),
    },
}

MODEL_OPTIONS = [
    option(f"--{name}", about, group=group, **words_)
    for group, rows in _ROWS.items()
    for name, (about, words_) in rows.items()
]


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Turn an error that the arguments cause into a UsageError with the same text."""
    try:
        yield
    # Refusals of the planner and the runtime, wrong values of options, files that
    # cannot be written.
    except (FSDPError, OSError, TypeError, ValueError) as error:
        # The rank is one of a job that the command made up.
        if isinstance(error, FSDPError):
            error.rank = None
        raise UsageError(error_text(error)) from error


@contextmanager
def job(given: argparse.Namespace) -> Iterator[DeviceMesh | None]:
    """Be a rank of the job that the arguments describe; yields its mesh, or None."""
    if given.tensor_parallel_size is None:
        yield None
        return
    sizes = (given.world_size, given.shard_world_size, given.tensor_parallel_size)
    check_sizes(*sizes)
    # A function that cuts its model needs the process groups of the job, which here are
    # those of a simulated world. No step runs, so nobody reads the times.
    world = simulated_world(sizes[0], Clock(Machine()), streams=False)
    with world, simulated_meshes():
        yield job_mesh(*sizes)


def cast_model(model: Model, given: argparse.Namespace) -> None:
    """Cast the model to ``--dtype``, if there is a ``--dtype``."""
    # On meta a cast changes dtypes and copies nothing.
    if given.dtype:
        model.module.to(DTYPES[given.dtype])


def chosen_of(model: Model, given: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the policy or the units that the arguments select, and how they do."""
    selections = [given.min_parameters, given.unit_class, given.units]
    if sum(map(bool, selections)) > 1:
        raise UsageError(
            "--units, --unit-class and --min-parameters select all units each; give "
            "one of them."
        )
    if given.min_parameters:
        number = f"{given.min_parameters:,}"
        policy: object = SizePolicy(given.min_parameters)
        return {"policy": policy}, f"the smallest modules of {number} parameters"
    if given.unit_class:
        policy = NoSplitPolicy(given.unit_class)
        return {"policy": policy}, f"modules of class {', '.join(given.unit_class)}"
    if given.units:
        return {"units": given.units}, ", ".join(given.units)
    # A function of MODEL that shards has chosen its units itself.
    if is_sharded(model.module):
        return {}, f"those that {model.source} shards"
    names, units_from = guess_units(model.module)
    return {"units": names}, units_from


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
