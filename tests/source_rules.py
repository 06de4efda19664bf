"""Rules on what source files use: torch's parts, collectives, doors, sizes.

Like ``import_graph``, every rule returns messages, and an empty list is a pass.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from torch.utils._device import _device_constructors

from tests.import_graph import DOORS, FORBIDDEN, PACKAGE, Module, imports

COLLECTIVES_HOME = f"{PACKAGE}.comm.collectives"
GROUP_MAKERS_HOME = f"{PACKAGE}.comm.meshes"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
"""Lines of code in a body: docstrings, comments and blank lines do not count."""

_COLLECTIVE_STARTS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
)
_COLLECTIVE_NAMES = frozenset({"barrier", "reduce"})
_FACTORIES = frozenset(function.__name__ for function in _device_constructors())
"""What ``torch.device`` as a context and ``torch.set_default_device`` act on."""
_ENTRY = "if __name__ == '__main__':\n    raise SystemExit(main())"
"""What the door ``__main__`` does beside."""
_GROUP_MAKERS = ("new_group", "new_subgroups", "split_group")

# Methods of a process group. The object cannot be resolved from syntax, so these are
# only the names that nothing else bears.
_GROUP_METHODS = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "all_gather_single_coalesced",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
    }
)


@cache
def aliases(module: Module) -> dict[str, str]:
    """Map each name that an import binds in ``module`` to its dotted origin."""
    bound: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


@cache
def uses(module: Module) -> list[tuple[int, str]]:
    """Return ``(line, dotted name)`` of each name or chain that an import begins."""
    bound, found = aliases(module), []
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute) and (name := _dotted(node)):
            first, _, rest = name.partition(".")
            if first in bound:
                whole = f"{bound[first]}.{rest}" if rest else bound[first]
                found.append((node.lineno, whole))
    return found


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def forbidden_uses(modules: dict[str, Module]) -> list[str]:
    """Imports and attribute chains that reach into torch's own FSDP or DDP."""
    found: dict[str, None] = {}
    for module in modules.values():
        named = [(edge.line, edge.target) for edge in imports(module)]
        for line, name in [*named, *uses(module)]:
            for banned in FORBIDDEN:
                if name == banned or name.startswith(f"{banned}."):
                    found[f"{module.at(line)} -> {banned}: this is a rewrite"] = None
    return list(found)


def collective_uses(modules: dict[str, Module]) -> list[str]:
    """Uses of torch.distributed's collectives outside their one home."""
    found: dict[str, None] = {}
    for module in modules.values():
        if module.name == COLLECTIVES_HOME:
            continue
        for line, name in [*uses(module), *_group_method_calls(module)]:
            if _is_collective(name) or name in _GROUP_METHODS:
                found[f"{module.at(line)} -> {name}: only {COLLECTIVES_HOME}"] = None
    return list(found)


def placeless_tensors(modules: dict[str, Module]) -> list[str]:
    """Uses of torch's factories without ``device=``: on the user's default device."""
    found = []
    for module in modules.values():
        placed = {
            id(node.func)
            for node in module.nodes
            if isinstance(node, ast.Call)
            and any(each.arg in ("device", None) for each in node.keywords)
        }
        found += [
            f"{module.at(node.lineno)} -> torch.{node.attr}: no device="
            for node in module.nodes
            if isinstance(node, ast.Attribute)
            and node.attr in _FACTORIES
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
            and id(node) not in placed
        ]
    return found


def group_makers(modules: dict[str, Module]) -> list[str]:
    """Places that make process groups outside their one home."""
    return [
        f"{module.at(line)} -> {name}: only {GROUP_MAKERS_HOME}"
        for module in modules.values()
        if module.name != GROUP_MAKERS_HOME
        for line, name in uses(module)
        if _from_distributed(name) and name.rpartition(".")[2].startswith(_GROUP_MAKERS)
    ]


def _from_distributed(name: str) -> bool:
    return name.startswith("torch.distributed.")


def _is_collective(name: str) -> bool:
    last = name.rpartition(".")[2]
    return _from_distributed(name) and (
        last in _COLLECTIVE_NAMES or last.startswith(_COLLECTIVE_STARTS)
    )


def _group_method_calls(module: Module) -> Iterator[tuple[int, str]]:
    """Yield method calls whose object no import explains, as a group's would be."""
    bound = aliases(module)
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = _dotted(node.func.value) or ""
            if name.partition(".")[0] not in bound:
                yield node.lineno, node.func.attr


def door_logic(modules: dict[str, Module]) -> list[str]:
    """Statements in doors that do anything but pass names on."""
    return [
        f"{module.at(statement.lineno)}: a door holds imports, __all__ and a docstring"
        for module in modules.values()
        # The package itself resolves its names when they are used.
        if module.part in DOORS and module.part
        for statement in module.tree.body
        if not _passes_names(statement)
    ]


def _passes_names(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets] == ["__all__"]
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or ast.unparse(node) == _ENTRY


def _code_lines(
    function: ast.FunctionDef | ast.AsyncFunctionDef, rows: Sequence[str]
) -> int:
    """Return how many lines of the body hold code."""
    first, last = function.body[0].lineno, function.end_lineno or 0
    documented: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return sum(
        1
        for at in range(first, last + 1)
        if at not in documented
        and rows[at - 1].strip()
        and not rows[at - 1].lstrip().startswith("#")
    )


def large(modules: dict[str, Module]) -> list[str]:
    """Files and functions that are longer than they may be."""
    found = []
    for module in modules.values():
        rows = module.path.read_text().splitlines()
        if len(rows) > MAX_FILE_LINES:
            found.append(f"{module.name}: {len(rows)} lines, not {MAX_FILE_LINES}")
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = _code_lines(node, rows)
                if count > MAX_FUNCTION_LINES:
                    found.append(f"{module.at(node.lineno)} {node.name}: {count} lines")
    return found


NAMED = re.compile(r"((?:\w+/)*\w+\.py)(?::(\w+(?:\.\w+)*))?")
"""``folder/file.py`` in a page, or ``folder/file.py:function`` or ``:Class.method``."""


def absent_names(text: str, roots: Sequence[Path]) -> list[str]:
    """Return the files and functions that ``text`` names and no root holds."""
    absent = []
    for path, name in NAMED.findall(text):
        file = next((root / path for root in roots if (root / path).is_file()), None)
        if file is None or (name and name not in _definitions(file)):
            absent.append(f"{path}:{name}" if name else path)
    return absent


@cache
def _definitions(file: Path) -> set[str]:
    """Return the functions and classes of ``file``, methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found
