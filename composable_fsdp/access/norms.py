"""Norms of gradients and of parameters over all ranks."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import NamedTuple, NoReturn, SupportsFloat, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.other_parts import (
    Route,
    require_one_world,
    route_of,
)
from composable_fsdp.access.unsharded_unit import require_awake
from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import can_compare
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.errors import DesyncError
from composable_fsdp.flat.flat_parameter import (
    add_own_gradients,
    find_flat,
    leaf_gradients,
)
from composable_fsdp.flat.gradients import shard_views, views_are_intact
from composable_fsdp.flat.handle import LEAVES, FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef, in_model_order, originals_by_vars
from composable_fsdp.flat.region import FlatParameter, grad_of
from composable_fsdp.naming import listed
from composable_fsdp.planning import walk
from composable_fsdp.tree.traversal import inside_wrappers

_named_modules = nn.Module.named_modules
_named_parameters = nn.Module.named_parameters


@torch.no_grad()
def grad_norm(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of all gradients, that of the unsharded model; change nothing.

    Args:
        module_or_params: As for ``clip_grad_norm_``.
        norm_type: The order of the norm, above 0. Default 2.0.

    Returns: the norm, a 0-d tensor on the compute device, equal on all ranks; 0 without
        gradients.
    Collective: as ``clip_grad_norm_``. Raises: as ``clip_grad_norm_``.

    >>> norm = grad_norm(model).item()
    """
    order = as_order(norm_type, "grad_norm")
    return norm_of("grad_norm", module_or_params, order).total


