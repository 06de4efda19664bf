"""The picture of a plan: the memory of a rank through one step, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import size_text
from composable_fsdp.tools.plan_report import KINDS
from composable_fsdp.tools.sharding_plan import Forecast


def draw_memory(path: Path, found: Forecast, capacity: int | None) -> None:
    """Draw the bytes on the device through one step, by kind, into ``path``.

    The suffix chooses the format: .png, .svg or .pdf.

    Raises: PlanError, without matplotlib; ValueError, for another suffix; OSError, if
        the file cannot be written.
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
    below = [0.0] * len(moments)
    # What stays from step to step lies at the bottom, what comes and goes above.
    for number, (kind, words) in enumerate(KINDS.items()):
        sizes = [getattr(moment.memory, kind) / size for moment in moments]
        if not any(sizes):
            continue
        above = [low + own for low, own in zip(below, sizes, strict=True)]
        # Steps and no slopes: memory is allocated and freed at once.
        axes.stairs(
            above, edges, baseline=below, fill=True, label=words, color=f"C{number}"
        )
        below = above
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
