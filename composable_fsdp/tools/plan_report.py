"""A plan as a dict of numbers, which ``--json`` prints, as text, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composable_fsdp.comm.placements import name_of
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import listed, size_text
from composable_fsdp.storage.manifest import dtype_name
from composable_fsdp.tools.texts import counted

Report = dict[str, Any]

KINDS = {
    "parameters": "parameters, sharded",
    "gradients": "gradients, sharded",
    "optimizer": "optimizer state",
    "full": "full parameters in use",
    "ahead": "all-gathers in flight",
    "reduce": "reduction buffers",
    "in_flight": "gradients not reduced yet",
    "activations": "activations",
    "temporaries": "temporaries",
}
"""Kinds of memory, with the words that a reader sees."""

_KEPT = ("parameters", "gradients", "optimizer")
"""Kinds that stay between steps."""


def report_of(found: Any, *, source: str = "", units_from: str = "") -> Report:
    """Return the numbers of a ``Forecast``, for JSON. Bytes are per rank."""
    plan, peak, activations = found.plan, found.peak.memory, found.activations
    columns = ("numel", "padded_numel", *_KEPT, "sharded", "full")
    rows = [
        {
            "unit": row.fold.name,
            "times": row.fold.times,
            "class": row.fold.unit.class_name,
            **{name: getattr(row, name) for name in columns},
            **row.traffic.by_op(),
        }
        for row in found.rows
    ]
    # The root of a hybrid plan may be unsharded; the units below tell the groups.
    groups = max(plan.units, key=lambda unit: unit.shard_world_size)
    return {
        "model": {
            "source": source,
            "class": plan.units[0].class_name,
            "parameters": plan.numel,
            # With tensor parallelism a rank has less than the whole model.
            "whole_parameters": plan.whole_numel,
            "trainable": sum(sum(unit.trainable.values()) for unit in plan.units),
            "units": len(plan.units),
            "units_from": units_from,
        },
        "world_size": plan.world_size,
        "shard_world_size": groups.shard_world_size,
        "replicas": groups.replicas,
        "options": list(filter(None, _options(found))),
        "rows": rows,
        "total": {
            name: sum(row[name] for row in rows) for name in ("times", *columns[:-1])
        }
        # Units take turns, so the largest of them counts.
        | {"full": max(row["full"] for row in rows)},
        "peak": {
            "when": peak.when,
            "bytes": peak.total,
            "kinds": {kind: peak.by_kind()[kind] for kind in KINDS},
            "activations_of": activations.batch if activations else None,
        },
        "host_bytes": found.host_bytes,
        "save_bytes": found.save_bytes,
        "step": plan.traffic.by_op(),
        "further": list(_further(found)),
        "warnings": [],
    }


def _options(found: Any) -> list[str]:
    """Return the options of the plan in words, the root's where units differ."""
    root, units = found.plan.units[0], found.plan.units
    options, activations = root.options, found.activations
    dtypes = {dtype_name(region.dtype) for unit in units for region in unit.regions}
    mixed = options.mixed_precision
    low = (mixed.param_dtype, mixed.reduce_dtype) if mixed else (None, None)
    compute, reduction = (dtype and dtype_name(dtype) for dtype in low)
    return [
        name_of(options.chosen),
        f"parameters in {' and '.join(sorted(dtypes))}",
        compute and f"compute in {compute}",
        reduction and f"reduction in {reduction}",
        options.wire and f"all-gathers by {options.wire!r}",
        "shards on the host" if root.is_offloaded else "",
        "activation checkpointing" if activations and activations.checkpointed else "",
        found.optimizer.name,
    ]


