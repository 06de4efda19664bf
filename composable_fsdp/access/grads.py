"""Gradients outside the step: accumulation without communication, norms, clipping."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.access.block import block
from composable_fsdp.access.other_parts import Route, require_one_world
from composable_fsdp.access.settings import set_reshard, units_of
from composable_fsdp.access.unshard_params import require_awake
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
from composable_fsdp.planning import walk
from composable_fsdp.tree.moments import NAME_NONFINITE


@block
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally, without communication, while the block runs.

    The next backward outside the block reduces the sum. Until then each unit keeps an
    unsharded reduce buffer ``(padded_numel,)``. Units whose strategy keeps them
    unsharded between forward and backward (SHARD_GRAD_OP) also stay unsharded for the
    next forward, as in FSDP1; ``reshard(module)`` shards them.

    Collective: none itself; forward and backward all-gather units that are sharded.
    Raises: CompositionError, if ``module`` holds no fully sharded module.

    >>> with no_sync(model):
    ...     loss_of(first_half).backward()
    >>> loss_of(second_half).backward()
    """
    states = units_of(module, "no_sync", recurse=True)
    before = [
        (s.settings.sync_gradients, s.settings.reshard_after_backward) for s in states
    ]
    for state in states:
        state.settings.sync_gradients = False
        # No optimizer step follows, so full parameters stay valid for the next forward.
        if not state.options.reshard_after_forward:
            set_reshard(state, False)
    try:
        yield
    finally:
        for state, (sync, reshard) in zip(states, before, strict=True):
            state.settings.sync_gradients = sync
            set_reshard(state, reshard)


