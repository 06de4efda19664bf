"""Which rank holds which elements, as boxes; and who sends what to another layout.

Integers alone: every rank computes the same, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from composable_fsdp.access.single import closest_names
from composable_fsdp.access.tensors import Entry, entries_of
from composable_fsdp.access.unshard_params import _route, units_with_parts
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.flat.param_ref import in_model_order
from composable_fsdp.naming import quoted
from composable_fsdp.planning.boxes import interval_boxes, moved
from composable_fsdp.planning.dtensors import whole_of
from composable_fsdp.planning.layout import (
    ParameterSlot,
    ParameterSpec,
    RegionLayout,
    Whole,
    row_block,
)
from composable_fsdp.planning.partition import plan_regions
from composable_fsdp.tree.state import _FSDPState

RankBox = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A global rank, and offsets and sizes of a box that it holds."""
Boxes = Mapping[str, tuple[RankBox, ...]]


class Transfer(NamedTuple):
    """A box of a tensor that rank ``source`` sends to rank ``target``."""

    source: int
    target: int
    name: str
    box: tuple[tuple[int, ...], tuple[int, ...]]
    """Offsets and sizes in the whole tensor."""


def boxes(
    model: nn.Module, *, replicas: bool = False
) -> dict[str, tuple[RankBox, ...]]:
    """Return which global rank holds which box of each tensor, on all ranks alike.

    The boxes of a name hold each of its elements once; with ``replicas`` once on each
    rank that has them. Names are those of ``stream_full``. A rank's boxes of a name lie
    in its sharded parameter one behind the other. Of experts that are no DTensors
    (``expert_mesh``), a rank knows its own alone.

    Raises: CompositionError, if the ranks of the meshes form no regular grid.

    >>> boxes(model)["head.weight"]
    ((0, (0, 0), (4, 4)),)
    """
    states = units_with_parts(model, "boxes")
    found: dict[str, tuple[RankBox, ...]] = {}
    for unit in entries_of(states, model):
        for entry in unit:
            axes = _axes(entry, states)
            parts = tuple(sorted(_boxes_of(entry, axes, replicas=replicas)))
            found |= dict.fromkeys(entry.names, parts)
    return found


def transfer_plan(source: Boxes, target: Boxes) -> list[Transfer]:
    """Return what ranks of ``source`` send, so that ``target`` has its boxes.

    Each element is sent once to each rank of ``target`` that asks for it. Ranks are
    those of either side, which may be other processes.

    Raises: TypeError, for no boxes; CompositionError, naming the tensor, if ``source``
        lacks elements, or holds them twice.

    >>> engine = {"head.weight": ((0, (0, 0), (2, 4)), (1, (2, 0), (2, 4)))}
    >>> transfer_plan(boxes(model), engine)[1]
    Transfer(source=0, target=1, name='head.weight', box=((2, 0), (2, 4)))
    """
    for each in (source, target):
        if not isinstance(each, Mapping):
            raise TypeError(
                "transfer_plan expects boxes by the name of the tensor, got a "
                f"{type(each).__name__}. Pass boxes(model)."
            )
    plan: list[Transfer] = []
    for name, wanted in target.items():
        if name not in source:
            raise CompositionError(
                f"transfer_plan: the source has no tensor {quoted(name)}. "
                f"{closest_names(name, source)}"
            )
        for rank, offsets, sizes in wanted:
            left = prod(sizes)
            for holder, begins, counts in source[name]:
                low = tuple(map(max, offsets, begins))
                ends = zip(offsets, sizes, begins, counts, low, strict=True)
                shape = tuple([min(o + s, b + c) - i for o, s, b, c, i in ends])
                if min(shape, default=1) > 0:
                    plan.append(Transfer(holder, rank, name, (low, shape)))
                    left -= prod(shape)
            if left:
                raise CompositionError(
                    f"transfer_plan: of box {offsets}, {sizes} of {quoted(name)} the "
                    f"source {'lacks' if left > 0 else 'holds twice'} {abs(left)} "
                    "elements. Pass boxes(model) of the whole model, without replicas."
                )
    return plan


class _Axis(NamedTuple):
    """The ranks along a dim of the grid of ranks, and whether they hold other parts."""

    ranks: list[int]
    is_cut: bool


Groups = list[tuple[dist.ProcessGroup | None, bool]]
"""Groups that hold a tensor, and whether their ranks hold other parts."""


def _own_groups(entry: Entry) -> Groups:
    """Return the groups that a tensor itself knows: shard, mesh dims, replicate."""
    ref = entry.ref
    if ref is None:
        mesh: Any = getattr(entry.source, "device_mesh", None)
        over = () if mesh is None else tuple(mesh.get_all_groups())
        whole = whole_of(entry.source)
    else:
        over, whole = ref.form.mesh_groups, ref.slot.whole
    cuts = [dim is not None for *_, dim in whole.axes] if whole else []
    mesh_dims: Groups = list(zip(over, cuts, strict=True))
    if ref is None:
        return mesh_dims
    groups = ref.handle.groups
    return [(groups.shard, True), *mesh_dims, (groups.replicate, False)]


