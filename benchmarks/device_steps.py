"""Steps, times and peaks of one device: a GPU, or the CPU to try the code.

Used by ``benchmarks.cuda`` and by the tests marked ``gpu``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision as Precision1
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from composable_fsdp import CustomPolicy, MixedPrecision, fully_shard, plan
from composable_fsdp.tools.memory import Memory
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support import seam
from tests.support.memory import LiveBytes
from tests.support.tiny import TinyBlock

NAMES = ("plain", "fsdp1", "fsdp2", "ours")
WARM_UP = 4
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Size:
    """A model of ``layers`` blocks, and its input ``(batch, tokens, width)``."""

    name: str
    width: int
    layers: int
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.name} ({self.layers} blocks of width {self.width})"


SIZES = {
    "cuda": (
        Size("host-bound", width=64, layers=32, batch=1, tokens=8),
        Size("compute-bound", width=2048, layers=8, batch=4, tokens=1024),
    ),
    "cpu": (Size("tiny", width=32, layers=3, batch=1, tokens=4),),
}


class Blocks(nn.Module):
    """Transformer blocks under a root that owns a gain."""

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size.width, device=device))
        heads = max(1, size.width // 64)
        self.blocks = nn.ModuleList(
            TinyBlock(size.width, heads, device) for _ in range(size.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, tokens, width)`` to the same."""
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return x


class Trainee:
    """A model with AdamW, an input, and a training step in two halves."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.model, self.example = model, example
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def forward_backward(self) -> None:
        """Forward, loss, backward."""
        self.model(self.example).float().square().mean().backward()

    def update(self) -> None:
        """Optimizer step; gradients dropped."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Both."""
        self.forward_backward()
        self.update()


def shard(
    name: str,
    model: nn.Module,
    units: Iterable[nn.Module],
    device: torch.device,
    **options: Any,
) -> None:
    """Make ``model`` compute in bf16, by ``name``; ours takes the ``options``."""
    if name == "plain":
        model.to(torch.bfloat16)
    elif name == "fsdp2":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*units, model):
            fsdp2_fully_shard(module, mesh=mesh, mp_policy=policy)
    else:
        for module in (*units, model):
            fully_shard(module, mixed_precision=BF16, **options)


def block_trainee(name: str, size: Size, device: torch.device) -> Trainee:
    """``Blocks``, sharded by ``name``."""
    torch.manual_seed(0)
    blocks = Blocks(size, device)
    model: nn.Module = blocks
    if name == "fsdp1":
        model = FSDP1(
            blocks,
            auto_wrap_policy=ModuleWrapPolicy({TinyBlock}),
            mixed_precision=Precision1(torch.bfloat16, torch.float32),
            use_orig_params=True,
            device_id=device,
        )
    else:
        shard(name, blocks, blocks.blocks, device)
    shape = size.batch, size.tokens, size.width
    return Trainee(model, torch.randn(shape, device=device, dtype=torch.bfloat16))


@contextmanager
def world(kind: str, device: torch.device) -> Iterator[int]:
    """Be rank 0 of a world: ``one``, real, of one rank; ``fake``, of eight."""
    size = 8 if kind == "fake" else 1
    real = "nccl" if device.type == "cuda" else "gloo"
    backend, store = (
        ("fake", seam.fake_store()) if kind == "fake" else (real, seam.hash_store())
    )
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    try:
        yield size
    finally:
        dist.destroy_process_group()


class Timer:
    """Milliseconds between marks: by events of the device, or by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[torch.cuda.Event] = []
        self.moments: list[float] = []

    def mark(self) -> None:
        """What the current stream was given so far ends an interval."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append(event)
        else:
            self.moments.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Milliseconds between neighbouring marks; waits for the device."""
        if self.device.type != "cuda":
            pairs = zip(self.moments, self.moments[1:], strict=False)
            return [(end - begin) * 1e3 for begin, end in pairs]
        torch.cuda.synchronize(self.device)
        events = zip(self.marks, self.marks[1:], strict=False)
        return [begin.elapsed_time(end) for begin, end in events]


def step_times(
    size: Size, device: torch.device, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median milliseconds of forward + backward, and of a step, of all in turn."""
    makers = {name: partial(block_trainee, name, size, device) for name in NAMES}
    return times_in_turn(makers, device, rounds)


