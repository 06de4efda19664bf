"""How a unit communicates: the divisor of gradients, and the user's settings.

A sum over ranks is divided by ``factor``, by default the number of ranks.

::

    dtype                        before the sum    after the sum
    float32, bfloat16, float64   -                 factor (NCCL can average by itself)
    other (float16)              power of two      the rest of factor
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.comm.groups import GroupRef

# float16 ends at 65504: dividing only after the sum could overflow, and dividing by the
# whole factor before the sum would flush small gradients to zero. The other dtypes have
# the range for the sum.
_ROOMY = (torch.float32, torch.bfloat16, torch.float64)
"""Dtypes in which a sum over ranks does not overflow if its terms do not."""


class Division(NamedTuple):
    """The divisors of sums over ranks."""

    before: float
    """Divisor of each rank's gradients before the sum."""
    after: float
    """Divisor of the sum."""
    by_backend: bool
    """Whether the collective itself averages; both divisors are then 1."""


NO_DIVISION = Division(1.0, 1.0, False)


@cache
def divisor_of(divisor: float, dtype: torch.dtype) -> Tensor | float:
    """Return what divides plain tensors of ``dtype`` as the number does, but faster."""
    # Of a number torch makes a tensor at each division, which takes most of the time.
    # In other dtypes torch rounds the number less.
    if dtype not in (torch.float32, torch.float64):
        return divisor
    with torch.inference_mode(False):
        return torch.tensor(divisor, dtype=dtype, device="cpu")


@dataclass(slots=True, eq=False)
class ReduceRule:
    """The settings of a unit's collectives; written by ``access.settings``."""

    factor: float | None = None
    """Divisor of the sum over ranks. Default: None, the number of ranks."""
    expert_ranks: int = 1
    """Ranks whose tokens the unit's experts compute, and so whose losses are in
    each rank's gradients before any sum. Default: 1, this rank's own."""
    group: GroupRef | None = None
    """The group of reduce-scatters. Default: None, the shard group."""
    all_reduce: bool = True
    """Whether a reduction includes the all-reduce over the replicate group. If
    False, the sums of the reduce-scatter wait in ``ReduceBuffer.partial``.
    Default: True."""
    fill: bool = False
    """Whether every trainable parameter takes part in every reduction, with zeros
    if a rank has no gradient (``features.unused.common_order``). Default: False."""
    hook: Callable[..., object] | None = None
    """Communication hook of the user, which replaces the collectives. Default:
    None."""
    hook_state: Any = None
    """First argument of ``hook``."""
    keeps_empty: bool = False
    """Whether leaves without elements on this rank get an empty gradient, as FSDP2
    gives, and not ``None``, as FSDP1 does. Default: False."""
    force_sum: bool = False
    """Whether the collectives may only sum, also if the backend can average.
    Default: False."""
    after_sum: Callable[[torch.Tensor], None] | None = None
    """Called with the sums of a region, before the division after the sum. Default:
    None."""
    # With the arguments of ``collectives``, so that a step only picks a function.
    all_gather: Callable[..., Any] | None = None
    """Stands in for ``collectives.all_gather_flat`` in the step. Default: None."""
    reduce_scatter: Callable[..., Any] | None = None
    """Stands in for ``collectives.reduce_scatter_flat``. Default: None."""


def split_factor(factor: float) -> tuple[float, float]:
    """Split ``factor`` into two divisors of similar size whose product is ``factor``.

    The first divisor is a power of two.

    >>> split_factor(8), split_factor(6), split_factor(1)
    ((4.0, 2.0), (4.0, 1.5), (1.0, 1.0))
    """
    # Dividing by a power of two changes only the exponent.
    first = 1.0
    while factor % first == 0 and first * first < factor:
        first *= 2
    return first, factor / first


def division(
    rule: ReduceRule, dtype: torch.dtype, *, ranks: int, can_average: bool
) -> Division:
    """Return the divisors before and after sums over ranks."""
    if rule.hook is not None:
        return NO_DIVISION  # the hook divides
    factor = rule.factor
    # A backend that averages knows of its own ranks alone.
    if factor is None and rule.expert_ranks > 1:
        factor = float(ranks * rule.expert_ranks)
    return _division(factor, dtype, ranks, can_average)


@lru_cache(maxsize=64)
def _division(
    factor: float | None, dtype: torch.dtype, ranks: int, can_average: bool
) -> Division:
    """Compute ``division``; cached, because all units of a model share few results."""
    # The user's factor, or the number of ranks for an average.
    whole = float(ranks) if factor is None else factor
    if dtype not in _ROOMY:
        return Division(*split_factor(whole), by_backend=False)
    # A backend averages over the number of ranks and cannot use another factor.
    if factor is None and can_average:
        return Division(1.0, 1.0, by_backend=True)
    return Division(1.0, whole, by_backend=False)
