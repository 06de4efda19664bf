"""Noticing that ranks initialised their shards in place and drew the same numbers.

``reset_parameters()`` on shards draws this rank's rows alone, so under one seed each
rank has rows of another, and the model is not what the plain one would be. Equal draws
are the proof: before the first forward each rank says in the store how its parameters
begin, and compares with the rank that said so first. It says nothing if nothing was
written to its shards since they were cut, and waits for nobody.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.flat.build import written
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import join_name, quoted

_LENGTH = 16
"""How many numbers are compared: torch draws so many at a time on a CPU."""
_PER_UNIT = 8


def warn_of_equal_init(handles: Iterable[FlatParamHandle]) -> None:
    """Warn if shards of ``handles`` hold the numbers that another rank's hold.

    Sends nothing; a round trip to the key-value store per shard group.
    """
    by_group: dict[str, list[FlatParamHandle]] = {}
    for handle in handles:
        group = handle.groups.shard
        is_cut = group is not None and can_compare(group)
        if group is not None and is_cut and written(handle) != handle.written_at_build:
            by_group.setdefault(group.group_name, []).append(handle)
    for chosen in by_group.values():
        group = chosen[0].groups.shard
        assert group is not None
        mine = {mark: name for handle in chosen for mark, name in _samples(handle)}
        # With its number no rank says what another one does.
        words = [f"{mark}={name}" for mark, name in mine.items()]
        peers = Peers(group, "draws")
        said = peers.say("first", " ".join([f"{chosen[0].groups.rank}", *words]))
        peers.leave("left", ["first"])
        if said is None:
            continue
        theirs = dict(word.split("=", 1) for word in said.text.split(" ")[1:])
        equal = [mark for mark in mine if mark in theirs]
        if equal:
            _warn(said.rank, theirs[equal[0]], mine[equal[0]], len(equal))


def _warn(rank: int, theirs: str, mine: str, count: int) -> None:
    more = f", and so do {count - 1} more" if count > 1 else ""
    warnings.warn(
        f"Parameters were initialised in place on shards, and ranks drew the same "
        f"numbers: {quoted(mine)} begins here as {quoted(theirs)} does on rank {rank}"
        f"{more}. Each rank draws for its own rows, so rows repeat under one seed. "
        "Pass param_init_fn to fully_shard, or initialise inside "
        "unshard_params(module), which draw what the plain model does. A seed per "
        "rank before the initialisation gives other numbers than the plain model's.",
        stacklevel=2,
    )


def _samples(handle: FlatParamHandle) -> Iterator[tuple[str, str]]:
    """How parameters begin on this rank, up to a factor, and their names."""
    found = 0
    for name, leaf in zip(handle._fqns, handle.leaves, strict=True):
        start = _start(leaf.detach())
        if start is not None:
            digest = hashlib.blake2b(str(start).encode(), digest_size=8).hexdigest()
            yield digest, join_name(handle.full_fqn, name)
            found += 1
            if found == _PER_UNIT:
                return


def _start(leaf: Tensor) -> list[int] | None:
    """The first numbers of ``leaf`` over the largest; ``None`` if none were drawn.

    A drawn parameter has no two equal rows, and its numbers are in no order.
    """
    if leaf.numel() < _LENGTH or not leaf.is_floating_point() or leaf.is_meta:
        return None
    if leaf.dim() > 1 and (len(leaf) < 2 or torch.equal(leaf[0], leaf[1])):
        return None
    start = leaf.reshape(-1)[:_LENGTH].to("cpu", torch.float64)
    steps = start.diff()
    if (steps >= 0).all() or (steps <= 0).all() or not start.isfinite().all():
        return None
    # Bounds of a uniform distribution depend on the shape, which differs by rank.
    scaled: list[int] = (start / start.abs().max() * 1000).round().int().tolist()
    return scaled
