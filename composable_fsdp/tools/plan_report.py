"""A plan as one dict of numbers, which ``--json`` prints, and as the text of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from composable_fsdp.naming import size_text
from composable_fsdp.tools.command import Report, counted
from composable_fsdp.tools.fit import Fit, at_world_size, fit
from composable_fsdp.tools.forecast import Forecast, UnitRow
from composable_fsdp.tools.sharding_plan import ShardingPlan, owner_lines
from composable_fsdp.tools.unit_costs import Traffic

KEY = "composable_fsdp_plan"
"""The key that tells a saved report; the value is the version of the report."""

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

_OPTIONS = {
    "strategy=FULL_SHARD": "--strategy full-shard",
    "strategy=HYBRID_SHARD": "--strategy hybrid-shard",
    "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)": (
        "--param-dtype bfloat16"
    ),
    "backward_prefetch=None": "--backward-prefetch none",
    "block=Block.ELEMENT": "--block element",
    "one shard group of all ranks, without replicas": (
        "--strategy full-shard, without --shard-world-size"
    ),
    "cpu_offload=CPUOffload(offload_params=True)": "--cpu-offload",
    "activation checkpointing of each unit": "--checkpointing",
}
"""Changes that ``tools.fit`` suggests, with the option that tries each."""


def report_of(
    found: Forecast,
    *,
    source: str,
    units_from: str,
    capacity: int | None = None,
    world_sizes: Sequence[int] = (),
    tensor_parallel_size: int | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Return the numbers of a forecast.

    Returns: a dict of texts, numbers, lists and dicts. Bytes are per rank.
    Raises: PlanError, if a world size is not possible.
    """
    plan, peak, activations = found.plan, found.peak, found.activations
    rows = [_row(row) for row in found.rows]
    cut = tensor_parallel_size or 1
    # The root of a hybrid plan may be unsharded; the units below tell the groups.
    groups = max(plan.units, key=lambda unit: unit.shard_world_size)
    whole = plan.whole_numel
    report: Report = {
        KEY: 1,
        "model": {
            "source": source,
            "class": plan.units[0].class_name,
            "parameters": plan.numel,
            # With tensor parallelism a rank has less than the whole model.
            **({"whole_parameters": whole} if whole != plan.numel else {}),
            "trainable": sum(sum(unit.trainable.values()) for unit in plan.units),
            "units": len(plan.units),
            "units_from": units_from,
        },
        "options": {
            **_options(plan),
            "optimizer": found.optimizer.name,
            "checkpointing": bool(activations and activations.checkpointed),
            "world_size": plan.world_size * cut,
            "shard_world_size": groups.shard_world_size,
            "replicas": groups.replicas,
            "tensor_parallel_size": tensor_parallel_size,
        },
        "rows": rows,
        "total": {
            name: sum(row[name] for row in rows)
            for name in ("times", "numel", "padded_numel", *_KEPT, "sharded")
        }
        # Units take turns, so the largest of them counts.
        | {"full": max(row["full"] for row in rows)},
        "peak": {
            "when": peak.when,
            "bytes": peak.memory.total,
            "kinds": peak.memory.by_kind(),
            "activations_of": activations.batch if activations else None,
        },
        "host_bytes": found.host_bytes,
        "save_bytes": found.save_bytes,
        "step": _traffic(plan.traffic),
        "owners": owner_lines(plan),
        "warnings": [*notes, *plan.warnings],
    }
    # A key that is absent was not asked for.
    if capacity is not None:
        report["fit"] = _fit(fit(found, capacity), cut)
    # Only layouts change with the world size; the model is walked once.
    if world_sizes:
        report["world_sizes"] = [
            _at(at_world_size(found, size // cut), capacity) | {"world_size": size}
            for size in world_sizes
        ]
    return report


def _options(plan: ShardingPlan) -> Report:
    """Return the options of the plan, the root's where units differ."""
    root = plan.units[0]
    options, mixed = root.options, root.options.mixed_precision
    prefetch = options.backward_prefetch

    # JSON has no dtypes: their names without "torch.".
    def dtype(value: object) -> str | None:
        return None if value is None else str(value).removeprefix("torch.")

    regions = [region for unit in plan.units for region in unit.regions]
    return {
        "strategy": options.strategy.name,
        "dtypes": sorted({dtype(region.dtype) or "" for region in regions}),
        "param_dtype": dtype(getattr(mixed, "param_dtype", None)),
        "reduce_dtype": dtype(getattr(mixed, "reduce_dtype", None)),
        "cpu_offload": root.is_offloaded,
        "backward_prefetch": None if prefetch is None else prefetch.name,
        "forward_prefetch": options.forward_prefetch,
        "block": str(options.block).removeprefix("Block."),
        "wire": None if options.wire is None else repr(options.wire),
        "arena": None if options.arena is None else repr(options.arena),
    }


def _row(row: UnitRow) -> Report:
    """Return the numbers of equal units."""
    columns = ("numel", "padded_numel", *_KEPT, "sharded", "full")
    return {
        "unit": row.fold.name,
        "times": row.fold.times,
        "class": row.fold.unit.class_name,
        **{name: getattr(row, name) for name in columns},
        **_traffic(row.traffic),
    }


def _traffic(traffic: Traffic) -> Report:
    """Return calls and bytes of each kind of collective."""
    return {
        name: {
            "calls": getattr(traffic, f"{name}_calls"),
            "bytes": getattr(traffic, f"{name}_bytes"),
        }
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    }


def _fit(found: Fit, cut: int) -> Report:
    """Return whether the plan fits, and what would make it fit.

    ``cut`` ranks hold the parts of the model of a rank of the plan.
    """
    return {
        "capacity": found.capacity,
        "fits": found.fits,
        "smallest_world_size": found.smallest and cut * found.smallest,
        "changes": [
            {"change": change.text, "bytes": change.total, "fits": change.fits}
            for change in found.changes
        ],
    }


def _at(found: Forecast, capacity: int | None) -> Report:
    """Return the row of a world size."""
    plan = found.plan
    row: Report = {
        "world_size": plan.world_size,
        "padding": plan.padded_numel - plan.numel,
        "parameters": plan.parameter_bytes,
        "gradients": plan.gradient_bytes,
        "optimizer": sum(each.optimizer for each in found.rows),
        "peak": found.total,
        "when": found.peak.when,
    }
    return row if capacity is None else {**row, "fits": found.total <= capacity}


def text_of(report: Report, width: int | None = None) -> str:
    """Return the report as text; tables leave columns out to keep to ``width``."""
    lines = [_headline(report), *_units(report, width), *_peak(report), ""]
    lines += _sentences(report)
    if "fit" in report:
        lines += ["", *_verdict(report)]
    if "world_sizes" in report:
        lines += _world_sizes(report)
    if report["warnings"]:
        lines += ["", *(f"note: {each}" for each in report["warnings"])]
    return "\n".join(lines)


def _table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int
) -> list[str]:
    """Return the lines of a table; the first ``left`` columns are left-aligned."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "",
        title,
        *(
            "  ".join(
                cell.ljust(width) if index < left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ),
    ]


def _headline(report: Report) -> str:
    """Return the model and the options as two lines."""
    model, options = report["model"], report["options"]
    # Replicas times ranks per shard group, as the dims of a mesh.
    ranks = counted(options["world_size"], "rank")
    dims = [str(options["shard_world_size"])]
    if options["replicas"] > 1:
        dims.insert(0, str(options["replicas"]))
    cut = options["tensor_parallel_size"]
    if cut is not None:
        dims.append(f"{cut} tensor-parallel")
    if len(dims) > 1:
        ranks += f" ({' x '.join(dims)})"
    given = [
        options["strategy"],
        f"parameters in {' and '.join(options['dtypes'])}",
        *(
            f"{kind} in {options[name]}"
            for name, kind in (
                ("param_dtype", "compute"),
                ("reduce_dtype", "reduction"),
            )
            if options[name]
        ),
        f"all-gathers by {options['wire']}" if options["wire"] else "",
        "shards on the host" if options["cpu_offload"] else "",
        "activation checkpointing" if options["checkpointing"] else "",
        options["optimizer"],
    ]
    # Frozen parameters have neither gradients nor optimizer state.
    frozen = model["parameters"] - model["trainable"]
    is_frozen = f" ({frozen:,} frozen)" if frozen else ""
    whole = model.get("whole_parameters")
    of = "" if whole is None else f" per rank of {whole:,}"
    return (
        f"{model['class']}, {model['parameters']:,} parameters{of}{is_frozen}, on "
        f"{ranks}: {', '.join(filter(None, given))}\n"
        f"units below the root: {model['units_from']}"
    )


def _units(report: Report, width: int | None) -> list[str]:
    """Return the table of units; its last row is the sum."""
    total = {"unit": "total", "class": "", **report["total"]}
    rows = [
        {
            "unit": row["unit"],
            "": f"{row['times']} x",
            "class": row["class"],
            "elements": f"{row['numel']:,}",
            **{name: size_text(row[name]) for name in _KEPT},
            "sum": size_text(row["sharded"]),
            "padding": _padding(row),
            # Units are full in turns, so this column has no sum.
            "one unit full": "most " * (row is total) + size_text(row["full"]),
        }
        for row in (*report["rows"], total)
    ]
    title, names = "Bytes per rank between steps", list(rows[0])
    # A reader misses the sums and the names last.
    for dropped in ("padding", "class", "elements", "one unit full", None):
        left = 3 if "class" in names else 2
        lines = _table(title, names, [[r[n] for n in names] for r in rows], left)
        if width is None or dropped is None or max(map(len, lines)) <= width:
            break
        names.remove(dropped)
    return lines


def _padding(row: Report) -> str:
    """Return the padding of a row, as a part of its elements."""
    return f"{row['padded_numel'] / row['numel'] - 1:.2%}" if row["numel"] else "-"


def _peak(report: Report) -> list[str]:
    """Return the table of the memory at the peak; its last row is the sum."""
    peak = report["peak"]
    rows = []
    for name, words in KINDS.items():
        size = size_text(peak["kinds"][name])
        if name == "activations":
            batch = peak["activations_of"]
            # The end of backward may be the peak, with the gradients of the root.
            freed = "" if peak["kinds"][name] else " (freed)"
            words += "" if batch is None else f" of {batch}{freed}"
            # A zero would be read as an answer, where the question was not asked.
            size = "left out" if batch is None else size
        # The optimizer's temporaries are seldom the peak, and a line of 0 B asks why.
        if name != "temporaries" or peak["kinds"][name]:
            rows.append([words, size])
    rows.append(["total", size_text(peak["bytes"])])
    title = f"Bytes on the device at the peak of a step: {peak['when']}"
    return _table(title, ["", "per rank"], rows, 1)


def _sentences(report: Report) -> list[str]:
    """Return the traffic of a step, and the memory on the host."""
    sent = [
        f"{counted(each['calls'], name.replace('_', '-'))} of "
        f"{size_text(each['bytes'])} in all"
        for name, each in report["step"].items()
        if each["calls"]
    ]
    lines = [f"Per step and rank: {', '.join(sent) or 'no communication'}."]
    lines += [f"{line}." for line in report["owners"]]
    if report["host_bytes"]:
        lines.append(
            f"On the host: {size_text(report['host_bytes'])} per rank (parameters, "
            "gradients and optimizer state of offloaded units)."
        )
    lines.append(
        f"async_save holds {size_text(report['save_bytes'])} of host memory per rank."
    )
    if report["peak"]["activations_of"] is None:
        lines.append("Activations are left out; --batch, such as 1x4096, adds them.")
    return lines


def _verdict(report: Report) -> list[str]:
    """Return whether the plan fits, and what would make it fit."""
    found, needed = report["fit"], report["peak"]["bytes"]
    known = report["peak"]["activations_of"] is not None
    capacity = size_text(found["capacity"])
    smallest = found["smallest_world_size"]
    # A plan counts tensors; the device holds more than tensors.
    if found["fits"]:
        left = size_text(found["capacity"] - needed)
        return [
            f"fits{'' if known else ' without activations'}: {size_text(needed)} of "
            f"{capacity}; {left} are left for {'' if known else 'activations, '}"
            "CUDA, NCCL and fragmentation, which no plan counts.",
            f"The smallest world size that fits is {smallest:,}.",
        ]
    lines = [f"does not fit: {size_text(needed)} of {capacity}. What would:"]
    # Full buffers and activations do not shrink with the number of ranks.
    if smallest is None:
        lines.append(
            f"  no world size: buffers that do not shrink with ranks need more than "
            f"{capacity}"
        )
    else:
        lines.append(f"  {smallest:,} ranks and more (--world-size {smallest})")
    for change in found["changes"]:
        verdict = "fits" if change["fits"] else "not enough alone"
        # The options that try the change, to be copied behind the command.
        options = " ".join(_OPTIONS.get(c, "") for c in change["change"].split(" and "))
        lines.append(
            f"  {size_text(change['bytes'])}, {verdict}: {change['change']}"
            + (f" ({options})" if options.strip() else "")
        )
    return lines


def _world_sizes(report: Report) -> list[str]:
    """Return the table of further world sizes."""
    rows = [
        [
            f"{row['world_size']:,}",
            *(size_text(row[name]) for name in (*_KEPT, "peak")),
            *([("yes" if row["fits"] else "no")] if "fits" in row else []),
        ]
        for row in report["world_sizes"]
    ]
    # Without a capacity there is nothing to fit into.
    header = ["ranks", *_KEPT, "peak", "fits"][: len(rows[0])]
    return _table("Bytes per rank by world size", header, rows, 0)


def differences(first: Report, second: Report) -> Report:
    """Return all that differs: each entry is a pair, with None for what is absent."""
    found: Report = {}
    readers: dict[str, Callable[[Report], Report]] = {
        "options": lambda report: {**report["model"], **report["options"]},
        "bytes": _bytes,
        "calls": lambda report: {
            name.replace("_", "-") + "s": each["calls"]
            for name, each in report["step"].items()
        },
        "units": lambda report: {
            row["unit"]: f"{row['times']} x {row['class']}, {row['numel']:,} elements, "
            f"{size_text(row['sharded'])} per rank"
            for row in report["rows"]
        },
    }
    for key, read in readers.items():
        a, b = read(first), read(second)
        # A dict keeps the order of names, a set would not.
        found[key] = {
            name: [a.get(name), b.get(name)]
            for name in {**a, **b}
            if a.get(name) != b.get(name)
        }
    return found


def _bytes(report: Report) -> dict[str, int]:
    """Return the bytes per rank by what they are."""
    # The order is that of the report: what stays, what comes and goes, what is sent.
    return {
        **{KINDS[name].partition(",")[0]: report["total"][name] for name in _KEPT},
        **{
            f"at the peak: {words}": report["peak"]["kinds"][name]
            for name, words in KINDS.items()
        },
        "peak": report["peak"]["bytes"],
        "on the host": report["host_bytes"],
        **{
            f"sent by {name.replace('_', '-')}s": each["bytes"]
            for name, each in report["step"].items()
        },
    }


def text_of_differences(found: Report, names: tuple[str, str]) -> str:
    """Return the differences as text; ``names`` named the two plans."""
    lines = [f"A: {names[0]}", f"B: {names[1]}"]
    # Two spellings of one plan have no differences.
    if not any(found.values()):
        lines.append("The two plans are equal.")
    for key, title in {
        "options": "Options and models",
        "bytes": "Bytes per rank",
        "calls": "Calls per step",
        "units": "Units",
    }.items():
        if not found[key]:
            continue
        header, left = ["", "A", "B"], 3
        rows = [[name, *map(_value, pair)] for name, pair in found[key].items()]
        if key == "bytes":
            rows = [
                [name, size_text(a), size_text(b), _change(a, b)]
                for name, (a, b) in found[key].items()
            ]
        elif key == "calls":
            rows = [
                [*row, f"{b - a:+,}"]
                for row, (a, b) in zip(rows, found[key].values(), strict=True)
            ]
        if key in ("bytes", "calls"):
            header, left = [*header, "B - A"], 1
        lines += _table(title, header, rows, left)
    return "\n".join(lines)


def _value(value: Any) -> str:
    """Return a value of an option as text."""
    if value is None:
        return "-"
    # bool is a subclass of int.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_number else str(value)


def _change(first: int, second: int) -> str:
    """Return the difference of two sizes as text, with the sign and the ratio."""
    sign = "+" if second >= first else "-"
    # A ratio to nothing says nothing.
    ratio = f", {second / first:.2f} x" if first and second else ""
    return f"{sign}{size_text(abs(second - first))}{ratio}"
