"""Whole values for optimizers that need whole matrices, each on a single rank.

The owner of a matrix holds a part of it, and follows from the plan. The exchange of the
next unit runs while owners compute. The idea is that of Distributed Muon
(arXiv:2502.16982).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import nan, prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.access.other_parts import refuse_forms
from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import operation_log
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.errors import CompositionError, FSDPError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.param_ref import ParamRef, find_param
from composable_fsdp.optim.step_checks import flat_name

WholeFunction = Callable[[Tensor, Tensor], Tensor]
"""``function(whole, parameter)`` returns the whole result."""
Owner = tuple[int, int]
"""The replica and the rank of the shard group that computes."""


class _Item(NamedTuple):
    """A parameter in the exchange of its unit."""

    at: int
    ref: ParamRef
    value: Tensor | None
    sizes: list[int]
    owner: int
    replica: int


@torch.no_grad()
def map_on_owners(
    parameters: Iterable[Tensor],
    values: Sequence[Tensor | None],
    function: WholeFunction,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Apply ``function`` to whole values of which each rank passes a part.

    For the step of an optimizer that needs whole matrices (Muon, Shampoo, SOAP): each
    value is put together on a single rank, its owner, where ``function`` runs, and the
    ranks get their parts of the result. State that is element-wise, such as momentum,
    stays with the shards. The class of the optimizer says ``works_on_shards = True``::

        momentum = [update(p) for p in matrices]
        for p, u in zip(matrices, map_on_owners(matrices, momentum, orthogonalize)):
            p.add_(u, alpha=-lr)

    Args:
        parameters: sharded parameters, and any others, in the same order on all ranks,
            including parameters of which this rank holds no element.
        values: per parameter, this rank's part of a value, in the shape of the
            parameter on this rank. None for a parameter without a value, on all ranks
            that hold elements; ranks without elements may pass None at any time.
        function: called as ``function(whole, parameter)`` with a value of the shape of
            the unsharded parameter, on the owner only; for a parameter that is not
            sharded on every rank. Returns a tensor of the same shape.
        dtype: the dtype of ``whole`` and of the results, in which both are sent.
            Default None: the dtype of each parameter.

    Returns: per parameter, this rank's part of the result, in the shape of the
        parameter on this rank; None where the value is None.
    Collective: per unit whose matrices are cut, two all-to-alls over the shard group,
        and with hybrid sharding a broadcast per replica over the replicate group.
    Raises: DesyncError, if another rank does not make this call with as many parameters
        and the same ``dtype``; ValueError, if a value or a result has another shape;
        CompositionError, for a flat parameter; what ``function`` raises, on the owner,
        while the other ranks of the owner's group raise a CollectiveError.
    """
    chosen = list(parameters)
    refs = _found(chosen, values)
    refuse_forms((ref.handle for ref in refs if ref), "map_on_owners")
    results: list[Tensor | None] = [None] * len(chosen)
    groups: dict[dist.ProcessGroup, None] = {}
    for ref in refs:
        if ref is not None:
            groups |= dict.fromkeys(ref.handle.groups.present)
    # Before the first message: ranks with other parameters would send pieces of other
    # sizes.
    details = (f"{len(chosen)} parameters", _checksum(refs), f"dtype={dtype}")
    meet(groups, Call("map_on_owners", details=details), always=False)
    exchanges = [
        _exchange(items, dtype or items[0].ref.region.layout.dtype, function, results)
        for items in _items_by_unit(refs, values)
    ]
    for at, (parameter, value, ref) in enumerate(
        zip(chosen, values, refs, strict=True)
    ):
        # All ranks hold such a parameter whole, so each computes it and sends nothing.
        if ref is None and value is not None:
            whole = value if dtype is None else value.to(dtype)
            results[at] = _call(function, whole, parameter, whole.dtype, f"number {at}")
    # The exchange of the next unit is on its way while this unit computes.
    for number in range(len(exchanges) + 2):
        # One begins, the one before computes, and the one before that ends.
        for each in reversed(exchanges[max(0, number - 2) : number + 1]):
            next(each, None)
    return results


