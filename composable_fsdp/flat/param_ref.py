"""``ParamRef``: a sharded parameter together with the unit that holds the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from composable_fsdp.flat.handle import LEAVES, FlatParamHandle, find_leaf
from composable_fsdp.flat.param_form import ParamForm
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.region import FlatParameter, part_of
from composable_fsdp.planning.layout import ParameterSlot


@dataclass(frozen=True, slots=True)
class ParamRef:
    """The place of a sharded parameter; valid until the unit is laid out anew."""

    handle: FlatParamHandle
    region: FlatParameter
    index: int
    """Index among the parameters of the region."""

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
        return self.handle.groups.shard is not None or bool(self.form.cut_over)

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


def first_sharded(module: nn.Module) -> str | None:
    """Return the name of the first parameter of ``module`` that a unit holds."""
    held = (name for name, p in module.named_parameters() if find_leaf(p) is not None)
    return next(held, None)


def find_param(parameter: object) -> ParamRef | None:
    """Return the reference to a sharded parameter; ``None`` for other objects."""
    found = find_leaf(parameter)
    return None if found is None else param_ref(*found)


def originals_by_vars() -> dict[int, tuple[FlatParamHandle, int]]:
    """Return every existing sharded parameter, by the identity of the ``__dict__``."""
    # All parameters of a unit share a weak reference to the handle; visit each handle
    # once.
    links = {id(link): link for link in list(LEAVES.values())}
    handles = [handle for link in links.values() if (handle := link()) is not None]
    return {
        id(vars(leaf)): (handle, index)
        for handle in handles
        for index, leaf in enumerate(handle.leaves)
    }
