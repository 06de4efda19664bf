"""``python -m composable_fsdp plan`` and ``simulate``: a model without a GPU."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    Placement,
    ShardingStrategy,
)
from composable_fsdp.errors import FSDPError, PlanError
from composable_fsdp.features.wires import Float8Wire, Int8Wire
from composable_fsdp.naming import size_text
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.policies import SizePolicy
from composable_fsdp.tools import plan_models, plan_report
from composable_fsdp.tools.activations import measure_activations
from composable_fsdp.tools.arguments import split_words, word_of
from composable_fsdp.tools.command import BAD, USAGE, Command, Report
from composable_fsdp.tools.fake_world import simulated_meshes
from composable_fsdp.tools.fit import fit
from composable_fsdp.tools.machine import Machine
from composable_fsdp.tools.memory import Activations
from composable_fsdp.tools.model_units import NoSplitPolicy, guess_units
from composable_fsdp.tools.plan import plan
from composable_fsdp.tools.sharding_plan import Forecast, ShardingPlan, forecast
from composable_fsdp.tools.simulate import simulate
from composable_fsdp.tools.simulated_clock import Clock
from composable_fsdp.tools.simulated_world import simulated_world

_STRATEGIES = {word_of(strategy.name): strategy for strategy in ShardingStrategy}
_WIRES = {"int8": Int8Wire(), "float8": Float8Wire()}
_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}


def _plan(given: argparse.Namespace) -> Report:
    """Make the plan, and return its report; a key that is absent was not asked for."""
    # ``--hf`` is another way to write a MODEL.
    targets = [*given.models, *([given.hf] if given.hf else [])]
    if len(targets) != 1:
        raise PlanError(
            f"plan expects one MODEL, got {len(targets)}. Write MODULE:FUNCTION or the "
            "path of a config.json; see --help."
        )
    if (given.compile or given.float8) and not given.time:
        raise PlanError("--compile and --float8 need --time, as --time h100.")
    cut = given.tensor_parallel_size or 1
    # Measuring activations sends, and so does planning for other dtypes.
    with _job(given) as mesh:
        model, options, units_from = _asked(targets[0], given, mesh)
        planned = plan(model.module, world_size=given.world_size // cut, **options)
        found = forecast(
            planned,
            optimizer=given.optimizer,
            activations=_activations(model, planned, given),
        )
        # A plan has the collectives of sharding; the model's own are in its forward.
        own = f"collectives over the {cut} tensor-parallel ranks are not counted"
        report = plan_report.report_of(
            found,
            source=model.source,
            units_from=units_from,
            tensor_parallel_size=given.tensor_parallel_size,
            notes=[*model.notes, *([own] if cut > 1 else [])],
        )
        if given.gpu_memory is not None:
            report["fit"] = fit(found, given.gpu_memory, cut)
        if given.time:
            report["time"] = _time(found, given)
            dtypes = [d for unit in found.plan.units for _, d in unit.with_dtypes]
            if any(each.compute.itemsize > 2 for each in dtypes):
                report["warnings"].append(
                    "the estimated time counts matrix products in float32 at the speed "
                    "of bfloat16; pass --param-dtype bfloat16"
                )
        if given.plot:
            plan_report.draw_memory(given.plot, found, given.gpu_memory)
            # The report says where the picture is, also in JSON.
            report["plot"] = str(given.plot)
    return report


def _activations(
    model: plan_models.Model, planned: ShardingPlan, given: argparse.Namespace
) -> Activations | None:
    """Return the activations of the batch, if there is a batch."""
    # The report says if activations are left out.
    if model.inputs is None:
        for option in ("checkpointing", "time"):
            if getattr(given, option):
                raise PlanError(f"--{option} needs --batch, as --batch 1x4096.")
        return None
    if plan_models.is_sharded(model.module):
        raise PlanError(
            f"plan counts activations before sharding, and {model.source} shards its "
            "model itself. Let the function return the model after parallelize_module "
            "and select --units, leave the batch out, or run simulate."
        )
    return measure_activations(
        model.module,
        planned,
        model.inputs,
        loss=model.loss,
        batch="x".join(map(str, given.batch or ())) or None,
        checkpointing=given.checkpointing,
    )


def _time(found: Forecast, given: argparse.Namespace) -> Report:
    """Return the estimated time of a step."""
    assert found.activations is not None
    how = {"compiled": given.compile, "float8": given.float8}
    time = found.plan.step_time(
        given.time, found.activations, optimizer=given.optimizer, **how
    )
    words = ["compiled" if given.compile else "eager", *["float8"] * given.float8]
    return {
        "machine": given.time,
        "step": ", ".join(words),
        **time._asdict(),
        "tokens_per_second": time.tokens_per_second,
    }


def _show_plan(found: Report) -> None:
    """Print a report on standard output."""
    # A file or a pipe gets all columns.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(plan_report.text_of(found, width))
    if "plot" in found:
        print(f"\nwrote {found['plot']}")


def _simulate(given: argparse.Namespace) -> Report:
    """Simulate the step, write the trace, and return the report."""
    model, options, _ = _asked(given.model, given, None)
    if model.inputs is None:
        raise PlanError(
            "simulate needs --batch, as --batch 4x2048, or a function that returns "
            "(model, arguments of its forward)."
        )
    found = simulate(
        model.module,
        world_size=given.world_size,
        batch=model.inputs,
        loss=model.loss,
        optimizer=given.optimizer,
        max_norm=given.max_norm,
        **options,
    )
    report = {"model": given.model, **found.as_dict()}
    # The text is made only if it is printed.
    if not given.json:
        report["text"] = str(found)
    if given.trace:
        found.save_trace(given.trace)
        report["trace"] = str(given.trace)
    if given.gpu_memory:
        report["fits"] = found.peak.memory.total <= given.gpu_memory
        report["gpu_memory"] = given.gpu_memory
    return report


def _show_step(found: Report) -> None:
    """Print a report on standard output."""
    print(f"{found['model']}: {found['text']}")
    # Without ``--gpu-memory`` there is nothing to fit into.
    if "fits" in found:
        verdict = "fits" if found["fits"] else "does not fit"
        need, size = found["peak"]["bytes"], found["gpu_memory"]
        print(f"{verdict}: {size_text(need)} of {size_text(size)}")
    if "trace" in found:
        print(f"trace, for https://ui.perfetto.dev: {found['trace']}")


_BAD_INPUT = (FSDPError, OSError, TypeError, ValueError)
"""What a model or its arguments may raise: refusals of the planner and the runtime,
wrong values of options, files that cannot be written."""


@contextmanager
def _job(given: argparse.Namespace) -> Iterator[DeviceMesh | None]:
    """Be a rank of the job that the arguments describe; yields its mesh, or None."""
    if given.tensor_parallel_size is None:
        yield None
        return
    sizes = (given.world_size, given.shard_world_size, given.tensor_parallel_size)
    plan_models.check_sizes(*sizes)
    # A function that cuts its model needs the process groups of the job, which here are
    # those of a simulated world. No step runs, so nobody reads the times.
    world = simulated_world(sizes[0], Clock(Machine()), streams=False)
    with world, simulated_meshes():
        yield plan_models.job_mesh(*sizes)


def _asked(
    target: str, given: argparse.Namespace, mesh: DeviceMesh | None
) -> tuple[plan_models.Model, dict[str, Any], str]:
    """Return the model on meta, arguments of ``plan``, and how units were selected."""
    # ``--hf`` says that the path is that of a configuration.
    is_config = target == getattr(given, "hf", None)
    model = plan_models.load_model(target, mesh, is_config=is_config)
    # A batch on the command line goes before inputs that the function returned.
    if given.batch:
        model = model._replace(inputs=plan_models.inputs_for(model, given.batch))
    # On meta a cast changes dtypes and copies nothing.
    if given.dtype:
        model.module.to(getattr(torch, given.dtype))
    chosen, units_from = _chosen_of(model, given)
    sizes = {"shard_world_size": given.shard_world_size}
    return model, {**chosen, **_options_of(given), **sizes}, units_from


def _chosen_of(
    model: plan_models.Model, given: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Return the policy or the units that the arguments select, and how they do."""
    number, classes, units = given.min_parameters, given.unit_class, given.units
    if sum(map(bool, (number, classes, units))) > 1:
        raise PlanError(
            "--units, --unit-class and --min-parameters select all units each; give "
            "one of them."
        )
    if number:
        text = f"the smallest modules of {number:,} parameters"
        return {"policy": SizePolicy(number)}, text
    if classes:
        text = f"modules of class {', '.join(classes)}"
        return {"policy": NoSplitPolicy(classes)}, text
    # A function of MODEL that shards has chosen its units itself.
    if not units and plan_models.is_sharded(model.module):
        return {}, f"those that {model.source} shards"
    names, text = (units, ", ".join(units)) if units else guess_units(model.module)
    return {"units": names}, text


