"""What the commands of ``python -m composable_fsdp`` share; and the command ``env``."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable_fsdp.errors import FSDPError
from composable_fsdp.tools.texts import installed, version

BAD = 1
"""Exit status: a bad checkpoint, nothing written, or a model that does not fit."""
USAGE = 2
"""Exit status of wrong usage, as that of argparse."""

Report = dict[str, Any]
"""What a command found, as JSON has it."""


class Command(NamedTuple):
    """How a command runs, prints its report, and ends."""

    run: Callable[[argparse.Namespace], Report]
    show: Callable[[Report], None]
    status: Callable[[Report], int] = lambda found: 0
    # The exit status if ``run`` raises one of ``errors``, which bad input causes.
    bad: int = BAD
    errors: tuple[type[Exception], ...] = (FSDPError, OSError)


class Progress:
    """A line on standard error with the part of ``total`` bytes that is done, which
    disappears at the end of the block."""

    def __init__(self, label: str, total: int = 0, *, wanted: bool = True) -> None:
        # A log file must not receive a line per update.
        self._wanted = wanted and sys.stderr.isatty()
        self._label, self._total = label, total
        self._done, self._shown = 0, 0.0

    def advance(self, more: int) -> None:
        """Take note of ``more`` bytes."""
        self.show(self._done + more, self._total)

    def show(self, done: int, total: int) -> None:
        """Show the bytes done so far."""
        self._done = done
        # Writing to a terminal is slow, so limit the updates.
        if self._wanted and time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            # ``total`` may be an estimate, and smaller than ``done``.
            share = f"{min(1.0, done / total):4.0%}" if total else "..."
            print(f"\r{self._label} {share}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        self.advance(0)
        return self

    def __exit__(self, *exc: object) -> None:
        # Returns to the start of the line, and erases the line.
        if self._wanted:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


_PACKAGES = ("safetensors", "numpy", "transformers", "accelerate", "peft", "lightning")
"""Packages that this package needs or works with."""

_VARIABLES = re.compile(
    "(COMPOSABLE_FSDP_|NCCL_|GLOO_|TORCH|PYTORCH_|OMP_|CUDA_).*"
    "|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
)
"""Environment variables that are printed."""


def _facts(given: argparse.Namespace) -> Report:
    """Return the facts about this installation and this machine."""
    built = {name: getattr(torch.version, name, None) for name in ("cuda", "hip")}
    backends = {}
    for name in ("gloo", "nccl", "mpi") if dist.is_available() else ():
        there = getattr(dist, f"is_{name}_available")()
        backends[name] = "yes" if there else "no"
        # With NCCL the version matters more than the presence.
        if there and name == "nccl":
            number: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # untyped in torch
            backends[name] = ".".join(map(str, number))
    # No GPU is initialized by its properties, so other programs lose no memory.
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {
        "versions": {
            "composable_fsdp": version(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            # A build of torch is for one of the two, or for CPU.
            **{name: text for name, text in built.items() if text},
            # From the metadata: importing transformers takes seconds.
            **{name: installed(name) or "not installed" for name in _PACKAGES},
        },
        "platform": {
            "system": platform.platform(),
            "cpus": os.cpu_count() or 1,
            "threads": torch.get_num_threads(),
        },
        "backends": backends,
        "gpus": [
            {
                "name": found.name,
                "memory": found.total_memory,
                "capability": f"{found.major}.{found.minor}",
            }
            for found in gpus
        ],
        # Never all variables: a report of a bug must not carry a password.
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
    }


def _show_facts(found: Report) -> None:
    """Print the facts as text."""
    for section, entries in found.items():
        print(section)
        rows = entries.items() if isinstance(entries, dict) else enumerate(entries)
        # Equal widths, so that a reader finds a value by its column. A machine without
        # a GPU, or without settings, is worth a line, too.
        lines = [(str(key), value) for key, value in rows] or [("none", "")]
        width = max(len(key) for key, _ in lines)
        for key, value in lines:
            parts = value.items() if isinstance(value, dict) else ()
            text = ", ".join(f"{name} {each}" for name, each in parts) or value
            print(f"  {key:{width}}  {text}".rstrip())


ENV = Command(_facts, _show_facts)
