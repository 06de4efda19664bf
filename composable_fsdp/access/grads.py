"""Gradients outside the step: accumulation without communication, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from composable_fsdp.access.block import block
from composable_fsdp.access.norms import as_number, as_order, norm_of
from composable_fsdp.access.settings import set_reshard, units_of
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
        foreach: False scales gradients one by one. Default None, as True:
            multi-tensor operators.

    Returns: the norm before clipping, a 0-d tensor on the compute device, equal on all
        ranks; NaN or inf on every rank of a shard group if that of any of them is.
    Collective: per shard group among the parameters an all-reduce of one float64 (two
        for the ``inf`` norm, and on the CPU two more, which compare ``max_norm``); for
        parameters that tensor parallelism cuts, another over its ranks. All ranks must
        pass the same parameters. If ``error_if_nonfinite`` raises, also an all-gather
        of objects, for the message.
    Raises: DesyncError, if another rank does not make this call, before anything is
        sent, or, on the CPU, passes another ``max_norm``; CompositionError, for units
        whose gradients are over the data of different ranks; ValueError, unless
        ``norm_type`` > 0 and ``max_norm`` >= 0; TypeError, for an argument that is no
        parameter; RuntimeError for ``error_if_nonfinite``, before any gradient is
        scaled: on all ranks alike, since a reduction spreads a NaN or inf. A NaN that
        is written after it into the gradients of one replica (HYBRID_SHARD) is known to
        that replica alone.

    >>> model(x).sum().backward()
    >>> norm = clip_grad_norm_(model, max_norm=1.0)
    >>> optimizer.step()
    """
    order = as_order(norm_type, "clip_grad_norm_")
    max_norm = as_number("max_norm", max_norm, "clip_grad_norm_")
    if not max_norm >= 0:
        raise ValueError(
            f"clip_grad_norm_ expects a max_norm of 0 or above, got {max_norm}. A "
            "negative one would turn every gradient around."
        )
    found = norm_of("clip_grad_norm_", module_or_params, order, max_norm=max_norm)
    total, gradients = found.total, found.tensors
    if error_if_nonfinite and not total.isfinite():
        bad = " ".join(name(found) for name in NAME_NONFINITE)
        raise RuntimeError(
            f"clip_grad_norm_ expects finite gradients (error_if_nonfinite=True), and "
            f"their norm of order {order} over all ranks is {total.item()}. "
            f"{bad} Skip the step, or pass error_if_nonfinite=False."
        )
    _scale(gradients, total, max_norm, foreach=foreach is not False)
    return total


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
        own = factor.to(device=device, dtype=dtype)
        if foreach:
            torch._foreach_mul_(tensors, own)
            continue
        for tensor in tensors:
            tensor.mul_(own)