def _found(
    parameters: Sequence[Tensor], values: Sequence[Tensor | None]
) -> list[ParamRef | None]:
    """Return the sharded parameters among ``parameters``; None for any other."""
    if len(values) != len(parameters):
        raise ValueError(
            f"map_on_owners() takes a value for each parameter, and got {len(values)} "
            f"values for {len(parameters)} parameters. Pass None for a parameter "
            "without a value."
        )
    refs = []
    # Checked before any exchange: a rank that raises later leaves the others waiting.
    for at, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        flat = find_flat(parameter)
        if flat is not None:
            raise CompositionError(
                f"map_on_owners() needs original parameters, and {flat_name(*flat)} "
                "joins what this rank holds of several. Make the optimizer over "
                "model.parameters() instead of flat_parameters(model)."
            )
        ref = find_param(parameter)
        if value is not None and value.shape != parameter.shape:
            name = f"number {at}" if ref is None else repr(ref.name)
            raise ValueError(
                f"map_on_owners() expects for parameter {name} a value of the shape of "
                f"this rank's part, {tuple(parameter.shape)}, and got "
                f"{tuple(value.shape)}. Gather nothing before this call."
            )
        refs.append(ref)
    return refs


def _checksum(refs: Sequence[ParamRef | None]) -> str:
    """Return a checksum of which parameters are where, in words."""
    names = [ref.name if ref else "" for ref in refs]
    return f"order {zlib.crc32(repr(names).encode()):08x}"


def _items_by_unit(
    refs: Sequence[ParamRef | None], values: Sequence[Tensor | None]
) -> list[list[_Item]]:
    """Return the sharded parameters of each unit and dtype, with owners."""
    known = [(at, ref) for at, ref in enumerate(refs) if ref is not None]
    owners = owners_of([ref for _, ref in known])
    units: dict[tuple[int, torch.dtype], list[_Item]] = {}
    for (at, ref), (replica, owner) in zip(known, owners, strict=True):
        # A message has one dtype, and a unit may hold regions of several.
        layout = ref.region.layout
        key = id(ref.handle), layout.dtype
        ranks = range(layout.world_size)
        cuts = [layout.interval(ref.slot, rank) for rank in ranks]
        sizes = [stop - start for start, stop in cuts]
        units.setdefault(key, []).append(
            _Item(at, ref, values[at], sizes, owner, replica)
        )
    return list(units.values())


def owners_of(refs: Sequence[ParamRef]) -> list[Owner]:
    """Return the owner of each matrix, from plans, which are equal on all ranks."""
    found = [(0, 0)] * len(refs)
    load: dict[object, dict[Owner, int]] = {}
    work = [_work(ref.slot.shape) for ref in refs]
    # The largest first, each to the holder with the least work so far: the small ones
    # then fill the gaps. ``sorted`` is stable, so equal matrices keep the order of the
    # parameters.
    for number in sorted(range(len(refs)), key=lambda n: -work[n]):
        ref, groups = refs[number], refs[number].handle.groups
        # Ranks of different meshes do not share their loads.
        busy = load.setdefault((groups.shard, groups.replicate), {})
        # Holders only: a rank without a part would receive, and send back, all of it.
        holders = ref.region.layout.holders(ref.slot)
        places = [(q, r) for q in range(groups.replicas) for r in holders]
        best = min(places, key=lambda place: (busy.get(place, 0), place))
        busy[best] = busy.get(best, 0) + work[number]
        found[number] = best
    return found


def _work(shape: Sequence[int]) -> int:
    """Return a measure of the work on a matrix: elements times the smaller side."""
    # The products of Newton-Schulz and of a decomposition grow in this way.
    return prod(shape) * (min(shape[0], prod(shape[1:])) if len(shape) > 1 else 1)


