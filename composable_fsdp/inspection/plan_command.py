"""``python -m composable_fsdp plan``: whether a model fits, before there is a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.inspection.job import data_ranks, job
from composable_fsdp.inspection.model_arguments import (
    add_model_arguments,
    as_usage_errors,
    cast_model,
    chosen_of,
    options_of,
    words,
)
from composable_fsdp.inspection.plan_diff import differences, parts_of_difference
from composable_fsdp.inspection.plan_models import (
    Model,
    UsageError,
    inputs_for,
    is_sharded,
    load_config,
    load_model,
)
from composable_fsdp.inspection.plan_pictures import draw_memory
from composable_fsdp.inspection.plan_report import KEY, Report, report_of
from composable_fsdp.inspection.plan_text import parts_of, print_parts
from composable_fsdp.inspection.progress import waiting
from composable_fsdp.inspection.sizes import count
from composable_fsdp.tools.activations import Activations, measure_activations
from composable_fsdp.tools.forecast import forecast
from composable_fsdp.tools.optimizers import OPTIMIZERS
from composable_fsdp.tools.plan import plan
from composable_fsdp.tools.sharding_plan import ShardingPlan

DOES_NOT_FIT = 1
"""Exit status if ``--gpu-memory`` is given and the plan needs more."""

ABOUT = "tell whether a model fits on your GPUs"

EXAMPLES = """\
examples:
  python -m composable_fsdp plan train:build_model --world-size 64 --gpu-memory 80GiB
  python -m composable_fsdp plan --hf config.json --world-size 64 --gpu-memory 80GiB
  python -m composable_fsdp plan --hf config.json --world-sizes 8,16,64 --batch 1x4096
  python -m composable_fsdp plan train:build_model --units 'blocks.*' --plot plan.png
  python -m composable_fsdp plan train:small train:large --diff

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
  plan.json             what --json printed, for --diff

exit status: 0 fits, or --gpu-memory is not given; 1 does not fit; 2 no plan could be
made, such as a wrong path or option
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan`` to its parser."""
    command.usage = "python -m composable_fsdp plan MODEL [MODEL --diff] [options]"
    command.add_argument("models", nargs="*", metavar="MODEL", help="see below")
    command.add_argument(
        "--hf", metavar="PATH", help="a config.json of transformers, or its directory"
    )
    command.add_argument(
        "--world-sizes",
        type=_counts,
        default=(),
        metavar="N,N",
        help="print a row for each of these world sizes, too",
    )
    command.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the memory over one step, as plan.png, .svg or .pdf",
    )
    command.add_argument(
        "--diff", action="store_true", help="print how two MODELs differ"
    )
    add_model_arguments(command, fits="model", no_batch="activations are not counted")
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
    # A picture is of one plan.
    if given.diff and given.plot:
        raise UsageError("--plot draws one plan; leave --diff or --plot out.")
    with as_usage_errors(), waiting("planning", wanted=not given.json):
        if given.diff:
            a, b = (_report(target, given) for target in targets)
            return {"differences": differences(a, b), "a": a, "b": b}
        return _report(targets[0], given)


def show(found: Report) -> None:
    """Print a report of ``run`` on standard output."""
    # A report of a difference holds the two reports, too.
    if "differences" in found:
        names = (found["a"]["model"]["source"], found["b"]["model"]["source"])
        print_parts(parts_of_difference(found["differences"], names))
        return
    print_parts(parts_of(found))
    if "plot" in found:
        print(f"\nwrote {found['plot']}")


def status(found: Report) -> int:
    """Return the exit status of a report of ``run``."""
    # Without ``--gpu-memory`` there is nothing to fit into, and a difference fits.
    return DOES_NOT_FIT if not found.get("fit", {}).get("fits", True) else 0


def _report(target: str, given: argparse.Namespace) -> Report:
    """Return the report of a model, or a saved report."""
    # A saved report needs neither the model nor its packages.
    saved = _saved(target)
    if saved is not None:
        if given.plot:
            raise UsageError(f"{target} is a saved report; --plot needs the model.")
        return saved
    # Measuring activations sends, and so does planning for other dtypes.
    with job(given) as mesh:
        return _report_of(target, given, mesh)


def _report_of(
    target: str, given: argparse.Namespace, mesh: DeviceMesh | None
) -> Report:
    """Return the report of a model that is built now."""
    # The configuration that --hf names is refused with a mesh like any other.
    is_config = target == given.hf and mesh is None
    model = load_config(target) if is_config else load_model(target, mesh)
    cast_model(model, given)
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
        tensor_parallel_size=given.tensor_parallel_size,
        notes=[*model.notes, *_notes(given)],
    )
    if given.plot:
        draw_memory(given.plot, found, given.gpu_memory)
        # The report says where the picture is, also in JSON.
        report["plot"] = str(given.plot)
    return report


def _notes(given: argparse.Namespace) -> list[str]:
    """Return a sentence on collectives that the plan does not count, if there are."""
    # A plan has the collectives of sharding; the model's own depend on its forward.
    cut = given.tensor_parallel_size or 1
    return [
        f"collectives over the {cut} tensor-parallel ranks are not counted; "
        "`python -m composable_fsdp simulate` counts them"
    ] * (cut > 1)


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
        world_size=data_ranks(given),
        shard_world_size=given.shard_world_size,
        policy=policy,
        units=units,
        **options_of(given),
    )
    return planned, units_from


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
    if is_sharded(model.module):
        raise UsageError(
            f"plan counts activations before sharding, and {model.source} shards its "
            "model itself. Let the function return the model after parallelize_module "
            "and select --units, leave the batch out, or run simulate."
        )
    found = measure_activations(
        model.module, planned, inputs, loss=model.loss, batch=batch
    )
    return found.with_checkpointing() if given.checkpointing else found


def _counts(text: str) -> tuple[int, ...]:
    """Return positive numbers that are separated by commas."""
    return tuple(count(each) for each in words(text))
