"""How the gradients of one unit are reduced: what is averaged, and what goes along.

A sum over ranks is divided by ``factor``, the number of ranks unless it was set.
float32 and bfloat16 have room for the sum, so it is divided afterwards (NCCL averages
by itself). float16 ends at 65504: there the factor is split, a part before the sum and
the rest after it, so that neither the sum overflows nor small gradients vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

_ROOMY = (torch.float32, torch.bfloat16, torch.float64)
"""Dtypes in which a sum over ranks does not overflow where its terms do not."""


class Division(NamedTuple):
    """What sums over ranks are divided by, and where."""

    before: float
    after: float
    by_backend: bool
    """Whether the collective averages, so that nothing is left to divide."""


class ReduceRule:
    """The settings of one unit, which ``access.settings`` writes.

    ``factor`` None is the number of ranks. ``all_reduce`` False ends a reduction after
    the reduce-scatter. ``fill`` has every trainable parameter take part in every
    reduction. ``hook`` reduces in place of the collectives.
    """

    __slots__ = ("all_reduce", "factor", "fill", "hook", "hook_state")

    def __init__(self) -> None:
        self.factor: float | None = None
        self.all_reduce = True
        self.fill = False
        self.hook: Callable[..., object] | None = None
        self.hook_state: Any = None


def split_factor(factor: float) -> tuple[float, float]:
    """Two factors of about equal size whose product is ``factor``.

    The first is a power of two, so dividing by it only moves the exponent.

    >>> split_factor(8), split_factor(6), split_factor(1)
    ((4.0, 2.0), (4.0, 1.5), (1.0, 1.0))
    """
    first = 1.0
    while factor % first == 0 and first * first < factor:
        first *= 2
    return first, factor / first


def division(
    rule: ReduceRule, dtype: torch.dtype, *, ranks: int, can_average: bool
) -> Division:
    """How to divide sums of ``dtype`` over ``ranks`` ranks.

    ``can_average``: whether the collectives that sum can divide, too.
    """
    return _division(rule.factor, dtype, ranks, can_average)


@lru_cache(maxsize=64)
def _division(
    factor: float | None, dtype: torch.dtype, ranks: int, can_average: bool
) -> Division:
    whole = float(ranks) if factor is None else factor
    if dtype not in _ROOMY:
        return Division(*split_factor(whole), by_backend=False)
    if factor is None and can_average:
        return Division(1.0, 1.0, by_backend=True)
    return Division(1.0, whole, by_backend=False)
