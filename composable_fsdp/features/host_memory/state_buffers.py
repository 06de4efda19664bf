"""States of an optimizer in host memory, which pass through two device buffers.

::

    lane      in 0   in 1            out 0  in 2            out 1          out 2
    compute          step of 0  ->   step of 1       ->     step of 2

A step of the optimizer becomes one per region, with the parameters of that region in
its groups: what works element by element gives the same bits. Seam: torch's hooks of
steps. The hook before the step does all of it, and the step itself finds no group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_fsdp.access.settings import units_of
from composable_fsdp.comm.device import StreamEvent, is_capturing
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.features.host_memory.lane import Lane
from composable_fsdp.flat import memory
from composable_fsdp.flat.param_ref import param_ref
from composable_fsdp.optim.step_checks import (
    find_held,
    handles_of,
    needs_whole_params,
    parameters_of,
)
from composable_fsdp.tools.slots import slot_bytes

Group = dict[str, Any]
_INSTALLED = "_composable_fsdp_host_states"
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def offload_states(optimizer: Optimizer, model: nn.Module) -> None:
    """Keep the optimizer's states in host memory; weights and gradients stay.

    States live in pinned memory, one buffer per region, and pass through two device
    buffers during a step: the states of the next region come beside the step of this
    one. Numbers are those without, bit by bit; state dicts and checkpoints, too. A step
    takes at least the time of two copies of the states over the link to the host, and
    the host waits for its end. Counters of a single element stay where they are.

    Args:
        optimizer: one of torch's that work element by element (Adam, AdamW, SGD with
            momentum, ...), or one with ``works_on_shards = True``.
        model: holds fully sharded modules. ``CPUOffload(offload_states=True)`` has
            the same effect at the first step of each optimizer of its units.

    Collective: none.
    Raises: CompositionError, for an optimizer of whole parameters or of unknown kind,
        one of other models, or a model without units.

    >>> offload_states(optimizer, model)
    """
    units = units_of(model, "offload_states", recurse=True)
    handles = {state.handle for state in units}
    name = type(optimizer).__name__
    if not handles.intersection(handles_of(optimizer)):
        raise CompositionError(
            f"offload_states: {name} holds no parameter of a unit of this "
            f"{type(model).__name__}. Make it of model.parameters() after fully_shard."
        )
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    reason = needs_whole_params(optimizer)
    if reason or not (is_torchs or getattr(optimizer, "works_on_shards", False)):
        raise CompositionError(
            f"offload_states steps region by region, and {name} "
            f"{reason or 'is not known to work element by element'}. If it does, set "
            f"{name}.works_on_shards = True; else keep its states on the device."
        )
    if not hasattr(optimizer, _INSTALLED):
        device = units[0].handle.layout.device
        states = vars(optimizer)[_INSTALLED] = _States(optimizer, device)
        optimizer.register_step_pre_hook(states.begin)
        optimizer.register_step_post_hook(states.end)


def offload_planned(optimizer: Optimizer) -> None:
    """Call ``offload_states`` for units with ``CPUOffload(offload_states=True)``."""
    for handle in handles_of(optimizer):
        offload = handle.layout.plan.options.cpu_offload
        if offload is not None and offload.offload_states:
            return offload_states(optimizer, handle.layout.owners[0])


@dataclass(eq=False)
class _Region:
    """The states of the parameters of a region."""

    parameters: list[Tensor] = field(default_factory=list)
    host: Tensor = _NOTHING
    """Bytes of all states, one after another."""
    kept: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    """Dict and key of each state, and the view of ``host`` that it is between steps."""
    shown: list[Tensor] = field(default_factory=list)
    """Aligned with ``kept``: the views of a device buffer that a step sees."""

    def settle(self, states: _States) -> None:
        """Move states to the host that are new, or that a load has replaced."""
        found = [
            (values, key, value)
            for p in self.parameters
            # Parameters in host memory (``CPUOffload``) have their states beside them.
            if p.device == states.device
            for values in (states.optimizer.state.get(p, {}),)
            for key, value in values.items()
            # A counter has no dims, and an optimizer may read it on the host.
            if type(value) is Tensor and value.shape == p.shape and value.dim()
        ]
        if [id(value) for *_, value in found] == [id(home) for *_, home in self.kept]:
            return
        states.lane.finish()
        nbytes = slot_bytes(value.nbytes for *_, value in found)
        pinned, cpu = states.device.type == "cuda", torch.device("cpu")
        self.host = memory.new_buffer(nbytes, torch.uint8, cpu, pinned=pinned)
        views = _views(self.host, [value for *_, value in found])
        self.kept = [
            (values, key, view.copy_(value))
            for (values, key, value), view in zip(found, views, strict=True)
        ]
        self.hide()

    def show(self, buffer: Tensor) -> None:
        """Have the step see the states in ``buffer``."""
        self.shown = _views(buffer, [home for *_, home in self.kept])
        for (values, key, _), view in zip(self.kept, self.shown, strict=True):
            values[key] = view

    def hide(self) -> None:
        """Have the optimizer show the states on the host."""
        self.shown = []
        for values, key, home in self.kept:
            values[key] = home

    def take_replaced(self) -> None:
        """Copy states that the step has put into new tensors into the buffer."""
        for (values, key, _), view in zip(self.kept, self.shown, strict=True):
            if (now := values.get(key, view)) is not view:
                view.copy_(now)


def _views(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return a view of bytes for each tensor, one after another."""
    views, at = [], 0
    for each in like:
        part = buffer[at : at + each.nbytes].view(each.dtype)
        views.append(part.as_strided(each.size(), each.stride()))
        at += slot_bytes([each.nbytes])
    return views