def _placement(text: str | None) -> Placement | None:
    """Return the placement that ``--placement`` describes. Raises: PlanError."""
    if text is None:
        return None
    # A comma without a name behind it is between dims.
    rows = re.split(r",(?=\w+=)", text.replace(" ", ""))
    pairs = [row.partition("=") for row in rows]
    try:
        if not all(equals for _, equals, _ in pairs):
            raise TypeError("a name without its dims")
        return Placement(**{name: tuple(split_words(dims)) for name, _, dims in pairs})
    except (TypeError, PlanError) as error:
        raise PlanError(
            "--placement expects the dims of parameters, between, gradients and "
            "states, as parameters=shard,between=shard,gradients=shard,states=replicate"
            f",shard, where what is left out is whole; got {text!r}: {error}"
        ) from None


def _options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``fully_shard`` that the arguments select."""
    names = (given.param_dtype, given.reduce_dtype)
    low = MixedPrecision(*(name and getattr(torch, name) for name in names))
    block, _, rows = given.block.partition(":")
    found = {
        "strategy": _STRATEGIES[given.strategy],
        "placement": _placement(given.placement),
        # Without a dtype there is no mixed precision, as in ``fully_shard``.
        "mixed_precision": low if low != MixedPrecision() else None,
        "cpu_offload": CPUOffload(offload_params=True) if given.cpu_offload else None,
        "backward_prefetch": _PREFETCH[given.backward_prefetch],
        "forward_prefetch": given.forward_prefetch,
        "block": Block.rows(int(rows)) if rows else Block[block.upper()],
        # ``get``: None without ``--wire``.
        "wire": _WIRES.get(given.wire),
        "tied_params": given.tied_params,
    }
    # Without defaults, which a function that shards by itself would be asked to change;
    # "error" is that of ``tied_params``, which is no option of a unit.
    return {
        name: each
        for name, each in found.items()
        if each != getattr(UnitOptions(), name, "error")
    }


PLAN = Command(
    _plan,
    _show_plan,
    # Without ``--gpu-memory`` there is nothing to fit into.
    lambda found: 0 if found.get("fit", {}).get("fits", True) else BAD,
    USAGE,
    _BAD_INPUT,
)
SIMULATE = Command(
    _simulate,
    _show_step,
    lambda found: 0 if found.get("fits", True) else BAD,
    USAGE,
    _BAD_INPUT,
)
