"""Activations and states of optimizers in host memory, which come back for their use.

At most two blocks of activations are on the device; states pass through two buffers.
Torch's hook before a step gives it a twin of the optimizer, which steps one region at a
time: what works element by element gives the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from composable_fsdp.access.settings import units_of
from composable_fsdp.comm.device import (
    NO_EVENTS,
    StreamEvent,
    current_stream,
    is_capturing,
    use_stream,
)
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.flat import memory
from composable_fsdp.optim.step_checks import (
    find_held,
    handles_of,
    needs_whole_params,
)
from composable_fsdp.tools.memory import slot_bytes
from composable_fsdp.tree.state import _get_module_fsdp_state

Group = dict[str, Any]
_INSTALLED = "_composable_fsdp_host_states"
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_LIVE = 2
"""Blocks that are on the device at a time."""


class Lane:
    """Copies in the order of their calls; on a CPU done when a call returns."""

    # Memory belongs to compute, which allocates and frees it: a copy comes behind what
    # compute was given so far, and compute waits for the event of the last copy before
    # it frees the memory. So nothing needs ``record_stream``.

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, *pairs: tuple[Tensor, Tensor]) -> StreamEvent:
        """Copy to the first of each pair; return the event that compute waits for."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return NO_EVENTS.gather
        self.stream.wait_stream(current_stream(self.device))
        with use_stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done = StreamEvent(self.device)
        done.record(self.stream)
        return done

    def finish(self) -> None:
        """Have the host wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()


class offloaded(saved_tensors_hooks):  # in lower case as the class of torch
    """``with offloaded():`` keeps what the block saves on the host until backward.

    Raises: RuntimeError, if what the block saved was written in place.
    """

    def __init__(self) -> None:
        self.blocks: dict[torch.device, _Block] = {}
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor | tuple[_Block, int]:
        """Begin the copy to the host; wrappers stay, and parameters of units."""
        whole = tensor if tensor._base is None else tensor._base
        wraps = hasattr(type(tensor), "__tensor_flatten__")
        if wraps or isinstance(whole, nn.Parameter):
            return tensor
        if tensor.device not in self.blocks:
            self.blocks[tensor.device] = _Block(tensor.device)
        return self.blocks[tensor.device].save(tensor)

    def __exit__(self, *error: object) -> None:
        """End the block: those before the last two leave the device."""
        super().__exit__(*error)
        while self.blocks:
            self.blocks.popitem()[1].end()


@cache
def _trail(device: torch.device) -> tuple[Lane, list[weakref.ref[_Block]]]:
    """Return the lane of a device, and its last blocks, which have not left it."""
    return Lane(device), []


class _Block:
    """What a forward has saved on a device; the graph keeps it, by number."""

    def __init__(self, device: torch.device) -> None:
        self.lane, self.live = _trail(device)
        self.host: list[Tensor] = []
        self.here: dict[int, tuple[Tensor, int | None]] = {}
        """What is on the device now, with its version, None of a copy."""
        self.before: weakref.ref[_Block] | None = None
        self.done: StreamEvent = NO_EVENTS.gather
        """The end of the last copy; compute waits for it before it frees the memory."""

    def save(self, tensor: Tensor) -> tuple[_Block, int]:
        """Begin the copy of a tensor to the host."""
        # A forecast counts all memory but that of meta: there the host has none.
        home, at = "meta" if is_fake(tensor) else "cpu", len(self.host)
        host = torch.empty_like(tensor, device=home, pin_memory=tensor.is_cuda)
        self.host.append(host)
        self.here[at] = tensor.detach(), tensor._version
        if home == "cpu":
            self.done = self.lane.copy((host, tensor.detach()))
        return self, at

    def land(self) -> None:
        """Have compute wait for the copies of the block."""
        self.done.wait()

    # A block may go with its graph while the lane writes the memory.
    __del__ = land

    def take(self, at: int) -> Tensor:
        """Return a tensor on the device, and let go of it."""
        here, version = self.here.pop(at)
        # The copy may have seen the write.
        if version not in (None, here._version):
            raise RuntimeError(
                f"A tensor of shape {tuple(here.shape)} that an offloaded module needs "
                "for backward was written in place after it was saved. Write into a "
                "new tensor: y = y + z for y += z."
            )
        return here

    def end(self) -> None:
        """End the forward; the oldest block frees its memory on the device."""
        if self.live:
            self.before = self.live[-1]
        self.live.append(weakref.ref(self))
        if len(self.live) > _LIVE and (oldest := self.live.pop(0)()) is not None:
            oldest.land()
            for at in [*oldest.here]:
                oldest.take(at)

    def fetch(self) -> None:
        """Begin the copies to the device of what is on the host alone."""
        pairs = []
        for at, host in enumerate(self.host):
            if at not in self.here:
                here = torch.empty_like(host, device=self.lane.device)
                self.here[at] = here, None
                pairs.append((here, host))
        if pairs and not pairs[0][1].is_meta:
            self.done = self.lane.copy(*pairs)


def _unpack(saved: Tensor | tuple[_Block, int]) -> Tensor:
    """Return the tensor on the device; begin the copies of the block before."""
    if isinstance(saved, Tensor):
        return saved
    block, at = saved
    # At once only in a second backward, or one in another order.
    if at not in block.here:
        block.fetch()
    block.land()
    found = block.take(at)
    if block.before is not None and (before := block.before()) is not None:
        # Once: what is back, or was used, is on the device or has no backward left.
        block.before = None
        before.fetch()
    return found


def offload_states(optimizer: Optimizer, model: nn.Module) -> None:
    """Keep the optimizer's states in host memory; weights and gradients stay.

    States live in pinned memory, and pass through two device buffers during a step.
    Numbers, state dicts and checkpoints are those without, bit by bit. A step takes at
    least the time of two copies of the states over the link to the host.

    Args:
        optimizer: one of torch's that work element by element (Adam, AdamW, SGD with
            momentum, ...), or one with ``works_on_shards = True``, whose step does its
            work inside a loop over ``self.param_groups``.
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
        states = _States(optimizer, units[0].handle.layout.device)
        vars(optimizer)[_INSTALLED] = states
        optimizer.register_step_pre_hook(states.begin)


