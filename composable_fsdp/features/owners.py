"""Whole values for optimizers that need whole matrices, each on a single rank.

A rank holds rows of a sharded matrix, and Muon or Shampoo need all rows. Gathering the
matrix on every rank would send it ``W`` times, and compute the same result ``W`` times.
Here each matrix has an *owner*, a rank that holds a part of the matrix already::

    rows of a matrix            owner: the whole matrix         rows of the result
    rank 0 [ 0 1 2 ]  --.                                  .->  rank 0 [ 0 1 2 ]
    rank 1 [ 3 4 ]    ---+->  rank 0 [ 0 1 2 3 4 ]  -> f --+->  rank 1 [ 3 4 ]
    rank 2 [ 5 ]      --'              5 ]                 '->  rank 2 [ 5 ]

Owners follow from the plan, so ranks agree on owners without communication. The
exchange of the next unit runs while the owners compute the matrices of this unit. The
idea is that of Distributed Muon (arXiv:2502.16982). Replicas of hybrid sharding share
the matrices, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import nan, prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.access.other_parts import refuse_forms
from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import Groups, operation_log
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.comm.operations import Operation
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
    """Position among the parameters of the call."""
    ref: ParamRef
    value: Tensor | None
    sizes: list[int]
    """Elements on each rank."""
    owner: int
    """The rank of the shard group that computes."""
    replica: int
    """The replica that computes."""


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
        _Exchange(items, dtype or items[0].ref.region.layout.dtype, function)
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
    count = len(exchanges)
    for number in range(count + 2):
        if number < count:
            exchanges[number].begin()
        if 0 < number <= count:
            exchanges[number - 1].compute()
        if number > 1:
            exchanges[number - 2].end(results)
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


class _Exchange:
    """The exchange of a unit: parts to the owners, and parts of results back."""

    def __init__(
        self, items: Sequence[_Item], dtype: torch.dtype, function: WholeFunction
    ) -> None:
        handle = items[0].ref.handle
        self.groups: Groups = handle.groups
        self.rank = handle.groups.rank
        self.device = handle.layout.device
        self.dtype, self.function = dtype, function
        group = self.groups.replicate
        self.replica = 0 if group is None else group.rank()
        # In the order in which the results lie in memory.
        self.items = sorted(items, key=lambda item: (item.replica, item.owner))
        self.here = [item for item in self.items if item.replica == self.replica]
        # A matrix that its owner holds whole needs no message; from the plan, so that
        # all ranks agree.
        self.is_sent = self.groups.shard is not None and any(
            max(item.sizes) < sum(item.sizes) for item in self.here
        )
        # Empty outside of ``begin`` and ``end``, because a step has many units.
        self.parts = self.received = self.answers = torch.empty(0, device="cpu")
        self.operation: Operation | None = None

    def begin(self) -> None:
        """Send this rank's parts to the owners."""
        held = [item.sizes[self.rank] for item in self.here]
        self.parts = self._buffer(sum(held))
        for part, item in zip(torch.split(self.parts, held), self.here, strict=True):
            if item.value is None:
                # Read by no function, unless a rank alone passes None: then the result
                # is NaN, and not that of a matrix with zeros.
                part.fill_(nan)
            else:
                part.copy_(item.value.reshape(-1))
        self.received = self._buffer(sum(self._from_ranks()))
        self._send(self.received, self.parts, self._from_ranks(), self._to_owners())

    def compute(self) -> None:
        """Compute the matrices of this rank, and send the results back."""
        self._wait()
        mine = [item for item in self.here if item.owner == self.rank]
        # NaN for a rank that waits for a result of a matrix which the owner has not.
        answers = self._buffer(self.received.numel()).fill_(nan)
        # Pieces lie by rank and, within a rank, by matrix.
        starts = list(accumulate(self._from_ranks(), initial=0))
        for item in mine:
            pieces = [
                slice(at, at + n) for at, n in zip(starts, item.sizes, strict=False)
            ]
            for rank, n in enumerate(item.sizes):
                starts[rank] += n
            if item.value is None:
                continue
            joined = torch.cat([self.received[piece] for piece in pieces])
            result = self._apply(item, joined.view(item.ref.slot.shape)).reshape(-1)
            for piece, part in zip(
                pieces, torch.split(result, item.sizes), strict=True
            ):
                answers[piece] = part
        # The parts were sent before the results come: the same memory takes both.
        results = self._buffer(self.parts.numel())
        self.answers, self.parts = answers, results
        self._send(results, answers, self._to_owners(), self._from_ranks())

    def end(self, results: list[Tensor | None]) -> None:
        """Give each parameter its part of the result."""
        self._wait()
        # Freed before the results of the replicas need memory.
        self.received = self.answers = torch.empty(0, device="cpu")
        for replica in range(self.groups.replicas):
            items = [item for item in self.items if item.replica == replica]
            held = [item.sizes[self.rank] for item in items]
            parts = self.parts if replica == self.replica else self._buffer(sum(held))
            if self.groups.replicate is not None and any(held):
                collectives.broadcast(parts, self.groups.replicate, rank=replica)
            for part, item in zip(torch.split(parts, held), items, strict=True):
                if item.value is not None:
                    results[item.at] = part.view(item.value.shape).to(item.value.device)

    def _to_owners(self) -> list[int]:
        """Return the elements that go from this rank to each owner."""
        sizes = [0] * self.groups.shard_world_size
        for item in self.here:
            sizes[item.owner] += item.sizes[self.rank]
        return sizes

    def _from_ranks(self) -> list[int]:
        """Return the elements that this rank, as an owner, gets from each rank."""
        sizes = [0] * self.groups.shard_world_size
        for item in self.here:
            if item.owner == self.rank:
                sizes = [n + m for n, m in zip(sizes, item.sizes, strict=True)]
        return sizes

    def _send(
        self, output: Tensor, pieces: Tensor, theirs: list[int], ours: list[int]
    ) -> None:
        """Issue an all-to-all, or copy if each matrix is whole on its owner."""
        if self.groups.shard is None or not self.is_sent:
            output.copy_(pieces)
        else:
            self.operation = collectives.all_to_all(
                output, pieces, (theirs, ours), self.groups.shard, async_op=True
            )

    def _wait(self) -> None:
        """Wait for the all-to-all that was issued last."""
        # Cleared first, so that nothing waits again after an error.
        operation, self.operation = self.operation, None
        if operation is not None:
            operation.wait()

    def _buffer(self, numel: int) -> Tensor:
        """Return memory on the compute device, from which ``shard`` can send."""
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def _apply(self, item: _Item, whole: Tensor) -> Tensor:
        """Call the function; tell the ranks that wait for this rank if it raises."""
        name = repr(item.ref.name)
        try:
            return _call(self.function, whole, item.ref.leaf, self.dtype, name)
        # Ctrl-C, too: other ranks wait for the result in any case.
        except BaseException as error:
            text = (
                f"map_on_owners() for parameter {name} raised on its owner: {error!r}"
            )
            # The other ranks wait in an all-to-all that this rank will not send.
            for group in self.groups.present:
                # A refusal of this package comes on all owners, at the same place.
                if not isinstance(error, FSDPError):
                    owes = self.is_sent and group is self.groups.shard
                    operation_log(group).recorder.raises(text, owes=owes)
            raise


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
