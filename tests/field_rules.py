"""Rules on fields of classes: how many, and from how many files they are written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import TypeGuard

from tests.import_graph import Module

MAX_FIELDS = 20
MAX_SHARED_FIELDS = 12
"""How many fields of the package may be written from more than one file."""


def _classes(modules: dict[str, Module]) -> Iterator[tuple[Module, ast.ClassDef]]:
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                yield module, node


def fields(cls: ast.ClassDef) -> set[str]:
    """Return the slots, the annotated names and the attributes set on ``self``."""
    found: set[str] = set()
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if "ClassVar" not in ast.unparse(node.annotation):
                found.add(node.target.id)
        elif (
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
        ):
            found |= set(re.findall(r"'(\w+)'", ast.unparse(node.value)))
    for each in ast.walk(cls):
        if _is_written(each) and ast.unparse(each.value) == "self":
            found.add(each.attr)
    return found - {"__weakref__"}


def _is_written(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def wide_classes(modules: dict[str, Module]) -> list[str]:
    """Classes with more fields than MAX_FIELDS."""
    return [
        f"{module.at(cls.lineno)} {cls.name}: {count} fields, more than {MAX_FIELDS}"
        for module, cls in _classes(modules)
        if (count := len(fields(cls))) > MAX_FIELDS
    ]


class _Types:
    """The package's classes and the classes that annotations name, by name alone.

    A container is taken for its items: ``tuple[FlatParameter, ...]`` names
    ``FlatParameter``. Names that the package defines twice are left out.
    """

    def __init__(self, modules: dict[str, Module]) -> None:
        self.fields: dict[str, set[str]] = {}
        self.named: dict[str, str] = {}
        """Class of a field, property or function; "" if the package has several."""
        self.constructors: dict[str, set[str]] = {}
        """Per class: ``__init__``, and the methods that ``__init__`` calls."""
        for _, cls in _classes(modules):
            bases = [self.fields.get(ast.unparse(base), set()) for base in cls.bases]
            self.fields[cls.name] = fields(cls).union(*bases)
            for each in cls.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    called = re.findall(r"self\.(\w+)\(", ast.unparse(each))
                    self.constructors[cls.name] = {"__init__", *called}
        for module in modules.values():
            for node in module.nodes:
                if isinstance(node, ast.AnnAssign):
                    self._note(ast.unparse(node.target), node.annotation)
                elif isinstance(node, ast.FunctionDef) and node.returns:
                    self._note(node.name, node.returns)

    def _note(self, name: str, annotation: ast.expr) -> None:
        name = name.rpartition(".")[2]
        cls = self.in_annotation(annotation)
        self.named[name] = cls if self.named.get(name, cls) == cls else ""

    def in_annotation(self, annotation: ast.expr) -> str:
        """Return the only class of the package that ``annotation`` names, or ""."""
        names = re.findall(r"\w+", ast.unparse(annotation))
        known = [name for name in names if name in self.fields]
        return known[0] if len(set(known)) == 1 else ""

    def of(self, value: ast.expr, local: dict[str, str]) -> str:
        """Return the class of an expression, given those of local names, or ""."""
        if isinstance(value, ast.Name):
            return local.get(value.id, "")
        if isinstance(value, ast.Attribute):
            return self.named.get(value.attr, "")
        if isinstance(value, ast.Subscript):
            return self.of(value.value, local)
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func).rpartition(".")[2]
            return name if name in self.fields else self.named.get(name, "")
        return ""

    def locals(self, function: ast.FunctionDef, cls: str) -> dict[str, str]:
        """Return the classes of the arguments and local names of ``function``."""
        known = {"self": cls}
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if each.annotation is not None:
                known[each.arg] = self.in_annotation(each.annotation)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.For | ast.comprehension):
                targets = (
                    node.targets if isinstance(node, ast.Assign) else [node.target]
                )
                value = node.value if isinstance(node, ast.Assign) else node.iter
                for target in targets:
                    for name, item in _pairs(target, value):
                        known.setdefault(name, self.of(item, known))
        return known


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that an assignment or a loop sets, with the value or items."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "zip":
            value = ast.Tuple(value.args)
        values = value.elts if isinstance(value, ast.Tuple) else target.elts
        for inner, each in zip(target.elts, values, strict=False):
            yield from _pairs(inner, each)


def shared_fields(modules: dict[str, Module]) -> list[str]:
    """Fields of the package's classes that more than one file writes."""
    return [
        f"{of}.{name}: {', '.join(sorted(files))}"
        for (of, name), files in sorted(written_fields(modules).items())
        if len(files) > 1
    ]


def written_fields(modules: dict[str, Module]) -> dict[tuple[str, str], set[str]]:
    """Return by class and field: the modules that write the field.

    A constructor writes its own fields and does not count, nor does a method of the
    class that the constructor calls.
    """
    return _written_fields(tuple(modules.values()))


@cache
def _written_fields(package: tuple[Module, ...]) -> dict[tuple[str, str], set[str]]:
    modules = {module.name: module for module in package}
    types = _Types(modules)
    owners: dict[str, list[str]] = {}
    for name, names in types.fields.items():
        for each in names:
            owners.setdefault(each, []).append(name)
    written: dict[tuple[str, str], set[str]] = {}
    for module in modules.values():
        for cls, function in _functions(module.tree):
            local = types.locals(function, cls)
            for node in filter(_is_written, ast.walk(function)):
                own = ast.unparse(node.value) == "self"
                if own and function.name in types.constructors.get(cls, ()):
                    continue
                of = types.of(node.value, local)
                if not of and len(owners.get(node.attr, ())) == 1:
                    (of,) = owners[node.attr]
                if node.attr in types.fields.get(of, ()):
                    written.setdefault((of, node.attr), set()).add(module.name)
    return written


def _functions(tree: ast.AST, cls: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield each function that is not inside another, with the name of its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield cls, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, node.name)
        else:
            yield from _functions(node, cls)
