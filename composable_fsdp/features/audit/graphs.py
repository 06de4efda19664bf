"""Shards in the graph of a loss: told when the gradient of a sharded leaf arrives.

Units compute with full parameters, so the AccumulateGrad node of a sharded leaf, which
has a hook, runs only if the user computed with the shard::

    AccumulateGrad <- PowBackward <- SumBackward <- MulBackward <- loss         right
    AccumulateGrad <- TBackward <- MmBackward <- ...                             told
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.features.audit.telling import (
    backward_frame,
    harmless,
    place_of,
    tell,
)
from composable_fsdp.runtime.grad_hooks import accumulators_of
from composable_fsdp.runtime.graph_task import current_task, run_backward

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


class Nodes(dict[Any, str]):
    """AccumulateGrad nodes of sharded leaves, and the names of the parameters."""


def watch_graphs(
    leaves: Sequence[nn.Parameter], names: Sequence[str], *, is_error: bool
) -> Nodes:
    """Hook the AccumulateGrad nodes of ``leaves``; return the nodes, to be kept."""
    with torch.inference_mode(False), torch.enable_grad():
        nodes = Nodes(zip(accumulators_of(leaves), names, strict=True))
    # A node holds its hook, and a hook that held nodes would keep the leaves for ever.
    link = weakref.ref(nodes)
    reasons: dict[int, dict[str, str] | None] = {}
    looked_at = set[str]()

    def reached(name: str, shape: tuple[int, ...], _: Any) -> None:
        if name in looked_at:
            return
        looked_at.add(name)
        frame, task = backward_frame(run_backward.__code__), current_task()
        if task not in reasons:
            outputs = frame.f_locals["outputs"] if frame is not None else ()
            reasons.clear()
            reasons[task] = _reasons(outputs, link() or {})
        found = reasons[task]
        reason = "" if found is None else found.get(name, "an operation")
        if reason:
            place = place_of(frame.f_back) if frame is not None else None
            tell(_text(name, shape, reason), place, is_error=is_error)

    for (node, name), leaf in zip(nodes.items(), leaves, strict=True):
        node.register_prehook(partial(reached, name, tuple(leaf.shape)))
    return nodes


@harmless
def _reasons(outputs: Sequence[Any], nodes: dict[Any, str]) -> dict[str, str]:
    """Return, per name of a reached node, the operation that is wrong, or empty."""
    readers: dict[Any, list[Any]] = {}
    roots = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is not None:
                readers.setdefault(below, []).append(node)
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)
    return {n: _climb(node, readers) for node, n in nodes.items() if node in readers}


def _climb(leaf: Any, readers: dict[Any, list[Any]]) -> str:
    """Return the first operation above ``leaf`` that is not right on parts."""
    waiting = [(reader, False) for reader in readers[leaf]]
    seen = set(waiting)
    while waiting:
        node, is_sum = waiting.pop()
        name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
        reduced = getattr(node, "_saved_reduction", None) == 2
        if is_sum:
            # A product of two results that need a gradient is not linear.
            operands = sum(below is not None for below, _ in node.next_functions)
            if not _LINEAR.fullmatch(name) or (name in ("Mul", "Div") and operands > 1):
                return name
        elif _SUMS.fullmatch(name) or reduced:
            is_sum = True
        elif not _BY_ELEMENT.fullmatch(name):
            return name
        for reader in readers.get(node, ()):
            if (reader, is_sum) not in seen:
                seen.add((reader, is_sum))
                waiting.append((reader, is_sum))
    return ""


def _text(name: str, shape: tuple[int, ...], reason: str) -> str:
    return (
        f"The loss reads parameter {name} outside the forward of its unit, where this "
        f"rank has its shard {shape} only, and {reason} of a shard is not that of the "
        "parameter: its gradient differs from the plain model's. Compute it in the "
        "forward of the unit and return it as a second output (register_forward_method "
        "for another method). Sums over elements, as an L2 penalty, are right outside."
    )
