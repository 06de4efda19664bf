"""On one GPU: the whole report, dated, into ``benchmarks/reports``.

Llama-3-8B (``benchmarks.llama``), sleep and wake, the GPU tests, step time in bf16
beside FSDP1 and FSDP2, constant peaks, overlap in a trace, and a step in a CUDA graph::

    python -m benchmarks.cuda                 # a few minutes; says if there is no GPU
    python -m benchmarks.cuda --device cpu    # the same code at a tiny size, no report

Two worlds: one NCCL rank, where nothing is sent and casts and copies go by the side
streams; and rank 0 of 8 on torch's ``fake`` backend, whose all-gather copies this
rank's shard on the stream it is issued on, once per rank, and whose reduce-scatter
writes nothing. Neither is a network: what is measured is what the library makes the
host and the GPU do.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import complaints, llama, sleeping
from benchmarks.captured import captured_step
from benchmarks.device_steps import (
    SIZES,
    WARM_UP,
    Size,
    block_trainee,
    chain_peaks,
    peaks_of,
    step_times,
    world,
)
from benchmarks.tables import say, say_versions, table
from benchmarks.trace import StreamUse, hidden_part, record, stream_uses

MIB = 2**20
REPORTS = Path(__file__).parent / "reports"
TESTS = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-q", "-W", "default"]
"""As ``make test-gpu``."""
if find_spec("xdist") is not None:
    # Tests of one file have their own process and share the GPU with the others.
    TESTS += ["-n", "8", "--dist", "loadfile"]


def trace_of(size: Size, device: torch.device) -> list[StreamUse]:
    """Use of the streams in a steady forward and backward of ours."""
    trainee = block_trainee("ours", size, device)
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
            _run_captured(size, device, options.rounds, has_numbers=kind != "fake")


def _run_peaks(world_size: int, device: torch.device, steps: int) -> None:
    width = 4096 if device.type == "cuda" else 256
    found, planned = chain_peaks(width, device, world_size, steps)
    table(
        f"Six layers of {width} x {width}, {steps} steps: MiB of ours",
        ("", "at the most", "differs between steps", "planned", "measured / planned"),
        [
            (
                "ours",
                f"{found.most / MIB:.3f}",
                f"{found.varies / MIB:.3f}",
                f"{planned.total / MIB:.3f}",
                f"{found.most / planned.total:.4f}",
            )
        ],
    )
    size = SIZES[device.type][-1]
    rows = []
    for name in ("fsdp1", "fsdp2", "ours"):

        def make(name: str = name) -> Callable[[], None]:
            return block_trainee(name, size, device).step

        peaks = peaks_of(make, device, steps)
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


def _run_captured(
    size: Size, device: torch.device, rounds: int, *, has_numbers: bool
) -> None:
    found = captured_step(size, device, rounds)
    name = "a CUDA graph" if device.type == "cuda" else "no graph: a CPU captures none"
    columns = ["eager", "replayed"]
    cells = [f"{found.eager:.2f}", f"{found.replayed:.2f}"]
    if has_numbers:  # a reduce-scatter of ``fake`` writes nothing
        columns += ["largest difference of a weight", "between two eager runs"]
        cells += [f"{found.difference:.3g}", f"{found.by_chance:.3g}"]
    table(
        f"{size.name}: a step with AdamW, in {name}; milliseconds",
        ("", *columns),
        [("ours", *cells)],
    )


def _run_tests() -> bool:
    """Run the GPU tests in a process of their own, which leaves no memory behind."""
    say(f"\nTests: {' '.join(TESTS[1:])}")
    root = Path(__file__).parents[1]
    done = subprocess.run(
        TESTS,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # The summary: failures, reasons of skipped tests, numbers.
    lines = done.stdout.partition("short test summary info")[2].splitlines()[1:]
    say("\n".join(f"  {line}" for line in lines[-60:] or done.stdout.splitlines()[-9:]))
    # 5: no test was collected, as where no GPU is.
    return done.returncode in (0, 5)


class _Both(io.TextIOBase):
    """Writes to two streams."""

    def __init__(self, *streams: io.TextIOBase) -> None:
        self.streams = streams

    def write(self, text: str) -> int:
        """Write to both."""
        for stream in self.streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush both."""
        for stream in self.streams:
            stream.flush()


@contextmanager
def _reported(folder: Path | None, device: torch.device) -> Iterator[None]:
    """Write what is printed into a dated report as well, if there is a folder."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{date.today().isoformat()}-{device.type}.md"
    # Line by line, so that a run that is cut off leaves what it measured.
    with path.open("w", encoding="utf-8", buffering=1) as file:
        file.write(f"# One {device.type} device, {date.today().isoformat()}\n\n```\n")
        both: Any = _Both(cast("Any", sys.stdout), cast("Any", file))
        try:
            with redirect_stdout(both):
                yield
        finally:
            file.write("```\n")
    say(f"\nreport: {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; without the device that was asked for, say so."""
    parser = argparse.ArgumentParser(prog="benchmarks.cuda")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--world", choices=("one", "fake"), nargs="+", default=["one", "fake"])
    add("--rounds", type=int, default=20, help="timed steps of each library (20)")
    add("--steps", type=int, default=20, help="steps whose peaks are compared (20)")
    add("--no-tests", action="store_true", help="leave out the tests marked gpu")
    add("--no-llama", action="store_true", help="leave out benchmarks.llama")
    add("--report", type=Path, help="folder of the report (on CUDA: its usual place)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        say("no CUDA device: nothing was measured. --device cpu tries the code.")
        return 0
    folder = options.report or (REPORTS if device.type == "cuda" else None)
    with _reported(folder, device):
        return _measure(device, options)


def _measure(device: torch.device, options: argparse.Namespace) -> int:
    """Print the whole report; return 1 if a test failed."""
    where = ""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        where = f", {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    say_versions(where)
    if not options.no_llama:
        # First: the figures that are compared with other libraries'.
        small = [] if device.type == "cuda" else ["--small", "--how", "eager"]
        llama.main(["--device", device.type, "--rounds", "3", *small])
    sleeping.measure(device)
    passed = options.no_tests or _run_tests()
    if device.type == "cuda":
        complaints.run(device, options.rounds)
    for kind in options.world:
        run(kind, device, options)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
