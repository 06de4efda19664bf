"""Gradients outside the step: accumulation without communication, and clipping."""

from __future__ import annotations

import math
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import NamedTuple, NoReturn, SupportsFloat, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.nonfinite import (
    collect_nonfinite,
    parameters_given,
    units_and_others,
)
from composable_fsdp.access.schedule import set_reshard
from composable_fsdp.access.settings import set_sync, units_of
from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import can_compare
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.errors import DesyncError
from composable_fsdp.flat.experts import (
    Route,
    count_common,
    require_one_world,
    route_of,
)
from composable_fsdp.flat.flat_parameter import (
    add_own_gradients,
    grad_of,
    leaf_gradients,
)
from composable_fsdp.flat.gradients import views_are_intact
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef, param_refs
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import listed


@contextmanager
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
        set_sync(state, False)
        # SHARD_GRAD_OP keeps full parameters to save all-gathers. Without a reduction
        # normally no optimizer step follows, so they stay valid for the next forward.
        if not state.options.reshard_after_forward:
            set_reshard(state, False)
    try:
        yield
    finally:
        for state, (sync, reshard) in zip(states, before, strict=True):
            set_sync(state, sync)
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

    Use this function instead of ``torch.nn.utils.clip_grad_norm_``, which sees only
    this rank's shards and so scales by a different factor on each rank. The norm equals
    the norm of the unsharded model.

    Args:
        module_or_params: A module, or parameters: sharded parameters (this rank's
            shards) and plain parameters (equal on all ranks) in any mixture. Frozen
            parameters count if they have a gradient.
        max_norm: The largest norm allowed, at least 0.
        norm_type: The order of the norm, above 0; ``inf`` for the maximum norm. Default
            2.0.
        error_if_nonfinite: Raise if the norm is NaN or inf; this check waits for the
            GPU. Default False.
        foreach: False processes gradients one by one. Default None, as True:
            multi-tensor operators.

    Returns: the norm before clipping, a 0-d tensor on the compute device, equal on all
        ranks; NaN or inf on every rank if the norm of any rank is NaN or inf.
    Collective: per shard group among the parameters an all-reduce of one number (two
        numbers for the ``inf`` norm); for parameters that tensor parallelism cuts,
        another over its ranks. All ranks must pass the same parameters. If
        ``error_if_nonfinite`` raises, also an all-gather of objects, for the message.
    Raises: DesyncError, if another rank does not make this call, before anything is
        sent, or, on the CPU, passes another ``max_norm``; CompositionError, for units
        whose gradients are over the data of different ranks; ValueError, unless
        ``norm_type`` > 0 and ``max_norm`` >= 0; TypeError, for an argument that is no
        parameter; RuntimeError for ``error_if_nonfinite``, on
        all ranks alike and before any gradient is scaled.
    """
    parameters = parameters_given(module_or_params, "clip_grad_norm_")
    norm_type, max_norm = _as_norms(norm_type, max_norm)
    chosen = dict(zip(map(id, parameters), parameters, strict=True))
    handles, others = units_and_others(chosen)
    sharded: dict[Route, list[Tensor]] = {}
    plain = [p.grad for p in others if p.grad is not None]
    gradients = plain.copy()
    device = others[0].device if others else None
    dtypes = {p.dtype for p in others}
    for handle in handles:
        # The all-reduce runs on the compute device, also if the gradients are in host
        # memory.
        device = handle.layout.device
        if handle.layout.forms:
            dtypes.update(region.shard.dtype for region in handle.layout.regions)
            for route, gradient in _gradients_in_form(handle, chosen):
                # Also without a gradient: all ranks send over the same groups.
                where = sharded.setdefault(route, []) if route else plain
                where += gradient
                gradients += gradient
            continue
        cut = handle.groups.cut
        # Without such a group every rank holds all elements, as of plain parameters: a
        # sum over ranks would count them repeatedly. Not ``route_of``, which is a call.
        where = sharded.setdefault(cut, []) if cut else plain
        for region in handle.layout.regions:
            dtypes.add(region.shard.dtype)
            if region.layout.trainable:
                found = _gradients(handle, region, chosen)
            else:
                found = _left_gradients(region, chosen)
            where += found
            gradients += found
    # float16 powers overflow, so float32 at least. The parameters decide, not the
    # gradients: a rank without any element of a parameter has no gradient, but must
    # send the same dtype as the other ranks.
    is_double = not dtypes.isdisjoint((torch.float64, torch.complex128))
    dtype = torch.float64 if is_double else torch.float32
    # Units over the same groups, of most models, need no look at their ranks.
    if len(sharded) > 1 or len({handle.groups.names for handle in handles}) > 1:
        require_one_world(handles, "clip_grad_norm_")
    if sharded:
        # A training loop repeats this call, and an expected call visits no store.
        groups = dict.fromkeys(group for route in sharded for group in route)
        count = count_common(chosen, handles)
        meet(groups, _clip_call(norm_type, dtype, count), always=False)
    norms = _norms_one_by_one if foreach is False else torch._foreach_norm
    device = device or torch.device("cpu")
    kind = _Kind(norm_type, device, dtype, norms, max_norm)
    # The parts are kept apart, because an error names the gradients of a bad part.
    parts = _norm_parts(plain, sharded, kind)
    total = _joined(parts, kind)
    # A rank without elements of the parameters that have gradients has no gradient
    # itself: only a norm of 0 shows that no rank has a gradient. ``item()`` waits for
    # the GPU, so the test comes last.
    if not gradients and any(p.numel() for p in parameters) and not total.item():
        warnings.warn(_NO_GRADIENTS, stacklevel=2)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_ expects finite gradients (error_if_nonfinite=True), and "
            f"their norm of order {norm_type} over all ranks is {total.item()}. "
            f"{_offenders(handles, chosen, sharded, parts[1:])} Skip the step, or pass "
            "error_if_nonfinite=False."
        )
    _scale(gradients, total, max_norm, foreach=foreach is not False)
    return total


def _as_norms(norm_type: object, max_norm: object) -> tuple[float, float]:
    """Return the numbers that the caller has passed, as ``float``.

    Raises: TypeError, for a value that is no number; ValueError, for a norm that
    gradients cannot be clipped to.
    """
    numbers = []
    for name, given in (("norm_type", norm_type), ("max_norm", max_norm)):
        try:
            # As torch's function, also a 0-d tensor, and a number in a string.
            numbers.append(float(cast("SupportsFloat", given)))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"clip_grad_norm_ expects a number for {name}, got {given!r}."
            ) from error
    _require_norm(*numbers)
    return numbers[0], numbers[1]


def _require_norm(norm_type: float, max_norm: float) -> None:
    """Raise ValueError for a norm that gradients cannot be clipped to."""
    if not max_norm >= 0:
        raise ValueError(
            f"clip_grad_norm_ expects a max_norm of 0 or above, got {max_norm}. A "
            "negative one would turn every gradient around."
        )
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_ expects a norm_type above 0 (2.0, 1.0, inf), got "
            f"{norm_type}. Norms below that do not grow with the gradients."
        )


_NO_GRADIENTS = (
    "clip_grad_norm_ found no gradient on this rank: nothing is clipped here. Call it "
    "after backward and before zero_grad, with the model or its parameters."
)


def _clip_call(norm_type: float, dtype: torch.dtype, count: int) -> Call:
    """Return the call of ``clip_grad_norm_`` as ranks compare it."""
    return Call(
        "clip_grad_norm_",
        f"{count} parameters",
        (f"norm_type={norm_type:g}", f"{dtype}"),
        _CLIP_EVERYWHERE,
    )


_CLIP_EVERYWHERE = (
    "The norm is a sum over all ranks: call clip_grad_norm_ on every rank, with the "
    "same parameters, also on a rank that will skip the step."
)
"""The end of an error of a rank that clips alone."""


class _Kind(NamedTuple):
    """The norm to compute: order, device, dtype and operator."""

    norm_type: float
    device: torch.device
    """The device of the total, on which the all-reduce runs."""
    dtype: torch.dtype
    """The dtype of the norms, in which powers are summed."""
    norms: Callable[[list[Tensor], float, torch.dtype], Sequence[Tensor]]
    """Returns the norm of each tensor of a list."""
    max_norm: float
    """Compared over the ranks, where that costs nothing."""


def _norms_one_by_one(
    tensors: list[Tensor], norm_type: float, dtype: torch.dtype
) -> list[Tensor]:
    """Return the norm of each tensor, without multi-tensor operators."""
    return [torch.linalg.vector_norm(t, norm_type, dtype=dtype) for t in tensors]


def _gradients_in_form(
    handle: FlatParamHandle, chosen: dict[int, Tensor]
) -> Iterator[tuple[Route, list[Tensor]]]:
    """Yield route and gradient of each chosen parameter of a unit with forms."""
    refs: dict[int, tuple[FlatParameter, int]] = {}
    for region in handle.layout.regions:
        if region.flat is not None:
            add_own_gradients(handle, region)
        for index, slot in enumerate(region.layout.parameters):
            flat, leaf = region.flat, region.leaves[index]
            # A flat parameter stands for all parameters of its region.
            if id(leaf) in chosen or (flat is not None and id(flat) in chosen):
                refs[slot.index] = region, index
    # By index: tensor-parallel ranks with parts of other sizes have other regions, and
    # must meet the groups in the same order.
    for key in sorted(refs):
        region, index = refs[key]
        gradient = leaf_gradients(region)[index]
        yield route_of(handle, key), [] if gradient is None else [gradient]


def _gradients(
    handle: FlatParamHandle, region: FlatParameter, chosen: dict[int, Tensor]
) -> list[Tensor]:
    """Return the gradients of the chosen parameters of a trainable region.

    If all parameters of the region are chosen, the result is the flat gradient alone.
    """
    flat = region.flat
    if flat is not None:
        add_own_gradients(handle, region)
        if id(flat) in chosen or all(map(chosen.__contains__, map(id, region.leaves))):
            return [] if flat.grad is None else [flat.grad]
        return [
            gradient
            for leaf, gradient in zip(
                region.leaves, leaf_gradients(region), strict=True
            )
            if gradient is not None and id(leaf) in chosen
        ]
    # The padding of the flat gradient is zero, so a single operation on the flat
    # gradient gives the norm and the scaling of all its parameters.
    if all(map(chosen.__contains__, map(id, region.leaves))) and _is_whole(region):
        assert region.gradient.shard is not None
        return [region.gradient.shard]
    leaves = [leaf for leaf in region.leaves if id(leaf) in chosen]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _left_gradients(region: FlatParameter, chosen: dict[int, Tensor]) -> list[Tensor]:
    """Return gradients of frozen parameters, left from before freezing or set by hand.

    Optimizers step on such gradients, too.
    """
    return [
        leaf.grad
        for leaf in region.leaves
        if leaf.grad is not None and id(leaf) in chosen
    ]


def _is_whole(region: FlatParameter) -> bool:
    """Return whether every ``.grad`` of the region still views the flat gradient."""
    if region.gradient.shard is None:
        return False
    shown = all(map(is_, map(grad_of, region.leaves), region.gradient.views))
    return shown and views_are_intact(region)


def _offenders(
    handles: Sequence[FlatParamHandle],
    chosen: dict[int, Tensor],
    routes: Iterable[Route],
    norms: Sequence[Tensor],
) -> str:
    """Return the gradients that are not finite, in words.

    Collective: an all-gather of objects over each group whose norm is not finite.
    """
    # The norm over a group is equal on the group's ranks, so all ranks decide alike.
    # A list and no set: the groups exchange one after the other, in an order that is
    # equal on all ranks.
    bad = [r for r, norm in zip(routes, norms, strict=True) if not norm.isfinite()]
    # Units without a shard group hold whole gradients, equal on all ranks.
    whole = [each for each in handles if not each.groups.cut and not each.layout.forms]
    found = collect_nonfinite(whole, chosen, ()) if whole else []
    for route in bad:
        held = {
            id(ref.leaf): (handle, ref.leaf)
            for handle in handles
            for ref in param_refs(handle)
            if route_of(handle, ref.slot.index) == route and _is_chosen(ref, chosen)
        }
        units = list(dict.fromkeys(handle for handle, _ in held.values()))
        leaves = {key: leaf for key, (_, leaf) in held.items()}
        found += collect_nonfinite(units, leaves, route)
    # Finite gradients may have a norm that is too large for the dtype of the sum.
    if not found:
        return (
            "No gradient of a unit is NaN or inf: the norm overflows, or a plain one."
        )
    return f"{listed(found, '; ')}."


def _is_chosen(ref: ParamRef, chosen: dict[int, Tensor]) -> bool:
    """Return whether a parameter, or the flat parameter of its region, is chosen."""
    return id(ref.leaf) in chosen or id(ref.region.flat) in chosen


def _norm_parts(
    plain: list[Tensor], sharded: dict[Route, list[Tensor]], kind: _Kind
) -> list[Tensor]:
    """Return powers of norms: of plain gradients, then over the ranks of each group.

    Gradients that are equal on all ranks count once.
    """
    infinite = kind.norm_type == float("inf")
    parts, differing = [_power(plain, kind)], []
    # 18 bits: the sum of the squares of 100,000 ranks is exact in float64.
    mark = zlib.crc32(struct.pack("d", kind.max_norm)) >> 14
    for route, gradients in sharded.items():
        part = _power(gradients, kind)
        sent = [part]
        # On a GPU the host would wait for the result.
        compares = kind.device.type == "cpu" and all(map(can_compare, route))
        if infinite:
            # A maximum may lose a NaN (gloo's does), so the NaN flag is reduced as a
            # second number.
            sent = [part.nan_to_num(0.0, posinf=math.inf), part.isnan()]
        if compares:
            sent += map(torch.tensor, (mark, -mark if infinite else mark * mark))
        wide = torch.float64 if compares else kind.dtype
        both = torch.stack([each.to(wide) for each in sent])
        for group in route:
            collectives.all_reduce(both, group, maximum=infinite)
        part = both[0].to(kind.dtype)
        if infinite:
            part = torch.where(both[1] > 0, math.nan, part)
        parts.append(part)
        if compares:
            # Integers: a square of a sum may need more bits than float64 has.
            one, other = map(int, both[-2:].tolist())
            # Equal marks: the largest is the least, or their variance is 0.
            ranks = math.prod(group.size() for group in route)
            if (other != -one) if infinite else (other * ranks != one * one):
                differing.append(route)
    # After the last group, whose other ranks wait for this rank.
    for route in differing:
        _refuse_max_norms(kind.max_norm, route)
    return parts


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


def _joined(parts: list[Tensor], kind: _Kind) -> Tensor:
    """Return the norm of all gradients, from the powers of ``_norm_parts``."""
    stacked = torch.stack(parts)
    if kind.norm_type == float("inf"):
        return stacked.amax()
    return stacked.sum() ** (1.0 / kind.norm_type)


def _power(gradients: list[Tensor], kind: _Kind) -> Tensor:
    """Return the sum of ``|g| ** norm_type``, or the maximum for the inf norm."""
    norm_type, device, dtype, norms_of, _ = kind
    filled = [g.abs() if g.is_complex() else g for g in gradients if g.numel()]
    if not filled:
        return torch.zeros((), device=device, dtype=dtype)
    norms = norms_of(filled, norm_type, dtype)
    if len({norm.device for norm in norms}) > 1:
        # Units with CPU offload and units without are clipped together.
        norms = [norm.to(device) for norm in norms]
    stacked = torch.stack(tuple(norms))
    norm: Tensor = torch.linalg.vector_norm(stacked, norm_type).to(device)
    return norm if norm_type == float("inf") else norm**norm_type


def _scale(
    gradients: list[Tensor], total: Tensor, max_norm: float, *, foreach: bool
) -> None:
    """Multiply by ``max_norm / total`` if the quotient is below 1."""
    # clamp instead of an ``if``: a comparison in Python would wait for the GPU. The
    # constant is torch's and avoids a division by zero.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), tensors in by_kind.items():
        # A multi-tensor operator requires tensors on the same device; ``factor``
        # follows.
        own = factor.to(device=device, dtype=dtype)
        if foreach:
            torch._foreach_mul_(tensors, own)
            continue
        for tensor in tensors:
            tensor.mul_(own)
