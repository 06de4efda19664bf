"""Prepare the values of a unit's parameters and buffers just before sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name, listed, quoted, strip_wrapper
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.planning.planner import Target
from composable_fsdp.runtime.meta_values import (
    as_unfilled,
    mark_meta_buffers,
    watch_shards,
)
from composable_fsdp.tree.state import _FSDPState

Init = Callable[[nn.Module], object]
Held = tuple[dict[str, Any], str, Tensor]
"""A module's dict of parameters or buffers, the key, and the tensor."""


class MetaModule(NamedTuple):
    """A module that holds meta tensors directly."""

    top: nn.Module
    """The module at which names start."""
    module: nn.Module
    own: list[Held]
    """Tensors that no earlier module holds, in ``.modules()`` order."""
    others: list[Held]

    @property
    def fqn(self) -> str:
        """Return the FQN of the module, for error messages."""
        return walk.name_of(self.top, self.module)


class PreparedValues:
    """How the units of a call get their values; PlanError, if some cannot get any."""

    def __init__(
        self,
        targets: Sequence[Target],
        ranks: RankLayout,
        device: torch.device,
        ignored: frozenset[int],
        init: Init | None,
        sync: bool,
        on_meta: bool,
    ) -> None:
        self._targets, self._sync = targets, sync
        self._ranks, self._device = ranks, device
        # Without an initializer the shards of a model on meta stay on meta until
        # to_empty or a state dict gives them values.
        self._stays_on_meta = on_meta and init is None and not sync
        initializes = init is not None or sync
        self._waiting = _on_meta_in(targets, ignored) if initializes else []
        # A param_init_fn of the caller allocates the memory itself, on every rank.
        self._init: Init = init or reset_parameters
        if self._init is reset_parameters:
            # The broadcast overwrites the values of all ranks but the first.
            groups = filter(None, (ranks.shard, ranks.replicate))
            resets = not sync or not any(group.rank() for group in groups)
            self._init = partial(give_memory, device=device, resets=resets)
            if resets:
                _require_resets(self._waiting)
        # A buffer that several units share is moved and broadcast once.
        self._done: set[int] = set()
        # Read before ``before`` runs the initializer.
        self.awaiting = [
            index
            for index, target in enumerate(targets if on_meta else ())
            if any(buffer.is_meta for buffer in _buffers(target))
        ]
        """Indices of the targets whose modules hold a buffer on meta."""
        if self._stays_on_meta:
            for target in targets:
                _refuse_mixed_meta(target)
            for target in targets:
                mark_meta_buffers(target.members)

    def before(self, index: int) -> None:
        """Give a target its values; with ``sync`` by a broadcast per tensor."""
        for each in self._waiting[index] if self._waiting else ():
            materialize(each, self._init)
        target, done = self._targets[index], self._done
        buffers = [b for b in _buffers(target) if id(b) not in done]
        done.update(map(id, buffers))
        for buffer in buffers:
            if buffer.device != self._device and not buffer.is_meta:
                # Through .data, because other modules may hold the same buffer object.
                buffer.data = buffer.to(self._device)
        # After initialization, so that rank 0's initial values are sent, too.
        if self._sync:
            for tensor in (*chain(*target.parameters), *buffers):
                _broadcast(local_of(tensor), self._ranks, self._device)

    def built(self, states: Sequence[_FSDPState]) -> None:
        """Watch for values, if the units have none yet."""
        for state in states if self._stays_on_meta else ():
            watch_shards(state.handle)


def _buffers(target: Target) -> Iterable[Tensor]:
    """Return the buffers of a unit, one that modules share several times."""
    found = chain(*(module._buffers.values() for module in target.members))
    return (buffer for buffer in found if buffer is not None)


def _require_resets(waiting: Iterable[Iterable[MetaModule]]) -> None:
    """Raise PlanError for a module that has no initializer of its own."""
    for each in chain(*waiting):
        held = (*each.own, *each.others)
        if not callable(getattr(each.module, "reset_parameters", None)):
            raise PlanError(
                f"{type(each.module).__name__} {quoted(each.fqn)} holds "
                f"{listed(repr(key) for _, key, _ in held)} on meta and has no "
                "reset_parameters() to initialise it. Give it one, or pass "
                "param_init_fn."
            )


def own_forms(targets: Sequence[Target]) -> dict[str, str]:
    """Return dtype and shape of this rank's parameters and buffers, by name."""
    names = {id(m): name for top in targets[0].modules for name, m in walk.named(top)}
    forms: dict[str, str] = {}
    for target in targets:
        own = {id(p) for region in target.parameters for p in region}
        for module in target.members:
            found = [(k, p) for k, p in module._parameters.items() if id(p) in own]
            for key, tensor in (*found, *module._buffers.items()):
                if tensor is not None:
                    part = local_of(tensor)
                    name = strip_wrapper(join_name(names[id(module)], key))
                    forms[name] = f"{part.dtype} of shape {tuple(part.shape)}"
    return forms


def _broadcast(tensor: Tensor, ranks: RankLayout, device: torch.device) -> None:
    """Broadcast a tensor from the first rank of the shard and replicate groups."""
    # Collectives require dense memory on the device of the group's backend.
    data = tensor.detach().to(device).contiguous()
    # First within the shard group, then over the replicate group: all ranks end with
    # the values of the rank that is first in both groups.
    for group in (ranks.shard, ranks.replicate):
        if group is not None and group.size() > 1:
            collectives.broadcast(data, group)
    # Copy back only if ``data`` is a copy on another device or with other strides.
    if data.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(data)