def offload_planned(optimizer: Optimizer) -> None:
    """Call ``offload_states`` for units with ``CPUOffload(offload_states=True)``."""
    for handle in handles_of(optimizer):
        offload = handle.layout.plan.options.cpu_offload
        if offload is not None and offload.offload_states:
            # The owner may be a layer inside of the unit.
            state = _get_module_fsdp_state(handle.layout.owners[0])
            assert state is not None
            return offload_states(optimizer, state.module)


@dataclass(eq=False)
class _Region:
    """The states of the parameters of a region."""

    members: dict[int, list[Tensor]] = field(default_factory=dict)
    host: Tensor = _NOTHING
    """Bytes of all states, one after another."""
    kept: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    """Dict and key of each state, and the view of ``host`` that it is between steps."""

    def settle(self, states: _States) -> None:
        """Move states to the host that are new, loaded, or left in a buffer."""
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
        self.kept = []
        for (values, key, value), view in zip(found, views, strict=True):
            values[key] = view.copy_(value)
            self.kept.append((values, key, view))


def _views(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return a view of bytes for each tensor, one after another."""
    views, at = [], 0
    for each in like:
        views.append(buffer[at : at + each.nbytes].view(each.dtype).view(each.size()))
        at += slot_bytes([each.nbytes])
    return views


class _Groups(list[Group]):
    """The groups of a twin, a loop over which goes region by region."""

    def __init__(self, states: _States) -> None:
        super().__init__(states.optimizer.param_groups)
        self.states = states

    def __iter__(self) -> Iterator[Group]:
        return self.states.loop()


class _States:
    """The hook of an optimizer whose states are on the host."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self.lane = Lane(device)
        self.regions: dict[int, _Region] = {}
        kind = type(optimizer)
        groups = {"param_groups": property(lambda _: _Groups(self))}
        self.twin: Optimizer = object.__new__(type(kind.__name__, (kind,), groups))
        object.__setattr__(self.twin, "__dict__", vars(optimizer))

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hook before the step: have it run on the twin."""
        if is_capturing():
            raise PhaseError(
                "A step with offload_states cannot be captured in a CUDA graph: the "
                "host waits at its end. Capture forward and backward alone."
            )
        return (self.twin, *args[1:]), kwargs

    def find_regions(self) -> list[_Region]:
        """Sort the parameters by region; those of no unit are a region of their own."""
        before, self.regions = self.regions, {}
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                held = find_held(parameter)
                place = held and (held.flat or held.ref)
                key = id(place and place.region)
                if key not in self.regions:
                    self.regions[key] = before.get(key, _Region())
                    self.regions[key].members = {}
                members = self.regions[key].members
                members.setdefault(number, []).append(parameter)
        return [*self.regions.values()]

    @torch.no_grad()
    def loop(self) -> Iterator[Group]:
        """Yield the groups of each region, while its states are on the device."""
        groups, regions = self.optimizer.param_groups, self.find_regions()
        options, after = [{**group} for group in groups], dict[int, Group]()
        for region in regions:
            region.settle(self)
        nbytes = max((region.host.nbytes for region in regions), default=0)
        # Made here and not kept: backward has the memory, and a model that sleeps. Of
        # compute, which waits at the end for the lane before it frees them.
        buffers = [
            memory.new_buffer(nbytes, torch.uint8, self.device) for _ in range(2)
        ]
        places = [(region, buffers[at % 2]) for at, region in enumerate(regions)]
        try:
            ready = self.bring(*places[0])
            for at, (region, buffer) in enumerate(places):
                here = ready
                if places[at + 1 :]:
                    # Its buffer is free behind the copy of the region before this one,
                    # the last that the lane was given.
                    ready = self.bring(*places[at + 1])
                here.wait()
                shown = _views(buffer, [home for *_, home in region.kept])
                for (values, key, _), view in zip(region.kept, shown, strict=True):
                    values[key] = view
                for number, members in region.members.items():
                    # Each region has the options of the whole: a counter moves once.
                    after[number] = {**options[number], "params": members}
                    yield after[number]
                self.take(region, shown, buffer)
            for number, own in after.items():
                groups[number].update({**own, "params": groups[number]["params"]})
        finally:
            # The host reads the states from here on.
            self.lane.finish()

    def bring(self, region: _Region, buffer: Tensor) -> StreamEvent:
        """Begin to copy the states of a region into ``buffer``."""
        return self.lane.copy((buffer[: region.host.nbytes], region.host))

    def take(self, region: _Region, shown: list[Tensor], buffer: Tensor) -> None:
        """Begin to copy the states of a region to the host, where they are again."""
        for (values, key, home), view in zip(region.kept, shown, strict=True):
            # A step may put new tensors into the state.
            if (now := values.get(key, view)) is not view:
                view.copy_(now)
            values[key] = home
        self.lane.copy((region.host, buffer[: region.host.nbytes]))
        region.settle(self)
