"""On one GPU: step time in bf16 beside FSDP2, constant peaks, and overlap in a trace.

    python -m benchmarks.cuda                 # a few minutes; says if there is no GPU
    python -m benchmarks.cuda --device cpu    # the same code at a tiny size

Two worlds: one NCCL rank, where nothing is sent and casts and copies go by the side
streams; and rank 0 of 8 on torch's ``fake`` backend, whose all-gather copies this
rank's shard on the stream it is issued on, once per rank. Neither is a network: what is
measured is what the library makes the host and the GPU do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from benchmarks.device_steps import (
    SIZES,
    WARM_UP,
    Size,
    Trainee,
    chain_peaks,
    peaks_of,
    step_times,
    world,
)
from benchmarks.tables import say, say_versions, table
from benchmarks.trace import StreamUse, hidden_part, record, stream_uses

MIB = 2**20


def trace_of(size: Size, device: torch.device) -> list[StreamUse]:
    """Use of the streams in a steady forward and backward of ours."""
    trainee = Trainee("ours", size, device)
    for _ in range(WARM_UP):
        trainee.step()
    return stream_uses(record(trainee.forward_backward, device))


def run(kind: str, device: torch.device, options: argparse.Namespace) -> None:
    """Print the tables of one world."""
    sizes = SIZES[device.type]
    with world(kind, device) as world_size:
        for size in sizes:
            times = step_times(size, device, options.rounds)
            base = times["fsdp2"]
            table(
                f"{kind} world of {world_size}, {size}: milliseconds, bf16, median of "
                f"{options.rounds}",
                ("", "forward+backward", "step", "over fsdp2", "over fsdp2, step"),
                [
                    (
                        n,
                        f"{a:.2f}",
                        f"{b:.2f}",
                        f"{a / base[0]:.3f}",
                        f"{b / base[1]:.3f}",
                    )
                    for n, (a, b) in times.items()
                ],
            )
        _run_peaks(world_size, device, options.steps)
        for size in sizes:
            _run_trace(size, device)


def _run_peaks(world_size: int, device: torch.device, steps: int) -> None:
    width = 4096 if device.type == "cuda" else 256
    found, planned = chain_peaks(width, device, world_size, steps)
    expected = planned.full + planned.reduce + planned.in_flight
    table(
        f"Six layers of {width} x {width}, {steps} steps: MiB that come and go",
        ("", "at the most", "differs between steps", "planned", "measured / planned"),
        [
            (
                "ours",
                f"{found.transient / MIB:.3f}",
                f"{found.varies / MIB:.3f}",
                f"{expected / MIB:.3f}",
                f"{found.transient / expected:.4f}",
            )
        ],
    )
    size = SIZES[device.type][-1]
    rows = []
    for name in ("fsdp2", "ours"):
        peaks = peaks_of(lambda n=name: Trainee(n, size, device).step, device, steps)  # type: ignore[misc]  # lambda
        top = max(peaks.peaks)
        rows.append((name, f"{top / MIB:.1f}", f"{peaks.varies / MIB:.3f}"))
    table(
        f"Peak of a step of {size}, MiB, activations and AdamW included",
        ("", "peak", "differs between steps"),
        rows,
    )


def _run_trace(size: Size, device: torch.device) -> None:
    uses = trace_of(size, device)
    if not uses:
        say(f"\n{size.name}: the trace has no work of a device, so no overlap is shown")
        return
    table(
        f"{size.name}: streams in the trace of forward and backward; of the side "
        f"streams' work {hidden_part(uses):.1%} ran while compute was busy",
        ("stream", "busy us", "while compute is"),
        [
            (str(use.stream), f"{use.busy:.0f}", f"{use.hidden / use.busy:.1%}")
            for use in uses
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; without the device that was asked for, say so."""
    parser = argparse.ArgumentParser(prog="benchmarks.cuda")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--world", choices=("one", "fake"), nargs="+", default=["one", "fake"])
    add("--rounds", type=int, default=20, help="timed steps of each library (20)")
    add("--steps", type=int, default=20, help="steps whose peaks are compared (20)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        say("no CUDA device: nothing was measured. --device cpu tries the code.")
        return 0
    where = ""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        where = f", {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    say_versions(where)
    for kind in options.world:
        run(kind, device, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
