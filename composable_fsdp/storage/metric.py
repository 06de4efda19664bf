"""Ranks checkpoints by the metric that their saves were given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed
from composable_fsdp.storage.manifest import MODES, SavedMetric
from composable_fsdp.storage.values import decode, encode

Key = TypeVar("Key")


class Metric(NamedTuple):
    """The value of a metric, and whether ``"min"`` or ``"max"`` is best."""

    value: float
    best: str

    @staticmethod
    def of(value: Any, best: Any) -> Metric | None:
        """Return the metric of a caller's arguments; None without a value.

        Raises: TypeError, for another type; ValueError, for another ``best``.
        """
        # Also without a value: a later save of the script would fail, after hours.
        if best not in MODES:
            raise ValueError(f"save expects best='min' or best='max', got {best!r}.")
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # A loss is a tensor of one element, on any device.
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            is_number, value = not value.is_complex(), value.item()
        if not is_number:
            raise TypeError(
                "save expects metric=None or a number, or a tensor with one, got a "
                f"{type(value).__name__}."
            )
        return Metric(float(value), best)

    @staticmethod
    def saved(found: SavedMetric | None) -> Metric | None:
        """Return the metric of a manifest."""
        if found is None:
            return None
        return Metric(decode(found.value, "metric", lambda _: None), found.best)

    def to_save(self) -> SavedMetric:
        """Return the metric for a manifest."""
        return SavedMetric(encode(self.value, "metric", lambda *_: 0), self.best)

    @property
    def rank(self) -> float:
        """A number that is larger for a better metric."""
        return -self.value if self.best == "min" else self.value


def agreed(ranks: Sequence[int], metrics: Sequence[Metric | None]) -> Metric | None:
    """Return the metric of the ranks that gave one.

    Args:
        ranks: the global ranks, in the order of ``metrics``.
        metrics: the metric of each rank; often of rank 0 alone.

    Collective: none; all ranks have the same ``metrics``, so all decide alike.
    Raises: CheckpointError, if two ranks gave different metrics.
    """
    # Rank 0 often evaluates alone.
    given = [(rank, m) for rank, m in zip(ranks, metrics, strict=True) if m is not None]
    # By text: NaN differs from itself.
    if len({repr(metric) for _, metric in given}) > 1:
        told = [f"{m.value} (best={m.best!r}) on rank {rank}" for rank, m in given]
        raise CheckpointError(
            f"save got another metric on other ranks: {listed(told)}. Nothing was "
            "written. All-reduce the metric before the save, or pass it on one rank."
        )
    return given[0][1] if given else None


def best_of(metrics: Mapping[Key, Metric | None], count: int) -> list[Key]:
    """Return the keys of the ``count`` best metrics, best first; of equals, the last.

    A NaN is never among them. Raises: ValueError, if some are best at the minimum and
    some at the maximum.
    """
    # A training run that diverged must not become the best.
    known = [(k, m) for k, m in metrics.items() if m and not math.isnan(m.value)]
    # A loss and an accuracy under the same name cannot be ranked.
    if len({metric.best for _, metric in known}) > 1:
        raise ValueError("some metrics are best at the minimum and some at the maximum")
    # ``sorted`` keeps the order of equals: the newest, which stands last, comes first.
    known.reverse()
    return [key for key, _ in sorted(known, key=lambda each: -each[1].rank)[:count]]
