"""Models that sleep: what they hold leaves the device and comes back.

Storages are copied as bytes and resized to 0, so tensors, views and optimizers stay the
same objects. Those that a user can reach show empty data: kernels would crash on a
freed storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from composable_fsdp.access.block import block
from composable_fsdp.access.settings import units_of
from composable_fsdp.access.unshard_params import NO_STEPS
from composable_fsdp.comm.meeting import Call
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import memory
from composable_fsdp.flat.gradients import (
    free_cleared,
    has_arrived,
)
from composable_fsdp.flat.handle import FlatParamHandle, leaf_memory
from composable_fsdp.naming import listed, quoted
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.recover import settle_tree
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.tools.activations import parts_of
from composable_fsdp.tree.root import meet_over, outermost
from composable_fsdp.tree.state import RuntimeContext, Summon
from composable_fsdp.tree.traversal import require_module

Optimizers = Optimizer | Iterable[Optimizer] | None
_CPU = torch.device("cpu")
_WHY = (
    "while {} sleeps in host memory. Call composable_fsdp.features.wake(model) before."
)


@torch.inference_mode(False)
@torch.no_grad()
def sleep(
    model: nn.Module, optimizer: Optimizers = None, *, keep: str = "gradients"
) -> None:
    """Move parameters, gradients, buffers and states to the host, until ``wake``.

    Afterwards the model holds no device memory, for an inference engine to use. A
    forward, a step, a save or a state dict is an error meanwhile, and parameters show
    no elements. With ``CPUOffload`` the shards stay.

    Args:
        model: holds fully sharded modules, on either path, with all its units.
        optimizer: one or several, whose states go along. Default None.
        keep: "none" drops the gradients. Default "gradients": they come back.

    Collective: none; all ranks meet in the store.
    Raises: CompositionError, without a unit; PhaseError, inside a step or block, while
        gradients wait for a reduction, or if the model sleeps; ValueError; DesyncError,
        if a rank does not come.

    >>> sleep(model, optimizer)
    >>> wake(model)
    """
    states = units_of(model, "sleep", recurse=True)
    if keep not in ("gradients", "none"):
        raise ValueError(f"sleep(keep=...) expects 'gradients' or 'none', got {keep!r}")
    handles = [state.handle for state in states]
    # A rank that sleeps alone would alone gather again what all ranks hold now.
    meet_over(states, Call("sleep", states[0].title))
    trees = {settle_tree(top, "sleep"): top for top in map(outermost, states)}
    for context in trees:
        finish_reduction(context)
    waiting = [h for h in handles if has_arrived(h) or h.reduction.held is not None]
    if waiting:
        raise PhaseError(
            f"sleep was called while gradients of {waiting[0].name} wait for a "
            "reduction (no_sync). Call it after the backward that reduces."
        )
    for slot in filter(None, [handle.form.arena_slot for handle in handles]):
        # Before the versions are noted, which this moves: what a graph saved of the
        # slot is lost.
        slot.leave()
    if keep == "none":
        _drop_gradients(model, handles)
    several = optimizer if isinstance(optimizer, Iterable) else [optimizer]
    # Of a wrapper the one inside.
    optims = [getattr(each, "optimizer", each) for each in several if each is not None]
    asleep = _Sleep(model, [*trees], handles, optims)
    # From here on nothing allocates, and nothing fails.
    asleep.leave()
    for context, state in trees.items():
        context.summoned = Summon(state, rank0_only=False, why=_WHY, record=asleep)


def _drop_gradients(model: nn.Module, handles: list[FlatParamHandle]) -> None:
    """Drop the gradients of the model, also those of flat parameters."""
    regions = chain.from_iterable(handle.layout.regions for handle in handles)
    for leaf in chain(model.parameters(), *(region.graded for region in regions)):
        leaf.grad = None
    for handle in handles:
        free_cleared(handle)


@torch.inference_mode(False)
@torch.no_grad()
def wake(model: nn.Module, optimizer: Optimizers = None) -> None:
    """Bring back what ``sleep`` took: the same objects hold the same values.

    Args:
        model: as for ``sleep``.
        optimizer: may be left out: all that went to sleep with ``model`` come back.

    Collective: none.
    Raises: CompositionError, without a unit; PhaseError, if the model does not sleep,
        or, once it is back, if something was written to meanwhile; what torch raises
        without memory: the model sleeps on.

    >>> sleep(model, optimizer, keep="none")
    >>> wake(model, optimizer)
    """
    contexts = [state.context for state in units_of(model, "wake", recurse=True)]
    marks = [context.summoned for context in contexts if context is not None]
    found = dict.fromkeys(mark.record for mark in marks if mark and mark.record)
    if not found:
        raise PhaseError("wake was called on a model that is awake. Call sleep before.")
    lost = [name for asleep in found for name in asleep.bring()]
    if lost:
        raise PhaseError(
            f"Of a model that slept {listed(lost)} were written to or replaced; this "
            "is lost, and the values are those from before. Write after wake(model)."
        )


@block
def released(
    model: nn.Module, optimizer: Optimizers = None, *, keep: str = "gradients"
) -> Iterator[None]:
    """Let the model sleep while the block runs; see ``sleep`` and ``wake``.

    >>> with released(model, optimizer, keep="none"):
    ...     print(next(model.parameters()).numel())
    0
    """
    require_module(model, "released")
    sleep(model, optimizer, keep=keep)
    try:
        yield
    finally:
        wake(model)


class _Sleep:
    """What has left the device together, and its copies on the host."""

    def __init__(
        self,
        model: nn.Module,
        contexts: list[RuntimeContext],
        handles: list[FlatParamHandle],
        optims: list[Optimizer],
    ) -> None:
        self.contexts, self.handles, self.optims = contexts, handles, optims
        self.devices = {handle.layout.device for handle in handles}
        self.shown = list(self._find(model).values())
        """Name, tensor that shows empty data, version, and its true data."""
        self.allow: list[Callable[[], object]] = []
        """What opens the optimizers."""
        # Side streams may still write what the current stream copies.
        _synchronize(self.devices)
        self.stored: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in dict.fromkeys(data.untyped_storage() for *_, data in self.shown):
            nbytes, pinned = storage.nbytes(), storage.device.type == "cuda"
            host = memory.new_buffer(nbytes, torch.uint8, _CPU, pinned=pinned)
            home = host.untyped_storage()
            self.stored.append((storage, home.copy_(storage, non_blocking=True)))
        _synchronize(self.devices)

    def _find(self, model: nn.Module) -> dict[int, tuple[str, Tensor, int, Tensor]]:
        """Return the tensors that are to sleep, each once."""
        found: dict[int, tuple[str, Tensor, int, Tensor]] = {}
        for name, value in self._named(model):
            for part in parts_of(value) if isinstance(value, Tensor) else ():
                # Memory of another library, as of numpy, is not ours to free.
                here = part.device in self.devices and part.layout is torch.strided
                if here and part.numel() and part.untyped_storage().resizable():
                    version = -1 if part.is_inference() else part._version
                    found.setdefault(id(part), (name, part, version, part.data))
        return found

    def _named(self, model: nn.Module) -> list[tuple[str, Any]]:
        """Return all values of the model and its optimizers, with their names."""
        regions = [r for handle in self.handles for r in handle.layout.regions]
        named: list[tuple[str, Any]] = []
        named += [(quoted(name), p) for name, p in model.named_parameters()]
        named += [("a flat parameter", r.flat) for r in regions if r.flat is not None]
        named += [(f"the gradient of {name}", p.grad) for name, p in named]
        named += [(quoted(name), buffer) for name, buffer in model.named_buffers()]
        for optim in self.optims:
            values = _pytree.tree_leaves(list(optim.state.values()))
            named += [(f"state of {type(optim).__name__}", value) for value in values]
        for region in regions:
            # What no leaf shows: padding, and gradients that ``zero_grad`` has cleared.
            named += [
                ("a shard", region.shard),
                ("its gradient", region.gradient.shard),
            ]
        return named

    def leave(self) -> None:
        """Free the memory on the device, and refuse calls."""
        for handle in self.handles:
            # The old slots, which the views keep until they move into the new ones.
            for full in handle.form.fulls:
                memory.free(full)
            if handle.form.source is not None:
                handle.form.source.drop()
            for region in handle.layout.trainable:
                memory.free(region.reduce.buffer)
            handle.phase, NO_STEPS[handle] = Phase.SUMMON, _WHY
        for _, tensor, _, _ in self.shown:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        for storage, _ in self.stored:
            storage.resize_(0)
        for optim in self.optims:
            # ``copy.deepcopy`` and ``pickle`` ask the object, and would copy empty
            # states.
            vars(optim)["__reduce_ex__"] = partial(_refuse, optim)
            self.allow += [
                partial(vars(optim).pop, "__reduce_ex__", None),
                optim.register_state_dict_pre_hook(_refuse).remove,
                optim.register_load_state_dict_pre_hook(_refuse).remove,
            ]
        # The allocator of torch would keep the memory from other libraries and
        # processes.
        _synchronize(self.devices, empty=True)

    def bring(self) -> list[str]:
        """Bring all back; return the names of what has changed meanwhile."""
        # All memory first: without enough torch raises, and the model sleeps on.
        for storage, host in self.stored:
            storage.resize_(host.nbytes())
        for storage, host in self.stored:
            storage.copy_(host, non_blocking=True)
        memory.note_move()
        lost = []
        for name, tensor, version, data in self.shown:
            if tensor.numel() or (version >= 0 and tensor._version != version):
                lost.append(name)
            tensor.data = data
        for handle in self.handles:
            handle.writes.memory = leaf_memory(handle.layout)
            handle.phase = Phase.IDLE
            NO_STEPS.pop(handle, None)
        # Whatever stream reads next.
        _synchronize(self.devices)
        for context in self.contexts:
            context.summoned = None
        for each in self.allow:
            each()
        return lost


def _synchronize(devices: Iterable[torch.device], *, empty: bool = False) -> None:
    """Wait for all work of the devices, and give back what their allocator keeps."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            if empty:
                torch.cuda.empty_cache()


def _refuse(optim: Optimizer, *_: object) -> NoReturn:
    """Refuse a step, a state dict or a copy of an optimizer whose states sleep."""
    name = type(optim).__name__
    raise PhaseError(f"{name} was called, or copied, {_WHY.format('its model')}")
