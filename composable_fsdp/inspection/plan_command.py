"""``python -m composable_fsdp plan``: whether a model fits, before there is a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.entries.plan import plan
from composable_fsdp.errors import FSDPError
from composable_fsdp.inspection.plan_diff import differences, parts_of_difference
from composable_fsdp.inspection.plan_html import page_of, write_page
from composable_fsdp.inspection.plan_models import (
    Model,
    UsageError,
    inputs_for,
    load_config,
    load_model,
)
from composable_fsdp.inspection.plan_report import KEY, Report, report_of
from composable_fsdp.inspection.plan_text import parts_of, print_parts
from composable_fsdp.inspection.sizes import byte_size
from composable_fsdp.planning import walk
from composable_fsdp.planning.activations import Activations, measure_activations
from composable_fsdp.planning.forecast import Forecast, forecast
from composable_fsdp.planning.model_units import guess_units
from composable_fsdp.planning.optimizers import OPTIMIZERS
from composable_fsdp.planning.plan import ShardingPlan
from composable_fsdp.planning.policies import SizePolicy

DOES_NOT_FIT = 1
"""Exit status if ``--gpu-memory`` is given and the plan needs more."""

ABOUT = "tell whether a model fits on your GPUs"

EXAMPLES = """\
examples:
  python -m composable_fsdp plan train:build_model --world-size 64 --gpu-memory 80GiB
  python -m composable_fsdp plan --hf config.json --world-size 64 --gpu-memory 80GiB
  python -m composable_fsdp plan --hf config.json --world-sizes 8,16,64 --batch 1x4096
  python -m composable_fsdp plan train:build_model --units 'blocks.*' --html plan.html
  python -m composable_fsdp plan train:small train:large --diff

MODEL is one of:
  train:build_model     a function without arguments (or a class, or a module) of a
                        module; it is called with torch.device("meta"), so no weight
                        takes memory. It may return (model, inputs of its forward)
  train.py:build_model  the same, in a file
  config.json           a configuration of transformers, or its directory
  plan.json             what --json printed, for --diff

exit status: 0 fits, or --gpu-memory is not given; 1 does not fit; 2 no plan could be
made, such as a wrong path or option
"""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
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


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan`` to its parser."""
    command.usage = "python -m composable_fsdp plan MODEL [MODEL --diff] [options]"
    command.add_argument("models", nargs="*", metavar="MODEL", help="see below")
    command.add_argument(
        "--hf", metavar="PATH", help="a config.json of transformers, or its directory"
    )
    command.add_argument(
        "--world-size",
        type=count,
        default=8,
        metavar="N",
        help="number of ranks (GPUs) in all (default: 8)",
    )
    command.add_argument(
        "--gpu-memory",
        type=byte_size,
        metavar="SIZE",
        help="memory of a GPU, as 80GiB: says whether the model fits",
    )
    command.add_argument(
        "--world-sizes",
        type=_counts,
        default=(),
        metavar="N,N",
        help="print a row for each of these world sizes, too",
    )
    command.add_argument(
        "--batch",
        type=shape_of,
        metavar="BxT",
        help="batch per rank, as 4x2048: counts activations (default: left out)",
    )
    command.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with pictures"
    )
    command.add_argument(
        "--diff", action="store_true", help="print how two MODELs differ"
    )
    add_units(command.add_argument_group("units (default: found in the model)"))
    add_options(command.add_argument_group("options of fully_shard"))
    training = command.add_argument_group("training")
    training.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)}, or bytes per parameter, as 2 (default: adamw)",
    )
    training.add_argument(
        "--checkpointing",
        action="store_true",
        help="activation checkpointing of each unit; needs --batch",
    )


def add_units(group: Any) -> None:
    """Add the arguments that choose units."""
    # Each of the three selects all units.
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--units",
        type=_words,
        metavar="NAMES",
        help="names or patterns of modules, as 'blocks.*,head'",
    )
    choice.add_argument(
        "--unit-class", type=_words, metavar="CLASSES", help="class names, as Block"
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


def add_options(group: Any) -> None:
    """Add the arguments that are options of ``fully_shard``."""
    group.add_argument(
        "--strategy",
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
        choices=DTYPES,
        help="dtype of the parameters and the optimizer (default: as the model is "
        "built, which is float32 for a config.json)",
    )
    for name, about in (
        ("--param-dtype", "all-gathers and compute (default: the parameters' dtype)"),
        ("--reduce-dtype", "reductions of gradients (default: --param-dtype)"),
    ):
        group.add_argument(name, choices=DTYPES, help=f"dtype of {about}")
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
        choices=_BLOCKS,
        default="row",
        help="what shards may not cut (default: row)",
    )


