"""Which sharded leaves a loss reads, by its graph, and whether that is right::

AccumulateGrad <- PowBackward <- SumBackward <- MulBackward <- loss         right
AccumulateGrad <- TBackward <- MmBackward <- ...                            wrong
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from composable_fsdp.runtime.graph_task import run_backward

_VIEWS = (
    "(Unsafe)?View|ReshapeAlias|Clone|ToCopy|Alias|Cat|Stack|(Uns|S)queeze|T|Transpose|"
    "Permute"
)
_BY_ELEMENT = re.compile(
    f"Pow|Mul|Div|Add|R?[Ss]ub|Neg|Abs|Square|Sqrt|Exp|Log(1P)?|Clamp(Min|Max)?|Lerp|"
    f"Maximum|Minimum|Where|Relu|Sigmoid|Tanh|Softplus|Sgn|{_VIEWS}"
)
_SUMS = re.compile("Sum|Dot")
_LINEAR = re.compile(f"Add|R?[Ss]ub|Neg|Mul|Div|Sum|Mean|Select|{_VIEWS}")
_ABOVE, _BELOW = 1, 2
"""A path from the loss is above the sum over elements, or below it."""


def backward_frame() -> FrameType | None:
    """Return the frame of the running backward, in this thread or one that waits."""
    # On CUDA, hooks run in a thread of the engine, without the frames of the user.
    for frame in (sys._getframe(), *sys._current_frames().values()):
        found: FrameType | None = frame
        while found is not None:
            if found.f_code is run_backward.__code__:
                return found
            found = found.f_back
    return None


def uses(outputs: Sequence[Any]) -> dict[Tensor, bool]:
    """Return the leaves that ``outputs`` read, and whether that is right on parts."""
    found: dict[Any, bool] = {}
    roots: list[Any] = [o.grad_fn for o in outputs if isinstance(o, Tensor)]
    waiting = [(root, _ABOVE | _BELOW) for root in roots if root is not None]
    seen = set[tuple[Any, int]]()
    while waiting:
        node, at = here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        if node.name().endswith("AccumulateGrad"):
            leaf = node.variable
            found[leaf] = found.get(leaf, True) and bool(at & _BELOW)
            continue
        below = [each for each, _ in node.next_functions if each is not None]
        at = _behind(node, at, len(below))
        waiting += [(each, at) for each in below]
    return found


def _behind(node: Any, at: int, operands: int) -> int:
    """Return where a path is behind ``node``; 0 if it is wrong on parts."""
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    is_sum = _SUMS.fullmatch(name) or getattr(node, "_saved_reduction", None) == 2
    # A product of two results that need a gradient is not linear.
    linear = _LINEAR.fullmatch(name) and (name not in ("Mul", "Div") or operands < 2)
    behind = 0
    if at & _ABOVE:
        behind = (_ABOVE if linear else 0) | (_BELOW if is_sum else 0)
    if at & _BELOW and _BY_ELEMENT.fullmatch(name):
        behind |= _BELOW
    return behind