@torch.no_grad()
def clip_grad_norm_(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``.

    The norm is that of the unsharded model.

    Args:
        module_or_params: A module, or sharded parameters and plain ones (equal on all
            ranks) in any mixture. Frozen ones count if they have a gradient.
        max_norm: The largest norm allowed, at least 0.
        norm_type: The order of the norm, above 0; ``inf`` for the maximum norm.
        error_if_nonfinite: Raise if the norm is NaN or inf, after a wait for the GPU.
        foreach: Torch's argument; multi-tensor operators scale in any case.

    Returns: the norm before clipping, a 0-d tensor on the compute device, equal on all
        ranks; NaN or inf on every rank of a shard group if that of any of them is.
    Collective: per shard group among the parameters an all-reduce of one float64 (two
        for the ``inf`` norm, and on the CPU two more, which compare ``max_norm``); for
        parameters that tensor parallelism cuts, another over its ranks. All ranks must
        pass the same parameters. An error of ``error_if_nonfinite`` is told by an
        all-gather of objects.
    Raises: DesyncError, if another rank does not make this call, or, on the CPU, passes
        another ``max_norm``; CompositionError, for units whose gradients are over the
        data of different ranks; ValueError, unless ``norm_type`` > 0 and ``max_norm``
        >= 0; TypeError, for an argument that is no parameter; RuntimeError for
        ``error_if_nonfinite``, on all ranks alike, but a NaN that is written into the
        gradients of one replica is known there alone. Nothing is scaled then.

    >>> model(x).sum().backward()
    >>> norm = clip_grad_norm_(model, max_norm=1.0)
    >>> optimizer.step()
    """
    max_norm = _number("clip_grad_norm_", "max_norm", max_norm)
    if not max_norm >= 0:
        raise ValueError(
            f"clip_grad_norm_ expects a max_norm of 0 or above, got {max_norm}. A "
            "negative one would turn every gradient around."
        )
    found = norm_of("clip_grad_norm_", module_or_params, norm_type, max_norm)
    total = found.total
    if error_if_nonfinite and not total.isfinite():
        bad = " ".join(name(found) for name in NAME_NONFINITE)
        raise RuntimeError(
            f"clip_grad_norm_ expects finite gradients (error_if_nonfinite=True), and "
            f"their norm of order {norm_type} over all ranks is {total.item()}. "
            f"{bad} Skip the step, or pass error_if_nonfinite=False."
        )
    # clamp instead of an ``if``: a comparison in Python would wait for the GPU. The
    # constant is torch's and avoids a division by zero.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in found.tensors:
        if gradient.numel():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), tensors in by_kind.items():
        torch._foreach_mul_(tensors, factor.to(device=device, dtype=dtype))
    return total


@torch.no_grad()
def grad_norm(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of all gradients, that of the unsharded model; change nothing.

    Without gradients it is 0.

    Args, Returns, Collective, Raises: as ``clip_grad_norm_``.

    >>> norm = grad_norm(model).item()
    """
    return norm_of("grad_norm", module_or_params, norm_type).total


@torch.no_grad()
def param_norm(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of all parameters, that of the unsharded model, without a gather.

    Args, Returns, Collective, Raises: as ``clip_grad_norm_``.

    >>> norm = param_norm(model).item()
    """
    return norm_of("param_norm", module_or_params, norm_type).total


class Norm(NamedTuple):
    """A norm over all ranks, and what it is of."""

    total: Tensor
    tensors: list[Tensor]
    """The gradients or parameters of this rank."""
    handles: Sequence[FlatParamHandle]
    chosen: dict[int, Tensor]
    routes: tuple[Route, ...]
    """The sets of groups that share parameters."""
    parts: list[Tensor]
    """Per route: the power of the norm."""


def norm_of(
    call: str,
    module_or_params: nn.Module | Iterable[Tensor] | Tensor,
    norm_type: float,
    max_norm: float = 0.0,
) -> Norm:
    """Compute the norm of gradients or parameters, as ``clip_grad_norm_`` does."""
    norm_type = _number(call, "norm_type", norm_type)
    if not norm_type > 0:
        raise ValueError(
            f"{call} expects a norm_type above 0 (2.0, 1.0, inf), got "
            f"{norm_type}. Norms below that do not grow with the gradients."
        )
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
    dtype = _dtype_of(handles, others)
    # The compute device, also if the gradients are in host memory.
    devices = [*(h.layout.device for h in handles[-1:]), *(p.device for p in others)]
    device = next(iter(devices), torch.device("cpu"))
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
    parts, are_equal = [], True
    for route, tensors in found.items():
        part, is_equal = _over_ranks(
            _power(tensors, norm_type, device, dtype), route, norm_type, max_norm
        )
        parts.append(part)
        are_equal &= is_equal
    # After the last group, whose other ranks wait for this rank.
    if not are_equal:
        raise DesyncError(
            f"clip_grad_norm_ expects the same max_norm on all ranks, got {max_norm} "
            "here and others elsewhere, by which each rank would scale its part of a "
            "gradient by another factor. Nothing was scaled. Compute max_norm from "
            "values that are equal on all ranks."
        )
    stacked = torch.stack(parts)
    infinite = norm_type == math.inf
    total = stacked.amax() if infinite else stacked.sum() ** (1.0 / norm_type)
    every = list(chain(*found.values()))
    return Norm(total.to(dtype), every, handles, chosen, routes, parts[1:])


def _dtype_of(handles: list[FlatParamHandle], others: list[Tensor]) -> torch.dtype:
    """Return the dtype of a norm, by the parameters: a rank may have no gradient."""
    regions = chain.from_iterable(handle.layout.regions for handle in handles)
    dtypes = {each.dtype for each in others} | {each.shard.dtype for each in regions}
    is_double = not dtypes.isdisjoint((torch.float64, torch.complex128))
    return torch.float64 if is_double else torch.float32


def _number(call: str, name: str, given: Any) -> float:
    """Return an argument as a number. Raises: TypeError, for a text but ``"inf"``."""
    if not isinstance(given, str) or given == "inf":
        with suppress(TypeError):
            return float(given)
    raise TypeError(f"{call} expects a number for {name}, got {given!r}.")


_WAY_OUT = (
    "The norm is a sum over all ranks: call {} on every rank, with the same "
    "parameters, also on a rank that will skip the step."
)


def _over_ranks(
    part: Tensor, route: Route, norm_type: float, max_norm: float
) -> tuple[Tensor, bool]:
    """Return the sum of the ranks' powers, or the largest; an all-reduce per group."""
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


def _tensors_of(
    call: str, handle: FlatParamHandle, chosen: dict[int, Tensor]
) -> Iterator[tuple[Route, list[Tensor]]]:
    """Yield routes, and the gradients or parameters of a unit that go each route."""
    regions = handle.layout.regions
    if call != "param_norm":
        for region in regions:
            if region.flat is not None:
                add_own_gradients(handle, region)
        if not handle.layout.forms:
            # Not ``by_route``, which takes calls per parameter. Without a shard group
            # every rank holds all elements.
            shard = handle.groups.shard
            route: Route = () if shard is None else (shard,)
            yield route, [g for region in regions for g in _gradients(region, chosen)]
            return
    for route, ref in by_route(handle, chosen):
        held: Sequence[Tensor | None] = leaf_gradients(ref.region)
        if call == "param_norm":
            held, _ = shard_views(ref.region.cuts, ref.region.shard)
        each = held[ref.index]
        yield route, [] if each is None else [each]


def by_route(
    handle: FlatParamHandle, chosen: dict[int, Tensor]
) -> Iterator[tuple[Route, ParamRef]]:
    """Yield the parameters of a unit that are chosen, with the route of each."""
    # In model order: tensor-parallel ranks with parts of other sizes have other
    # regions, and must meet the groups in the same order.
    for ref in in_model_order(handle):
        # A flat parameter stands for all parameters of its region.
        if id(ref.leaf) in chosen or id(ref.region.flat) in chosen:
            shard, form = handle.groups.shard, ref.form
            # Replicas have equal gradients, as have ranks of a mesh that does not cut.
            own = () if shard is None or shard in form.mesh_groups else (shard,)
            yield (*own, *form.cut_over), ref


def _gradients(region: FlatParameter, chosen: dict[int, Tensor]) -> list[Tensor]:
    """Return the gradients of the chosen parameters of a region."""
    flat = region.flat
    every = all(map(chosen.__contains__, map(id, region.leaves)))
    if flat is not None:
        # A flat parameter stands for all parameters of its region.
        if every or id(flat) in chosen:
            return [] if flat.grad is None else [flat.grad]
    # The padding of the flat gradient is zero, so one operation scales all of it.
    elif every and region.layout.trainable and region.gradient.shard is not None:
        # If every ``.grad`` still views the flat gradient.
        shown = all(map(is_, map(grad_of, region.leaves), region.gradient.views))
        if shown and views_are_intact(region):
            return [region.gradient.shard]
    # Of a frozen one, left from before or set by hand: optimizers step on these, too.
    pairs = zip(region.leaves, leaf_gradients(region), strict=True)
    return [g for leaf, g in pairs if g is not None and id(leaf) in chosen]


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
    parameters: list[Any]
    if isinstance(given, nn.Module):
        # Not ``given.parameters()``: it builds names, half of the time of clipping.
        tables = [each._parameters.values() for each in walk.modules(given)]
        parameters = [each for each in chain(*tables) if each is not None]
    else:
        # A tensor is iterable, too.
        several = isinstance(given, Iterable) and not isinstance(given, Tensor)
        parameters = list(given) if several else [given]
        for parameter in parameters:
            if not isinstance(parameter, Tensor):
                raise TypeError(
                    f"{what} expects a module or parameters, got a "
                    f"{type(parameter).__name__}. Pass the values, not (name, "
                    "parameter) pairs."
                )
    return dict(zip(map(id, parameters), parameters, strict=True))


def units_and_others(
    chosen: dict[int, Tensor],
) -> tuple[list[FlatParamHandle], list[Tensor]]:
    """Return the units that hold chosen parameters, and the other parameters."""
    # In ``chosen``, sharded parameters take the places of full ones that modules show,
    # unless the latter have gradients (``with_grads=True``).
    # Without a Python loop per parameter, if units hold all of them.
    links = dict.fromkeys(map(LEAVES.get, chosen))
    others: list[Tensor] = []
    handles = dict.fromkeys([link() for link in links if link is not None])
    originals: dict[int, tuple[FlatParamHandle, int]] | None = None
    for key, parameter in [*chosen.items()] if None in links else ():
        if key in LEAVES:
            continue
        if (flat := find_flat(parameter)) is not None:
            handles[flat[0]] = None
            continue
        found = None
        if parameter.grad is None:
            originals = originals_by_vars() if originals is None else originals
            found = originals.get(id(vars(parameter)))
        if found is None:
            others.append(parameter)
            continue
        handle, index = found
        del chosen[key]
        chosen[id(handle.leaves[index])] = handle.leaves[index]
        handles[handle] = None
    return [handle for handle in handles if handle is not None], others
