"""A training program with a fault, over this package or over torch's FSDP2.

Ranks of torchrun, or of ``tests.support.scripts``, run this file::

    torchrun --nproc-per-node 2 -m tests.faults.faulty_training kill-in-backward
    torchrun --nproc-per-node 2 -m tests.faults.faulty_training --library torch swap

The fault happens on the last rank, in step 3 unless told; each rank prints a line per
step. ``docs/development/faults.md`` tells what both libraries print.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable_fsdp

WIDTH = 8


class Blocks(nn.Module):
    """Equal blocks, of which ``route`` says the order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Layer()) for _ in range(3))
        self.route = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same."""
        for index in self.route:
            x = torch.tanh(self.blocks[index](x))
        return x


class Layer(nn.Module):
    """Two matrices of ``WIDTH`` rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.outer: nn.Module = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(self.inner(x))
        return result


class Program:
    """The objects that a fault may touch."""

    def __init__(self, library: str, fault: str) -> None:
        self.torch = library == "torch"
        self.fault, self.faulty = fault, False
        self.model = Blocks()
        self.shard: Callable[..., Any] = composable_fsdp.fully_shard
        if self.torch:
            from torch.distributed.fsdp import fully_shard

            self.shard = fully_shard
        for block in self.model.blocks:
            self.shard(block)
        self.shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> Tensor:
        """One step; the batch is a function of its number and of the rank alone."""
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator)
        loss = (self.model(x) - x.flip(1)).square().mean()
        if not (self.faulty and self.fault == "no-backward"):
            loss.backward()
        if self.fault.endswith("before-call"):
            if self.faulty:
                AT_STEP[self.fault](self)
            self.model.state_dict()
        self.optimizer.step()
        self.optimizer.zero_grad()
        result: Tensor = loss.detach()
        return result


def send(number: signal.Signals) -> Callable[..., None]:
    """Return a hook that sends this process the signal ``number``, once."""

    left = [number]

    def hook(*_: object) -> None:
        if left:
            os.kill(os.getpid(), left.pop())

    return hook


def refuse(*_: object) -> None:
    raise ValueError("a bad sample")


def between_gathers(program: Program, hook: Callable[..., None]) -> None:
    program.model.get_submodule("blocks.1.0").register_forward_pre_hook(hook)


def in_backward(program: Program, hook: Callable[..., None]) -> None:
    """Call ``hook`` when the last block has reduced and the second has not."""

    def watch(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's stub lacks types

    program.model.get_submodule("blocks.1.0.inner").register_forward_hook(watch)


def before_call(hook: Callable[..., None]) -> None:
    time.sleep(1.0)
    hook()


def in_save(_: Program) -> None:
    """Kill this process when it opens its file of a checkpoint."""

    def watch(event: str, details: tuple[object, ...]) -> None:
        if event == "open" and str(details[0]).endswith(".safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def route(*order: int) -> Callable[[Program], None]:
    """Return a fault that runs the blocks ``order``."""

    def change(program: Program) -> None:
        program.model.route = list(order)

    return change


def ended(program: Program) -> None:
    sys.exit(0)


AT_STEP: dict[str, Callable[[Program], None]] = {
    "kill-between-gathers": lambda p: between_gathers(p, send(signal.SIGKILL)),
    "kill-in-backward": lambda p: in_backward(p, send(signal.SIGKILL)),
    "kill-in-save": in_save,
    "raise-in-backward": lambda p: in_backward(p, refuse),
    "swap": route(0, 2, 1),
    "skip-a-block": route(0, 2),
    "raise-before-call": lambda p: before_call(refuse),
    "fewer-batches": ended,
    # In ``Program.step``.
    "no-backward": lambda _: None,
    "none": lambda _: None,
}


def train(arguments: argparse.Namespace) -> None:
    """Train from the last checkpoint, if there is one, until the fault or the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    program = Program(arguments.library, arguments.fault)
    folder, begin = arguments.folder, 0
    if folder is not None and composable_fsdp.checkpoints(folder):
        extra = composable_fsdp.load(folder, program.model, program.optimizer)
        begin = extra["step"]
    for number in range(begin + 1, arguments.steps + 1):
        if number == arguments.at and rank == size - 1:
            program.faulty = True
            if arguments.fault in AT_STEP and "before-call" not in arguments.fault:
                AT_STEP[arguments.fault](program)
        loss = program.step(number)
        sys.stdout.write(f"step {number} loss {loss.item()!r}\n")
        sys.stdout.flush()
        if folder is not None and number % 2 == 0:
            extra = {"step": number}
            path = folder / f"step-{number}"
            composable_fsdp.save(path, program.model, program.optimizer, extra)


def main() -> None:
    """Read the command line, join the ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("fault", choices=AT_STEP)
    add("--library", choices=("composable_fsdp", "torch"), default="composable_fsdp")
    add("--steps", type=int, default=4)
    add("--at", type=int, default=3, help="the step of the fault")
    add("--timeout", type=float, default=8.0, help="of collectives, in seconds")
    add("--folder", type=Path, help="save here every second step, and resume from here")
    arguments = parser.parse_args()
    timeout = timedelta(seconds=arguments.timeout)
    dist.init_process_group("gloo", timeout=timeout)
    train(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
