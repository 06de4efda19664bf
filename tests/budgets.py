"""Measures of the package's size and structure, which only go down.

``tests/test_architecture.py`` holds each figure at its budget. A change that lowers a
figure lowers the budget in the same commit; a change that raises one takes as much
elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import composable_fsdp
from tests.import_graph import PACKAGE, Module, inner_edges, reached_from, targets

BUDGETS: dict[str, int] = {
    "lines": 48074,
    "lines of files": 1153,
    "lines of access": 2745,
    "lines of comm": 2485,
    "lines of compose": 481,
    "lines of doors": 1696,
    "lines of entries": 969,
    "lines of features": 8576,
    "lines of flat": 2754,
    "lines of hugging_face": 21,
    "lines of integrations": 2599,
    "lines of optim": 2604,
    "lines of planning": 2384,
    "lines of runtime": 3093,
    "lines of state_dict": 1569,
    "lines of storage": 8591,
    "lines of tools": 5364,
    "lines of tree": 990,
    "files reached from entries.fully_shard": 55,
    "lines reached from entries.fully_shard": 13824,
    "files reached from runtime.forward": 39,
    "lines reached from runtime.forward": 9448,
    "files reached from tree.traversal": 20,
    "lines reached from tree.traversal": 4133,
    "longest chain of imports": 25,
    "imports out of the core": 0,
    "branching functions": 0,
    "names": 60,
    "modules that fully_shard loads": 103,
}
"""The largest value of each figure."""
WORDS = frozenset({"errors", "config", "lazy", "naming", "phases"})
CORE = WORDS | {"compose", "comm", "planning", "flat", "tree", "runtime", "entries"}
MOST_DECISIONS = 15
"""Most decision points of a function: branches, loops, handlers and ``and``/``or``."""
_DECISIONS = (
    ast.If,
    ast.For,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.comprehension,
    ast.Assert,
    ast.match_case,
)


SLACK = 0.02
"""How far a figure may lie below its budget, as a part of the budget."""


def off_budget(found: dict[str, int]) -> list[str]:
    """Return the figures that are above their budgets, or below by more than SLACK."""
    told = []
    for name, figure in found.items():
        budget = BUDGETS.get(name, 0)
        if figure > budget:
            told.append(f"{name}: {figure}, more than {budget}")
        elif figure < budget * (1 - SLACK) - 1:
            told.append(f"{name}: {figure}; lower its budget of {budget}")
    return told


def measured(modules: dict[str, Module], root: Path) -> dict[str, int]:
    """Return each figure by name."""
    lines = {name: len(m.path.read_text().splitlines()) for name, m in modules.items()}
    found = {"lines": sum(lines.values())}
    for name, module in modules.items():
        # A folder by its name; single files, doors among them, count together.
        folder = module.part if (root / module.part).is_dir() else "files"
        key = f"lines of {folder or 'files'}"
        found[key] = found.get(key, 0) + lines[name]
    for start in ("entries.fully_shard", "runtime.forward", "tree.traversal"):
        reached = {f"{PACKAGE}.{start}", *reached_from(modules, f"{PACKAGE}.{start}")}
        reached &= set(lines)
        found[f"files reached from {start}"] = len(reached)
        found[f"lines reached from {start}"] = sum(lines[each] for each in reached)
    found["longest chain of imports"] = _longest_chain(modules)
    found["imports out of the core"] = sum(
        1
        for edge in inner_edges(modules)
        if edge.module.part in CORE and edge.target.split(".")[1] not in CORE
    )
    found["branching functions"] = len(branching(modules))
    found["names"] = len(composable_fsdp.__all__)
    return found


def branching(modules: dict[str, Module]) -> list[str]:
    """Return the functions with more than ``MOST_DECISIONS`` decision points."""
    return [
        f"{module.at(node.lineno)} {node.name}: {count}"
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (count := sum(_decisions(node))) > MOST_DECISIONS
    ]


def _decisions(function: ast.AST) -> Iterator[int]:
    """Yield the decision points of ``function``, without functions inside."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, _DECISIONS):
            yield 1
        elif isinstance(child, ast.BoolOp):
            yield len(child.values) - 1
        yield from _decisions(child)


def _longest_chain(modules: dict[str, Module]) -> int:
    """Return how many files the longest chain of imports has."""
    depth: dict[str, int] = {}
    imported = targets(modules)
    for name in TopologicalSorter(imported).static_order():
        depth[name] = 1 + max((depth[each] for each in imported[name]), default=0)
    return max(depth.values())
