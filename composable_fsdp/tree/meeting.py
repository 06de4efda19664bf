"""Calls about units, and models before their first gather, meet before they send."""

from __future__ import annotations

from collections.abc import Iterable

from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.tree.moments import MODELS_MEET
from composable_fsdp.tree.state import _FSDPState


def meet_over(
    states: Iterable[_FSDPState],
    call: Call,
    *,
    replicas: bool = False,
    always: bool = True,
) -> None:
    """Wait until every rank that shards one of the units makes an equal ``call``.

    Collective: none, as ``meet``.
    Raises: DesyncError, as ``meet``.
    """
    states = list(states)
    pairs = [(s.handle.groups.shard, s.handle.groups.replicate) for s in states]
    # All shard groups before the first replicate group, on all ranks alike.
    shards = [shard for shard, _ in pairs]
    groups = shards + [copies for _, copies in pairs] if replicas else shards
    # Ranks of tensor parallelism hold other parts of the same parameters.
    groups = groups + [g for s in states for g in groups_of(s.handle.layout.forms)]
    meet(
        dict.fromkeys(group for group in groups if group is not None),
        call,
        always=always,
    )


def compare_models(state: _FSDPState, *, replicas: bool, written: bool = False) -> None:
    """Ensure that all ranks have sharded the same model as the tree of ``state``.

    Collective: in the first call, as ``guard.same_models.compare_models``.
    Raises: DesyncError with the first difference, on all ranks alike.
    """
    for compare in MODELS_MEET:
        compare(state, replicas=replicas, written=written)
