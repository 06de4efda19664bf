"""Lists the tensors of a module by the plain model's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.compose.registry import TORCH_DDP, foreign_fsdp, incompatible_api
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.param_ref import ParamRef, find_param, param_refs
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.optim.flat_state import is_scalar
from composable_fsdp.optim.names import is_absent, names_of, optimizers_of
from composable_fsdp.planning import walk
from composable_fsdp.runtime.recover import require_between_steps, settle_tree
from composable_fsdp.storage.manifest import Span
from composable_fsdp.storage.source import OWN_STATE
from composable_fsdp.storage.tensors import (
    HeldWrapper,
    is_dtensor,
    is_wrapper,
    kind_of,
    local_of,
    local_state,
    loose_span,
    opened,
    ranks_of,
    require_readable,
    span_of,
)
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_unit_state


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's elements of a buffer, or of a parameter in no unit."""

    names: tuple[str, ...]
    """A tied tensor has several."""
    tensor: Tensor
    """The tensor that an optimizer holds: a sharded parameter, or the tensor itself."""
    shown: Tensor
    """The tensor that the module holds; another one if it wraps ``tensor``."""
    dtype: torch.dtype
    """The dtype to save, because mixed precision may have cast a buffer."""
    shape: tuple[int, ...]
    local: Tensor
    """The elements, a view; of a parameter of a unit, of one dim."""
    span: Span
    """Where the elements lie in the whole tensor."""

    @property
    def is_cut(self) -> bool:
        """Whether each rank holds a part."""
        return is_dtensor(self.tensor)

    @property
    def is_absent(self) -> bool:
        """Whether only other ranks hold elements, and the optimizer's state."""
        return is_absent(self.tensor)

    @property
    def is_parameter(self) -> bool:
        """Whether the module holds a parameter, and no buffer."""
        return isinstance(self.shown, nn.Parameter)

    def has_elements(self, key: str, value: Any) -> bool:
        """Return whether a state has an element for each element on this rank."""
        shape, name = tuple(local_of(self.tensor).shape), quoted(self.names[0])
        if is_scalar(key, value, shape):
            return False
        # A tensor that one rank has whole may have state of any shape.
        if value.shape == shape or not self.is_cut:
            return bool(value.shape == shape)
        raise CheckpointError(
            f"Optimizer state {key!r} of {name} has shape {tuple(value.shape)}; "
            f"expected a number or the shape of this rank's shard, {shape}. State that "
            "is not element-wise, or was made before fully_shard, cannot be saved in "
            "shards: use an element-wise optimizer, and make it hold state only after "
            "fully_shard."
        )


