"""What a module holds, by the plain model's names: regions of units, and other tensors.

Both saving and loading start here. Names come from the places where modules hold
tensors, so they are those of the plain model's state dict on both paths, whichever form
a unit shows; wrappers leave no trace in them: ours, DistributedDataParallel, and what
torch.compile returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composable_fsdp.compose.registry import TORCH_DDP, incompatible_api
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import TRANSPARENT, join_name, quoted
from composable_fsdp.optim.names import names_of, optimizers_of
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.runtime.recover import require_between_steps, require_idle
from composable_fsdp.storage.source import OWN_STATE
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_unit_state


@dataclass(frozen=True, slots=True)
class HeldRegion:
    """One region of a unit, and the names of its parameters in slot order.

    ``unit`` and ``index`` tell it from other regions, alike on every rank.
    """

    unit: str
    index: int
    handle: FlatParamHandle
    region: FlatParameter
    names: tuple[tuple[str, ...], ...]

    @property
    def key(self) -> tuple[str, int]:
        """Unit and index."""
        return self.unit, self.index

    def part(self, slot: ParameterSlot) -> tuple[int, int, int]:
        """Elements ``[start, stop)`` of the parameter here, and where in the shard."""
        layout, rank = self.region.layout, self.region.rank
        return *layout.interval(slot, rank), layout.shard_offset(slot, rank)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A buffer, or a parameter that no unit holds; the same on every rank.

    ``dtype`` is what is saved: buffers may be cast for compute.
    """

    names: tuple[str, ...]
    tensor: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a module that a checkpoint holds. Made by ``contents_of``."""

    states: tuple[_FSDPState, ...]
    regions: tuple[HeldRegion, ...]
    tensors: tuple[HeldTensor, ...]
    own_states: dict[str, nn.Module]
    """Modules with an extra state of their own (``get_extra_state``), by its name."""

    def slots(self) -> Iterator[tuple[HeldRegion, int]]:
        """Every parameter in a unit: its region, and its index there."""
        for held in self.regions:
            for i in range(len(held.names)):
                yield held, i


def contents_of(module: nn.Module, what: str) -> Contents:
    """Find what ``module`` holds; ``what`` is the caller in messages.

    The units are sharded and idle afterwards. Sends nothing.

    Raises: PhaseError, inside a step; CheckpointError, if a unit is only partly in
    ``module`` or has no values yet.
    """
    states = _settled_states(module, what)
    slot_of = {
        (id(info.module), info.name): (state, info.slot_index)
        for state in states.values()
        for info in state.handle.infos
    }
    in_units: dict[int, dict[int, list[str]]] = {id(s): {} for s in states.values()}
    others: dict[int, tuple[Tensor, list[str]]] = {}
    given = _names_given(module)
    for path, each in places(module):
        for key, tensor in _tensors(each):
            name = given.get(id(tensor), join_name(path, key))
            found = slot_of.get((id(each), key))
            if found is not None:
                in_units[id(found[0])].setdefault(found[1], []).append(name)
                continue
            if find_leaf(tensor) is not None:
                raise _partly(module, name, what)
            others.setdefault(id(tensor), (tensor, []))[1].append(name)
    regions = tuple(
        HeldRegion(
            path,
            i,
            state.handle,
            region,
            _names(module, region, in_units[id(state)], what),
        )
        for path, state in states.items()
        for i, region in enumerate(state.handle.regions)
    )
    original = _original_dtypes(states)
    tensors = tuple(
        HeldTensor(tuple(names), tensor, original.get(names[0], tensor.dtype))
        for tensor, names in others.values()
    )
    _require_values(regions, tensors, what)
    own_states = {
        join_name(path, OWN_STATE): each
        for path, each in places(module)
        if type(each).get_extra_state is not nn.Module.get_extra_state
    }
    return Contents(tuple(states.values()), regions, tensors, own_states)


def _names_given(module: nn.Module) -> dict[int, str]:
    """Parameters that a class shows under another name than their place's, by id."""
    here = {
        (id(parameter), join_name(path, key))
        for path, each in places(module, through_ddp=False)
        for key, parameter in each._parameters.items()
    }
    names = names_of(module)
    return {key: name for key, name in names.items() if (key, name) not in here}