def _refuse_mixed_meta(target: Target) -> None:
    """Raise PlanError for a region with parameters on meta beside ones with values."""
    for layout, parameters in zip(target.plan.regions, target.parameters, strict=True):
        pairs = zip(layout.parameters, parameters, strict=True)
        meta = [slot.fqn for slot, parameter in pairs if parameter.is_meta]
        if meta and len(meta) < len(parameters):
            raise PlanError(
                f"Unit {quoted(target.plan.fqn)} has parameters on meta "
                f"({', '.join(meta)}) beside parameters with values. Give all of "
                "them values, or none, or pass param_init_fn."
            )


# ---- modules on meta: initialized unit by unit, each just before it is sharded --


def reset_parameters(module: nn.Module) -> None:
    """Call ``module.reset_parameters()``; the tensors of the module have memory."""
    reset: Any = module.reset_parameters
    reset()


def give_memory(module: nn.Module, device: torch.device, *, resets: bool) -> None:
    """Replace meta tensors by empty ones on ``device``; ``resets``: give values."""
    for table in (module._parameters, module._buffers):
        for key, tensor in table.items():
            if tensor is not None and tensor.is_meta:
                table[key] = empty_like(tensor, device)
    if resets:
        reset_parameters(module)


def empty_like(tensor: Tensor, device: torch.device) -> Any:
    """Return an empty tensor or parameter like ``tensor`` on ``device``."""
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _on_meta_in(
    targets: Sequence[Target], kept: frozenset[int]
) -> list[list[MetaModule]]:
    """Return the modules to initialize per target, without tensors in ``kept``."""
    seen, found = set[int](), dict[int, MetaModule]()
    for module in chain(*map(walk.modules, targets[0].modules)):
        own, others = list[Held](), list[Held]()
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and tensor.is_meta and id(tensor) not in kept:
                    # The first module in this order initializes a shared tensor.
                    held = others if id(tensor) in seen else own
                    held.append((table, key, tensor))
                    seen.add(id(tensor))
        if own or others:
            top = targets[0].modules[0]
            found.setdefault(id(module), MetaModule(top, module, own, others))
    # A module that is reachable along two paths is initialized once.
    return [
        [found.pop(key) for key in map(id, target.members) if key in found]
        for target in targets
    ]


@torch.no_grad()
def materialize(waiting: MetaModule, init: Init) -> None:
    """Run ``init`` on a module; afterwards no tensor of the module is on meta."""
    # Initializers of the other modules that hold a tensor run, too, each on a temporary
    # tensor, as in a model that ties weights after all layers were made.
    for table, key, tensor in waiting.others:
        table[key] = empty_like(tensor, torch.device("meta"))
    for table, key, tensor in waiting.own:
        if table is waiting.module._buffers:
            table[key] = as_unfilled(tensor)
    # Tensors of inference mode have no version counter and cannot be trained.
    with torch.inference_mode(False):
        init(waiting.module)
    for table, key, tensor in waiting.others:
        table[key] = tensor
    for table, key, tensor in waiting.own:
        found = table.get(key)
        table[key] = tensor
        made = _require_like(waiting, key, tensor, found)
        if made is not tensor:
            _swap(waiting, key, tensor, made)


def _require_like(
    waiting: MetaModule, key: str, tensor: Tensor, made: object
) -> Tensor:
    """Return the tensor ``made`` by ``init``; raise PlanError if unlike ``tensor``."""
    if (
        isinstance(made, Tensor)
        and not made.is_meta
        and made.shape == tensor.shape
        and made.dtype == tensor.dtype
    ):
        return made
    got = type(made).__name__
    if isinstance(made, Tensor):
        got = f"{tuple(made.shape)} {made.dtype} on {made.device}"
    raise PlanError(
        f"param_init_fn was called with {type(waiting.module).__name__} "
        f"{quoted(waiting.fqn)} and left {key!r} as {got}; expected "
        f"{tuple(tensor.shape)} {tensor.dtype} with values. Let it call "
        "module.to_empty(device=..., recurse=False) and then set them."
    )


def _swap(waiting: MetaModule, key: str, tensor: Tensor, made: Tensor) -> None:
    """Give the object ``tensor`` the contents of ``made``, and keep old attributes."""
    trainable = tensor.requires_grad
    # ``vars``: ``swap_tensors`` is untyped in torch.
    swap: Callable[[Tensor, Tensor], None] = vars(torch.utils)["swap_tensors"]
    # The original objects stay, so that tied weights and optimizers made earlier still
    # refer to the parameters.
    try:
        swap(tensor, made)
    except RuntimeError as error:
        raise PlanError(
            f"{quoted(join_name(waiting.fqn, key))} on meta cannot be given values in "
            "place "
            f"({error}): something else refers to it, as nn.LSTM does weakly. "
            "Initialise the model before fully_shard."
        ) from error
    # ``swap_tensors`` also exchanges the attributes; exchange them back.
    tensor.__dict__, made.__dict__ = made.__dict__, tensor.__dict__
    tensor.requires_grad_(trainable)
