"""Llama-3-8B on one GPU: tokens per second, MFU, peaks and host time beside FSDP2.

Rank 0 of 8 on torch's ``fake`` backend holds an eighth of the model and runs whole
steps, so one GPU shows what a rank of eight does, without a network::

    python -m benchmarks.llama                          # minutes; prints as it goes
    python -m benchmarks.llama --device cpu --small     # the same code at a tiny size

Each block is a unit, is checkpointed as a whole, and computes in bf16 with reductions
in fp32; AdamW is fused. *plain* is the same model unsharded in bf16: what a step of all
blocks would take is extrapolated from two depths that fit, and the optimizer's time of
*ours* is added, which updates as many elements. MFU counts six operations per parameter
(without the embedding) and token, and ``12 x layers x width x tokens`` for attention,
as torchtitan does; recomputed forwards do not count.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import device_steps
from benchmarks.device_steps import Timer, shard, world
from benchmarks.models import LlamaBlock
from benchmarks.tables import say, say_versions, table
from benchmarks.trace import idle_part, record
from composable_fsdp.features import Arena
from composable_fsdp.features.captured_step import WARM_UP, capture

PEAK_FLOPS = 989e12
"""Dense bf16 operations per second of an H100 (SXM)."""
GIB = 2**30
NAMES = ("ours", "fsdp2", "captured")
HOST_TOKENS = 128
"""Length at which the host's time is taken: the host never waits for the device."""


@dataclass(frozen=True)
class Shape:
    """The numbers of a Llama."""

    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256

    @property
    def parameters(self) -> int:
        """Parameters in matrix products of a token: all but the embedding."""
        narrow = self.width // self.heads * self.kv_heads
        attention = 2 * self.width * (self.width + narrow)
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + self.vocab * self.width + self.width

    def operations(self, tokens: int) -> float:
        """Floating point operations of a step over one sequence."""
        attention = 12 * self.layers * self.width * tokens
        return tokens * (6.0 * self.parameters + attention)


SMALL = Shape(layers=3, width=64, hidden=96, heads=4, kv_heads=2, vocab=128)


class Block(nn.Module):
    """A block whose forward is run again in backward; the unit of sharding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = RotaryBlock(shape.width, shape.hidden, shape.heads, shape.kv_heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same."""
        # Nothing here is random, and a CUDA graph cannot read a generator's state.
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return cast(Tensor, run(self.block, x, cos, sin))


