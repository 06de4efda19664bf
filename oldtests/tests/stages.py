"""What a parameter is at each stage of a step, as a small program finds it.

``python -m tests.stages`` prints the table of ``docs/development/stages.md``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from composable_fsdp import fully_shard, unshard_params
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.world import fake_world

HEADER = (
    "stage of unit `a`",
    "`a.weight` is",
    "`grad`",
    "full",
    "gradients",
    "`Residency`",
    "`Phase`",
)

Row = tuple[str, ...]


class Unit(nn.Module):
    """A layer that calls ``note`` in its forward and when its backward begins."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        self.note("in its forward")
        y = x @ self.weight
        if y.requires_grad:
            y.register_hook(lambda _: self.note("in its backward"))  # type: ignore[no-untyped-call]  # torch
        return y


def rows() -> list[Row]:
    """Run a step of units ``c``, ``a``, ``b`` as rank 0 of 4; a row for each stage."""
    found: list[Row] = []

    def note(stage: str) -> None:
        shown, grad = a.weight, weight.grad
        cells, leaf = ["", "", "", ""], "as built"
        for handle in _get_fsdp_handles(a):
            (region,) = handle.layout.trainable
            full, gradients = region.full.buffer, region.reduce.buffer
            sizes = [each.untyped_storage().nbytes() for each in (full, gradients)]
            cells = [f"{size} B" if size else "" for size in sizes]
            cells += [handle.residency.name, handle.phase.name]
            leaf = "sharded leaf" if shown is weight else "full leaf"
        shape = "None" if grad is None else str(tuple(grad.shape))
        found.append((stage, f"{leaf} {tuple(shown.shape)}", shape, *cells))

    def beside(stage: str, text: str) -> Callable[[str], None]:
        return lambda now: note(text) if now == stage else None

    c = Unit(beside("in its backward", "reducing, while `c` is in its backward"))
    b = Unit(beside("in its backward", "gathered ahead, while `b` is in its backward"))
    a = Unit(note)
    model, weight = nn.Sequential(c, a, b), a.weight
    with fake_world(4):
        note("before `fully_shard`")
        for each in (c, a, b, model):
            fully_shard(each)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        note("between steps")
        loss = model(torch.ones(2, 8)).sum()
        note("between forward and backward")
        loss.backward()
        note("after backward")
        optimizer.step()
        optimizer.zero_grad()
        note("after `optimizer.step()` and `zero_grad()`")
        with unshard_params(model):
            note("inside `unshard_params`")
    return found


def table() -> str:
    """The table of the page."""
    lines = [HEADER, ("---",) * len(HEADER), *rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table())  # noqa: T201  # what the page shows
