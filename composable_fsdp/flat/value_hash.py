"""Hashes of values, so that ranks can compare parameters without sending them.

The bytes are int64 words. ``sum(mix(word) * weight)`` of each row of 32768 words gives
a word, and again, until one is left. ``mix`` brings the high half of a word into the
low: the signs of two elements would cancel out otherwise. ``torch.hash_tensor`` is an
exclusive-or, the same for zeros and for ones. The hash is no cryptographic one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import attrgetter, or_

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ``torch.cat`` of views in a single call; private, checked on torch 2.13.
from torch._utils import _flatten_dense_tensors

_ROW = 1 << 15
"""Words per row."""
_BLOCK = {"cpu": _ROW}
"""Words that are read at once, by device type: on CPU what stays in the cache, and
what torch gives to a single thread, because ranks share the cores."""
_SMALL = 1 << 15
"""Bytes up to which the tensors of a unit are hashed together."""
_LARGE_BLOCK = 1 << 22
"""Words that are read at once on other devices; two temporaries have this size."""


_is_meta = attrgetter("is_meta")


def have_values(tensors: Sequence[Tensor]) -> bool:
    """Return whether all ``tensors`` have values: none is on meta or fake."""
    if any(map(_is_meta, tensors)):
        return False
    # Fake tensors, on which torch predicts shapes and memory, have this attribute. A
    # look at the types first, because to miss an attribute takes long.
    return _PLAIN.issuperset(map(type, tensors)) or not any(
        hasattr(tensor, "fake_mode") for tensor in tensors
    )


_PLAIN = frozenset((Tensor, nn.Parameter))
"""The usual types, which are not fake."""


def hash_values(values: Sequence[Tensor]) -> Tensor:
    """Return a hash of each tensor, ``(n,)`` int64, without a wait for the device."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    # Not a decorator, which makes a context per call: each unit comes here at set-up.
    with torch.no_grad():
        if len({value.dtype for value in values}) == 1:
            devices = {value.device for value in values}
            joined = (
                _joined_weights(tuple([v.nbytes for v in values]), *devices)
                if len(devices) == 1
                else None
            )
            if joined is not None:
                return _hash_together(values, *joined)
        return torch.stack([_hash_words(_words(value)) for value in values])


def _words(value: Tensor) -> Tensor:
    """Return the bytes of ``value`` as int64 words; the last word is filled up."""
    # Contiguous; a copy of the memory only if the tensor is not.
    flat = value.detach().reshape(-1)
    nbytes = flat.numel() * flat.itemsize
    if nbytes % 8 == 0:
        # Words must begin at multiples of 8 bytes, also in a file that is mapped.
        if flat.storage_offset() * flat.itemsize % 8 or flat.data_ptr() % 8:
            flat = flat.clone()
        return flat.view(torch.int64)
    filled = flat.new_zeros(-(-nbytes // 8) * 8, dtype=torch.uint8)
    filled[:nbytes] = flat.view(torch.uint8)
    return filled.view(torch.int64)


def _hash_together(
    values: Sequence[Tensor], weights: Tensor, owners: Tensor, zeros: Tensor
) -> Tensor:
    """Return the hashes of small tensors, in few operations."""
    row: Tensor = _flatten_dense_tensors(values)  # type: ignore[no-untyped-call]
    words = row.view(torch.int64)
    mixed = _mix(words)
    mixed *= weights
    return zeros.index_add(0, owners, mixed)


@lru_cache(maxsize=64)
def _joined_weights(
    nbytes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return, for tensors in a row, each word's weight and tensor, and a zero each."""
    # A single tensor is not copied, and may lie at any address. ``|`` keeps the low
    # bits of all numbers: each has to be a multiple of 8.
    if len(nbytes) < 2 or max(nbytes) > _SMALL or reduce(or_, nbytes) % 8:
        return None
    sizes = [number // 8 for number in nbytes]
    weights = torch.cat([_weights(device)[:size] for size in sizes])
    numbers = torch.arange(len(sizes), device=device)
    owners = numbers.repeat_interleave(torch.tensor(sizes, device=device))
    return weights, owners, torch.zeros_like(numbers)


def _hash_words(words: Tensor) -> Tensor:
    """Return the hash of ``words`` ``(n,)``, without dimensions."""
    weights = _weights(words.device)
    # Each turn leaves a word per row; two turns serve 1 Gi words.
    while words.numel() > _ROW:
        block = _BLOCK.get(words.device.type, _LARGE_BLOCK)
        words = torch.cat([_sums(each, weights) for each in torch.split(words, block)])
    return (_mix(words) * weights[: words.numel()]).sum()


def _mix(words: Tensor) -> Tensor:
    """Return words whose low halves depend on the high halves, too."""
    mixed = words >> 32
    mixed ^= words
    return mixed


def _sums(words: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each row of ``words``; the last row is filled up."""
    mixed = _mix(words)
    if short := -mixed.numel() % _ROW:
        mixed = F.pad(mixed, (0, short))
    # Overflow is meant: sums and products are modulo 2**64 on all devices.
    return mixed.view(-1, _ROW).mul_(weights).sum(1)


@lru_cache(maxsize=64)
def _weights(device: torch.device) -> Tensor:
    """Return the odd weight of each place in a row, equal on all ranks."""
    # A generator of numbers (SplitMix64) instead of torch's own, which a version of
    # torch may change. Odd: an even weight would drop the highest bit of a word.
    number = torch.arange(1, _ROW + 1, dtype=torch.int64, device=device)
    number *= 0x9E3779B97F4A7C15 - 2**64
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9 - 2**64),
        (27, 0x94D049BB133111EB - 2**64),
    ):
        number = (number ^ (number >> shift)) * factor
    return (number ^ (number >> 31)) | 1


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
