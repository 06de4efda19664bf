"""Record of backwards that were asked for gradients of other tensors only.

``engine`` sees the arguments of a backward; ``unused_params`` needs the answer in
hooks, which run in a thread of the engine on CUDA. The answer is therefore a counter of
the process. If several threads run backwards at once, the answer may be True for a
backward that was asked for all gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_other_requests = 0


def parameters_not_requested() -> bool:
    """Return whether a backward runs whose ``inputs`` are no sharded parameters."""
    return _other_requests > 0


@contextmanager
def requesting_other_tensors() -> Iterator[None]:
    """Count such a backward as running inside the block."""
    # A counter and not a flag: several threads may run backwards at once.
    global _other_requests
    _other_requests += 1
    try:
        yield
    finally:
        _other_requests -= 1