def run(given: argparse.Namespace) -> Report:
    """Make the plan, and return its report.

    Raises: UsageError, if no plan can be made.
    """
    # ``--hf`` is another way to write a MODEL.
    targets = [*given.models, *([given.hf] if given.hf else [])]
    if len(targets) != (2 if given.diff else 1):
        raise UsageError(
            f"plan{' --diff' if given.diff else ''} expects "
            f"{'two MODELs' if given.diff else 'one MODEL'}, got {len(targets)}. Write "
            "MODULE:FUNCTION or the path of a config.json; see --help."
        )
    if given.checkpointing and not given.batch and not given.diff:
        raise UsageError("--checkpointing needs --batch, as --batch 1x4096.")
    # Pictures are of one plan.
    if given.diff and given.html:
        raise UsageError("--html draws one plan; leave --diff or --html out.")
    try:
        if given.diff:
            a, b = (_report(target, given) for target in targets)
            return {"differences": differences(a, b), "a": a, "b": b}
        return _report(targets[0], given)
    except UsageError:
        raise
    # Refusals of the planner, wrong values of options, files that cannot be written.
    except (FSDPError, OSError, TypeError) as error:
        raise UsageError(str(error)) from error


def show(found: Report) -> None:
    """Print a report of ``run`` on standard output."""
    # A report of a difference holds the two reports, too.
    if "differences" in found:
        names = (found["a"]["model"]["source"], found["b"]["model"]["source"])
        print_parts(parts_of_difference(found["differences"], names))
        return
    print_parts(parts_of(found))
    if "html" in found:
        print(f"\nwrote {found['html']}")


def status(found: Report) -> int:
    """Return the exit status of a report of ``run``."""
    # Without ``--gpu-memory`` there is nothing to fit into, and a difference fits.
    return DOES_NOT_FIT if not found.get("fit", {}).get("fits", True) else 0


def _report(target: str, given: argparse.Namespace) -> Report:
    """Return the report of a model, or a saved report."""
    # A saved report needs neither the model nor its packages.
    saved = _saved(target)
    if saved is not None:
        if given.html:
            raise UsageError(f"{target} is a saved report; --html needs the model.")
        return saved
    model = load_config(target) if target == given.hf else load_model(target)
    # On meta a cast changes dtypes and copies nothing.
    if given.dtype:
        model.module.to(DTYPES[given.dtype])
    planned, units_from = _plan(model, given)
    found = forecast(
        planned,
        optimizer=given.optimizer,
        activations=_activations(model, planned, given),
    )
    report = report_of(
        found,
        source=model.source,
        units_from=units_from,
        capacity=given.gpu_memory,
        world_sizes=given.world_sizes,
        notes=model.notes,
    )
    if given.html:
        _write(given.html, found, report)
    return report


def _saved(target: str) -> Report | None:
    """Return the report that ``--json`` printed to the file ``target``, or None."""
    path = Path(target)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    # The reader of configurations tells the error.
    except ValueError:
        return None
    return found if isinstance(found, dict) and KEY in found else None


def _plan(model: Model, given: argparse.Namespace) -> tuple[ShardingPlan, str]:
    """Return the plan, and how its units were chosen."""
    policy, units, units_from = chosen_of(model, given)
    planned = plan(
        model.module,
        world_size=given.world_size,
        shard_world_size=given.shard_world_size,
        policy=policy,
        units=units,
        **options_of(given),
    )
    return planned, units_from


def chosen_of(
    model: Model, given: argparse.Namespace
) -> tuple[object, Sequence[nn.Module | str] | None, str]:
    """Return the policy or the units that the arguments of ``add_units`` select.

    The text says how the units were chosen.
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
        "block": _BLOCKS[given.block],
        "tied_params": given.tied_params,
    }


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


def _activations(
    model: Model, planned: ShardingPlan, given: argparse.Namespace
) -> Activations | None:
    """Return the activations of the batch, if there is a batch."""
    batch = None
    inputs = model.inputs
    # A batch on the command line goes before inputs that the function returned.
    if given.batch:
        inputs, batch = inputs_for(model, given.batch), "x".join(map(str, given.batch))
    # The report says that activations are left out.
    if inputs is None:
        return None
    found = measure_activations(model.module, planned, inputs, batch=batch)
    return found.with_checkpointing() if given.checkpointing else found


def _write(path: Path, found: Forecast, report: Report) -> None:
    """Write the page, and note its path in the report."""
    # The report says where the page is, also in JSON.
    write_page(path, page_of(found, report))
    report["html"] = str(path)


def count(text: str) -> int:
    """Return a positive number; "1e9" and "70_000" are numbers, too."""
    # float() reads "1e9", which int() does not.
    try:
        number = float(text)
    except ValueError:
        number = 0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(number)


def _counts(text: str) -> tuple[int, ...]:
    """Return positive numbers that are separated by commas."""
    return tuple(count(each) for each in _words(text))


def shape_of(text: str) -> tuple[int, ...]:
    """Return a shape such as "4x2048"."""
    try:
        return tuple(count(each) for each in text.lower().split("x"))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; expected numbers with x between them, as 4x2048"
        ) from None


def _words(text: str) -> list[str]:
    """Return texts that are separated by commas, without spaces around them."""
    return [each for each in map(str.strip, text.split(",")) if each]