def _axes(entry: Entry, states: Sequence[_FSDPState]) -> list[_Axis]:
    """Return the axes that cut a tensor, the shard group first; then its copies."""
    ref, groups = entry.ref, _own_groups(entry)
    here = dist.get_rank()
    axes: list[_Axis] = []
    span = {here}
    # Ranks that the tensor itself does not know have copies, but of an expert.
    copies = [g for state in states for g in _route(state)]
    is_expert = ref is not None and ref.handle.groups.experts is not None
    for group, is_cut in [*groups, *((g, False) for g in copies if not is_expert)]:
        ranks = [here] if group is None else dist.get_process_group_ranks(group)
        if len(axes) >= len(groups) and span.intersection(ranks) != {here}:
            continue
        axes.append(_Axis(ranks, is_cut))
        span = {a + b - here for a in span for b in ranks}
    if not span <= set(range(dist.get_world_size())):
        raise CompositionError(
            f"boxes: the ranks {[each.ranks for each in axes]} that hold "
            f"{quoted(entry.names[0])} form no regular grid. Make one mesh by "
            "init_device_mesh."
        )
    return axes


def _boxes_of(
    entry: Entry, axes: Sequence[_Axis], *, replicas: bool
) -> Iterator[RankBox]:
    """Yield the boxes of a tensor, for each place in the grid of ranks."""
    ref, here = entry.ref, dist.get_rank()
    whole = whole_of(entry.source) if ref is None else ref.slot.whole
    used = [range(len(r) if is_cut or replicas else 1) for r, is_cut in axes]
    for at in product(*used):
        # The ranks of a grid have strides.
        rank = here + sum(r[i] - here for (r, _), i in zip(axes, at, strict=True))
        mesh = at if ref is None else at[1:]
        shape, offset = _rectangle(entry.shape, whole, mesh)
        start, stop = 0, prod(shape)
        if ref is not None:
            layout, slot = ref.region.layout, ref.slot
            if shape != slot.shape:
                layout, slot = _laid_out(ref.handle, mesh)[slot.index]
            start, stop = layout.interval(slot, at[0])
        for box in moved(interval_boxes(shape, start, stop), offset):
            yield rank, box.offsets, box.sizes


def _rectangle(
    shape: tuple[int, ...], whole: Whole | None, at: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of the rectangle at coordinate ``at`` of its mesh."""
    sizes, offset = [*shape], [0] * len(shape)
    for (_, ranks, dim), i in zip(whole.axes if whole else (), at, strict=False):
        if dim is not None:
            # As torch cuts: the last ranks may have fewer rows, or none.
            chunk = -(-shape[dim] // ranks)
            offset[dim] = min(i * chunk, shape[dim])
            sizes[dim] = min(chunk, shape[dim] - offset[dim])
    return tuple(sizes), tuple(offset)


Slots = dict[int, tuple[RegionLayout, ParameterSlot]]
"""The place of each parameter of a unit, by index."""


def _laid_out(handle: FlatParamHandle, at: tuple[int, ...]) -> Slots:
    """Return the unit as ranks at ``at`` of its mesh lay it out.

    Raises: CompositionError, if the unit was laid out anew since ``fully_shard``.
    """
    refs, size = in_model_order(handle), handle.groups.shard_world_size
    own = tuple(group.rank() for group in groups_of(handle.layout.forms))
    found: list[Slots] = []
    for place in (own, at):
        specs = []
        for ref in refs:
            slot, layout = ref.slot, ref.region.layout
            shape, _ = _rectangle(ref.shape, slot.whole, place)
            rows, rest = divmod(slot.block, row_block(slot.shape))
            block = slot.block if rest else rows * row_block(shape)
            kind = layout.dtype, layout.trainable, block, layout.group
            specs.append(ParameterSpec(slot.fqns, shape, *kind, wire=layout.wire))
        regions = plan_regions(specs, world_size=size)
        found.append({s.index: (each, s) for each in regions for s in each.parameters})
    for ref in refs:
        layout, slot = found[0][ref.slot.index]
        if (layout.shard_numel, slot.offset) != (
            ref.region.layout.shard_numel,
            ref.slot.offset,
        ):
            raise CompositionError(
                f"boxes: parts of {quoted(ref.name)} differ in size over the ranks of "
                "tensor parallelism, and the unit was frozen, unfrozen or laid out by "
                "map_on_owners. Choose a size that the ranks divide."
            )
    return found[1]