def places(
    module: nn.Module, *, through_ddp: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Every module below ``module`` at every path, in the order of ``.modules()``.

    ``through_ddp`` leaves DistributedDataParallel's ``module`` out of the paths, and
    ``_orig_mod`` of a module that torch.compile returned.
    """
    stack = [("", module)]
    while stack:
        path, current = stack.pop()
        yield path, current
        outer = _wrapped_as(current) if through_ddp else None
        for name, child in reversed(current._modules.items()):
            if child is not None:
                hidden = name in TRANSPARENT or name == outer
                stack.append((path if hidden else join_name(path, name), child))


def _wrapped_as(module: nn.Module) -> str | None:
    """The name under which one of torch's wrappers holds the plain model's module."""
    if incompatible_api(module) == TORCH_DDP:
        return "module"
    # By name: importing torch's compiler takes seconds.
    return "_orig_mod" if type(module).__name__ == "OptimizedModule" else None


def units_in(module: nn.Module) -> list[_FSDPState]:
    """Every unit in ``module``, those below other APIs included. Only reads."""
    return list(_states(module).values())


def _states(module: nn.Module) -> dict[str, _FSDPState]:
    found: dict[str, _FSDPState] = {}
    seen: set[int] = set()
    for path, each in places(module):
        state = _get_unit_state(each)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            found[path] = state
    return found


def _settled_states(module: nn.Module, what: str) -> dict[str, _FSDPState]:
    """The units in ``module`` by path, those below other APIs included."""
    found = _states(module)
    trees: dict[int, _FSDPState] = {}
    for state in found.values():
        require_between_steps(state, what)
        if state.context is not None:
            trees.setdefault(id(state.context), state)
    # Units that were left full on purpose give that up: their shards are read or
    # written now.
    for state in trees.values():
        require_idle(state, what)
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield key, buffer


def _names(
    module: nn.Module,
    region: FlatParameter,
    found: dict[int, list[str]],
    what: str,
) -> tuple[tuple[str, ...], ...]:
    for slot in region.layout.parameters:
        if slot.index not in found:
            raise _partly(module, slot.fqn, what)
    return tuple([tuple(found[slot.index]) for slot in region.layout.parameters])


def _partly(module: nn.Module, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} was called on a {type(module).__name__} that holds only a part of the "
        f"fully sharded module to which {quoted(name)} belongs. Pass the module that "
        "fully_shard was applied to, or the whole model."
    )


def _original_dtypes(states: dict[str, _FSDPState]) -> dict[str, torch.dtype]:
    """Buffers that mixed precision has cast, and their dtypes before."""
    return {
        join_name(path, name): dtype
        for path, state in states.items()
        if state.precision is not None
        for name, dtype in state.precision.buffer_dtypes.items()
    }


def _require_values(
    regions: tuple[HeldRegion, ...], tensors: tuple[HeldTensor, ...], what: str
) -> None:
    meta = [n[0] for r in regions if r.region.shard.is_meta for n in r.names]
    meta += [held.names[0] for held in tensors if held.tensor.is_meta]
    if meta:
        raise CheckpointError(
            f"{what} expects values, and {', '.join(map(quoted, meta[:8]))}"
            f"{' ..' if meta[8:] else ''} are on meta. Call model.to_empty(device=...) "
            "first, and set the buffers that are not persistent; load fills the rest."
        )


def not_in_module(parameter: Tensor, g: int, i: int, what: str) -> CheckpointError:
    """The error for an optimizer's parameter that the module does not have."""
    return CheckpointError(
        f"Parameter {i} of the optimizer's group {g}, of shape "
        f"{tuple(parameter.shape)}, is not a parameter of the module that is {what}. "
        "Pass the model that the optimizer trains. If it was on meta: to_empty parts "
        "tied parameters until the first load or forward, so make the optimizer after "
        "that, or tie them before it."
    )


def optimizers_in(optim: object, what: str) -> list[torch.optim.Optimizer]:
    """``optim``, which is None, an optimizer or a list of several, as a list.

    Raises: TypeError in the name of ``what``, for something else; CheckpointError, for
    a parameter that is in two of them.
    """
    found = [] if optim is None else optimizers_of(optim)
    for each in found:
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise TypeError(
                f"{what} expects an optimizer, or a list of several, got a "
                f"{type(each).__name__}. Pass the optimizers themselves, or extra=... "
                "by its name."
            )
    return found


def named(contents: Contents) -> dict[int, tuple[HeldRegion, int] | HeldTensor]:
    """What each of an optimizer's parameters is, by identity."""
    found: dict[int, tuple[HeldRegion, int] | HeldTensor] = {}
    for held, i in contents.slots():
        found[id(held.region.leaves[i])] = (held, i)
    for tensor in contents.tensors:
        found[id(tensor.tensor)] = tensor
    return found
