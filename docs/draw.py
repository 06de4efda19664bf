"""Draw the pictures of README and docs/understand as SVG: `python docs/draw.py`.

Each picture has a light background of its own, so it reads the same on light and dark
pages. Colors are those of Okabe and Ito, which color-blind readers can tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from composable_fsdp import fully_shard, simulate

FOLDER = Path(__file__).parent / "_static"
REPORT = Path(__file__).parents[1] / "benchmarks" / "reports" / "2026-11-26-cpu.md"
RANKS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7")
"""The colors of ranks 0 to 3."""
DPI = 72
"""Pixels per inch of an SVG by matplotlib."""
INK, SOFT, PAPER, EMPTY = "#1f2430", "#5b6270", "#fbfaf7", "#e4e2dc"


class Picture:
    """A figure whose coordinates are pixels, from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.about = title
        self.figure = Figure(figsize=(width / DPI, height / DPI), facecolor=PAPER)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, text: str = ""
    ) -> None:
        """Draw a rectangle with a centered text."""
        self.axes.add_patch(Rectangle((x, y), w, h, facecolor=fill, edgecolor=INK))
        if text:
            self.text(x + w / 2, y + h / 2 + 5, text, anchor="center")

    def text(
        self, x: float, y: float, text: str, anchor: str = "left", fill: str = INK
    ) -> None:
        """Write a line of text."""
        self.axes.text(x, y, text, ha=anchor, color=fill, fontsize=12)

    def title(self, x: float, y: float, text: str) -> None:
        """Write a line in bold."""
        self.axes.text(x, y, text, fontweight="bold", color=INK, fontsize=12)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a line with a head at its end."""
        style = {"arrowstyle": "-|>", "color": SOFT, "lw": 2, "shrinkA": 0}
        self.axes.annotate("", (x2, y2), (x1, y1), arrowprops=style)

    def write(self, name: str) -> None:
        """Write the file, equal for equal pictures."""
        about = {"Title": self.about, "Date": None, "Creator": None}
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            self.figure.savefig(FOLDER / name, format="svg", metadata=about)


def stripes(
    picture: Picture, x: float, y: float, w: float, h: float, ranks: Sequence[int]
) -> None:
    """Draw equal parts side by side; -1 is memory that is not there."""
    part = w / len(ranks)
    for i, rank in enumerate(ranks):
        picture.box(x + i * part, y, part, h, RANKS[rank] if rank >= 0 else EMPTY)


def block() -> None:
    """One block on four ranks: before, during and after its forward."""
    picture = Picture(
        770, 262, "A block on four ranks, before, in and after its forward"
    )
    columns = (("before forward", 90), ("during forward", 345), ("after forward", 600))
    for text, x in columns:
        picture.title(x, 32, text)
    for rank in range(4):
        y = 48 + rank * 42
        picture.text(20, y + 20, f"rank {rank}")
        own = [each if each == rank else -1 for each in range(4)]
        stripes(picture, 90, y, 150, 28, own)
        stripes(picture, 345, y, 150, 28, range(4))
        stripes(picture, 600, y, 150, 28, own)
    for x, text in ((265, "all-gather"), (520, "free")):
        picture.arrow(x, 124, x + 54, 124)
        picture.text(x + 28, 112, text, anchor="center", fill=SOFT)
    picture.text(
        20,
        242,
        "Each rank keeps a quarter, and sees the whole only while it computes.",
        fill=SOFT,
    )
    picture.write("block.svg")


def layout() -> None:
    """Unit, region, shard: where parameters lie in memory."""
    picture = Picture(760, 330, "A unit, its region, and the shards of four ranks")
    picture.title(20, 32, "unit: blocks.0")
    picture.box(20, 46, 330, 34, "#ffffff", "mlp.weight  (5, 4): 20 elements")
    picture.box(370, 46, 130, 34, "#ffffff", "mlp.bias  (8,)")
    picture.title(20, 122, "region: one flat buffer of 32 elements")
    scale, left = 22.5, 20
    picture.box(left, 136, 20 * scale, 34, "#ffffff", "mlp.weight, rows 0 to 4")
    picture.box(left + 20 * scale, 136, 8 * scale, 34, "#ffffff", "mlp.bias")
    picture.box(left + 28 * scale, 136, 4 * scale, 34, EMPTY, "padding")
    for cut in range(5):
        picture.arrow(left + cut * 8 * scale, 204, left + cut * 8 * scale, 178)
    picture.text(
        20,
        224,
        "Four equal parts. A cut falls between two rows, never inside a row.",
        fill=SOFT,
    )
    picture.title(20, 258, "shards")
    held = ("rows 0-1", "rows 2-3", "row 4 | bias 0-3", "bias 4-7 | padding")
    for rank, text in enumerate(held):
        x = left + rank * 8 * scale
        picture.box(x, 270, 8 * scale, 34, RANKS[rank], text)
        picture.text(x + 4 * scale, 322, f"rank {rank}", anchor="center", fill=SOFT)
    picture.write("layout.svg")


def step() -> None:
    """The life of units in a step: gathers run beside the computation."""
    picture = Picture(
        760, 212, "Computation and communication of a step with three units"
    )
    picture.text(20, 74, "compute")
    picture.text(20, 134, "network")
    width, x0 = 64, 96
    compute = ["", "f1", "f2", "f3", "", "b3", "b2", "b1", "", "step"]
    network = ["g1", "g2", "g3", "", "g3", "g2", "r3, g1", "r2", "r1", ""]
    shades = {
        "f": RANKS[0],
        "b": RANKS[1],
        "s": RANKS[2],
        "g": "#ffffff",
        "r": RANKS[3],
    }
    for i, (work, sent) in enumerate(zip(compute, network, strict=True)):
        if work:
            picture.box(x0 + i * width, 52, width - 4, 34, shades[work[0]], work)
        if sent:
            picture.box(x0 + i * width, 112, width - 4, 34, shades[sent[0]], sent)
    picture.title(x0 + width, 32, "forward")
    picture.title(x0 + 5 * width, 32, "backward")
    picture.title(x0 + 9 * width, 32, "optimizer")
    picture.text(
        20,
        176,
        "f forward, b backward, g all-gather, r reduce-scatter, of units 1, 2 and 3.",
        fill=SOFT,
    )
    picture.text(
        20,
        197,
        "The gather of the next unit, and the reduction of the last, run while a unit "
        "computes.",
        fill=SOFT,
    )
    picture.write("step.svg")


def checkpoint() -> None:
    """A save: files, manifest, one rename."""
    picture = Picture(
        760, 236, "A checkpoint of four ranks is written, and loaded by two"
    )
    picture.title(20, 32, "save on 4 ranks")
    for rank in range(4):
        y = 46 + rank * 40
        picture.box(20, y, 76, 28, RANKS[rank], f"rank {rank}")
        picture.arrow(102, y + 14, 146, y + 14)
        picture.box(154, y, 190, 28, RANKS[rank], f"rank0000{rank}.safetensors")
    picture.box(370, 46, 120, 68, "#ffffff", "manifest.json")
    picture.text(370, 140, "names, places,", fill=SOFT)
    picture.text(370, 158, "checksums", fill=SOFT)
    picture.title(560, 32, "load on 2 ranks")
    for rank in range(2):
        y = 46 + rank * 80
        stripes(picture, 560, y, 150, 44, (2 * rank, 2 * rank + 1))
        picture.text(560, y + 62, f"rank {rank}: only its slices", fill=SOFT)
    picture.arrow(500, 80, 548, 80)
    picture.text(
        20,
        222,
        "All files are written in a temporary directory. One rename makes the "
        "checkpoint visible, complete.",
        fill=SOFT,
    )
    picture.write("checkpoint.svg")


KINDS = {
    "parameters": ("parameters", "#0072b2"),
    "gradients": ("gradients", "#56b4e9"),
    "optimizer": ("optimizer state", "#009e73"),
    "full": ("full parameters", "#e69f00"),
    "reduce": ("reduction buffers", "#d55e00"),
    "activations": ("activations", "#cc79a7"),
    "temporaries": ("temporary tensors", "#a9a59b"),
}
"""The kinds of memory, from the bottom up: name and color."""


def sharded() -> nn.Module:
    """Return the model of the picture: six blocks between two layers."""
    blocks = [
        nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
        for _ in range(6)
    ]
    for each in blocks:
        fully_shard(each)
    first, last = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
    return fully_shard(nn.Sequential(first, *blocks, last))


def memory() -> None:
    """The live bytes of a rank through a step, as the simulator counts them."""
    found = simulate(sharded, world_size=8, batch=torch.zeros(512, 1024))
    picture = Picture(760, 400, "The memory of one of eight ranks through a step")
    left, bottom, width, height = 70, 330, 500, 280
    moments = found.timeline
    highest = max(each.memory.total for each in moments)
    across = width / len(moments)
    edges = [left + i * across for i in range(len(moments) + 1)]
    low = [float(bottom)] * len(moments)
    for number, (kind, (name, color)) in enumerate(KINDS.items()):
        high = [
            y - getattr(each.memory, kind) / highest * height
            for y, each in zip(low, moments, strict=True)
        ]
        picture.axes.stairs(high, edges, baseline=low, fill=True, color=color)
        picture.box(600, 280 - 32 * number, 18, 18, color)
        picture.text(626, 294 - 32 * number, name)
        low = high
    for part in range(3):
        y = bottom - part * height / 2
        size = f"{part * highest / 2 / 2**20:.0f} MiB"
        picture.text(left - 8, y + 5, size, anchor="right", fill=SOFT)
    backward = next(i for i, m in enumerate(moments) if "backward" in m.when)
    last = next(i for i, m in enumerate(moments) if "optimizer" in m.when)
    for begin, end, text in (
        (0, backward, "forward"),
        (backward, last, "backward"),
        (last, len(moments), "optimizer"),
    ):
        x = left + (begin + end) / 2 * across
        picture.text(x, bottom + 22, text, anchor="center")
    picture.text(
        20,
        382,
        "Simulated: 8 ranks, 6 blocks of 8.4 million parameters, AdamW.",
        fill=SOFT,
    )
    picture.write("memory.svg")


def host() -> None:
    """The host time that sharding adds to a layer, from the newest report."""
    cells = re.findall(
        r"^  (\d+) parameters +\d+ +(\d+) +(\d+) ", REPORT.read_text(), re.M
    )
    rows = cells[len(cells) // 2 :]
    picture = Picture(760, 60 + 74 * len(rows) + 30, "Host time that sharding adds")
    picture.title(20, 32, "CPU time that sharding adds to a layer, per training step")
    widest = max(int(fsdp2) for _, fsdp2, _ in rows)
    for i, (number, *times) in enumerate(rows):
        y = 56 + 74 * i
        picture.text(20, y + 36, f"{number} parameters")
        for j, (name, time) in enumerate(zip(("FSDP2", "ours"), times, strict=True)):
            width = 440 * int(time) / widest
            picture.box(140, y + 28 * j, width, 24, RANKS[1 + j])
            picture.text(148 + width, y + 17 + 28 * j, f"{name}  {time} µs", fill=SOFT)
    picture.text(
        20,
        60 + 74 * len(rows) + 12,
        f"64 layers, 8 ranks, two CPU cores, torch 2.13, {REPORT.name[:10]}.",
        fill=SOFT,
    )
    picture.write("host.svg")


if __name__ == "__main__":
    for draw in (block, layout, step, memory, checkpoint, host):
        draw()
