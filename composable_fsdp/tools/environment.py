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

PACKAGE = "composable-fsdp"

_PACKAGES = (
    "safetensors",
    "numpy",
    "transformers",
    "accelerate",
    "peft",
    "lightning",
)
"""Packages that this package needs or works with."""

_PREFIXES = ("COMPOSABLE_FSDP_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "CUDA_")
"""Beginnings of the names of environment variables that are printed."""

_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Environment variables of ``torch.distributed``, which are printed, too."""


def _run(given: argparse.Namespace) -> Report:
    """Return the facts about this installation and this machine."""
    return {
        "versions": _versions(),
        "platform": {
            "system": platform.platform(),
            "cpus": os.cpu_count() or 1,
            "threads": torch.get_num_threads(),
        },
        "backends": _backends(),
        "gpus": _gpus(),
        "environment": {
            name: value
            # Never all variables: a report of a bug must not carry a password.
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) or name in _NAMES
        },
    }


def _show(found: Report) -> None:
    """Print the facts as text."""
    for section, entries in found.items():
        print(section)
        # A machine without a GPU, or without settings, is worth a line, too.
        rows = entries.items() if isinstance(entries, dict) else enumerate(entries)
        # Equal widths, so that a reader finds a value by its column.
        lines = [(str(key), _text(value)) for key, value in rows]
        width = max([len(key) for key, _ in lines], default=0)
        for key, value in lines or [("none", "")]:
            print(f"  {key:{width}}  {value}".rstrip())


def version() -> str:
    """Return the version of this package.

    A checkout that is not installed has the version of its ``pyproject.toml``.
    """
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pass
    # An installed package lies in ``site-packages``, beside no such file.
    project = Path(__file__).parents[2] / "pyproject.toml"
    text = project.read_text() if project.is_file() else ""
    found = re.search(r'^version = "(.+)"', text, re.MULTILINE)
    return f"{found[1]} (not installed)" if found else "unknown"


def _versions() -> dict[str, str]:
    """Return the versions of the package, of Python, of torch and of other packages."""
    found = {
        "composable_fsdp": version(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    # A build of torch is for one of the two, or for CPU.
    built = {name: getattr(torch.version, name, None) for name in ("cuda", "hip")}
    found |= {name: text for name, text in built.items() if text}
    # The versions come from the metadata: importing transformers takes seconds.
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if outside := untested():
        found["not tested on"] = outside
    return found


def _backends() -> dict[str, str]:
    """Return which backends of ``torch.distributed`` this torch has."""
    if not dist.is_available():
        return {"torch.distributed": "not in this build of torch"}
    names = ("gloo", "nccl", "mpi")
    there = {name: getattr(dist, f"is_{name}_available")() for name in names}
    words = {name: "yes" if there[name] else "no" for name in names}
    # With NCCL the version matters more than the presence.
    if there["nccl"]:
        number: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # untyped in torch
        words["nccl"] = ".".join(map(str, number))
    return words


def _gpus() -> list[dict[str, Any]]:
    """Return the GPUs that torch finds."""
    # No GPU is initialized by its properties, so other programs lose no memory.
    return [
        {
            "name": found.name,
            "memory": found.total_memory,
            "capability": f"{found.major}.{found.minor}",
        }
        for found in map(
            torch.cuda.get_device_properties, range(torch.cuda.device_count())
        )
    ]


def _text(value: object) -> str:
    """Return a value in a line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return str(value)


COMMAND = Command(
    "print versions, GPUs and settings, for a report of a bug",
    """\
examples:
  python -m composable_fsdp env
  python -m composable_fsdp env --json > env.json
  torchrun --nproc-per-node 2 -m composable_fsdp env

exit status: 0
""",
    lambda command: None,
    _run,
    _show,
)
