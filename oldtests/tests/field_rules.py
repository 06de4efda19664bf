"""The rule on fields of classes: how many."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

from tests.import_graph import Module

MAX_FIELDS = 20


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