class RotaryBlock(LlamaBlock):
    """A ``LlamaBlock`` that rotates queries and keys by their positions."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]  # the rotation
        """Attend to the past, then mix within each position."""
        batch, time_, _ = x.shape
        y = self.norm_1(x)
        q, k, v = (
            part(y).view(batch, time_, -1, self.size).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = (_rotated(each, cos, sin) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + cast(Tensor, self.o(mixed.transpose(1, 2).reshape(x.shape)))
        y = self.norm_2(x)
        return x + cast(Tensor, self.down(F.silu(self.gate(y)) * self.up(y)))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class Llama(nn.Module):
    """Embedding, blocks, norm and head: ``(batch, time)`` tokens to the loss."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.pairs = shape.width // shape.heads // 2
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of the next tokens."""
        x = self.tokens(tokens)
        places = torch.arange(tokens.shape[1], device=x.device)
        rates = 500_000.0 ** (-torch.arange(self.pairs, device=x.device) / self.pairs)
        angles = torch.outer(places, rates)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits.float(), tokens[:, 1:].flatten())


class Trainee(device_steps.Trainee):
    """A Llama, sharded by ``name``, its optimizer and a sequence."""

    def __init__(
        self, name: str, shape: Shape, layers: int, device: torch.device, how: str
    ) -> None:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Llama(shape, layers)
        fill = partial(_fill, device=device)
        if how == "compiled":
            for block in model.blocks:
                # Each length has kernels of its own, as in a run of one length.
                cast(Block, block).block.compile(dynamic=False)
        shard(
            name,
            model,
            model.blocks,
            device,
            param_init_fn=fill,
            device_id=device,
            arena=Arena() if name == "captured" else None,
        )
        if name == "plain":
            model.apply(fill)
        elif name == "fsdp2":
            model.to_empty(device=device)
            for p in model.parameters():
                _draw(cast(Any, p).to_local())
        super().__init__(model, torch.zeros(1, 2, dtype=torch.long, device=device))
        self.device = device
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-5, fused=True, capturable=name == "captured"
        )

    def read(self, shape: Shape, length: int) -> None:
        """Train on a sequence of ``length`` tokens from now on."""
        self.example = torch.randint(shape.vocab, (1, length), device=self.device)

    def forward_backward(self) -> None:
        """Forward, loss, backward."""
        self.model(self.example).backward()


def _fill(module: nn.Module, device: torch.device) -> None:
    if any(True for _ in module.parameters(recurse=False)):
        module.to_empty(device=device, recurse=False)
        for p in module.parameters(recurse=False):
            _draw(p)


@torch.no_grad()
def _draw(values: Tensor) -> None:
    values.fill_(1.0) if values.dim() == 1 else values.normal_(std=0.02)


@dataclass
class Figures:
    """Of one way at one length: milliseconds, bytes, and a part of the step."""

    step: float
    """A whole step, on the device."""
    compute: float
    """Forward and backward, on the device."""
    peak: tuple[int, int] = (0, 0)
    """The most memory, allocated and reserved."""
    idle: float = 0.0
    """The part of a step in which no stream has work."""


@dataclass
class Results:
    """What was measured, by (eager or compiled, tokens, name)."""

    shape: Shape
    found: dict[tuple[str, int, str], Figures] = field(default_factory=dict)
    host: dict[tuple[str, str], float] = field(default_factory=dict)
    """Milliseconds until the calls of forward and backward have returned."""

    def row(self, how: str, tokens: int, name: str) -> list[str]:
        """The cells of one way."""
        got = self.found[how, tokens, name]
        plain, peer = (self.found.get((how, tokens, n)) for n in ("plain", "fsdp2"))
        flops = self.shape.operations(tokens) / (got.step * 1e-3)
        units = self.shape.layers + 1
        host, base = (self.host.get((how, n)) for n in (name, "plain"))
        return [
            name,
            f"{got.step:.1f}",
            f"{tokens / got.step * 1e3:.0f}",
            f"{flops / PEAK_FLOPS:.1%}",
            f"{got.step / plain.step:.3f}" if plain else "",
            f"{peer.step / got.step:.3f}" if peer else "",
            f"{(host - base) / units:.3f}" if host and base else "",
            f"{got.idle:.1%}" if name != "plain" else "",
            *(f"{each / GIB:.2f}" if each else "" for each in got.peak),
        ]


HEADER = (
    "",
    "step ms",
    "tokens/s",
    "MFU",
    "over plain",
    "speed of fsdp2",
    "host ms a unit",
    "idle",
    "allocated GiB",
    "reserved GiB",
)


def measure(trainee: Trainee, rounds: int, step: Callable[[], object]) -> Figures:
    """Time steps of ``trainee`` that are warm, and look at memory and at gaps."""
    device = trainee.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    rows = [_timed(trainee, step)[:2] for _ in range(rounds)]
    found = Figures(*(statistics.median(row) for row in zip(*rows, strict=True)))
    if is_cuda:
        stats = torch.cuda.memory_stats(device)
        found.peak = (
            stats["allocated_bytes.all.peak"],
            stats["reserved_bytes.all.peak"],
        )
    found.idle = idle_part(record(step, device))
    return found


def _timed(trainee: Trainee, step: Callable[[], object]) -> tuple[float, float, float]:
    """Milliseconds of a step, of its forward and backward, and of their calls."""
    timer = Timer(trainee.device)
    if trainee.device.type == "cuda":
        torch.cuda.synchronize(trainee.device)
    timer.mark()
    start = time.perf_counter()
    if step == trainee.step:
        trainee.forward_backward()
        host = time.perf_counter() - start
        timer.mark()
        trainee.update()
    else:
        # A graph is one call; its forward and backward cannot be told apart.
        step()
        host = time.perf_counter() - start
        timer.mark()
    timer.mark()
    compute, update = timer.intervals()
    return compute + update, compute, host * 1e3


def _release() -> None:
    """Free the memory of trainees that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def run(
    results: Results,
    how: str,
    lengths: Sequence[int],
    rounds: int,
    device: torch.device,
) -> None:
    """Measure every way at every length; print rows at once, and tables at the end."""
    shape = results.shape
    with world("fake", device):
        for name in NAMES:
            # What one way cannot do takes no other way's figures with it.
            try:
                _measure_way(results, how, name, lengths, rounds, device)
            except RuntimeError as error:
                say(f"  {how}, {name}: {type(error).__name__}: {error}")
            _release()
        done = [n for n in lengths if (how, n, "ours") in results.found]
        _extrapolate(results, how, done, rounds, device)
    for length in done:
        names = [n for n in ("plain", *NAMES) if (how, length, n) in results.found]
        table(
            f"Llama of {shape.layers} layers, {length} tokens, {how}",
            HEADER,
            [results.row(how, length, name) for name in names],
        )


