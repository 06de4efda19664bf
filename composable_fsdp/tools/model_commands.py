"""``python -m composable_fsdp plan`` and ``simulate``: a model without a GPU.

A command returns its report, as JSON has it, the report as text, and the exit status.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch

from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    Placement,
    ShardingStrategy,
)
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import size_text
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.tools import plan_models, plan_report
from composable_fsdp.tools.activations import measure_activations
from composable_fsdp.tools.command_line import split_words
from composable_fsdp.tools.fit import fit
from composable_fsdp.tools.memory import Activations
from composable_fsdp.tools.model_units import NoSplitPolicy, guess_units
from composable_fsdp.tools.plan import plan as plan_of
from composable_fsdp.tools.sharding_plan import Forecast, ShardingPlan, forecast
from composable_fsdp.tools.simulate import simulate as simulated_step

Answer = tuple[dict[str, Any], str, int]

STRATEGIES = {s.name.strip("_").lower().replace("_", "-"): s for s in ShardingStrategy}
PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}


def plan(given: argparse.Namespace) -> Answer:
    """Make the plan, and return its report; a key that is absent was not asked for."""
    if (given.compile or given.float8) and not given.time:
        raise PlanError("--compile and --float8 need --time, as --time h100.")
    # ``--hf`` is another way to write a MODEL, which says that it is a configuration.
    if bool(given.hf) == bool(given.model):
        raise PlanError(
            "Write one MODEL: MODULE:FUNCTION or the path of a config.json; see --help."
        )
    model = plan_models.load_model(given.hf or given.model, is_config=bool(given.hf))
    # A batch on the command line goes before inputs that the function returned.
    if given.batch:
        model = model._replace(inputs=plan_models.inputs_for(model, given.batch))
    # On meta a cast changes dtypes and copies nothing.
    if given.dtype:
        model.module.to(getattr(torch, given.dtype))
    chosen, units_from = _units_of(model, given)
    planned = plan_of(
        model.module,
        world_size=given.world_size,
        shard_world_size=given.shard_world_size,
        **chosen,
        **_options_of(given),
    )
    found = forecast(
        planned,
        optimizer=given.optimizer,
        activations=_activations(model, planned, given),
    )
    report = plan_report.report_of(
        found, source=model.source, units_from=units_from, notes=model.notes
    )
    if given.gpu_memory is not None:
        report["fit"] = fit(found, given.gpu_memory)
    if given.time:
        report["time"] = _time(found, given)
        dtypes = [d for unit in found.plan.units for _, d in unit.with_dtypes]
        if any(each.compute.itemsize > 2 for each in dtypes):
            report["warnings"].append(
                "the estimated time counts matrix products in float32 at the speed of "
                "bfloat16; pass --param-dtype bfloat16"
            )
    text = plan_report.text_of(report)
    if given.plot:
        plan_report.draw_memory(given.plot, found, given.gpu_memory)
        # The report says where the picture is, also in JSON.
        report["plot"] = str(given.plot)
        text += f"\n\nwrote {given.plot}"
    # Without ``--gpu-memory`` there is nothing to fit into.
    return report, text, int(not report.get("fit", {}).get("fits", True))


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
            "model itself. Let the function return the unsharded model and select "
            "--units, leave the batch out, or run simulate."
        )
    return measure_activations(
        model.module,
        planned,
        model.inputs,
        loss=model.loss,
        checkpointing=given.checkpointing,
    )


def _time(found: Forecast, given: argparse.Namespace) -> dict[str, Any]:
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


def simulate(given: argparse.Namespace) -> Answer:
    """Simulate the step, write the trace, and return the report."""
    make = plan_models.maker_of(given.model)

    def build() -> tuple[Any, ...]:
        model = make()
        # A batch on the command line goes before inputs that the function returned.
        batch = given.batch and plan_models.inputs_for(model, given.batch)
        return model.module, batch or model.inputs, model.loss

    build.__name__ = given.model
    found = simulated_step(
        build,
        world_size=given.world_size,
        optimizer=given.optimizer,
        max_norm=given.max_norm,
    )
    report, lines = {"model": given.model, **found.as_dict()}, [str(found)]
    if given.gpu_memory:
        need = found.peak.memory.total
        report |= {"fits": need <= given.gpu_memory, "gpu_memory": given.gpu_memory}
        verdict = "fits" if report["fits"] else "does not fit"
        lines.append(f"{verdict}: {size_text(need)} of {size_text(given.gpu_memory)}")
    if given.trace:
        found.save_trace(given.trace)
        report["trace"] = str(given.trace)
        lines.append(f"trace, for https://ui.perfetto.dev: {given.trace}")
    text = f"{given.model}: " + "\n".join(lines)
    # Without ``--gpu-memory`` there is nothing to fit into.
    return report, text, int(not report.get("fits", True))


def _units_of(
    model: plan_models.Model, given: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Return the policy or the units that the arguments select, and how they do."""
    classes, units = given.unit_class, given.units
    if classes and units:
        raise PlanError(
            "--units and --unit-class select all units each; give one of them."
        )
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
    rows = [row.partition("=") for row in re.split(r",(?=\w+=)", text)]
    try:
        return Placement(**{name: tuple(split_words(dims)) for name, _, dims in rows})
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
    found = {
        "strategy": STRATEGIES[given.strategy],
        "placement": _placement(given.placement),
        # Without a dtype there is no mixed precision, as in ``fully_shard``.
        "mixed_precision": low if low != MixedPrecision() else None,
        "cpu_offload": CPUOffload(offload_params=True) if given.cpu_offload else None,
        "backward_prefetch": PREFETCH[given.backward_prefetch],
        "block": Block[given.block.upper()],
    }
    # Without defaults, which a function that shards by itself would be asked to change.
    return {
        name: each
        for name, each in found.items()
        if each != getattr(UnitOptions(), name)
    }