def times_in_turn(
    makers: Mapping[str, Callable[[], Trainee]], device: torch.device, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median milliseconds of forward + backward, and of a step, of all in turn."""
    trainees = {name: make() for name, make in makers.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in trainees}
    for trainee in trainees.values():
        for _ in range(WARM_UP):
            trainee.forward_backward()
            trainee.update()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, trainee in trainees.items():
                samples[name].append(_time_step(trainee, device))
    finally:
        gc.enable()
    return {
        name: (
            statistics.median(a for a, _ in row),
            statistics.median(b for _, b in row),
        )
        for name, row in samples.items()
    }


def _time_step(trainee: Trainee, device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    timer = Timer(device)
    timer.mark()
    trainee.forward_backward()
    timer.mark()
    trainee.update()
    timer.mark()
    first, second = timer.intervals()
    return first, first + second


@dataclass(frozen=True)
class Peaks:
    """Bytes: what is there between steps, and the most in each of many steps.

    ``others``: what is there between steps and is not of our units, such as the
    workspace of a library of matrix products.
    """

    resident: int
    peaks: tuple[int, ...]
    others: int = 0

    @property
    def most(self) -> int:
        """The highest peak, without the others."""
        return max(self.peaks) - self.others

    @property
    def varies(self) -> int:
        """By how much the steps differ."""
        return max(self.peaks) - min(self.peaks)


def peaks_of(
    make: Callable[[], Callable[[], object]], device: torch.device, steps: int
) -> Peaks:
    """Build with ``make`` and measure its steps, from the allocator or op by op."""
    gc.collect()
    if device.type != "cuda":
        with LiveBytes() as live:
            step = make()
            return _peaks(step, steps, lambda: live.now, live.reset, lambda: live.peak)
    torch.cuda.empty_cache()
    return _peaks(
        make(),
        steps,
        # Requested bytes: the allocator counts the rest of a block that is too small to
        # be split as allocated, and equal requests may meet different blocks.
        lambda: _requested(device, "current"),
        lambda: torch.cuda.reset_peak_memory_stats(device),
        lambda: _requested(device, "peak"),
    )


def _requested(device: torch.device, which: str) -> int:
    """Bytes that tensors asked for, now or at the peak since the last reset."""
    found: int = torch.cuda.memory_stats(device)[f"requested_bytes.all.{which}"]
    return found


def _peaks(
    step: Callable[[], object],
    steps: int,
    now: Callable[[], int],
    reset: Callable[[], object],
    peak: Callable[[], int],
) -> Peaks:
    for _ in range(WARM_UP):
        step()
    resident, found = now(), []
    for _ in range(steps):
        reset()
        step()
        found.append(peak())
    return Peaks(resident, tuple(found))


class Chain(nn.Module):
    """Square layers without bias: next to them one row's activations are nothing."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False, device=device) for _ in range(6)
        )
        self.row = torch.ones(1, width, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(rows, width)`` to the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def chain_peaks(
    width: int, device: torch.device, world_size: int, steps: int = 20
) -> tuple[Peaks, Memory]:
    """Measured and planned, of steps of a ``Chain`` in bf16."""
    models = []

    def make() -> Callable[[], object]:
        model = Chain(width, device)
        models.append(model)
        for layer in model.layers:
            fully_shard(layer, mixed_precision=BF16)
        fully_shard(model, mixed_precision=BF16)

        def step() -> None:
            model(model.row).float().sum().backward()
            model.zero_grad()

        return step

    planned = plan(
        Chain(width, torch.device("meta")),
        world_size=world_size,
        policy=CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        mixed_precision=BF16,
    )
    found = peaks_of(make, device, steps)
    others = found.resident - kept_bytes(models[0])
    return replace(found, others=others), planned.peak(device_type=device.type)


def kept_bytes(model: nn.Module) -> int:
    """Bytes of what the units keep between steps: shards and their gradients."""
    regions = [region for h in _get_fsdp_handles(model) for region in h.layout.regions]
    buffers = [buffer for r in regions for buffer in (r.shard, r.gradient.shard)]
    return sum(b.untyped_storage().nbytes() for b in buffers if b is not None)
