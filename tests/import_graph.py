"""Reads the source of a package and says where it breaks the house's rules.

Works on syntax trees alone, so an import inside a function or under ``TYPE_CHECKING``
is an edge like any other, and nothing is executed. Every rule is a function that
returns messages of the form ``path:line -> module: reason``; an empty list is a pass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "composable_fsdp"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "config", "lazy", "naming", "phases"}),
    frozenset({"compose", "comm"}),
    frozenset({"planning"}),
    frozenset({"flat"}),
    frozenset({"tree"}),
    frozenset({"runtime"}),
    frozenset({"access"}),
    frozenset({"state_dict", "optim"}),
    frozenset({"storage"}),
    frozenset({"entries"}),
    frozenset({"tools", "features"}),
    frozenset({"doors"}),
    frozenset({"integrations"}),
)
"""Parts of the package, lowest first; a part imports from its own layer or lower."""

TIPS = LAYERS[-1]
"""Parts that nothing imports but themselves and the doors."""

DOORS = frozenset(
    {
        "",  # the package's own __init__
        "__main__",
        "_common_utils",
        "_composable_state",
        "_runtime_utils",
        "_traversal_utils",
        "_unshard_param_utils",
        "api",
        "fsdp2",
        "fully_sharded_data_parallel",
        "hugging_face",
        "lightning",
        "sharded_grad_scaler",
        "wrap",
    }
)
"""Modules that only pass names on: they import from everywhere, nobody imports them."""

FORBIDDEN = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.nn.parallel",
    "tests",
)


@dataclass(frozen=True, eq=False)
class Module:
    """One source file: its dotted name, its place and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, which every rule looks through."""
        return tuple(ast.walk(self.tree))

    @property
    def part(self) -> str:
        """First component below the package; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    def at(self, line: int) -> str:
        """``path:line`` as messages print it, the path from the package's parent."""
        depth = self.name.count(".") + (2 if self.path.stem == "__init__" else 1)
        return f"{'/'.join(self.path.parts[-depth:])}:{line}"


@dataclass(frozen=True)
class Edge:
    """``module`` imports ``target`` (dotted) at ``line``."""

    module: Module
    line: int
    target: str

    def message(self, reason: str) -> str:
        return f"{self.module.at(self.line)} -> {self.target}: {reason}"


def read_package(root: Path) -> dict[str, Module]:
    """Parse every file below ``root``, the folder named as the package."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    return modules


def imports(module: Module, known: frozenset[str] = frozenset()) -> Iterator[Edge]:
    """Yield every import in ``module``, each imported name as far as it is a module.

    ``from a import b`` names ``a.b`` when that is in ``known`` or outside the package
    (where it cannot be told apart), else ``a``.
    """
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (Edge(module, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            inside = base.split(".")[0] == PACKAGE
            for alias in node.names:
                full = f"{base}.{alias.name}"
                target = base if inside and full not in known else full
                yield Edge(module, node.lineno, target)
        elif isinstance(node, ast.Call) and (name := _imported_by_call(node)):
            yield Edge(module, node.lineno, name)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    drop = node.level - (1 if module.path.stem == "__init__" else 0)
    base = package[: len(package) - drop]
    return ".".join([*base, *([node.module] if node.module else [])])


def _imported_by_call(node: ast.Call) -> str | None:
    """Name in ``import_module("name")``, ``__import__("name")``, ``later("name")``."""
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else ""
    if isinstance(called, ast.Name):
        name = called.id
    if name not in {"import_module", "__import__", "later"} or not node.args:
        return None
    first = node.args[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    return None


def inner_edges(modules: dict[str, Module]) -> list[Edge]:
    """All imports from one module of the package to another, without repeats."""
    return _inner_edges(tuple(modules.values()))


@cache
def _inner_edges(modules: tuple[Module, ...]) -> list[Edge]:
    known = frozenset(module.name for module in modules)
    edges = (edge for module in modules for edge in imports(module, known))
    ours = (e for e in edges if e.target.split(".")[0] == PACKAGE)
    return list(dict.fromkeys(e for e in ours if e.target != e.module.name))


def layer_of(part: str) -> int | None:
    """Index of the layer that holds ``part``, or None."""
    return next((i for i, layer in enumerate(LAYERS) if part in layer), None)


def targets(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Return the modules of the package that each of them imports."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for edge in inner_edges(modules):
        if edge.target in modules:
            found[edge.module.name].add(edge.target)
    return found


def reached_from(modules: dict[str, Module], start: str) -> set[str]:
    """Return all modules that ``start`` imports, directly or through others."""
    edges = targets(modules)
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in edges[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


def layer_violations(modules: dict[str, Module]) -> list[str]:
    """Edges that point to the right or down, and files that stand in no layer."""
    found = [
        f"{module.at(1)}: {module.part!r} stands in no layer of LAYERS or DOORS"
        for module in modules.values()
        if module.part not in DOORS and layer_of(module.part) is None
    ]
    for edge in inner_edges(modules):
        if reason := _refused(edge):
            found.append(edge.message(reason))
    return found


def _refused(edge: Edge) -> str | None:
    source = edge.module.part
    target = edge.target.partition(".")[2].partition(".")[0]
    if source in DOORS or source == target:
        return None
    if target in DOORS:
        return "a door; import from where the name is made"
    if target in TIPS:
        return f"only doors import {target!r}"
    here, there = layer_of(source), layer_of(target)
    if here is None or there is None:
        return "no layer is known for one of the two"
    if there > here:
        return f"{target!r} stands above {source!r}; imports only point down"
    return None


def cycles(modules: dict[str, Module]) -> list[str]:
    """Return a cycle of imports as ``a -> b -> a``, if there is one."""
    try:
        TopologicalSorter(targets(modules)).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []
