"""Pictures of a plan: who holds what, the memory of a step, the schedule of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from composable_fsdp.inspection.plan_report import KINDS
from composable_fsdp.inspection.svg import (
    WIDTH,
    box,
    color,
    element,
    legend,
    line,
    picture,
    text,
)
from composable_fsdp.naming import ROOT_NAME
from composable_fsdp.planning.fold import Fold
from composable_fsdp.planning.layout import ParameterSlot, RegionLayout
from composable_fsdp.planning.memory import COMPUTE, GATHER, REDUCE
from composable_fsdp.planning.plan import size_text
from composable_fsdp.tools.forecast import Forecast, StepMoment

PADDING = "url(#padding)"
"""The fill of padding."""

_RANKS = 16
"""Most ranks that are drawn; of more, the first four and the last four."""

_COLUMNS = 12
"""Most columns of a schedule per phase; of more, the first and the last half."""

_LEFT = 76
"""Width of the labels on the left."""


def holdings(fold: Fold) -> str:
    """Return a picture of the shards: a row per rank, a color per parameter."""
    unit = fold.unit
    parts: list[str] = []
    entries: list[tuple[str, str]] = []
    y = 4.0
    for number, region in enumerate(unit.regions):
        # A region of empty parameters has no shards.
        if not region.padded_numel:
            continue
        dtype = str(region.dtype).removeprefix("torch.")
        frozen = "" if region.trainable else ", frozen"
        parts.append(
            text(
                0,
                y + 12,
                f"region {number + 1}: {region.numel:,} {dtype} elements{frozen}, "
                f"{region.shard_numel:,} per rank, "
                f"{region.padded_numel - region.numel:,} of padding",
            )
        )
        y += 20
        # Colors go on from region to region, so that a color is one parameter.
        colors = {
            slot.index: len(entries) + i for i, slot in enumerate(region.parameters)
        }
        drawn, y = _shards(region, colors, y, rows=unit.options.keeps_rows)
        parts.append(drawn)
        entries += [(color(colors[s.index]), _names(s)) for s in region.parameters]
    drawn, y = legend(y + 2, [*entries, (PADDING, "padding")])
    return picture(y, f"Shards of {fold.name}", [*parts, drawn])


def _names(slot: ParameterSlot) -> str:
    """Return the names and the shape of a parameter; a tie has several names."""
    return f"{' = '.join(slot.fqns)} {tuple(slot.shape)}"


def _shards(
    region: RegionLayout, colors: dict[int, int], y: float, *, rows: bool
) -> tuple[str, float]:
    """Return the rows of the ranks of a region from ``y`` on, and their lower end."""
    parts: list[str] = []
    scale = (WIDTH - _LEFT) / region.shard_numel
    for rank in _shown(region.world_size, _RANKS, kept=4):
        # A gap stands for the ranks between.
        if rank is None:
            hidden = region.world_size - 8
            parts.append(text(_LEFT, y + 12, f"⋮ {hidden:,} more ranks", class_="dim"))
            y += 18
            continue
        parts.append(text(0, y + 13, f"rank {rank:,}"))
        # Padding is what no parameter covers.
        parts.append(box(_LEFT, y, WIDTH - _LEFT, 16, PADDING, title="padding"))
        for slot in region.parameters:
            start, stop = region.interval(slot, rank)
            # Most ranks hold parts of a few parameters only.
            if stop <= start:
                continue
            offset = region.shard_offset(slot, rank)
            parts.append(
                box(
                    _LEFT + offset * scale,
                    y,
                    (stop - start) * scale,
                    16,
                    color(colors[slot.index]),
                    title=f"rank {rank}: {' = '.join(slot.fqns)}, "
                    + part_words(slot, start, stop, rows=rows),
                    label=f"{slot.fqn} {part_words(slot, start, stop, rows=rows)}",
                )
            )
        y += 19
    return "".join(parts), y + 6


def part_words(slot: ParameterSlot, start: int, stop: int, *, rows: bool) -> str:
    """Return the part ``[start, stop)`` of a parameter in words."""
    if (start, stop) == (0, slot.numel):
        return "whole"
    # Shards of Block.ELEMENT may begin inside a row.
    if rows and len(slot.shape) > 1:
        width = slot.numel // slot.shape[0]
        return _range("row", start // width, (stop - 1) // width)
    return _range("element", start, stop - 1)


def _range(what: str, first: int, last: int) -> str:
    """Return a range of rows or elements in words."""
    return f"{what}s {first:,}-{last:,}" if last > first else f"{what} {first:,}"


def _shown(count: int, most: int, *, kept: int) -> list[int | None]:
    """Return the numbers below ``count``.

    Of more than ``most`` numbers, ``kept`` on each side are left, with None between.
    """
    if count <= most:
        return list(range(count))
    return [*range(kept), None, *range(count - kept, count)]


def memory(found: Forecast, capacity: int | None) -> str:
    """Return a picture of the bytes on the device through one step."""
    moments = found.moments
    # Kinds without a byte would only lengthen the legend.
    kinds = [kind for kind in KINDS if any(getattr(m.memory, kind) for m in moments)]
    peak = found.peak
    # A GPU far above the peak would press the picture flat, and is left out.
    top = 1.12 * max(found.total, min(capacity or 0, 2 * found.total))
    height, left, base = 300.0, 76.0, 330.0
    # The optimizer's step is the last moment and would be too thin to be seen.
    widths = [1.0] * (len(moments) - 1) + [max(1.0, len(moments) / 16)]
    scale = (WIDTH - left) / sum(widths)
    edges = [left + scale * each for each in accumulate(widths, initial=0.0)]

    # SVG counts y from the top.
    def at(nbytes: float) -> float:
        return base - height * nbytes / top

    parts = _axis(top, at, left)
    # What stays from step to step lies at the bottom, what comes and goes above.
    below = [0] * len(moments)
    for kind in kinds:
        above = [
            low + getattr(m.memory, kind) for low, m in zip(below, moments, strict=True)
        ]
        # Steps and no slopes: memory is allocated and freed at once.
        outline = [
            *_stairs(above, edges, at),
            *_stairs(below, edges, at)[::-1],
        ]
        parts.append(
            element(
                "polygon",
                title=KINDS[kind],
                points=" ".join(f"{x:.1f},{y:.1f}" for x, y in outline),
                fill=_kind_color(kind),
            )
        )
        below = above
    parts += _phases(moments, edges, base)
    # The first of several equal peaks, as the report names.
    index = moments.index(peak)
    place = (edges[index] + edges[index + 1]) / 2
    if capacity is not None and capacity < top:
        parts.append(line(left, at(capacity), WIDTH, at(capacity), "limit"))
        words = f"{size_text(capacity)} of the GPU"
        parts.append(text(left + 6, at(capacity) - 5, words, class_="strong"))
    # The label lies on the side with more room.
    anchor = "end" if place > WIDTH / 2 else "start"
    words = f"peak {size_text(found.total)}, {peak.when}"
    parts.append(element("circle", cx=place, cy=at(found.total), r=4, fill="#111"))
    parts.append(
        text(place, at(found.total) - 9, words, text_anchor=anchor, class_="strong")
    )
    # The legend has the order of the picture, from the top.
    entries = [(_kind_color(kind), KINDS[kind]) for kind in reversed(kinds)]
    drawn, end = legend(base + 28, entries)
    return picture(end, f"Memory over one step, {words}", [*parts, drawn])


def _kind_color(kind: str) -> str:
    """Return the color of a kind of memory, the same in all pictures."""
    return color(list(KINDS).index(kind))


_Scale = Callable[[float], float]
"""A function from bytes to the height in a picture."""


def _stairs(
    values: Sequence[int], edges: Sequence[float], at: _Scale
) -> list[tuple[float, float]]:
    """Return the corners of a line that is constant during each moment."""
    sides = zip(values, pairwise(edges), strict=True)
    return [(x, at(value)) for value, both in sides for x in both]


def _axis(top: float, at: _Scale, left: float) -> list[str]:
    """Return horizontal lines at round numbers of bytes, with labels."""
    # The largest power of two that leaves at least three lines.
    gap = 1
    while gap * 2 <= top / 3:
        gap *= 2
    parts = []
    for nbytes in range(0, int(top) + 1, gap):
        parts.append(line(left, at(nbytes), WIDTH, at(nbytes), "grid"))
        # The lines are at whole numbers of a unit.
        label = size_text(nbytes).replace(".00", "")
        parts.append(text(left - 6, at(nbytes) + 4, label, text_anchor="end"))
    return parts


def _phases(
    moments: Sequence[StepMoment], edges: Sequence[float], base: float
) -> list[str]:
    """Return the names of the phases below the picture, with lines between."""
    phases = [m.event.phase if m.event is not None else "optimizer" for m in moments]
    parts = []
    for phase in dict.fromkeys(phases):
        begin = edges[phases.index(phase)]
        end = edges[phases.index(phase) + phases.count(phase)]
        parts.append(line(begin, 30, begin, base + 16, "grid"))
        # The last phase may be narrower than its name.
        is_last = phase == phases[-1]
        x, anchor = (end, "end") if is_last else ((begin + end) / 2, "middle")
        parts.append(text(x, base + 15, phase, text_anchor=anchor))
    return parts


@dataclass
class _Column:
    """What runs at the same time in a schedule; units by index."""

    phase: str
    gathers: list[int] = field(default_factory=list)
    compute: int | None = None
    reduces: list[int] = field(default_factory=list)


def schedule(found: Forecast) -> str:
    """Return a picture of the order of all-gathers, compute and reductions."""
    columns: list[_Column | None] = []
    for phase in ("forward", "backward"):
        # Both ends of each phase tell how the phase begins and how it ends.
        every = [column for column in _columns(found) if column.phase == phase]
        columns += [
            None if index is None else every[index]
            for index in _shown(len(every), _COLUMNS, kept=_COLUMNS // 2)
        ]
    width = (WIDTH - _LEFT) / max(len(columns), 1)
    lanes = {"all-gather": 24.0, "compute": 56.0, "reduction": 88.0}
    parts = [text(0, y + 17, name) for name, y in lanes.items()]
    for index, column in enumerate(columns):
        x = _LEFT + index * width
        if column is None:
            parts.append(text(x + width / 2, 73, "⋯", text_anchor="middle"))
            continue
        # A vertical line, and the name of the phase, where a phase begins.
        if not index or (columns[index - 1] or column).phase != column.phase:
            parts.append(line(x, 4, x, 118, "grid"))
            parts.append(text(x + 3, 14, column.phase))
        for lane, units in (
            ("all-gather", column.gathers),
            ("compute", [] if column.compute is None else [column.compute]),
            ("reduction", column.reduces),
        ):
            # Two gathers at once, as with two kinds of prefetch, share the column.
            for number, unit in enumerate(units):
                part = (width - 2) / len(units)
                parts.append(
                    _operation(
                        found, unit, lane, x + 1 + number * part, lanes[lane], part
                    )
                )
    return picture(122, "Schedule of one step", parts)


def _operation(
    found: Forecast, unit: int, lane: str, x: float, y: float, width: float
) -> str:
    """Return the box of an operation of a unit."""
    # The label of a narrow box is the end of the name, which no root has.
    name = found.plan.units[unit].fqn or ROOT_NAME
    fill = {"all-gather": 5, "compute": 1, "reduction": 2}[lane]
    return box(
        x, y, width, 26, color(fill), title=f"{lane}: {name}", label=name.strip("()")
    )


def _columns(found: Forecast) -> list[_Column]:
    """Return the operations of a step in columns of what may run at the same time."""
    # On a GPU the host issues operations ahead. So in forward a unit is gathered while
    # the unit before it computes; in backward the plan says which unit is prefetched.
    events = [m.event for m in found.moments if m.event is not None]
    computes = [e.unit if e.kind == COMPUTE else None for e in events]
    columns: list[_Column] = []
    gathers: list[int] = []
    reduces: list[int] = []
    for index, event in enumerate(events):
        # A gather for the next computation was not issued ahead of anything.
        following = next((u for u in computes[index:] if u is not None), None)
        if event.kind == GATHER and event.unit != following:
            gathers.append(event.unit)
        elif event.kind == GATHER and event.phase == "forward" and columns:
            columns[-1].gathers.append(event.unit)
        elif event.kind == GATHER:
            columns.append(_Column(event.phase, [event.unit], None, reduces))
            reduces = []
        elif event.kind == COMPUTE:
            columns.append(_Column(event.phase, gathers, event.unit, reduces))
            gathers, reduces = [], []
        # A reduction has two events if its output needs a buffer of its own.
        elif event.kind == REDUCE and event.unit not in reduces:
            reduces = [*reduces, event.unit]
    # The reduction of the root has nothing to run beside.
    if reduces:
        columns.append(_Column("backward", [], None, reduces))
    return columns
