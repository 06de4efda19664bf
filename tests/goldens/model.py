"""The model of the recorded steps, and the trace of what happens while it trains.

Parameters and inputs come from sines, so they are the same on every machine and in
every version of torch. The model calls `note` at fixed points of forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composable_fsdp.comm.collectives import CallRecord, record
from composable_fsdp.tree.traversal import _get_fsdp_handles

UNITS = ("blocks.0", "blocks.1.down", "blocks.1", "blocks.2")
"""The units below the root, inner units first."""
LETTERS = {
    "IDLE": ".",
    "FORWARD": "F",
    "BACKWARD_PRE": "B",
    "BACKWARD_POST": "P",
    "SUMMON": "S",
}
"""One letter per training state of a unit (S1-42)."""

_note: Callable[[str], None] | None = None


def note(point: str) -> None:
    if _note is not None:
        _note(point)


def note_gradient(tensor: Tensor, point: str) -> None:
    """Call ``note(point)`` when the gradient of ``tensor`` is complete."""
    if tensor.requires_grad:
        register: Any = tensor.register_hook  # without types
        register(lambda _: note(point))


def training_states(model: nn.Module) -> str:
    return "".join(LETTERS[h.phase.name] for h in _get_fsdp_handles(model))


def sines(shape: torch.Size | tuple[int, ...], seed: float) -> Tensor:
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return (count * (1.0 + 0.37 * seed)).sin().float().reshape(shape)


class Block(nn.Module):
    """A residual MLP, ``(batch, 6)`` to ``(batch, 6)``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 6)`` to ``(batch, 6)``."""
        note(f"forward of {self.name}")
        hidden = F.gelu(self.up(self.norm(x)))
        note_gradient(hidden, f"backward of {self.name}")
        return x + cast(Tensor, self.down(hidden))


class Net(nn.Module):
    """A root with parameters, three blocks, a frozen gain, a scalar and a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(f"blocks.{i}") for i in range(3))
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", sines((6,), 0.5))
        with torch.no_grad():
            for seed, param in enumerate(self.parameters()):
                param.copy_(0.4 * sines(param.shape, seed))
        blocks = cast("list[Block]", list(self.blocks))
        blocks[1].norm.weight.requires_grad_(False)

    def forward(
        self, x: Tensor, used: tuple[int, ...], ignored: tuple[int, ...]
    ) -> Tensor:
        """Map ``(batch, 5)`` to ``(batch, 3)`` through the blocks ``used``."""
        note("forward of the root")
        x = cast(Tensor, self.first(x))
        x = x + self.shift.to(x.dtype)
        note_gradient(x, "gradient of the first block's input")
        for i in used:
            y = self.blocks[i](x)
            note_gradient(y, f"gradient of the output of blocks.{i}")
            if i not in ignored:
                x = y
        return cast(Tensor, self.head(x)) * self.scale


class Trace:
    """The lines that a program leaves: collectives, and training states at points."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        """The sharded model, once there is one."""
        self.lines: list[str] = []
        self._calls: list[CallRecord] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Take `note` and collectives down while the block runs."""
        global _note
        with record() as self._calls:
            _note = self.point
            try:
                yield
            finally:
                _note = None
                self._take_calls()

    def point(self, point: str) -> None:
        """Write the collectives since the last point, then this point's states."""
        self._take_calls()
        states = training_states(self.model) if self.model is not None else ""
        self.lines.append(f"{states or '-':<6} {point}")

    def _take_calls(self) -> None:
        for call in self._calls:
            parts = ", ".join(
                f"{numel} {str(dtype).removeprefix('torch.')}"
                for numel, dtype in zip(call.numel, call.dtype, strict=True)
            )
            self.lines.append(f"  {call.op} {parts} over {call.world_size}".rstrip())
        self._calls.clear()