@torch.no_grad()
def param_norm(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of all parameters, that of the unsharded model.

    Args:
        module_or_params: As for ``clip_grad_norm_``.
        norm_type: The order of the norm, above 0. Default 2.0.

    Returns: the norm, as ``grad_norm`` does; no parameter is gathered.
    Collective: as ``clip_grad_norm_``. Raises: as ``clip_grad_norm_``.

    >>> norm = param_norm(model).item()
    """
    order = as_order(norm_type, "param_norm")
    return norm_of("param_norm", module_or_params, order).total


class Norm(NamedTuple):
    """A norm over all ranks, and what it is of."""

    total: Tensor
    tensors: list[Tensor]
    """The gradients or parameters of this rank."""
    handles: Sequence[FlatParamHandle]
    chosen: dict[int, Tensor]
    """The parameters by id."""
    routes: tuple[Route, ...]
    """The sets of groups that share parameters."""
    parts: list[Tensor]
    """Per route: the power of the norm."""


def norm_of(
    call: str,
    module_or_params: nn.Module | Iterable[Tensor] | Tensor,
    norm_type: float,
    *,
    max_norm: float = 0.0,
) -> Norm:
    """Compute the norm of gradients or parameters, as ``clip_grad_norm_`` does."""
    chosen = parameters_given(module_or_params, call)
    handles, others = units_and_others(chosen)
    require_awake(handles, call)
    # Ranks without a gradient send over the same groups as the others.
    of = Tensor.detach if call == "param_norm" else grad_of
    found: dict[Route, list[Tensor]] = {
        (): [each for each in map(of, others) if each is not None]
    }
    for handle in handles:
        for route, tensors in _tensors_of(call, handle, chosen):
            found.setdefault(route, []).extend(tensors)
    device, dtype = _device_and_dtype(handles, others)
    routes = tuple(route for route in found if route)
    # Units over the same groups, of most models, need no look at their ranks.
    if len(routes) > 1 or len({handle.groups.names for handle in handles}) > 1:
        require_one_world(handles, call)
    if routes:
        # Without ``max_norm``: a value that changes would visit the store every step.
        details = (f"norm_type={norm_type:g}", f"{dtype}")
        about = f"{len(chosen)} parameters"
        # A training loop repeats this call, and an expected call visits no store.
        meet(
            dict.fromkeys(chain(*routes)),
            Call(call, about, details, _WAY_OUT.format(call)),
            always=False,
        )
    parts, differing = [], []
    for route, tensors in found.items():
        part = _power(tensors, norm_type, device, dtype)
        part, same = _over_ranks(part, route, norm_type, max_norm)
        parts.append(part)
        differing += [] if same else [route]
    # After the last group, whose other ranks wait for this rank.
    for route in differing:
        _refuse_max_norms(max_norm, route)
    stacked = torch.stack(parts)
    infinite = norm_type == math.inf
    total = stacked.amax() if infinite else stacked.sum() ** (1.0 / norm_type)
    every = list(chain(*found.values()))
    return Norm(total.to(dtype), every, handles, chosen, routes, parts[1:])


def _over_ranks(
    part: Tensor, route: Route, norm_type: float, max_norm: float
) -> tuple[Tensor, bool]:
    """Return the sum of the ranks' powers, or the largest; if ``max_norm`` is the same.

    Collective: an all-reduce over each group of ``route``.
    """
    if not route:
        return part, True
    infinite = norm_type == math.inf
    # A maximum may lose a NaN (gloo's does), so a second number tells of one.
    sent = [part.nan_to_num(0.0, posinf=math.inf), part.isnan().to(part)]
    sent = sent if infinite else [part]
    # On a GPU the host would wait for the result.
    compares = part.device.type == "cpu" and all(map(can_compare, route))
    if compares:
        # 18 bits: the sum of the squares of 100,000 ranks is exact in float64.
        mark = zlib.crc32(struct.pack("d", max_norm)) >> 14
        sent += [part.new_tensor(mark), part.new_tensor(-mark if infinite else mark**2)]
    both = torch.stack(sent)
    for group in route:
        collectives.all_reduce(both, group, maximum=infinite)
    total = torch.where(both[1] > 0, math.nan, both[0]) if infinite else both[0]
    if not compares:
        return total, True
    # Integers: a square of a sum may need more bits than float64 has.
    one, other = map(int, both[-2:].tolist())
    # Equal marks: the largest is the least, or their variance is 0.
    ranks = math.prod(group.size() for group in route)
    return total, other == -one if infinite else other * ranks == one * one


def _refuse_max_norms(max_norm: float, route: Route) -> NoReturn:
    """Raise the error of ranks that clip to different norms.

    Collective: an all-gather of objects over each group of ``route``.
    Raises: DesyncError, on all ranks of ``route``.
    """
    given = [(dist.get_rank(), max_norm)]
    for group in route:
        # After the first group a rank passes on the values of the whole group.
        parts = collectives.all_gather_object(given, group)
        given = [each for part in parts for each in part]
    told = (f"{norm:g} on rank {rank}" for rank, norm in sorted(given))
    raise DesyncError(
        f"clip_grad_norm_ expects the same max_norm on all ranks, got {listed(told)}. "
        "Each rank would scale its part of a gradient by another factor. Nothing was "
        "scaled. Compute max_norm from values that are equal on all ranks."
    )


def _device_and_dtype(
    handles: Sequence[FlatParamHandle], others: Sequence[Tensor]
) -> tuple[torch.device, torch.dtype]:
    """Return where ranks sum the norm, and in which dtype it is returned."""
    # The parameters decide: a rank without elements has no gradient.
    dtypes = {p.dtype for p in others}
    for handle in handles:
        dtypes.update(region.shard.dtype for region in handle.layout.regions)
    is_double = not dtypes.isdisjoint((torch.float64, torch.complex128))
    # The compute device, also if the gradients are in host memory.
    devices = [*(h.layout.device for h in handles[-1:]), *(p.device for p in others)]
    device = devices[0] if devices else torch.device("cpu")
    return device, torch.float64 if is_double else torch.float32


def _tensors_of(
    call: str, handle: FlatParamHandle, chosen: dict[int, Tensor]
) -> list[tuple[Route, list[Tensor]]]:
    """Return routes, and the gradients or parameters of a unit that go each route."""
    regions = handle.layout.regions
    if call != "param_norm":
        for region in regions:
            if region.flat is not None:
                add_own_gradients(handle, region)
        if not handle.layout.forms:
            # Without such a group every rank holds all elements. Not ``route_of``, a
            # call per parameter.
            found: list[Tensor] = []
            for region in regions:
                found += _gradients(region, chosen)
            shard = handle.groups.shard
            return [(() if shard is None else (shard,), found)]
    routes: list[tuple[Route, list[Tensor]]] = []
    for route, ref in by_route(handle, chosen):
        held: Sequence[Tensor | None]
        if call == "param_norm":
            held, _ = shard_views(ref.region.cuts, ref.region.shard)
        else:
            held = leaf_gradients(ref.region)
        each = held[ref.index]
        routes.append((route, [] if each is None else [each]))
    return routes


def by_route(
    handle: FlatParamHandle, chosen: dict[int, Tensor]
) -> Iterator[tuple[Route, ParamRef]]:
    """Yield the parameters of a unit that are chosen, with the route of each."""
    # In model order: tensor-parallel ranks with parts of other sizes have other
    # regions, and must meet the groups in the same order.
    for ref in in_model_order(handle):
        # A flat parameter stands for all parameters of its region.
        if id(ref.leaf) in chosen or id(ref.region.flat) in chosen:
            yield route_of(handle, ref.slot.index), ref


def _gradients(region: FlatParameter, chosen: dict[int, Tensor]) -> list[Tensor]:
    """Return the gradients of the chosen parameters of a region."""
    flat = region.flat
    every = all(map(chosen.__contains__, map(id, region.leaves)))
    if flat is not None:
        # A flat parameter stands for all parameters of its region.
        if every or id(flat) in chosen:
            return [] if flat.grad is None else [flat.grad]
    # The padding of the flat gradient is zero, so one operation scales all of it.
    elif every and region.layout.trainable and _is_whole(region):
        assert region.gradient.shard is not None
        return [region.gradient.shard]
    # Of a frozen one, left from before or set by hand: optimizers step on these, too.
    pairs = zip(region.leaves, leaf_gradients(region), strict=True)
    return [g for leaf, g in pairs if g is not None and id(leaf) in chosen]


def _is_whole(region: FlatParameter) -> bool:
    """Return whether every ``.grad`` of the region still views the flat gradient."""
    if region.gradient.shard is None:
        return False
    shown = all(map(is_, map(grad_of, region.leaves), region.gradient.views))
    return shown and views_are_intact(region)


_WAY_OUT = (
    "The norm is a sum over all ranks: call {} on every rank, with the same "
    "parameters, also on a rank that will skip the step."
)


def as_order(norm_type: object, call: str) -> float:
    """Return the order of a norm. Raises: TypeError; ValueError, unless above 0."""
    order = as_number("norm_type", norm_type, call)
    if not order > 0:
        raise ValueError(
            f"{call} expects a norm_type above 0 (2.0, 1.0, inf), got "
            f"{order}. Norms below that do not grow with the gradients."
        )
    return order


def as_number(name: str, given: object, call: str) -> float:
    """Return an argument as ``float``. Raises: TypeError, for no number."""
    try:
        # As torch's function, also a 0-d tensor; no text, which ``float`` reads.
        if not isinstance(given, str):
            return float(cast("SupportsFloat", given))
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{call} expects a number for {name}, got {given!r}.")


def _power(
    tensors: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the sum of ``|g| ** norm_type``, or the maximum for the inf norm."""
    filled = [g.abs() if g.is_complex() else g for g in tensors if g.numel()]
    if not filled:
        return torch.zeros((), device=device, dtype=torch.float64)
    norms: Sequence[Tensor] = torch._foreach_norm(filled, norm_type, dtype)
    if len({norm.device for norm in norms}) > 1:
        # Units with CPU offload and units without are clipped together.
        norms = [norm.to(device) for norm in norms]
    # The square of a large but finite norm overflows float32.
    stacked = torch.stack(tuple(norms)).double()
    norm: Tensor = torch.linalg.vector_norm(stacked, norm_type).to(device)
    return norm if norm_type == math.inf else norm**norm_type


def parameters_given(
    given: nn.Module | Iterable[Tensor] | Tensor, what: str
) -> dict[int, Tensor]:
    """Return the parameters of an argument of ``what``, by id. Raises: TypeError."""
    if isinstance(given, nn.Module):
        parameters = _parameters_in(given)
    elif isinstance(given, Tensor):
        parameters = [given]
    elif isinstance(given, Iterable):
        parameters = list(given)
    else:
        raise TypeError(
            f"{what} expects a module or parameters, got a {type(given).__name__}."
        )
    # Those of a module need no look, which clipping would pay in every step.
    for parameter in () if isinstance(given, nn.Module) else parameters:
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"{what} expects a module or parameters, got an iterable with "
                f"a {type(parameter).__name__}. Pass the values, not (name, parameter) "
                "pairs."
            )
    return dict(zip(map(id, parameters), parameters, strict=True))


