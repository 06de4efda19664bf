"""A plan as one HTML page with its pictures; the page loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from composable_fsdp.errors import PlanError
from composable_fsdp.inspection.plan_pictures import holdings, memory, schedule
from composable_fsdp.inspection.plan_report import Report
from composable_fsdp.inspection.plan_text import Table, parts_of
from composable_fsdp.tools.forecast import Forecast

_BEGIN = "<!doctype html><!-- composable_fsdp plan -->\n"
"""The first line of every page; a file that begins otherwise is not overwritten."""

_FOLDS = 6
"""Most units whose shards are drawn."""

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 80rem; margin: 0 auto; padding: 1rem 1.25rem 3rem; }
h1 { font-size: 1.5rem; margin: .5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; overflow-wrap: anywhere; }
p { margin: .3rem 0; max-width: 60rem; }
.dim { color: #666; fill: #666; }
.verdict { padding: .6rem .9rem; border-left: 5px solid; margin: 1rem 0;
  overflow-wrap: anywhere; }
.yes { border-color: #2d7d3a; background: #eef7ef; }
.no { border-color: #b3261e; background: #fdf0ef; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  white-space: nowrap; margin: .4rem 0; font-size: .85rem; }
th, td { padding: .25rem .55rem; text-align: right; border-bottom: 1px solid #e3e3e3; }
th { font-weight: 600; border-bottom: 2px solid #999; }
.left { text-align: left; }
.total td { font-weight: 600; border-top: 2px solid #999; border-bottom: 0; }
svg { display: block; width: 100%; min-width: 720px; height: auto; margin: .5rem 0;
  font: 12px system-ui, sans-serif; }
svg .in { font-size: 11px; pointer-events: none; }
svg .light { fill: #fff; }
svg .strong { font-weight: 600; }
svg .grid { stroke: #ddd; }
svg .limit { stroke: #b3261e; stroke-width: 2; stroke-dasharray: 7 4; }
@media print { .scroll { overflow: visible; } svg { min-width: 0; } }
"""


def page_of(found: Forecast, report: Report) -> str:
    """Return the page of a plan."""
    options, model = report["options"], report["model"]
    capacity = report.get("fit", {}).get("capacity")
    title = f"{model['class']} on {options['world_size']:,} ranks"
    parts = parts_of(report)
    # The page shows the tables and the sentences of the text, in another order.
    tables = [part for part in parts if isinstance(part, Table)]
    # The first text is the headline, the last ones are verdict and notes.
    texts = [part for part in parts if isinstance(part, str) and part]
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(each)}</p>" for each in texts[0].splitlines()),
        f'<p class="dim">Planned by composable_fsdp from {escape(model["source"])}; '
        "bytes are per rank.</p>",
        _verdict(texts[1:], report),
        "<h2>Memory over one step</h2>",
        "<p>Each operation of a step has the same width. The height is the memory on "
        "the device while the operation runs.</p>",
        scroll(memory(found, capacity)),
        *(_table(each) for each in tables),
        "<h2>Schedule of a step</h2>",
        "<p>The order of the operations of a rank, from left to right; what is in one "
        "column may run at the same time. Widths are not times.</p>",
        scroll(schedule(found)),
        "<h2>Who holds what</h2>",
        "<p>A row is the shard of a rank, a color is a parameter, and hatching is "
        "padding. A parameter with several names (a = b) is tied. Point at a piece to "
        "read its rows.</p>",
        *_units(found),
    ]
    return page(title, body)


def page(title: str, body: Sequence[str]) -> str:
    """Return a whole page, which loads nothing, with ``body`` as HTML."""
    return (
        f'{_BEGIN}<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _verdict(texts: list[str], report: Report) -> str:
    """Return all sentences of the report in a box, green if the plan fits."""
    # Without a capacity there is no answer, and the box has no color.
    kind = ""
    if "fit" in report:
        kind = " yes" if report["fit"]["fits"] else " no"
    # The answer comes first, in bold; the traffic and the notes follow.
    answer = [each for each in texts if each.startswith(("fits", "does not fit"))]
    begin = texts.index(answer[0]) if answer else 0
    lines = "".join(
        f"<p><strong>{escape(each)}</strong></p>"
        if each in answer
        else f"<p>{escape(each)}</p>"
        for each in [*texts[begin:], *texts[:begin]]
    )
    return f'<div class="verdict{kind}">{lines}</div>'


def _table(table: Table) -> str:
    """Return a table with its title."""

    def _row(cells: object, tag: str, *, total: bool = False) -> str:
        assert isinstance(cells, (list, tuple))
        kind = ' class="total"' if total else ""
        left, right = f'<{tag} class="left">', f"<{tag}>"
        inside = "".join(
            f"{left if index < table.left else right}{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )
        return f"<tr{kind}>{inside}</tr>"

    # The sum stands below a line, as on paper.
    last = len(table.rows) - 1
    rows = "".join(
        _row(cells, "td", total=table.has_total and index == last)
        for index, cells in enumerate(table.rows)
    )
    head = _row(table.header, "th") if any(table.header) else ""
    # A wide table scrolls inside its box on a phone.
    return f"<h2>{escape(table.title)}</h2>" + scroll(f"<table>{head}{rows}</table>")


def _units(found: Forecast) -> list[str]:
    """Return the pictures of the shards, a unit of each kind."""
    parts = []
    # A root that has left all parameters to its units holds nothing.
    folds = [row.fold for row in found.rows if row.fold.unit.regions]
    for fold in folds[:_FOLDS]:
        times = f", each of {fold.times} units" if fold.times > 1 else ""
        parts.append(f"<h3>{escape(fold.name)} ({fold.unit.class_name}{times})</h3>")
        parts.append(scroll(holdings(fold)))
    # A model with a unit of each size would make a page of hundreds of pictures.
    if len(folds) > _FOLDS:
        parts.append(
            f'<p class="dim">and {len(folds) - _FOLDS} more kinds of units</p>'
        )
    return parts


def scroll(inside: str) -> str:
    """Return ``inside`` in a box that scrolls on a narrow screen, the page does not."""
    return f'<div class="scroll">{inside}</div>'


def write_page(path: Path, page: str) -> None:
    """Write the page; only a page of a plan is overwritten.

    Raises: PlanError, if ``path`` is another file; OSError, if it cannot be written.
    """
    # Plans are made again and again under one name; a slip must not cost a script.
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            if file.read(len(_BEGIN)) != _BEGIN:
                raise PlanError(
                    f"{path} exists and is no page of a plan. Choose another name."
                )
    path.write_text(page, encoding="utf-8")
