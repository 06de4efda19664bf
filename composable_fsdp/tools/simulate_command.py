"""``python -m composable_fsdp simulate``: a step of the real runtime, without GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.naming import size_text
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.tools.command import (
    BAD,
    Command,
    Report,
    UsageError,
    bound,
    option,
)
from composable_fsdp.tools.model_arguments import (
    MODEL_HELP,
    MODEL_OPTIONS,
    as_usage_errors,
    cast_model,
    chosen_of,
    job,
    options_of,
)
from composable_fsdp.tools.model_units import unit_names
from composable_fsdp.tools.plan_models import (
    Model,
    inputs_for,
    is_sharded,
    load_model,
    object_of,
)
from composable_fsdp.tools.simulate import OPTIMIZERS, simulate
from composable_fsdp.tools.simulation import Simulation
from composable_fsdp.tools.tensor_parallel import without_arguments

_EPILOG = f"""\
examples:
  python -m composable_fsdp simulate train:build_model --batch 4x2048 --world-size 64
  python -m composable_fsdp simulate config.json --batch 1x4096 --trace step.json

The step runs on tensors that have shapes and no values. https://ui.perfetto.dev opens
the file of --trace: a row of compute, a row of communication, and live bytes by kind.
Times are those of an assumed machine; composable_fsdp.simulate takes another.

{MODEL_HELP}
exit status: 0 simulated; 1 the step needs more than --gpu-memory; 2 no step could be
simulated, such as a wrong path or option
"""

_OPTIONS = [
    option("model", "see below", metavar="MODEL"),
    option("--trace", "write a trace for Perfetto", type=Path, metavar="FILE"),
    *MODEL_OPTIONS,
    option(
        "--optimizer",
        "the optimizer (default: adamw)",
        group="training",
        choices=OPTIMIZERS,
        default="adamw",
    ),
    option(
        "--max-norm",
        "clip gradients to this norm",
        group="training",
        type=bound,
        metavar="X",
    ),
]


def _run(given: argparse.Namespace) -> Report:
    """Simulate the step, write the trace, and return the report."""
    with as_usage_errors():
        found = _simulate(given)
        # The trace is written before the report is printed, which names the file.
        if given.trace:
            found.save_trace(given.trace)
    report = {"model": given.model, **found.as_dict()}
    # The text is made only if it is printed.
    if not given.json:
        report["text"] = str(found)
    if given.trace:
        report["trace"] = str(given.trace)
    if given.gpu_memory:
        report["fits"] = found.peak.memory.total <= given.gpu_memory
        report["gpu_memory"] = given.gpu_memory
    return report


def _simulate(given: argparse.Namespace) -> Simulation:
    """Run the step of a model on meta, or of one that its function cuts."""
    # Inputs and units are those of the model on meta, also if the step builds another.
    with job(given) as mesh:
        model = load_model(given.model, mesh)
        inputs = inputs_for(model, given.batch) if given.batch else model.inputs
        if inputs is None:
            raise UsageError(
                "simulate needs --batch, as --batch 4x2048, or a function that returns "
                "(model, arguments of its forward)."
            )
        cast_model(model, given)
        chosen, _ = chosen_of(model, given)
        # Names hold in the model of the step, too.
        if "units" in chosen:
            chosen["units"] = unit_names(model.module, chosen["units"])
        options = options_of(given)
        # ``simulate`` refuses options beside those of a function that shards; "error"
        # is the default of ``tied_params``, which is no option of a unit.
        if is_sharded(model.module):
            default = UnitOptions()
            options = {
                name: each
                for name, each in options.items()
                if each != getattr(default, name, "error")
            }
    return simulate(
        model.module if mesh is None else _maker(given),
        world_size=given.world_size,
        batch=inputs,
        loss=model.loss,
        shard_world_size=given.shard_world_size,
        tensor_parallel_size=given.tensor_parallel_size,
        optimizer=given.optimizer,
        max_norm=given.max_norm,
        **chosen,
        **options,
    )


def _maker(given: argparse.Namespace) -> Callable[[DeviceMesh], nn.Module]:
    """Return the function of MODEL, from the mesh to the model alone."""
    function = object_of(given.model)

    def make(mesh: DeviceMesh) -> nn.Module:
        found: Any = without_arguments(function, mesh, given.model)()
        # The batch and the loss are known from the model on meta.
        module: nn.Module = found[0] if isinstance(found, tuple) else found
        cast_model(Model(module, given.model), given)
        return module

    # Messages name MODEL, not this function.
    make.__name__ = given.model
    return make


def _show(found: Report) -> None:
    """Print a report on standard output."""
    print(f"{found['model']}: {found['text']}")
    # Without ``--gpu-memory`` there is nothing to fit into.
    if "fits" in found:
        verdict = "fits" if found["fits"] else "does not fit"
        need, size = found["peak"]["bytes"], found["gpu_memory"]
        print(f"{verdict}: {size_text(need)} of {size_text(size)}")
    if "trace" in found:
        print(f"trace, for https://ui.perfetto.dev: {found['trace']}")


COMMAND = Command(
    "show memory, collectives and times of a training step, without GPUs",
    _EPILOG,
    _OPTIONS,
    _run,
    _show,
    lambda found: 0 if found.get("fits", True) else BAD,
)
