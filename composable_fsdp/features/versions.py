"""Versions of Python and torch that the tests run on; others are told in the log."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Final

import torch

TORCH: Final = ("2.11", "2.13")
PYTHON: Final = ("3.11", "3.12")
"""The oldest and the newest tested version, both included."""

_log = logging.getLogger("composable_fsdp")


def untested() -> str:
    """Return the versions that no test ran on, as words; empty if there are none."""
    python = ".".join(map(str, sys.version_info[:2]))
    found = {"torch": (torch.__version__, TORCH), "Python": (python, PYTHON)}
    outside = [
        f"{name} {version} (tested: {oldest} to {newest})"
        for name, (version, (oldest, newest)) in found.items()
        if not _numbers(oldest) <= _numbers(version) <= _numbers(newest)
    ]
    return " and ".join(outside)


@cache
def tell_untested() -> None:
    """Write once to the log which versions no test ran on."""
    if versions := untested():
        # No warning: under ``-W error`` it would end a program that is right.
        _log.warning("composable_fsdp was not tested on %s.", versions)


def _numbers(version: str) -> list[int]:
    """Return the major and the minor number."""
    return [int(part) for part in version.split(".")[:2]]
