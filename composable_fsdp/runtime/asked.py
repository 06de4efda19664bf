"""Which gradients the backward that is running was asked for.

``engine`` knows, in front of autograd, and ``fill`` asks from hooks, which on CUDA run
in a thread of the engine's; so this is one number for the process. With backwards of
several threads at once it may say yes of one that was not asked for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_for_others = 0


def is_for_others() -> bool:
    """Whether a backward is running that was asked for other gradients than ours."""
    return _for_others > 0


@contextmanager
def for_others() -> Iterator[None]:
    """Note that such a backward runs inside the block."""
    global _for_others
    _for_others += 1
    try:
        yield
    finally:
        _for_others -= 1
