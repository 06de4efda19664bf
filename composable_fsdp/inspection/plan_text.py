"""A plan as text for a terminal: tables by rich if rich is installed, else plain."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from composable_fsdp.inspection.plan_report import KINDS, Report
from composable_fsdp.naming import size_text

OPTIONS = {
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


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Args:
        title: the line above.
        header: the names of the columns.
        rows: the cells.
        left: number of columns that are left-aligned; all others are numbers.
        has_total: whether the last row is the sum of the others. Default False.
        optional: columns that a narrow terminal leaves out, the first one first.
            Default: none.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    has_total: bool = False
    optional: tuple[int, ...] = ()

    @property
    def widths(self) -> list[int]:
        """Characters of the widest cell of each column."""
        columns = zip(self.header, *self.rows, strict=True)
        return [max(map(len, column)) for column in columns]

    def narrowed(self, width: int) -> Table:
        """Return the table without the optional columns that exceed ``width``."""
        kept = list(range(len(self.header)))
        for index in self.optional:
            # Two characters between columns.
            if sum(self.widths[each] + 2 for each in kept) <= width:
                break
            kept.remove(index)
        return replace(
            self,
            header=[self.header[each] for each in kept],
            rows=[[row[each] for each in kept] for row in self.rows],
            left=sum(each < self.left for each in kept),
        )


def plain_text(parts: Sequence[str | Table]) -> str:
    """Return sentences and tables as plain text."""
    return "\n".join(_plain(part) for part in parts)


def print_parts(parts: Sequence[str | Table]) -> None:
    """Print sentences and tables on standard output, with rich on a terminal."""
    # A file or a pipe gets plain text: no color codes, no lines cut to a width.
    if not sys.stdout.isatty():
        print(plain_text(parts))
        return
    # rich is optional.
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(plain_text(parts))
        return
    # rich would color every number.
    console = Console(highlight=False)
    for part in parts:
        if isinstance(part, str):
            # The verdict is the line that a reader looks for.
            style = {"fits": "bold green", "does": "bold red"}.get(part[:4], "")
            console.print(part, style=style, markup=False)
            continue
        # The title apart: rich would wrap a title to the width of the table.
        console.print(f"\n{part.title}", style="bold", markup=False)
        part = part.narrowed(console.width)
        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for index, name in enumerate(part.header):
            justify: Literal["left", "right"] = "left" if index < part.left else "right"
            table.add_column(name, justify=justify, no_wrap=True)
        for index, row in enumerate(part.rows):
            if part.has_total and index == len(part.rows) - 1:
                table.add_section()
            table.add_row(*row)
        console.print(table)


def _plain(part: str | Table) -> str:
    """Return a part as lines of plain text."""
    if isinstance(part, str):
        return part
    rows, widths = [part.header, *part.rows], part.widths
    lines = [
        "  ".join(
            cell.ljust(width) if index < part.left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(["", part.title, *lines])


def parts_of(report: Report) -> list[str | Table]:
    """Return the report as sentences and tables, in reading order."""
    parts: list[str | Table] = [_headline(report), _units(report), _peak(report)]
    parts += ["", *_sentences(report)]
    if "fit" in report:
        parts += ["", *_verdict(report)]
    if "world_sizes" in report:
        parts.append(_world_sizes(report))
    if report["warnings"]:
        parts += ["", *(f"note: {each}" for each in report["warnings"])]
    return parts


def _headline(report: Report) -> str:
    """Return the model and the options as two lines."""
    model, options = report["model"], report["options"]
    dtypes = [
        f"{kind} in {options[name]}"
        for name, kind in (("param_dtype", "compute"), ("reduce_dtype", "reduction"))
        if options[name]
    ]
    # Replicas times ranks per shard group, as the dims of a mesh.
    ranks = f"{options['world_size']:,} rank{'s' * (options['world_size'] > 1)}"
    dims = [options["shard_world_size"]]
    if options["replicas"] > 1:
        dims.insert(0, options["replicas"])
    # ``get``: a saved report may be older than the option.
    cut = options.get("tensor_parallel_size")
    if cut is not None or len(dims) > 1:
        tensor_parallel = f" x {cut} tensor-parallel" if cut is not None else ""
        ranks += f" ({' x '.join(map(str, dims))}{tensor_parallel})"
    given = [
        options["strategy"],
        f"parameters in {' and '.join(options['dtypes'])}",
        *dtypes,
        f"all-gathers by {options['wire']}" if options["wire"] else "",
        "shards on the host" if options["cpu_offload"] else "",
        "activation checkpointing" if options["checkpointing"] else "",
        options["optimizer"],
    ]
    # Frozen parameters have neither gradients nor optimizer state.
    frozen = model["parameters"] - model["trainable"]
    is_frozen = f" ({frozen:,} frozen)" if frozen else ""
    whole = model.get("whole_parameters", model["parameters"])
    of = f" per rank of {whole:,}" if whole != model["parameters"] else ""
    return (
        f"{model['class']}, {model['parameters']:,} parameters{of}{is_frozen}, on "
        f"{ranks}: {', '.join(filter(None, given))}\n"
        f"units below the root: {model['units_from']}"
    )


def _units(report: Report) -> Table:
    """Return the table of units; its last row is the sum."""
    columns = ("parameters", "gradients", "optimizer", "sharded")
    rows = [
        [
            row["unit"],
            f"{row['times']} x",
            row["class"],
            f"{row['numel']:,}",
            *(size_text(row[name]) for name in columns),
            padding_text(row),
            size_text(row["full"]),
        ]
        for row in report["rows"]
    ]
    # Units are full in turns, so the last column has no sum.
    total = report["total"]
    rows.append(
        [
            "total",
            f"{total['times']} x",
            "",
            f"{total['numel']:,}",
            *(size_text(total[name]) for name in columns),
            padding_text(total),
            f"most {size_text(total['full'])}",
        ]
    )
    header = [
        "unit",
        "",
        "class",
        "elements",
        "parameters",
        "gradients",
        "optimizer",
        "sum",
        "padding",
        "one unit full",
    ]
    title = "Bytes per rank between steps"
    # A reader misses the sums and the names last.
    return Table(title, header, rows, 3, has_total=True, optional=(8, 2, 3, 9))


def padding_text(row: Report) -> str:
    """Return the padding of a row, as a part of its elements."""
    if not row["numel"]:
        return "-"
    return f"{row['padded_numel'] / row['numel'] - 1:.2%}"


def _peak(report: Report) -> Table:
    """Return the table of the memory at the peak; its last row is the sum."""
    peak = report["peak"]
    rows = []
    for name, words in KINDS.items():
        nbytes = peak["kinds"][name]
        # A zero would be read as an answer, where the question was not asked.
        if name == "activations":
            batch = peak["activations_of"]
            if batch is None:
                rows.append(["activations", "left out"])
            else:
                # The end of backward may be the peak, with the gradients of the root.
                freed = "" if nbytes else " (freed)"
                rows.append([f"activations of {batch}{freed}", size_text(nbytes)])
        # The optimizer's temporaries are seldom the peak, and a line of 0 B asks why.
        elif name != "temporaries" or nbytes:
            rows.append([words, size_text(nbytes)])
    rows.append(["total", size_text(peak["bytes"])])
    title = f"Bytes on the device at the peak of a step: {peak['when']}"
    return Table(title, ["", "per rank"], rows, 1, has_total=True)


def _sentences(report: Report) -> list[str]:
    """Return the traffic of a step, and the memory on the host."""
    sent = [
        f"{each['calls']:,} {name.replace('_', '-')}{'s' if each['calls'] > 1 else ''}"
        f" of {size_text(each['bytes'])} in all"
        for name, each in report["step"].items()
        if each["calls"]
    ]
    lines = [f"Per step and rank: {', '.join(sent) or 'no communication'}."]
    # A report that was saved by an earlier version has none.
    lines += [f"{line}." for line in report.get("owners", ())]
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
        for_what = "" if known else "activations, "
        return [
            f"fits: {size_text(needed)} of {capacity}; {left} are left for {for_what}"
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
        options = " ".join(OPTIONS.get(c, "") for c in change["change"].split(" and "))
        lines.append(
            f"  {size_text(change['bytes'])}, {verdict}: {change['change']}"
            + (f" ({options})" if options.strip() else "")
        )
    return lines


def _world_sizes(report: Report) -> Table:
    """Return the table of further world sizes."""
    rows = [
        [
            f"{row['world_size']:,}",
            *(
                size_text(row[name])
                for name in ("parameters", "gradients", "optimizer")
            ),
            size_text(row["peak"]),
            *([("yes" if row["fits"] else "no")] if "fits" in row else []),
        ]
        for row in report["world_sizes"]
    ]
    header = ["ranks", "parameters", "gradients", "optimizer", "peak"]
    # Without a capacity there is nothing to fit into.
    if any("fits" in row for row in report["world_sizes"]):
        header.append("fits")
    return Table("Bytes per rank by world size", header, rows, 0)
