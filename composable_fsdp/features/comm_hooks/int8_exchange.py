"""Gradients that ranks exchange as int8: a communication hook.

::

    rank 0  [ a0 | b0 ]  encode   [ a0 | b0 ]  all-to-all  [ a0 | a1 ]  decode, a0 + a1
    rank 1  [ a1 | b1 ]   int8    [ a1 | b1 ]              [ b0 | b1 ]  and sum, b0 + b1
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm import collectives
from composable_fsdp.features.wires.formats import decode_int8, encode_int8, int8_nbytes


class RanksOfHook(Protocol):
    """The fields that the hook reads of a ``DefaultState``."""

    process_group: dist.ProcessGroup
    world_size: int


INT8_BLOCK = 128
"""Elements per scale of ``int8_all_to_all_hook``."""


def int8_all_to_all_hook(
    state: RanksOfHook, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients that ranks exchange as int8, and sum in float32.

    Each rank sends to each other rank the slice of that rank, encoded once, with a
    scale in float32 per 128 elements; no value is encoded a second time, as a ring
    of low precision sums does. Of ``n`` elements per slice, ``world_size * (n +
    n / 32)`` bytes are sent, each term rounded up to 16 bytes. Source: ZeRO++ (Wang
    et al., arXiv:2306.10209, section 3.3), without its second level within nodes.

    Args:
        state: the process group, whose ranks are those of the shard group.
        grad: the gradients of this rank ``(padded_numel,)``.
        output: ``(shard_numel,)``, filled with the averages. Default None: the averages
            of all slices replace the values of ``grad``.

    Collective: one all-to-all over the process group of ``state``; without ``output``
        also one all-gather in the dtype of ``grad``.
    """
    ranks, group = state.world_size, state.process_group
    # Slices and blocks of equal sizes: the tail is filled up with zeros.
    numel = -(-grad.numel() // ranks)
    size = -(-numel // INT8_BLOCK) * INT8_BLOCK
    values = grad.new_zeros(ranks, size)
    if numel * ranks == grad.numel():
        values[:, :numel].copy_(grad.view(ranks, numel))
    else:
        # The slices of the last rank are shorter: cut the padded buffer instead.
        numel = size
        values.view(-1)[: grad.numel()].copy_(grad)
    sent = grad.new_empty(ranks, int8_nbytes(size, INT8_BLOCK), dtype=torch.uint8)
    encode_int8(values, sent, INT8_BLOCK)
    del values
    # Gradients of a rank's slice come from all ranks; the sum over them stays exact in
    # float32, whatever the number of ranks.
    received = torch.empty_like(sent)
    each = [sent.shape[1]] * ranks
    collectives.all_to_all(received.view(-1), sent.view(-1), (each, each), group)
    decoded = torch.empty(ranks, size, device=grad.device)
    decode_int8(received, decoded, INT8_BLOCK)
    mean = decoded.sum(0).div_(ranks)[:numel]
    if output is not None:
        output.copy_(mean)
        return
    parts = grad.new_empty(ranks * numel)
    collectives.all_gather_flat([parts], [mean.to(grad.dtype)], group)
    grad.copy_(parts[: grad.numel()])