def _parts(
    regions: list[_Region], groups: list[Group]
) -> list[list[tuple[Group, Group]]]:
    """Return, per region, each group with a copy that has the region's parameters."""
    places = {id(p): at for at, r in enumerate(regions) for p in r.parameters}
    parts: list[list[tuple[Group, Group]]] = [[] for _ in regions]
    for group in groups:
        members: dict[int, list[Tensor]] = {}
        for p in group["params"]:
            if id(p) in places:
                members.setdefault(places[id(p)], []).append(p)
        for at, params in members.items():
            parts[at].append((group, {**group, "params": params}))
    return parts


class _States:
    """The hooks of an optimizer whose states are on the host."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self.lane = Lane(device)
        self.regions: list[_Region] = []
        self.known: list[int] = []
        """Identities of the parameters when ``regions`` were found."""
        self.groups: list[dict[str, Any]] = []

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hook before the step: take the whole step, region by region."""
        if is_capturing():
            raise PhaseError(
                "A step with offload_states cannot be captured in a CUDA graph: the "
                "host waits at its end. Capture forward and backward alone."
            )
        closure = kwargs.get("closure", args[1] if args[1:] else None)
        given: Any = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            given = (optimizer, lambda: loss), {}
        self._find_regions()
        groups = self.groups = optimizer.param_groups
        try:
            self._step(groups)
        except BaseException:
            self.lane.finish()
            for region in self.regions:
                region.hide()
            optimizer.param_groups = groups
            raise
        # The step itself finds nothing to do.
        optimizer.param_groups = []
        return given

    def end(self, optimizer: Optimizer, *_: object) -> None:
        """Hook after the step: show the groups again."""
        optimizer.param_groups = self.groups

    def _find_regions(self) -> None:
        """Sort the parameters by region; those of no unit are a region of their own."""
        parameters = parameters_of(self.optimizer)
        if self.known == [*map(id, parameters)]:
            return
        found: dict[int, _Region] = {}
        for parameter in parameters:
            held, key = find_held(parameter), 0
            if held is not None:
                flat, ref = held.flat, held.handle
                key = id(flat.region if flat else param_ref(ref, held.number).region)
            found.setdefault(key, _Region()).parameters.append(parameter)
        # Their states move from the regions before, if there were any.
        self.regions, self.known = [*found.values()], [*map(id, parameters)]

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """Step on each region that has gradients."""
        regions = []
        for region in self.regions:
            region.settle(self)
            if any(p.grad is not None for p in region.parameters):
                regions.append(region)
        nbytes = max((region.host.nbytes for region in regions), default=0)
        # Made here and not kept: backward has the memory, and a model that sleeps.
        buffers = [
            memory.new_buffer(nbytes, torch.uint8, self.device) for _ in regions[:2]
        ]
        self.lane.behind()
        parts = _parts(regions, groups)
        step = type(self.optimizer).step
        # Without the hooks, which run once.
        step = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
        here = self._bring(regions[0], buffers[0]) if regions else None
        for at, region in enumerate(regions):
            ready = here
            if at + 1 < len(regions):
                # Its buffer is free behind the copy of the region before this one, the
                # last that the lane was given.
                here = self._bring(regions[at + 1], buffers[(at + 1) % 2])
            if ready is not None:
                ready.wait()
            self.optimizer.param_groups = [own for _, own in parts[at]]
            step(self.optimizer)
            region.take_replaced()
            self.lane.behind()
            buffer = buffers[at % 2][: region.host.nbytes]
            self.lane.copy((region.host, buffer))
            region.hide()
            region.settle(self)
        # Each region began with the options of the whole: a counter moves once.
        for group, own in chain.from_iterable(parts):
            group.update({key: own[key] for key in own if key != "params"})
        # The host reads the states from here on.
        self.lane.finish()

    def _bring(self, region: _Region, buffer: Tensor) -> StreamEvent | None:
        """Copy the states of a region into a buffer, which the step sees."""
        buffer = buffer[: region.host.nbytes]
        region.show(buffer)
        return self.lane.copy((buffer, region.host))