def _exchange(
    items: Sequence[_Item],
    dtype: torch.dtype,
    function: WholeFunction,
    results: list[Tensor | None],
) -> Iterator[None]:
    """Send parts of a unit to the owners, and results back; yield after each."""
    handle = items[0].ref.handle
    groups, me = handle.groups, handle.groups.rank
    replica = groups.replicate.rank() if groups.replicate else 0
    # In the order in which the results lie in memory.
    items = sorted(items, key=lambda item: (item.replica, item.owner))
    here = [item for item in items if item.replica == replica]
    mine = [item for item in here if item.owner == me]
    # A matrix that its owner holds whole needs no message; from the plan, so that all
    # ranks agree.
    is_sent = any(max(item.sizes) < sum(item.sizes) for item in here)
    shard = groups.shard if is_sent else None
    to_owners, from_ranks = _sizes(here, mine, me)
    held = [item.sizes[me] for item in here]

    def buffer(numel: int) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=handle.layout.device)

    parts, received = buffer(sum(held)), buffer(sum(from_ranks))
    for part, item in zip(torch.split(parts, held), here, strict=True):
        if item.value is None:
            # Read by no function, unless a rank alone passes None: then the result is
            # NaN, and not that of a matrix with zeros.
            part.fill_(nan)
        else:
            part.copy_(item.value.reshape(-1))
    yield from _sent(received, parts, from_ranks, to_owners, shard)
    answers = _answers(mine, received, function, shard)
    # The parts were sent before the results come: the same memory takes both.
    del parts
    parts = buffer(sum(held))
    yield from _sent(parts, answers, to_owners, from_ranks, shard)
    # Freed before the results of the replicas need memory.
    del received, answers
    for number in range(groups.replicas):
        there = [item for item in items if item.replica == number]
        held = [item.sizes[me] for item in there]
        values = parts if number == replica else buffer(sum(held))
        if groups.replicate is not None and any(held):
            collectives.broadcast(values, groups.replicate, rank=number)
        _give(results, there, torch.split(values, held))


def _give(
    results: list[Tensor | None], items: Iterable[_Item], parts: Iterable[Tensor]
) -> None:
    """Give each parameter its part of the result."""
    for part, item in zip(parts, items, strict=True):
        if item.value is not None:
            results[item.at] = part.view(item.value.shape).to(item.value.device)


def _sizes(
    here: Sequence[_Item], mine: Sequence[_Item], me: int
) -> tuple[list[int], list[int]]:
    """Return the elements that go from this rank to each owner, and come from each."""
    ranks = range(len(here[0].sizes)) if here else range(1)
    to_owners = [sum(i.sizes[me] for i in here if i.owner == rank) for rank in ranks]
    return to_owners, [sum(item.sizes[rank] for item in mine) for rank in ranks]


def _sent(
    output: Tensor,
    pieces: Tensor,
    theirs: list[int],
    ours: list[int],
    shard: dist.ProcessGroup | None,
) -> Iterator[None]:
    """Send pieces, or copy them if each matrix is whole on its owner; wait later."""
    if shard is None:
        output.copy_(pieces)
        yield
        return
    sizes = theirs, ours
    operation = collectives.all_to_all(output, pieces, sizes, shard, async_op=True)
    yield
    if operation is not None:
        operation.wait()


def _answers(
    mine: Sequence[_Item],
    received: Tensor,
    function: WholeFunction,
    shard: dist.ProcessGroup | None,
) -> Tensor:
    """Compute the matrices of this rank; return the results as the parts have come."""
    # NaN for a rank that waits for a result of a matrix which the owner has not.
    answers = torch.full_like(received, nan)
    # Pieces lie by rank and, within a rank, by matrix.
    sizes = [
        n for by_matrix in zip(*[i.sizes for i in mine], strict=True) for n in by_matrix
    ]
    pieces, places = torch.split(received, sizes), torch.split(answers, sizes)
    for at, item in enumerate(mine):
        if item.value is None:
            continue
        own = slice(at, None, len(mine))
        whole = torch.cat(pieces[own]).view(item.ref.slot.shape)
        name = repr(item.ref.name)
        try:
            result = _call(function, whole, item.ref.leaf, whole.dtype, name)
        # Ctrl-C, too: other ranks wait for the result in any case.
        except BaseException as error:
            text = f"map_on_owners() for parameter {name} raised on its owner: "
            # The other ranks wait in an all-to-all that this rank will not send.
            for group in item.ref.handle.groups.present:
                # A refusal of this package comes on all owners, at the same place.
                if not isinstance(error, FSDPError):
                    told = operation_log(group).recorder
                    told.raises(f"{text}{error!r}", owes=group is shard)
            raise
        parts = torch.split(result.reshape(-1), item.sizes)
        for place, part in zip(places[own], parts, strict=True):
            place.copy_(part)
    return answers


def _call(
    function: WholeFunction,
    whole: Tensor,
    parameter: Tensor,
    dtype: torch.dtype,
    name: str,
) -> Tensor:
    """Return ``function(whole, parameter)`` in ``dtype``."""
    result = function(whole, parameter)
    if result.shape != whole.shape:
        raise ValueError(
            f"map_on_owners() expects the function to return a tensor of the shape of "
            f"its argument, {tuple(whole.shape)} for parameter {name}, and got "
            f"{tuple(result.shape)}."
        )
    return result.to(dtype)
