"""``ParamRef``: a sharded parameter and its unit; paths; and replaced parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from composable_fsdp.flat.handle import LEAVES, FlatParamHandle, find_leaf
from composable_fsdp.flat.param_form import ParamForm
from composable_fsdp.flat.region import FlatParameter, part_of
from composable_fsdp.naming import join_name
from composable_fsdp.planning.layout import ParameterSlot


def place_path(handle: FlatParamHandle, at: int) -> str:
    """Return the path of the parameter at place number ``at`` of the layout."""
    place, owner = handle.layout.places[at], handle.layout.owners[at]
    path = handle.paths.get(id(owner))
    # Most units have a single module, whose path begins all names of the plan.
    if path is None:
        return join_name(handle.full_fqn, place.fqn)
    return join_name(path, place.name)


def slot_paths(
    handle: FlatParamHandle, slot: ParameterSlot, unit: str | None = None
) -> list[str]:
    """Return all paths of a parameter; a tied parameter has several."""
    if not handle.paths:
        start = handle.full_fqn if unit is None else unit
        return [join_name(start, fqn) for fqn in slot.fqns]
    places = enumerate(handle.layout.places)
    return [place_path(handle, at) for at, p in places if p.slot_index == slot.index]


def slot_path(handle: FlatParamHandle, slot: ParameterSlot) -> str:
    """Return the path of a parameter; of a tied parameter the first."""
    return slot_paths(handle, slot)[0]


@dataclass(frozen=True, slots=True)
class ParamRef:
    """The place of a sharded parameter; valid until the unit is laid out anew."""

    handle: FlatParamHandle
    region: FlatParameter
    index: int

    @property
    def slot(self) -> ParameterSlot:
        """Return the parameter's place in the layout of the region."""
        return self.region.layout.parameters[self.index]

    @property
    def leaf(self) -> nn.Parameter:
        """Return the sharded parameter itself."""
        return self.region.leaves[self.index]

    @property
    def name(self) -> str:
        """Return the parameter's name in the plain model, from the root."""
        return slot_path(self.handle, self.slot)

    @property
    def form(self) -> ParamForm:
        """Return how compute sees the parameter."""
        return self.handle.layout.forms[self.slot.index]

    @property
    def is_cut(self) -> bool:
        """Return whether other ranks hold elements that this rank does not hold."""
        return self.handle.groups.shard_ref is not None or bool(self.form.cut_over)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the plain model, of which tensor parallelism cuts."""
        slot = self.slot
        return slot.shape if slot.whole is None else slot.whole.shape

    @property
    def interval(self) -> tuple[int, int]:
        """Return elements ``[start, stop)`` of the flattened parameter on this rank."""
        return self.region.layout.interval(self.slot, self.region.rank)

    @property
    def offset(self) -> int:
        """Return where the parameter's elements start in the shard."""
        return self.region.layout.shard_offset(self.slot, self.region.rank)

    def part_of(self, value: Tensor) -> Tensor:
        """Return this rank's part of the full ``value``, in the shape of ``leaf``."""
        # First the part of this rank's mesh, of which the shard group cuts rows.
        own = self.form.part(value)
        return part_of(self.region, self.slot, own, like=self.leaf)


def param_refs(handle: FlatParamHandle) -> Iterator[ParamRef]:
    """Yield the parameters of a unit, in region order."""
    for region in handle.layout.regions:
        for index in range(len(region.leaves)):
            yield ParamRef(handle, region, index)


def in_model_order(handle: FlatParamHandle) -> list[ParamRef]:
    """Return the parameters of a unit in the order of the plain model."""
    return sorted(param_refs(handle), key=lambda ref: ref.slot.index)


def param_ref(handle: FlatParamHandle, index: int) -> ParamRef:
    """Return the parameter of ``handle`` that ``find_leaf`` gives the ``index``."""
    for region in handle.layout.regions:
        if index < len(region.leaves):
            return ParamRef(handle, region, index)
        index -= len(region.leaves)
    raise AssertionError(f"unit {handle.name} has no leaf {index}")


def find_param(parameter: object) -> ParamRef | None:
    """Return the reference to a sharded parameter; ``None`` for other objects."""
    found = find_leaf(parameter)
    return None if found is None else param_ref(*found)


def originals_by_vars() -> dict[int, tuple[FlatParamHandle, int]]:
    """Return every existing sharded parameter, by the identity of the ``__dict__``."""
    return {
        id(vars(leaf)): (handle, index)
        for handle in dict.fromkeys(link() for link in list(LEAVES.values()))
        if handle is not None
        for index, leaf in enumerate(handle.leaves)
    }


# A parameter that a module shows in place of a sharded one is the sharded one from the
# next use on. An optimizer that was made before would step on unused parameters without
# an error; ``optim`` asks ``successor`` about these objects.
# ``Any``, because torch has no type stubs for this class.
_replaced: Any = WeakIdKeyDictionary()
"""By replaced parameter: a weak reference to its unit, and the index of its slot."""
_times = 0


def record_replaced(
    handle: FlatParamHandle, *leaves: Sequence[Sequence[nn.Parameter]]
) -> None:
    """Record the old leaves, given first, that the new leaves of ``handle`` replace."""
    global _times
    # Of a DTensor, the first leaf is already another object than the parameter.
    for region, before, after in zip(handle.layout.regions, *leaves, strict=True):
        for slot, old, new in zip(region.layout.parameters, before, after, strict=True):
            if old is not new:
                _replaced[old] = weakref.ref(handle), slot.index
                # A parameter that returns is a leaf again. The entry must go, because
                # ``torch.utils.swap_tensors`` refuses a parameter that has weak
                # references.
                _replaced.pop(new, None)
                _times += 1


def times_replaced() -> int:
    """Return how many parameters have been replaced so far in this process."""
    return _times


def successor(parameter: nn.Parameter) -> tuple[FlatParamHandle, nn.Parameter] | None:
    """Return the unit and the leaf that replaced ``parameter``."""
    link, index = _replaced.get(parameter, (None, -1))
    handle = None if link is None else link()
    if handle is None or find_leaf(parameter) is not None:
        return None
    # The parameter was assigned to its place again; the next forward will adopt it.
    if any(table.get(key) is parameter for table, key, *_ in handle.swaps):
        return None
    leaves = (ref.leaf for ref in param_refs(handle) if ref.slot.index == index)
    return handle, next(leaves)