def _further(found: Any) -> Iterator[str]:
    """Yield sentences on an arena, states on the host, and units frozen in part."""
    step = found.plan.step_memory()
    if step.kept:
        count = counted(sum(len(slot.units) for slot in step.slots), "unit")
        yield (
            f"arena: {counted(len(step.slots), 'slot')} of {size_text(step.kept)} in "
            f"all for the full parameters of {count}, between steps, too"
        )
    units = [unit for unit in found.plan.units if unit.has_host_states]
    if units:
        nbytes = sum(map(found.optimizer.state_bytes, units))
        two = size_text(found.optimizer.buffer_bytes(units))
        # 50 GB/s between host and device: what PCIe 5.0 with 16 lanes reaches.
        yield (
            f"optimizer states on the host: {size_text(nbytes)}, on the device two "
            f"buffers of {two} in all, in a step of at least {nbytes / 25e6:.3g} ms "
            "(there and back at 50 GB/s)"
        )
    for fold in (row.fold for row in found.rows):
        trainable, frozen = fold.unit.trainable, fold.unit.frozen
        if trainable and frozen:
            yield (
                f"unit {fold.name} trains {len(trainable)} of "
                f"{len(trainable) + len(frozen)} parameters "
                f"({sum(trainable.values()):,} elements; {sum(frozen.values()):,} are "
                f"frozen): {listed(trainable)}"
            )


def text_of(report: Report) -> str:
    """Return the report as text."""
    lines = [_headline(report), *_units(report), *_peak(report), ""]
    sent = ", ".join(
        f"{counted(each['calls'], op.replace('_', '-'))} of "
        f"{size_text(each['bytes'])} in all"
        for op, each in report["step"].items()
        if each["calls"]
    )
    lines.append(f"Per step and rank: {sent or 'no communication'}.")
    lines += report["further"]
    if report["host_bytes"]:
        lines.append(
            f"On the host: {size_text(report['host_bytes'])} per rank (parameters, "
            "gradients and optimizer state that are offloaded)."
        )
    saved = size_text(report["save_bytes"])
    lines.append(f"async_save holds {saved} of host memory per rank.")
    if "time" in report:
        time = report["time"]
        lines.append(
            f"Estimated time of a step on {time['machine']}, {time['step']}: "
            f"{time['seconds']:.3g} s, of which the GPU waits {time['waiting']:.3g} s "
            f"for collectives; {time['tokens_per_second']:,.0f} tokens per second and "
            "GPU. The host's time per unit is left out."
        )
    if report["peak"]["activations_of"] is None:
        lines.append("Activations are left out; a batch, as --batch 1x4096, adds them.")
    if "fit" in report:
        lines += ["", *_verdict(report)]
    if report["warnings"]:
        lines += ["", *(f"note: {each}" for each in report["warnings"])]
    return "\n".join(lines)


def _headline(report: Report) -> str:
    """Return the model and the options as two lines."""
    model, ranks = report["model"], counted(report["world_size"], "rank")
    # Replicas times ranks per shard group, as the dims of a mesh.
    if report["replicas"] > 1:
        ranks += f" ({report['replicas']} x {report['shard_world_size']})"
    # Frozen parameters have neither gradients nor optimizer state.
    numel, whole = model["parameters"], model["whole_parameters"]
    frozen = numel - model["trainable"]
    return (
        f"{model['class']}, {numel:,} parameters"
        f"{'' if whole == numel else f' per rank of {whole:,}'}"
        f"{f' ({frozen:,} frozen)' if frozen else ''}, on {ranks}: "
        f"{', '.join(report['options'])}"
        + (f"\nunits below the root: {model['units_from']}" if model["source"] else "")
    )


def _units(report: Report) -> list[str]:
    """Return the table of units; its last row is the sum."""
    rows = [["unit", "", *_KEPT, "sum", "padding"]]
    for row in (*report["rows"], {"unit": "total", **report["total"]}):
        sizes = [size_text(row[name]) for name in (*_KEPT, "sharded")]
        padding = row["numel"] and f"{row['padded_numel'] / row['numel'] - 1:.2%}"
        rows.append([row["unit"], f"{row['times']} x", *sizes, padding or "-"])
    return ["", "Bytes per rank between steps", *_table(rows)]


def _table(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table whose first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, row, widths[1:])]).rstrip()
        for name, *row in rows
    ]


