"""What the reader sees: progress while training, the loss curve, the table of bytes."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm


@dataclass
class Curve:
    """Training loss of every step, and held-out losses as (step, loss)."""

    train: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


def progress(steps: int, *, shown: bool) -> tqdm[None]:
    """A bar on a terminal; nothing elsewhere, or unless ``shown``."""
    return tqdm(total=steps, disable=None if shown else True, dynamic_ncols=True)


def save_curve(curve: Curve, folder: Path, *, bigram: float, limit: float) -> str:
    """Draw the curve, or write its numbers without matplotlib; return what was done."""
    try:
        import matplotlib
    except ImportError:
        path = folder / "loss.csv"
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("step", "train", "held_out"))
            held_out = dict(curve.held_out)
            for step, loss in enumerate(curve.train, start=1):
                rows.writerow((step, loss, held_out.get(step, "")))
        return f"loss curve: {path} (numbers; with matplotlib it would be a picture)"
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(curve.train) + 1)
    axes.plot(steps, curve.train, color="tab:blue", alpha=0.5, lw=1, label="training")
    axes.plot(
        *zip(*curve.held_out, strict=True), "o-", color="tab:red", label="held out"
    )
    axes.axhline(bigram, color="gray", ls=":", label=f"bigram counts ({bigram:.2f})")
    axes.axhline(limit, color="black", ls="--", lw=1, label=f"to beat ({limit:.1f})")
    axes.set(
        xlabel="step", ylabel="loss (nats per byte)", title="Sharded byte-level GPT"
    )
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"loss curve: {path}"


@dataclass(frozen=True)
class Bytes:
    """Bytes of one kind of memory on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def measured(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
        """Sum the storages behind this rank's tensors, each once, between the steps."""
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return cls(
            _storage_bytes(parameters),
            _storage_bytes(gradients),
            _storage_bytes(states),
        )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def bytes_table(planned: Bytes, measured: Sequence[Bytes], whole: Bytes) -> str:
    """Bytes as planned, as found on every rank, and of the same training unsharded."""
    columns = [("planned", planned)]
    columns += [(f"rank {rank}", each) for rank, each in enumerate(measured)]
    columns += [("unsharded", whole)]
    head = "".join(f"{name:>13}" for name, _ in columns)
    lines = [f"{'bytes':<16}{head}"]
    for row in ("parameters", "gradients", "optimizer"):
        cells = "".join(f"{getattr(each, row):>13,}" for _, each in columns)
        lines.append(f"{row:<16}{cells}")
    lines.append("(planned counts padding, of which AdamW's state has none)")
    return "\n".join(lines)
