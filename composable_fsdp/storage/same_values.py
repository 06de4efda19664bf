"""Compares what all ranks of a save told, if hashes have shown a difference."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.same_on_ranks import require_same
from composable_fsdp.storage.same_replicas import warning_of
from composable_fsdp.storage.team import Team

_LOGGER = logging.getLogger("composable_fsdp")


def require_same_values(
    team: Team, told: Sequence[tuple[Any, ...]]
) -> Exception | None:
    """Compare what all ranks told in full: kinds, ``RankValues``, ``ReplicaShards``.

    ``None`` stands for what was equal. Rank 0 alone warns. Collective: none.

    Returns: the error for ``write`` if warnings are errors in this process.
    Raises: CheckpointError, the same on every rank.
    """
    texts, (_, values, shards) = [], zip(*told, strict=True)
    if values[0] is not None:
        text = require_same(team.ranks, values)
        # Running means differ in ordinary training.
        if text and team.rank == 0:
            _LOGGER.info(text)
    if shards[0] is not None:
        texts.append(warning_of(team.ranks, shards))
    # A warning per rank would say no more.
    warned = [_warned(text) for text in texts if text and team.rank == 0]
    return next(filter(None, warned), None)


def _warned(text: str) -> Exception | None:
    """Warn; return the error for ``write`` if this process lets warnings raise."""
    try:
        warnings.warn(text, stacklevel=5)
    except Warning as raised:
        # Raised here, the warning would end rank 0 alone, and the others would wait.
        error = CheckpointError(
            f"{text} Nothing was written, because warnings are errors in this process."
        )
        error.__cause__ = raised
        return error
    return None
