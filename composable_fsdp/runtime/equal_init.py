"""Detection of equal random numbers on all ranks after initialization in place.

``reset_parameters()`` on shards draws numbers for this rank's rows only. With the same
seed on all ranks the rows repeat, and the model differs from the plain model. Before
the first forward each rank publishes the start of each parameter in the key-value store
and compares with the rank that published first. A rank publishes nothing if no shard
was written to since construction. No rank waits for another rank.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import param_path
from composable_fsdp.flat.step_counts import written
from composable_fsdp.naming import quoted

_LENGTH = 16
"""Number of elements that are compared; torch on CPU draws this many at a time."""
_PER_UNIT = 8


def warn_of_equal_init(handles: Iterable[FlatParamHandle]) -> None:
    """Warn if shards begin with the same numbers as the shards of another rank.

    Collective: none; a round trip to the key-value store per shard group.
    """
    by_group: dict[str, tuple[Peers | None, list[FlatParamHandle]]] = {}
    for handle in handles:
        group = handle.groups.shard
        if group is None:
            continue
        # Keys are chosen for every group: a program may write to the shards of some
        # ranks only, and the keys of the next model must be equal on all ranks.
        if group.group_name not in by_group:
            peers = Peers(group, "draws").name() if can_compare(group) else None
            by_group[group.group_name] = peers, []
        # Only units whose shards were written to since construction can have been
        # initialized in place.
        if written(handle.layout) != handle.writes.at_build:
            by_group[group.group_name][1].append(handle)
    for peers, chosen in by_group.values():
        if peers is None or not chosen:
            continue
        mine = {mark: name for handle in chosen for mark, name in _samples(handle)}
        # The rank is part of the value, so that no two ranks publish equal values.
        said = peers.say("first", [chosen[0].groups.rank, mine])
        peers.leave("left", ["first"])
        if said is None:
            continue
        _, theirs = said.value
        equal = [mark for mark in mine if mark in theirs]
        if equal:
            _warn(said.rank, theirs[equal[0]], mine[equal[0]], len(equal))


def _warn(rank: int, theirs: str, mine: str, count: int) -> None:
    """Warn that ``count`` parameters begin as parameters of ``rank`` do."""
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
    """Yield a digest of a parameter's first numbers, up to a factor, and the name."""
    found = 0
    for index, leaf in enumerate(handle.leaves):
        start = _start(leaf.detach())
        if start is not None:
            digest = hashlib.blake2b(str(start).encode(), digest_size=8).hexdigest()
            yield digest, param_path(handle, index)
            # A few parameters per unit are enough, and the text in the store stays
            # short.
            found += 1
            if found == _PER_UNIT:
                return


def _start(leaf: Tensor) -> list[int] | None:
    """Return the first numbers of ``leaf``, scaled; None if they do not look random.

    A random parameter has no two equal rows, and the numbers are not sorted.
    """
    if leaf.numel() < _LENGTH or not leaf.is_floating_point() or leaf.is_meta:
        return None
    if leaf.dim() > 1 and (len(leaf) < 2 or torch.equal(leaf[0], leaf[1])):
        return None
    start = leaf.reshape(-1)[:_LENGTH].to("cpu", torch.float64)
    steps = start.diff()
    if (steps >= 0).all() or (steps <= 0).all() or not start.isfinite().all():
        return None
    # Scale by the largest number: the bounds of a uniform distribution depend on the
    # shape, which differs between ranks.
    scaled: list[int] = (start / start.abs().max() * 1000).round().int().tolist()
    return scaled
