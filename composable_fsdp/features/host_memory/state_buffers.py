"""States of an optimizer in host memory, which pass through two device buffers.

::

    lane      in 0   in 1            out 0  in 2            out 1          out 2
    compute          step of 0  ->   step of 1       ->     step of 2

A step of the optimizer becomes one per region, with the parameters of that region in
its groups: what works element by element gives the same bits. Seam: torch's hooks of
steps. The hook before the step does all of it, with twins of the optimizer that differ
in their groups, and hands the step itself a twin with nothing to do: the optimizer is
whole at all times. It is the last hook, since any other may change gradients or raise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composable_fsdp.access.settings import units_of
from composable_fsdp.comm.device import StreamEvent, is_capturing
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.features.host_memory.lane import Lane
from composable_fsdp.flat import memory
from composable_fsdp.optim.step_checks import (
    find_held,
    handles_of,
    needs_whole_params,
)
from composable_fsdp.tools.unit_costs import slot_bytes

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
    _offload(optimizer, model)
    _move_hooks()


def _offload(optimizer: Optimizer, model: nn.Module) -> None:
    """Install the hook. Raises: as ``offload_states``."""
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
        vars(optimizer)[_INSTALLED] = _States(optimizer, device)


def offload_planned(optimizer: Optimizer) -> None:
    """Call ``offload_states`` for units with ``CPUOffload(offload_states=True)``."""
    for handle in handles_of(optimizer):
        offload = handle.layout.plan.options.cpu_offload
        if offload is not None and offload.offload_states:
            return _offload(optimizer, handle.layout.owners[0])


@cache
def _move_hooks() -> None:
    """Install the global hook, once; not from another one, which torch iterates."""
    register_optimizer_step_pre_hook(_move_last)


def _move_last(optimizer: Optimizer, *_: object) -> None:
    """Hook of all optimizers, before their own: put ``begin`` behind these."""
    states = vars(optimizer).get(_INSTALLED)
    if states is not None and states.optimizer is optimizer:
        states.hook.remove()
        states.hook = optimizer.register_step_pre_hook(states.begin)


@dataclass(eq=False)
class _Region:
    """The states of the parameters of a region."""

    members: dict[int, list[Tensor]] = field(default_factory=dict)
    """The parameters, by the number of their group."""
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
            for p in chain.from_iterable(self.members.values())
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
        self.kept, self.shown = [], []
        for (values, key, value), view in zip(found, views, strict=True):
            values[key] = view.copy_(value)
            self.kept.append((values, key, view))

    def show(self, buffer: Tensor) -> None:
        """Have the step see the states in ``buffer``."""
        self.shown = _views(buffer, [home for *_, home in self.kept])
        for (values, key, _), view in zip(self.kept, self.shown, strict=True):
            values[key] = view

    def hide(self) -> None:
        """Have the optimizer show the states on the host."""
        for (values, key, home), _ in zip(self.kept, self.shown, strict=False):
            values[key] = home
        self.shown = []

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
        # The strides of memory of its own, which one with gaps has not.
        stride = torch.empty_like(each, device="meta").stride()
        views.append(part.as_strided(each.size(), stride))
        at += slot_bytes([each.nbytes])
    return views


def _twin(optimizer: Optimizer, attributes: Group, groups: list[Group]) -> Optimizer:
    """Return an optimizer with ``attributes``, the same states and other groups."""
    twin: Optimizer = object.__new__(type(optimizer))
    vars(twin).update(attributes, param_groups=groups)
    return twin


class _States:
    """The hook of an optimizer whose states are on the host."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self.lane = Lane(device)
        self.regions: list[_Region] = []
        self.buffers: list[Tensor] = []
        """On the device, for the time of a step."""
        self.known: list[list[int]] = []
        """Identities of the parameters of each group when ``regions`` were found."""
        self.hook = optimizer.register_step_pre_hook(self.begin)

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hook before the step: take the whole step, region by region."""
        if optimizer is not self.optimizer:
            # A twin, whose class calls ``super().step()``: hooks, too.
            return None
        _move_hooks()
        if is_capturing():
            raise PhaseError(
                "A step with offload_states cannot be captured in a CUDA graph: the "
                "host waits at its end. Capture forward and backward alone."
            )
        closure = kwargs.get("closure", args[1] if args[1:] else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1] + args[2:], {**kwargs, "closure": lambda: loss}
        self._find_regions()
        try:
            self._step(args[1:], kwargs)
        finally:
            # The host reads the states from here on.
            self.lane.finish()
            self.buffers = []
            for region in self.regions:
                region.hide()
        idle = [{**group, "params": []} for group in optimizer.param_groups]
        return (_twin(optimizer, vars(optimizer), idle), *args[1:]), kwargs

    def _find_regions(self) -> None:
        """Sort the parameters by region; those of no unit are a region of their own."""
        groups = self.optimizer.param_groups
        known = [[*map(id, group["params"])] for group in groups]
        if self.known == known:
            return
        found: dict[int, _Region] = {}
        for at, group in enumerate(groups):
            for parameter in group["params"]:
                held = find_held(parameter)
                place = held and (held.flat or held.ref)
                key = id(place and place.region)
                members = found.setdefault(key, _Region()).members
                members.setdefault(at, []).append(parameter)
        # Their states move from the regions before, if there were any.
        self.regions, self.known = [*found.values()], known

    def _step(self, args: Any, kwargs: Any) -> None:
        """Step on each region that has gradients."""
        optimizer, regions = self.optimizer, []
        for region in self.regions:
            region.settle(self)
            parameters = chain.from_iterable(region.members.values())
            if any(p.grad is not None for p in parameters):
                regions.append(region)
        nbytes = max((region.host.nbytes for region in regions), default=0)
        # Made here and not kept: backward has the memory, and a model that sleeps.
        buffers = self.buffers = [
            memory.new_buffer(nbytes, torch.uint8, self.device) for _ in regions[:2]
        ]
        self.lane.behind()
        step = type(optimizer).step
        # Without the hooks, which run once.
        step = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
        here = self._bring(regions[0], buffers[0]) if regions else None
        before, after = dict(vars(optimizer)), dict[int, Group]()
        for at, region in enumerate(regions):
            ready = here
            if at + 1 < len(regions):
                # Its buffer is free behind the copy of the region before this one, the
                # last that the lane was given.
                here = self._bring(regions[at + 1], buffers[(at + 1) % 2])
            if ready is not None:
                ready.wait()
            groups = {
                number: {**optimizer.param_groups[number], "params": parameters}
                for number, parameters in region.members.items()
            }
            after |= groups
            twin = _twin(optimizer, before, [*groups.values()])
            step(twin, *args, **kwargs)
            region.take_replaced()
            self.lane.behind()
            self.lane.copy((region.host, buffers[at % 2][: region.host.nbytes]))
            region.hide()
            region.settle(self)
        # Each region began with the options of the whole: a counter moves once.
        for number, own in after.items():
            group = optimizer.param_groups[number]
            group.update({**own, "params": group["params"]})
        if regions:
            now = {**vars(twin), "param_groups": optimizer.param_groups}
            vars(optimizer).update(now)

    def _bring(self, region: _Region, buffer: Tensor) -> StreamEvent | None:
        """Copy the states of a region into a buffer, which the step sees."""
        buffer = buffer[: region.host.nbytes]
        region.show(buffer)
        return self.lane.copy((buffer, region.host))
