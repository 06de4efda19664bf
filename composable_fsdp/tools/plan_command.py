"""``python -m composable_fsdp plan``: whether a model fits, before there is a GPU."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.tools.activations import measure_activations
from composable_fsdp.tools.command import (
    BAD,
    Command,
    Report,
    UsageError,
    count,
    option,
    words,
)
from composable_fsdp.tools.forecast import OPTIMIZERS, forecast
from composable_fsdp.tools.model_arguments import (
    MODEL_HELP,
    MODEL_OPTIONS,
    as_usage_errors,
    cast_model,
    chosen_of,
    job,
    options_of,
)
from composable_fsdp.tools.plan import plan
from composable_fsdp.tools.plan_models import (
    inputs_for,
    is_sharded,
    load_config,
    load_model,
)
from composable_fsdp.tools.plan_pictures import draw_memory
from composable_fsdp.tools.plan_report import (
    KEY,
    differences,
    report_of,
    text_of,
    text_of_differences,
)

_EPILOG = f"""\
examples:
  python -m composable_fsdp plan train:build_model --world-size 64 --gpu-memory 80GiB
  python -m composable_fsdp plan --hf config.json --world-size 64 --batch 1x4096 \\
      --param-dtype bfloat16 --checkpointing --gpu-memory 80GiB
  python -m composable_fsdp plan train:small train:large --diff

Without --batch the activations are not counted, and "fits" does not include them.

{MODEL_HELP}\
  plan.json             what --json printed, for --diff

exit status: 0 fits, or --gpu-memory is not given; 1 does not fit; 2 no plan could be
made, such as a wrong path or option
"""

_OPTIONS = [
    option("models", "see below", nargs="*", metavar="MODEL"),
    option("--hf", "a config.json of transformers, or its directory", metavar="PATH"),
    option(
        "--world-sizes",
        "print a row for each of these world sizes, too",
        type=lambda text: tuple(count(each) for each in words(text)),
        default=(),
        metavar="N,N",
    ),
    option(
        "--plot",
        "draw the memory over one step, as plan.png, .svg or .pdf",
        type=Path,
        metavar="FILE",
    ),
    option("--diff", "print how two MODELs differ", action="store_true"),
    *MODEL_OPTIONS,
    option(
        "--optimizer",
        f"{', '.join(OPTIMIZERS)}, or bytes per parameter, as 2 (default: adamw)",
        group="training",
        default="adamw",
        metavar="NAME",
    ),
    option(
        "--checkpointing",
        "activation checkpointing of each unit; needs --batch",
        group="training",
        action="store_true",
    ),
]


def _run(given: argparse.Namespace) -> Report:
    """Make the plan, and return its report."""
    # ``--hf`` is another way to write a MODEL.
    targets = [*given.models, *([given.hf] if given.hf else [])]
    if len(targets) != (2 if given.diff else 1):
        raise UsageError(
            f"plan{' --diff' if given.diff else ''} expects "
            f"{'two MODELs' if given.diff else 'one MODEL'}, got {len(targets)}. Write "
            "MODULE:FUNCTION or the path of a config.json; see --help."
        )
    reports = [_saved(target) for target in targets]
    # A picture is of one plan, whose model is needed.
    if given.plot and (given.diff or reports[0]):
        raise UsageError("--plot draws the plan of one model; leave it or --diff out.")
    for index, target in enumerate(targets):
        if reports[index] is None:
            # Measuring activations sends, and so does planning for other dtypes.
            with as_usage_errors(), job(given) as mesh:
                reports[index] = _report_of(target, given, mesh)
    found = [each for each in reports if each is not None]
    if given.diff:
        return {"differences": differences(*found), "a": found[0], "b": found[1]}
    return found[0]


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


def _report_of(
    target: str, given: argparse.Namespace, mesh: DeviceMesh | None
) -> Report:
    """Return the report of a model that is built now."""
    # The configuration that --hf names is refused with a mesh like any other.
    is_config = target == given.hf and mesh is None
    model = load_config(target) if is_config else load_model(target, mesh)
    cast_model(model, given)
    chosen, units_from = chosen_of(model, given)
    cut = given.tensor_parallel_size or 1
    planned = plan(
        model.module,
        world_size=given.world_size // cut,
        shard_world_size=given.shard_world_size,
        **chosen,
        **options_of(given),
    )
    activations = batch = None
    inputs = model.inputs
    # A batch on the command line goes before inputs that the function returned.
    if given.batch:
        inputs, batch = inputs_for(model, given.batch), "x".join(map(str, given.batch))
    if given.checkpointing and inputs is None:
        raise UsageError("--checkpointing needs --batch, as --batch 1x4096.")
    # The report says if activations are left out.
    if inputs is not None:
        if is_sharded(model.module):
            raise UsageError(
                f"plan counts activations before sharding, and {model.source} shards "
                "its model itself. Let the function return the model after "
                "parallelize_module and select --units, leave the batch out, or run "
                "simulate."
            )
        activations = measure_activations(
            model.module,
            planned,
            inputs,
            loss=model.loss,
            batch=batch,
            checkpointing=given.checkpointing,
        )
    found = forecast(planned, optimizer=given.optimizer, activations=activations)
    notes = list(model.notes)
    # A plan has the collectives of sharding; the model's own depend on its forward.
    if cut > 1:
        notes.append(
            f"collectives over the {cut} tensor-parallel ranks are not counted; "
            "`python -m composable_fsdp simulate` counts them"
        )
    report = report_of(
        found,
        source=model.source,
        units_from=units_from,
        capacity=given.gpu_memory,
        world_sizes=given.world_sizes,
        tensor_parallel_size=given.tensor_parallel_size,
        notes=notes,
    )
    if given.plot:
        draw_memory(given.plot, found, given.gpu_memory)
        # The report says where the picture is, also in JSON.
        report["plot"] = str(given.plot)
    return report


def _show(found: Report) -> None:
    """Print a report on standard output."""
    # A report of a difference holds the two reports, too.
    if "differences" in found:
        names = (found["a"]["model"]["source"], found["b"]["model"]["source"])
        print(text_of_differences(found["differences"], names))
        return
    # A file or a pipe gets all columns.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(text_of(found, width))
    if "plot" in found:
        print(f"\nwrote {found['plot']}")


COMMAND = Command(
    "tell whether a model fits on your GPUs",
    _EPILOG,
    _OPTIONS,
    _run,
    _show,
    # Without ``--gpu-memory`` there is nothing to fit into, and a difference fits.
    lambda found: 0 if found.get("fit", {}).get("fits", True) else BAD,
)
