"""Digests of the first numbers of a shard, which tell rows that two ranks drew alike.

``reset_parameters()`` on shards draws numbers for this rank's rows only, and computes
fans of the shard. With the same seed on all ranks the rows repeat.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

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
