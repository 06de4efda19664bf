"""Which gradients the backward that is running was asked for.

``engine`` knows, in front of autograd, and ``write_unit_values`` asks from hooks, which
on CUDA run in a thread of the engine's; so this is one number for the process. With
backwards of several threads at once it may say yes of one that was not asked for
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_other_requests = 0


def parameters_not_requested() -> bool:
    """Whether a backward is running that was asked for other gradients than ours."""
    return _other_requests > 0


@contextmanager
def requesting_other_tensors() -> Iterator[None]:
    """Note that such a backward runs inside the block."""
    global _other_requests
    _other_requests += 1
    try:
        yield
    finally:
        _other_requests -= 1
