"""The parameters of a unit as state dicts have them: full, or this rank's parts."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_whole
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle, Table
from composable_fsdp.flat.param_ref import ParamRef, in_model_order, param_refs
from composable_fsdp.naming import listed, quoted
from composable_fsdp.phases import Phase
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.runtime.offload import on_device
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.sharded import SHOWN, Home, ShardedValue, describe
from composable_fsdp.tree.state import _FSDPState


@torch.no_grad()
def full_values(
    state: _FSDPState, *, first_only: bool = False, to_cpu: bool = False
) -> dict[int, Tensor]:
    """Return new full tensors by slot index; with ``first_only`` zeros on other ranks.

    Collective: as ``gather_unit``; inside ``unshard_params`` only what TP cuts.
    """
    handle, context = state.handle, state.context
    # Other ranks show sharded parameters and cannot gather inside a block.
    summoned = None if context is None else context.summoned
    if summoned is not None and summoned.rank0_only:
        raise PhaseError(
            f"state_dict of {state.name} was called inside unshard_params("
            "rank0_only=True), where only the first rank has full parameters. Call it "
            "before or after the block, on every rank."
        )
    if handle.phase is Phase.SUMMON and handle.is_full:
        # The tensors in the modules, because the block may have replaced parameters.
        shown = {
            index: held.detach()
            for index, table, key, _ in placed(handle)
            if (held := table.get(key)) is not None
        }
        # Inside a block the modules show DTensors, whole over the data ranks alone.
        return {
            index: handle.layout.forms[index].whole(local_of(shown[index].clone()))
            for index in sorted(shown)
        }
    require_between_steps(state, "state_dict")
    values = gather_unit(handle, first_only=first_only, to_cpu=to_cpu)
    if first_only and not handle.groups.is_first:
        return {
            ref.slot.index: torch.zeros(
                (), dtype=ref.region.layout.dtype, device="cpu"
            ).expand(ref.shape)
            for ref in param_refs(handle)
        }
    return values


@torch.no_grad()
def gather_unit(
    handle: FlatParamHandle, *, first_only: bool = False, to_cpu: bool = False
) -> dict[int, Tensor]:
    """Return full parameters by slot index. Collective: as ``gather_whole``."""
    # As in plain torch, the state dict of a model on meta has keys, shapes and dtypes.
    if handle.layout.on_meta:
        return {
            ref.slot.index: torch.empty(
                ref.shape, dtype=ref.region.layout.dtype, device="meta"
            )
            for ref in param_refs(handle)
        }
    # By index: ranks of tensor parallelism may have other regions, and must send alike.
    refs = in_model_order(handle)
    # Offloaded shards are copied to the compute device, from which the backend sends.
    shards = [on_device(handle, region.shard) for region in handle.layout.regions]
    values = gather_whole(handle, shards, refs, first_only=first_only, to_cpu=to_cpu)
    return {ref.slot.index: value for ref, value in zip(refs, values, strict=False)}


def sharded_value(ref: ParamRef, local: Tensor) -> Tensor:
    """Return ``local``, this rank's part of a parameter, as a sharded value."""
    handle, region, slot = ref.handle, ref.region, ref.slot
    # No box could represent a parameter without elements.
    if not prod(ref.shape):
        return local.new_empty(ref.shape)
    if handle.groups.shard is None and not slot.shape:
        return local
    within = None
    # Of a parameter that tensor parallelism cuts, the rectangle here. Plain tuples,
    # which ``torch.load(weights_only=True)`` reads.
    if slot.whole is not None:
        cuts = prod(size for _, size, dim in slot.whole.axes if dim is not None)
        within = slot.shape, slot.whole.offset, cuts
    # Also without a shard group, so that DCP reads and writes boxes.
    return ShardedValue(
        local,
        ref.shape,
        slot.offset,
        region.layout.shard_numel,
        region.rank,
        region.layout.world_size,
        Home(handle.groups.shard_ref, handle.layout.device, ref.form),
        within,
    )


def sharded_values(
    handle: FlatParamHandle, *, to_cpu: bool, copy: bool
) -> dict[int, Tensor]:
    """Return this rank's part of the unit's parameters, by slot index."""
    return {
        ref.slot.index: sharded_value(
            ref, ref.leaf.detach().to("cpu" if to_cpu else ref.leaf.device, copy=copy)
        )
        for ref in param_refs(handle)
    }