def _parameters_in(module: nn.Module) -> list[Tensor]:
    """Return ``list(module.parameters())``; usually at a fifth of the cost."""
    top = inside_wrappers(module)
    # ``nn.Module.parameters`` builds names, half of the time of clipping.
    found: list[Tensor | None] = []
    for each in walk.modules(top):
        # A class that overrides either may return other parameters.
        if type(each).named_modules is not _named_modules:
            return list(module.parameters())
        found += each._parameters.values()
    if type(top).named_parameters is not _named_parameters:
        return list(module.parameters())
    return [parameter for parameter in found if parameter is not None]


def units_and_others(
    chosen: dict[int, Tensor],
) -> tuple[list[FlatParamHandle], list[Tensor]]:
    """Return the units that hold chosen parameters, and the other parameters.

    In ``chosen``, sharded parameters take the places of full ones that modules show,
    unless the latter have gradients (``with_grads=True``).
    """
    # Without a Python loop per parameter, if units hold all of them.
    links = dict.fromkeys(map(LEAVES.get, chosen))
    others: list[Tensor] = []
    handles = dict.fromkeys([link() for link in links if link is not None])
    if None in links:
        for key, parameter in chosen.items():
            if key not in LEAVES:
                found = find_flat(parameter)
                if found is None:
                    others.append(parameter)
                else:
                    handles[found[0]] = None
        if LEAVES:
            others = _without_full(others, chosen, handles)
    return [handle for handle in handles if handle is not None], others


def _without_full(
    others: list[Tensor],
    chosen: dict[int, Tensor],
    handles: dict[FlatParamHandle | None, None],
) -> list[Tensor]:
    """Replace full parameters by the sharded parameters, which have the gradients."""
    originals = originals_by_vars() if any(p.grad is None for p in others) else {}
    left = []
    for parameter in others:
        found = originals.get(id(vars(parameter)))
        if parameter.grad is not None or found is None:
            left.append(parameter)
            continue
        handle, index = found
        del chosen[id(parameter)]
        leaf = handle.leaves[index]
        chosen[id(leaf)] = leaf
        handles[handle] = None
    return left
