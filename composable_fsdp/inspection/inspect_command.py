"""``python -m composable_fsdp inspect``: what is in a checkpoint, and who holds it."""

from __future__ import annotations

import argparse
from typing import Any

from composable_fsdp.inspection.describe import describe

ABOUT = "show what is in a checkpoint: units, names, shapes, dtypes, shards per rank"

EXAMPLES = """\
examples:
  python -m composable_fsdp inspect runs/step_100
  python -m composable_fsdp inspect runs/step_100 --json

In a program, composable_fsdp.describe(model) shows the same of a sharded model.

exit status: 0 good, 1 no checkpoint there, or damaged, 2 wrong usage
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect`` to its parser."""
    command.add_argument("path", metavar="PATH", help="the checkpoint; a path or URL")


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Describe the checkpoint.

    Raises: CheckpointError, if the checkpoint cannot be read.
    """
    # Only the manifest, or the tables of the files, are read.
    described = describe(given.path)
    found = described.as_dict()
    # JSON has no use for the text, which is made only if it is printed.
    if not given.json:
        found["text"] = str(described)
    return found


def show(found: dict[str, Any]) -> None:
    """Print the description as text."""
    print(found["text"])


def status(found: dict[str, Any]) -> int:
    """Return the exit status of a checkpoint that could be read: 0."""
    return 0
