"""``python -m composable_fsdp env``: what a report of a bug needs to say."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from composable_fsdp.features.versions import untested
from composable_fsdp.tools.command import Command, Report

_PACKAGES = ("safetensors", "numpy", "transformers", "accelerate", "peft", "lightning")
"""Packages that this package needs or works with."""

_VARIABLES = re.compile(
    "(COMPOSABLE_FSDP_|NCCL_|GLOO_|TORCH|PYTORCH_|OMP_|CUDA_).*"
    "|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
)
"""Environment variables that are printed."""


def _run(given: argparse.Namespace) -> Report:
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
            **{name: _installed(name) or "not installed" for name in _PACKAGES},
            **({"not tested on": text} if (text := untested()) else {}),
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


def _show(found: Report) -> None:
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


def version() -> str:
    """Return the version of this package, or that of the checkout."""
    found = _installed("composable-fsdp")
    if found is not None:
        return found
    # An installed package lies in ``site-packages``, beside no such file.
    project = Path(__file__).parents[2] / "pyproject.toml"
    text = project.read_text() if project.is_file() else ""
    match = re.search(r'^version = "(.+)"', text, re.MULTILINE)
    return f"{match[1]} (not installed)" if match else "unknown"


def _installed(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


COMMAND = Command(
    "print versions, GPUs and settings, for a report of a bug",
    """\
examples:
  python -m composable_fsdp env
  torchrun --nproc-per-node 2 -m composable_fsdp env
""",
    _run,
    _show,
)
