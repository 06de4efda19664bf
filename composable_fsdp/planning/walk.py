"""Walks over a module tree that never recurse, so depth is no limit.

``nn.Module.modules`` and ``parameters`` recurse and give up at about a thousand levels.
The orders here are theirs: a module before its children, children left to right, each
module once, at the first place it is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import nn

from composable_fsdp.naming import join_name

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Edge(NamedTuple):
    """One place in the tree: ``parent`` holds ``child`` under ``name``."""

    parent: nn.Module
    name: str
    child: nn.Module


def edges(parent: nn.Module) -> Iterator[Edge]:
    """Yield every place under ``parent``; a module held under two names comes twice."""
    for name, child in parent._modules.items():
        if child is not None:
            yield Edge(parent, name, child)


def children(parent: nn.Module) -> list[nn.Module]:
    """Return the distinct modules directly under ``parent``, left to right."""
    return list(dict.fromkeys(edge.child for edge in edges(parent)))


def modules(root: nn.Module) -> Iterator[nn.Module]:
    """Yield ``root`` and all modules below it in the order of ``root.modules()``."""
    seen: set[nn.Module] = set()
    stack = [root]
    while stack:
        module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        stack.extend(reversed(children(module)))


def post_order(root: nn.Module) -> list[nn.Module]:
    """Return all modules, each after everything below it, ``root`` last.

    Children are taken right to left: in a tree that is ``modules`` reversed. Where one
    module has two parents, the plain reverse would give one of them before its child.
    """
    order: list[nn.Module] = []
    seen = {root}
    stack = [(root, iter(children(root)[::-1]))]
    while stack:
        module, pending = stack[-1]
        child = next(pending, None)
        if child is None:
            order.append(module)
            stack.pop()
        elif child not in seen:
            seen.add(child)
            stack.append((child, iter(children(child)[::-1])))
    return order


def subtrees(roots: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """Return ``roots`` and everything below them."""
    return frozenset(module for root in roots for module in modules(root))


def is_container(module: nn.Module) -> bool:
    """Whether ``module`` only holds others: nothing calls it, so no hook on it runs."""
    has_forward = type(module).forward is not nn.Module.forward
    return isinstance(module, _CONTAINERS) and not (
        has_forward or "forward" in vars(module)
    )


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that ``module`` holds itself; one held twice comes twice."""
    return (param for param in module._parameters.values() if param is not None)


def name_of(root: nn.Module, module: nn.Module) -> str:
    """Return the name of ``module`` below ``root`` (the first, if it has several).

    Raises: KeyError, if ``module`` is not in the tree.
    """
    came_from: dict[nn.Module, Edge] = {}
    stack = list(edges(root))[::-1]
    while stack:
        edge = stack.pop()
        if edge.child not in came_from:
            came_from[edge.child] = edge
            stack.extend(list(edges(edge.child))[::-1])
    name, at = "", module
    while at is not root:
        edge = came_from[at]
        name, at = join_name(edge.name, name), edge.parent
    return name


def subtree_numels(
    root: nn.Module, left_out: Collection[int] = frozenset()
) -> dict[nn.Module, int]:
    """Return, for each module, the elements of the distinct parameters in its subtree.

    Parameters whose ``id`` is in ``left_out`` count zero. Linear in the tree: only
    parameters that can be met twice are carried upwards as sets, all others as a sum.
    """
    met_twice = _met_twice(root)
    plain: dict[nn.Module, int] = {}
    repeated: dict[nn.Module, frozenset[nn.Parameter]] = {}
    for module in post_order(root):
        counted = {p for p in own_parameters(module) if id(p) not in left_out}
        below = children(module)
        once = sum(p.numel() for p in counted if p not in met_twice)
        plain[module] = once + sum(plain.get(child, 0) for child in below)
        carried = [repeated[child] for child in below if repeated.get(child)]
        own = frozenset(counted & met_twice)
        # One set, shared along a chain, keeps deep trees linear.
        repeated[module] = (
            carried[0] if len(carried) == 1 and not own else own.union(*carried)
        )
    return {
        module: plain[module] + sum(p.numel() for p in repeated[module])
        for module in plain
    }


def _met_twice(root: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters that a walk down every path could meet more than once."""
    held = Counter(edge.child for parent in modules(root) for edge in edges(parent))
    below_shared = subtrees(module for module, places in held.items() if places > 1)
    places: Counter[nn.Parameter] = Counter()
    for module in modules(root):
        times = 2 if module in below_shared else 1
        for param in own_parameters(module):
            places[param] += times
    return frozenset(param for param, times in places.items() if times > 1)
