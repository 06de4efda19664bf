"""Hashes of values, so that ranks can compare parameters without sending them.

``torch.hash_tensor`` is an exclusive-or, the same for zeros and for ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

import torch
from torch import Tensor, nn

# ``torch.cat`` of views in a single call; private, checked on torch 2.13.
from torch._utils import _flatten_dense_tensors

_ROW = 1 << 17
"""Words per row, equal on all devices: 1 MiB stays in the cache of a CPU."""
_SMALL = 1 << 12
"""Words up to which the tensors of a unit are hashed together."""

_is_meta = attrgetter("is_meta")
_PLAIN = frozenset((Tensor, nn.Parameter))
"""The usual types, which are not fake."""


def have_values(tensors: Sequence[Tensor]) -> bool:
    """Return whether all ``tensors`` have values: none is on meta or fake."""
    if any(map(_is_meta, tensors)):
        return False
    # Fake tensors, on which torch predicts shapes and memory, have this attribute. A
    # look at the types first, because to miss an attribute takes long.
    return _PLAIN.issuperset(map(type, tensors)) or not any(
        hasattr(tensor, "fake_mode") for tensor in tensors
    )


def hash_values(values: Sequence[Tensor]) -> Tensor:
    """Return a hash of each tensor, ``(n,)`` int64, without a wait for the device."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    # Not a decorator, which makes a context per call: each unit comes here at set-up.
    with torch.no_grad():
        device = values[0].device
        kinds = {(v.dtype, v.device == device, v.nbytes % 8) for v in values}
        sizes = [value.nbytes // 8 for value in values]
        if (
            kinds != {(values[0].dtype, True, 0)}
            or len(sizes) < 2
            or max(sizes) > _SMALL
        ):
            return torch.stack([_hash(value) for value in values])
        # Small tensors together, in few operations.
        words = _flatten_dense_tensors(values).view(torch.int64)  # type: ignore[no-untyped-call]  # untyped in torch
        mixed = _mix(words).mul_(_joined_weights(tuple(sizes), device))
        return torch.stack([each.sum() for each in mixed.split_with_sizes(sizes)])


def _hash(value: Tensor) -> Tensor:
    """Return the hash of ``value``, without dimensions."""
    # Contiguous; a copy of the memory only if the tensor is not.
    words = value.detach().reshape(-1)
    weights, nbytes = _weights(words.device), words.nbytes
    if nbytes % 8:
        filled = words.new_zeros(-(-nbytes // 8) * 8, dtype=torch.uint8)
        filled[:nbytes] = words.view(torch.uint8)
        words = filled
    # Words must begin at multiples of 8 bytes, also in a file that is mapped.
    elif words.storage_offset() * words.itemsize % 8 or words.data_ptr() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    while True:
        # Overflow is meant: sums and products are modulo 2**64 on all devices.
        rows = torch.split(words, _ROW)
        sums = [_mix(row).mul_(weights[: row.numel()]).sum() for row in rows]
        if len(sums) == 1:
            return sums[0]
        words = torch.stack(sums)


def _mix(words: Tensor) -> Tensor:
    """Return words whose low halves depend on the high halves, too."""
    return (words >> 32).bitwise_xor_(words)


@lru_cache(maxsize=64)
def _joined_weights(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return each word's weight, for tensors in a row."""
    return torch.cat([_weights(device)[:size] for size in sizes])


@lru_cache(maxsize=64)
def _weights(device: torch.device) -> Tensor:
    """Return the odd weight of each place in a row, equal on all ranks."""
    # Odd: an even weight would drop the highest bit of a word.
    numbers = torch.empty(_ROW, dtype=torch.int64, device="cpu")
    return (numbers.random_(generator=torch.Generator().manual_seed(0)) | 1).to(device)


# ---- rows that two ranks drew alike --------------------------------------------

_LENGTH = 16
"""Number of elements that are compared; torch on CPU draws this many at a time."""


@torch.no_grad()
def digest_of_start(part: Tensor) -> int:
    """Return a digest of the first numbers, ``< 2**56``; 0 if not like random ones."""
    if part.numel() < _LENGTH or not part.is_floating_point() or part.is_meta:
        return 0
    if part.dim() > 1 and (len(part) < 2 or torch.equal(part[0], part[1])):
        return 0
    start = part.reshape(-1)[:_LENGTH].to("cpu", torch.float64)
    steps = start.diff()
    if (steps >= 0).all() or (steps <= 0).all() or not start.isfinite().all():
        return 0
    # Scale by the largest number: the bounds of a uniform distribution depend on the
    # shape, which differs between ranks.
    scaled = (start / start.abs().max() * 1000).round().int().tolist()
    return int(hashlib.blake2b(str(scaled).encode(), digest_size=7).hexdigest(), 16)


WAY_OUT = (
    "An initialiser that runs on shards draws for this rank's rows only and takes fans "
    "from them, so under one seed rows repeat. In its place call init_weights(model) "
    "or init_weights(model, fn), or initialise inside of 'with unshard_params(model):' "
    "(the plain model's values); or pass param_init_fn to fully_shard."
)
"""The end of messages about equal starts."""