def mismatch(ref: ParamRef, value: ShardedValue) -> str:
    """Return why ``value`` is not this rank's part of ``ref``, or an empty text."""
    own = sharded_value(ref, value.local)
    if isinstance(own, ShardedValue) and own.is_part_like(value):
        return ""
    region, slot = ref.region, ref.slot
    start, stop = ref.interval
    cut = f" in shards of {region.layout.shard_numel} elements from {slot.offset} on"
    return (
        f"expected elements [{start}, {stop}) of shape {ref.shape} on rank "
        f"{region.rank} of {region.layout.world_size},{cut}, got {describe(value)} of "
        f"shape {tuple(value.shape)}, in shards of {value.shard_numel} elements from "
        f"{value.offset} on. Sharded values go back into the layout from which they "
        "came, and another world size, other units, or frozen parameters change the "
        "layout. Save them with torch.distributed.checkpoint and load that into this "
        "model's own state_dict(), or save under FULL_STATE_DICT."
    )


class Shown:
    """Parameters over given values, in the places of the unit's own parameters."""

    __slots__ = ("__weakref__", "_buffers", "_kept", "parameters", "places")

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = [*places]
        self.parameters: dict[int, nn.Parameter] = {}
        self._kept: list[tuple[Table, str, nn.Parameter]] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def show(self, values: Mapping[int, Tensor]) -> None:
        """Register a parameter over each value, by slot index, at all its places."""
        SHOWN.add(self)
        for index, table, key, leaf in self.places:
            if index in values and (shown := table.get(key)) is not None:
                # A tied parameter is one object at all its places.
                if index not in self.parameters:
                    value = values[index].detach()
                    made = nn.Parameter(value, requires_grad=leaf.requires_grad)
                    # Of version 0, with attributes of the user. The parts of a sharded
                    # value are attributes, too.
                    vars(made).update({**vars(leaf), **vars(made)})
                    self.parameters[index] = made
                self._kept.append((table, key, shown))
                table[key] = self.parameters[index]

    def show_buffer(self, buffer: Tensor, value: Tensor) -> None:
        """Give a buffer the data of ``value``."""
        self._buffers.append((buffer, buffer.data))
        buffer.data = value

    def hide(self) -> None:
        """Register the earlier parameters again."""
        SHOWN.discard(self)
        for table, key, before in self._kept:
            table[key] = before
        # In reverse, because a buffer that modules share was changed several times.
        for buffer, data in reversed(self._buffers):
            buffer.data = data

    def changed(self) -> Iterator[tuple[int, Tensor | None]]:
        """Yield slot index and present value of parameters written to or replaced."""
        for index, table, key, _ in self.places:
            made, now = self.parameters.get(index), table.get(key)
            if made is not None and (now is not made or now._version):
                yield index, now


Place = tuple[int, Table, str, nn.Parameter]
"""Slot index, table of a module, key there and sharded leaf."""


def placed(handle: FlatParamHandle) -> Iterator[Place]:
    """Yield the places of all parameters of a unit."""
    for place, swap in zip(handle.layout.places, handle.swaps, strict=True):
        yield place.slot_index, *swap[:3]


_log = logging.getLogger("composable_fsdp.state_dict")

_Given = tuple[str, "weakref.ref[Tensor]", Tensor, int]
"""Name, value, a tensor without elements that has its version counter, the version."""

_given: weakref.WeakKeyDictionary[_FSDPState, list[_Given]] = (
    weakref.WeakKeyDictionary()
)
_told: weakref.WeakSet[_FSDPState] = weakref.WeakSet()


def watch_values(state: _FSDPState, values: Mapping[str, Any]) -> None:
    """Note the values that ``state_dict()`` returns for a unit, none kept alive."""
    found = _given[state] = []
    for name, value in values.items():
        # Tensors made in inference mode count no versions.
        if isinstance(value, Tensor) and not value.is_inference():
            counter = value.detach()
            # Other memory, and the version counter stays the value's.
            if isinstance(counter, ShardedValue):
                counter.local = counter.local.new_empty(0)
            else:
                counter.data = value.new_empty(0)
            found.append((name, weakref.ref(value), counter, value._version))


def forget_values(state: _FSDPState) -> None:
    """Forget the values: the model loads, perhaps these values."""
    _given.pop(state, None)


def tell_of_lost_writes(state: _FSDPState) -> None:
    """Log, once a unit, if the values given last were written to and dropped."""
    written = [
        quoted(name)
        for name, value, counter, version in _given.pop(state, ())
        # Values that are kept belong to the caller, who may change and save them.
        if counter._version != version and value() is None
    ]
    if written and state not in _told:
        _told.add(state)
        _log.warning(
            "Values of state_dict() of %s were written to in place and dropped (%s). "
            "They are copies, and the model has not changed. For an average of the "
            "weights update the parameters: torch.optim.swa_utils.AveragedModel, or a "
            "loop over average.parameters() and model.parameters(). To write full "
            "values use unshard_params(model), or model.load_state_dict(values).",
            state.title,
            listed(written),
        )
