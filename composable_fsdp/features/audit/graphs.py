"""Shards in the graph of a loss: told when the gradient of a sharded leaf arrives.

Units compute with full parameters, so the AccumulateGrad node of a sharded leaf, which
has a hook, runs only if the user computed with the shard::

    AccumulateGrad <- PowBackward <- SumBackward <- MulBackward <- loss         right
    AccumulateGrad <- TBackward <- MmBackward <- ...                             told
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.features.audit.telling import (
    backward_frame,
    harmless,
    tell,
    users_frame,
)
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.param_ref import param_ref
from composable_fsdp.naming import quoted
from composable_fsdp.runtime.grad_hooks import accumulators_of
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


def watch_graphs(leaves: Sequence[nn.Parameter], *, is_error: bool) -> object:
    """Hook the AccumulateGrad nodes of ``leaves``; return the nodes, to be kept."""
    with torch.inference_mode(False), torch.enable_grad():
        nodes = accumulators_of(leaves)
    # By id: a node holds its hook, and a hook that held a leaf would keep it for ever.
    left = set(map(id, leaves))

    def reached(leaf: int, _: Any) -> None:
        frame = backward_frame(run_backward.__code__) if leaf in left else None
        left.discard(leaf)
        if frame is None:
            return
        for other, is_right in _uses(frame.f_locals["outputs"]) or ():
            if (id(other) in left or id(other) == leaf) and not is_right:
                tell(_text(other), users_frame(frame.f_back), is_error=is_error)
            left.discard(id(other))

    for node, leaf in zip(nodes, leaves, strict=True):
        node.register_prehook(partial(reached, id(leaf)))
    return nodes


@harmless
def _uses(outputs: Sequence[Any]) -> Iterable[tuple[Tensor, bool]]:
    """Return the sharded leaves that the outputs read, and whether that is right."""
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
    return found.items()


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


def _text(leaf: Tensor) -> str:
    found = find_leaf(leaf)
    name = quoted(param_ref(*found).name) if found is not None else "of this model"
    return (
        f"The loss reads parameter {name} outside the forward of its unit, where this "
        f"rank has its shard {tuple(leaf.shape)} only, and not by a sum over its "
        "elements, as an L2 penalty is: its gradient differs from the plain model's. "
        "Compute it in the forward of the unit and return it as a second output "
        "(register_forward_method for another method)."
    )