def _measure_way(
    results: Results,
    how: str,
    name: str,
    lengths: Sequence[int],
    rounds: int,
    device: torch.device,
) -> None:
    """Note and print the figures of a way of training, by length."""
    shape = results.shape
    trainee = Trainee(name, shape, shape.layers, device, how)
    for length in lengths:
        step = _warm(trainee, shape, length, captures=name == "captured")
        results.found[how, length, name] = measure(trainee, rounds, step)
        row = results.row(how, length, name)
        cells = zip(HEADER[1:], row[1:], strict=True)
        told = ", ".join(f"{title} {cell}" for title, cell in cells if cell)
        say(f"  {how}, {length} tokens, {name}: {told}")
    if name != "captured":  # whose calls return at once
        results.host[how, name] = _host_time(trainee, shape, rounds)


def _warm(
    trainee: Trainee, shape: Shape, length: int, *, captures: bool = False
) -> Callable[[], object]:
    """Return a step over ``length`` tokens, after some."""
    trainee.read(shape, length)
    if not captures:
        for _ in range(2):
            trainee.step()
        return trainee.step
    step = capture(trainee.step)
    for _ in range(WARM_UP + 2):
        step()
    if step.reason:
        say(f"  {length} tokens: no graph: {step.reason}")
    return step


def _host_time(trainee: Trainee, shape: Shape, rounds: int) -> float:
    """Milliseconds of the host for forward and backward of a short sequence."""
    step = _warm(trainee, shape, HOST_TOKENS)
    return statistics.median(_timed(trainee, step)[2] for _ in range(rounds))


def _extrapolate(
    results: Results,
    how: str,
    lengths: Sequence[int],
    rounds: int,
    device: torch.device,
) -> None:
    """Note what the plain model would take at full depth, from two depths that fit."""
    shape = results.shape
    depths = (max(1, shape.layers // 8), max(2, shape.layers // 4))
    found: list[list[float]] = []
    for depth in depths:
        found.append(_plain_times(shape, depth, how, lengths, rounds, device))
        _release()
    times = (shape.layers - depths[1]) / (depths[1] - depths[0])
    *full, host = (b + times * (b - a) for a, b in zip(*found, strict=True))
    results.host[how, "plain"] = host
    for length, compute in zip(lengths, full, strict=True):
        ours = results.found[how, length, "ours"]
        step = compute + ours.step - ours.compute
        results.found[how, length, "plain"] = Figures(step, compute)


def _plain_times(
    shape: Shape,
    depth: int,
    how: str,
    lengths: Sequence[int],
    rounds: int,
    device: torch.device,
) -> list[float]:
    """Milliseconds of forward and backward by length, and last of the host."""
    trainee = Trainee("plain", shape, depth, device, how)
    found = []
    for length in lengths:
        step = _warm(trainee, shape, length)
        found.append(measure(trainee, rounds, step).compute)
    return [*found, _host_time(trainee, shape, rounds)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; without the device that was asked for, say so."""
    parser = argparse.ArgumentParser(prog="benchmarks.llama")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--small", action="store_true", help="three narrow layers, to try the code")
    add("--tokens", type=int, nargs="+", help="lengths (8192 4096 2048; small: 32)")
    add("--rounds", type=int, default=5, help="timed steps of each way (5)")
    add(
        "--how", choices=("eager", "compiled"), nargs="+", default=["eager", "compiled"]
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        say(
            "no CUDA device: nothing was measured. --device cpu --small tries the code."
        )
        return 0
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    shape = SMALL if options.small else Shape()
    lengths = options.tokens or ([32] if options.small else [8192, 4096, 2048])
    say_versions(
        f", rank 0 of 8, {shape.parameters / 1e9:.2f} B parameters in products"
    )
    results = Results(shape)
    # What is measured stays printed if the run is stopped.
    with suppress(KeyboardInterrupt):
        for how in options.how:
            run(results, how, lengths, options.rounds, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