@dataclass(frozen=True, slots=True)
class HeldParam(Held):
    """This rank's elements of a parameter of a unit."""

    ref: ParamRef

    @property
    def is_cut(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class HeldRegion:
    """A region of a unit, and the region's parameters in slot order."""

    ref: ParamRef
    params: tuple[HeldParam, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a module that a checkpoint holds; see ``contents_of``."""

    states: tuple[_FSDPState, ...]
    regions: tuple[HeldRegion, ...]
    tensors: tuple[Held, ...]
    own_states: dict[str, nn.Module]
    mesh_groups: tuple[dist.ProcessGroup, ...] = ()
    wrappers: tuple[HeldWrapper, ...] = ()

    def params(self) -> Iterator[HeldParam]:
        """Yield the parameters of units."""
        for region in self.regions:
            yield from region.params

    def each(self) -> Iterator[Held]:
        """Yield the parameters of units, and then the other tensors."""
        yield from self.params()
        yield from self.tensors


def contents_of(module: nn.Module, what: str, *, inner: bool = False) -> Contents:
    """Return the tensors that ``module`` holds."""
    states = _states(module)
    _settle(states.values(), what)
    # (module, attribute) -> (unit, slot), whatever form the unit shows.
    slot_of = {
        (id(owner), place.name): (state, place.slot_index)
        for state in states.values()
        for place, owner in zip(
            state.handle.layout.places, state.handle.layout.owners, strict=True
        )
    }
    in_units: dict[int, dict[int, list[str]]] = {id(s): {} for s in states.values()}
    others: dict[int, tuple[Tensor, list[str]]] = {}
    wrappers: list[HeldWrapper] = []
    around: dict[int, Tensor] = {}
    given = _names_given(module)
    for path, each in places(module):
        _refuse_foreign(path, each, what)
        for key, tensor in _tensors(each):
            name = given.get(id(tensor), join_name(path, key))
            found = slot_of.get((id(each), key))
            if found is not None:
                in_units[id(found[0])].setdefault(found[1], []).append(name)
                continue
            if find_param(tensor) is not None:
                raise _partly(module, name, what)
            # By identity: a tied tensor is saved once, with all names.
            parts = opened(tensor, name, what, wrappers) if inner else [(name, tensor)]
            for told, part in parts:
                require_readable(part, told, what)
                around[id(part)] = tensor
                others.setdefault(id(part), (part, []))[1].append(told)
    regions = tuple(
        _region(module, list(refs), in_units[id(state)], what)
        for state in states.values()
        for _, refs in groupby(param_refs(state.handle), lambda ref: id(ref.region))
    )
    original = _original_dtypes(module, states)
    tensors = tuple(
        Held(
            tuple(names),
            tensor,
            around.get(id(tensor), tensor),
            original.get(names[0], tensor.dtype),
            tuple(tensor.shape),
            # Autograd refuses an in-place write to a leaf that requires a gradient.
            local_of(tensor).detach(),
            loose_span(tensor, names[0], what),
        )
        for tensor, names in others.values()
    )
    _refuse_meta(regions, tensors, what)
    own_states = {
        join_name(path, OWN_STATE): each
        for path, each in places(module)
        # The base class raises: modules that override it have an extra state.
        if type(each).get_extra_state is not nn.Module.get_extra_state
    }
    units = tuple(states.values())
    groups = tuple(mesh_groups_in(module, units))
    return Contents(units, regions, tensors, own_states, groups, tuple(wrappers))


def _settle(states: Iterable[_FSDPState], what: str) -> None:
    """Make the units sharded and idle, or raise."""
    for state in states:
        require_between_steps(state, what)
    # Units that were kept unsharded on purpose are resharded, and read or overwritten.
    for state in {id(s.context): s for s in states if s.context is not None}.values():
        settle_tree(state, what)


def _refuse_meta(
    regions: Iterable[HeldRegion], tensors: Iterable[Held], what: str
) -> None:
    """Raise CheckpointError if a tensor has no values."""
    meta = [p.names[0] for r in regions if r.ref.region.shard.is_meta for p in r.params]
    meta += [held.names[0] for held in tensors if held.tensor.is_meta]
    if meta:
        raise CheckpointError(
            f"{what} expects values, and {listed(map(quoted, meta))} are on meta. Call "
            "model.to_empty(device=...) first, and set what load does not fill."
        )


def _refuse_foreign(path: str, module: nn.Module, what: str) -> None:
    """Raise CheckpointError if another library has sharded ``module`` itself."""
    found = foreign_fsdp(module)
    # ZeRO 3 marks each parameter, and leaves an empty tensor in the module.
    for key, parameter in module._parameters.items():
        if hasattr(parameter, "ds_id"):
            found, path = "DeepSpeed (ZeRO)", join_name(path, key)
    if found is not None:
        raise CheckpointError(
            f"{quoted(path)} was sharded by {found}, so each rank holds a part that "
            f"{what} cannot place. Call torch.distributed.checkpoint or that library's "
            "own functions; load reads what torch.distributed.checkpoint wrote."
        )


def _names_given(module: nn.Module) -> dict[int, str]:
    """Return, by id, names of parameters that differ from the attribute's path."""
    here = {
        (id(parameter), join_name(path, key))
        for path, each in places(module, through_ddp=False)
        for key, parameter in each._parameters.items()
    }
    # Names that differ from every place of the parameter: the class has chosen them.
    return {k: name for k, name in names_of(module).items() if (k, name) not in here}


def places(
    module: nn.Module, *, through_ddp: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` and all below at every path, in the order of ``modules()``."""

    def hidden(each: nn.Module) -> str | None:
        """Return the attribute under which torch's wrapper holds the module."""
        if incompatible_api(each) == TORCH_DDP:
            return "module"
        # Compare the class name: importing torch's compiler takes seconds.
        return "_orig_mod" if type(each).__name__ == "OptimizedModule" else None

    return walk.named(module, every_path=True, hidden=hidden if through_ddp else None)


def units_in(module: nn.Module) -> list[_FSDPState]:
    """Return every unit in ``module``, also units below other APIs. Changes nothing."""
    return list(_states(module).values())


def _states(module: nn.Module) -> dict[str, _FSDPState]:
    """Return every unit in ``module`` by path, each unit once, at the first path."""
    found: dict[int, tuple[str, _FSDPState]] = {}
    for path, each in places(module):
        if (state := _get_unit_state(each)) is not None:
            found.setdefault(id(state), (path, state))
    return dict(found.values())


def mesh_groups_in(module: nn.Module, units: Iterable[Any]) -> list[dist.ProcessGroup]:
    """Return the groups of the meshes of DTensors, each set once."""
    # Units first: modules show plain parameters, and the units' forms know the meshes.
    found: list[dist.ProcessGroup] = []
    for unit in units:
        # By index, because ranks of tensor parallelism may have other regions.
        forms = unit.handle.layout.forms
        for index in sorted(forms):
            found += forms[index].mesh_groups
    for each in walk.modules(module):
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            # Alike on all ranks. Outside of the mesh there is no group.
            if is_dtensor(tensor):
                given: Any = tensor
                mesh = given.device_mesh
                inside = mesh.get_coordinate() is not None
                dims = range(mesh.ndim if inside else 0)
                found += [mesh.get_group(dim) for dim in dims]
    # Each slice of a mesh may have made a group of its own for the same ranks.
    by_ranks = {ranks_of(group): group for group in reversed(found)}
    return [by_ranks[r] for r in dict.fromkeys(map(ranks_of, found)) if len(r) > 1]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of ``module`` itself, with names."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter
    for key, buffer in module._buffers.items():
        # A plain model's state dict has no non-persistent buffers.
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield key, buffer


def _region(
    module: nn.Module, refs: list[ParamRef], found: dict[int, list[str]], what: str
) -> HeldRegion:
    """Return a region, whose parameters have the names ``found`` by slot index."""
    params = []
    for ref in refs:
        slot, leaf, dtype = ref.slot, ref.leaf, ref.region.layout.dtype
        if slot.index not in found:
            raise _partly(module, slot.fqn, what)
        span = span_of(slot.whole, slot.shape, *ref.interval)
        flat, names = leaf.detach().reshape(-1), tuple(found[slot.index])
        facts = dtype, ref.shape, flat, span
        params.append(HeldParam(names, leaf, leaf, *facts, ref))
    return HeldRegion(refs[0], tuple(params))


def _partly(module: nn.Module, name: str, what: str) -> CheckpointError:
    """Return the error for a module that holds only a part of a unit."""
    return CheckpointError(
        f"{what} was called on a {type(module).__name__} that holds only a part of the "
        f"fully sharded module of {quoted(name)}. Pass that module, or the whole model."
    )


def _original_dtypes(
    module: nn.Module, states: dict[str, _FSDPState]
) -> dict[str, torch.dtype]:
    """Return the original dtypes of buffers that mixed precision has cast, by name."""
    # A checkpoint does not depend on the precision policy.
    found: dict[str, torch.dtype] = {}
    for path, state in states.items():
        dtypes = {} if state.precision is None else state.precision.buffer_dtypes
        paths = {id(state.module): path}
        if dtypes and len(state.modules) > 1:
            paths |= {id(each): fqn for fqn, each in walk.named(module)}
        for (number, name), dtype in dtypes.items():
            if (start := paths.get(id(state.modules[number]))) is not None:
                found[join_name(start, name)] = dtype
    return found


def not_in_module(parameter: Tensor, g: int, i: int, what: str) -> CheckpointError:
    """Return the error for an optimizer's parameter that the module does not have."""
    shape = tuple(parameter.shape)
    told = (
        f"is not a parameter of the module that is {what}. Pass the model that the "
        "optimizer trains, and tie parameters again after to_empty, before the "
        "optimizer is made."
    )
    if is_wrapper(parameter):
        told = (
            f"is a {kind_of(parameter)}, which wraps other tensors; its optimizer "
            f"state cannot be {what}. Train a plain parameter, or none."
        )
    return CheckpointError(
        f"Parameter {i} of the optimizer's group {g}, of shape {shape}, {told}"
    )


def optimizers_in(optim: object, what: str) -> list[torch.optim.Optimizer]:
    """Return ``optim`` (None, an optimizer or a list of optimizers) as a list."""
    found = [] if optim is None else optimizers_of(optim)
    for each in found:
        # Checked by attributes: an optimizer may be a wrapper of another class.
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise TypeError(
                f"{what} expects an optimizer, or a list of several, got a "
                f"{type(each).__name__}; extra is passed by its name."
            )
    return found


def named(contents: Contents) -> dict[int, Held]:
    """Return each parameter and tensor by the ``id`` of what an optimizer holds."""
    return {id(held.tensor): held for held in contents.each()}


def readable_state(value: Any, held: Held, key: str) -> Any:
    """Return a state with the elements of this rank."""
    if not isinstance(value, Tensor):
        return value
    where = f"{held.names[0]} (state {key!r})"
    require_readable(value, where, "save")
    return local_state(value, held.tensor, where)