def _peak(report: Report) -> list[str]:
    """Return the table of the memory at the peak; its last row is the sum."""
    peak, batch = report["peak"], report["peak"]["activations_of"]
    rows = [["", "per rank"]]
    for name, words in KINDS.items():
        number = peak["kinds"][name]
        size = size_text(number)
        if name == "activations":
            # A zero would be read as an answer, where the question was not asked. The
            # end of backward may be the peak, with the gradients of the root.
            size = "left out" if batch is None else size
            freed = "" if number else " (freed)"
            words += "" if batch is None else f" of {batch}{freed}"
        # The optimizer's temporaries are seldom the peak, and a line of 0 B asks why.
        if name != "temporaries" or number:
            rows.append([words, size])
    rows.append(["total", size_text(peak["bytes"])])
    title = f"Bytes on the device at the peak of a step: {peak['when']}"
    return ["", title, *_table(rows)]


def _verdict(report: Report) -> Iterator[str]:
    """Yield whether the plan fits, and what would make it fit."""
    found, needed = report["fit"], report["peak"]["bytes"]
    known = report["peak"]["activations_of"] is not None
    capacity = size_text(found["capacity"])
    smallest = found["smallest_world_size"]
    # A plan counts tensors; the device holds more than tensors.
    if found["fits"]:
        left = size_text(found["capacity"] - needed)
        yield (
            f"fits{'' if known else ' without activations'}: {size_text(needed)} of "
            f"{capacity}; {left} are left for {'' if known else 'activations, '}"
            "CUDA, NCCL and fragmentation, which no plan counts."
        )
        yield f"The smallest world size that fits is {smallest:,}."
        return
    yield f"does not fit: {size_text(needed)} of {capacity}. What would:"
    # Full buffers and activations do not shrink with the number of ranks.
    yield (
        "  no world size: buffers that do not shrink with ranks need more than "
        f"{capacity}"
        if smallest is None
        else f"  {smallest:,} ranks and more (--world-size {smallest})"
    )
    for change in found["changes"]:
        verdict = "fits" if change["fits"] else "not enough alone"
        # The options that try the change, to be copied behind the command.
        yield f"  {size_text(change['bytes'])}, {verdict}: {change['options']}"


def draw_memory(path: Path, found: Any, capacity: int | None) -> None:
    """Draw the bytes of a ``Forecast`` through one step into a .png, .svg or .pdf.

    Raises: PlanError, without matplotlib; ValueError, for another suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(
            "--plot draws with matplotlib, which is not installed here: "
            "pip install 'composable-fsdp[cli]'."
        ) from error
    moments = found.moments
    unit = "GiB" if found.total >= 2**30 else "MiB"
    size = 2**30 if unit == "GiB" else 2**20
    # The last moment, the optimizer's step, would be too thin to be seen.
    last = max(1, len(moments) // 16)
    edges = [*range(len(moments)), len(moments) - 1 + last]
    # Without pyplot no window system is asked for.
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    axes = figure.subplots()
    # What stays from step to step lies at the bottom, what comes and goes above. Steps
    # and no slopes: memory is allocated and freed at once.
    rows = {
        words: [getattr(moment.memory, kind) / size for moment in moments]
        for kind, words in KINDS.items()
    }
    rows = {words: [*row, row[-1]] for words, row in rows.items() if any(row)}
    axes.stackplot(edges, [*rows.values()], labels=[*rows], step="post")
    total = found.total / size
    top = 1.12 * total
    if capacity is not None:
        # A GPU far above the peak would press the picture flat, and is left out.
        if capacity <= 2 * found.total:
            axes.axhline(capacity / size, color="C3", linestyle="--")
            top = max(top, 1.08 * capacity / size)
        axes.set_title(f"one rank; a GPU has {size_text(capacity)}", loc="left")
    index = moments.index(found.peak)
    axes.annotate(
        f"peak {size_text(found.total)}, {found.peak.when}",
        ((edges[index] + edges[index + 1]) / 2, total),
        (0, 5),
        textcoords="offset points",
        ha="right" if index > len(moments) / 2 else "left",
        fontweight="bold",
    )
    phases = [m.event.phase if m.event else "optimizer" for m in moments]
    begins = {phase: phases.index(phase) for phase in dict.fromkeys(phases)}
    axes.set(xlim=(0, edges[-1]), ylim=(0, top), ylabel=unit)
    axes.set_xticks(list(begins.values()), list(begins), ha="left")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right upper", reverse=True, frameon=False)
    figure.savefig(path)
