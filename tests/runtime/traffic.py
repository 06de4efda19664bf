"""What was sent and what a plan says is sent, in one form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from composable_fsdp.comm.collectives import CallRecord
from composable_fsdp.tools.sharding_plan import ShardingPlan

Counts = dict[str, tuple[int, int]]
"""Calls and bytes by kind."""


def counts(calls: Iterable[CallRecord]) -> Counts:
    """What was sent, kind by kind."""
    number: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for call in calls:
        number[call.op] += 1
        size[call.op] += call.nbytes
    return {op: (number[op], size[op]) for op in number}


def planned(plan: ShardingPlan) -> Counts:
    """What a plan says of one step."""
    t = plan.traffic
    kinds = {
        "all_gather": (t.all_gather_calls, t.all_gather_bytes),
        "reduce_scatter": (t.reduce_scatter_calls, t.reduce_scatter_bytes),
        "all_reduce": (t.all_reduce_calls, t.all_reduce_bytes),
    }
    return {op: both for op, both in kinds.items() if both[0]}
