"""``storage`` could be a package of its own: what it still needs of the rest."""

from __future__ import annotations

import ast
from pathlib import Path

import composable_fsdp

ROOT = Path(composable_fsdp.__file__).parent
WORDS = {"errors", "naming", "lazy"}
ALLOWED = {*WORDS, "tree.traversal", "flat.param_ref", "optim.names"}
OTHERS: dict[str, set[str]] = {
    # Ranks meet, agree and exchange over a private group: the only file that sends.
    "comm": {"team"},
    "comm.agreement": {"team"},
    "comm.meeting": {"team"},
    "comm.meshes": {"team"},
    # The seam to modules: which units there are, that no step runs on them, which
    # modules another library has sharded, and a walk that no depth of modules stops.
    "compose.registry": {"contents"},
    "planning": {"contents"},
    "runtime.recover": {"contents"},
    "tree.state": {"contents"},
    # The seam to DTensors: where a rank's rectangle lies in the whole tensor.
    "planning.dtensors": {"tensors"},
    "planning.layout": {"tensors", "save_parts"},
    # The seam to optimizers: state by original parameter, also where the optimizer
    # holds flat ones; which state is a number or wraps tensors, no elements.
    "optim.state_dict_hooks": {"part", "load_optim"},
    "optim.flat_state": {"contents", "tensors", "load_optim", "formats.nested"},
    # Pure functions of numbers and tensors: boxes of an interval, a hash of values.
    "planning.partition": {"manifest"},
    "flat.value_hash": {"same_on_ranks"},
    # An export gathers the values of a unit on one rank.
    "state_dict.full": {"export"},
}
"""This table only gets shorter: the module, and the files of ``storage`` that use it.

``features.guard`` is not in it: it compares models, in a layer above this one."""


def outside(path: Path) -> set[str]:
    """The modules beside ``storage`` that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, name = node.module.partition(".")
            if package == "composable_fsdp" and not name.startswith("storage"):
                found.add(name)
    return found - ALLOWED


def test_storage_imports_no_more_of_the_rest_than_it_is_said_to() -> None:
    """Words, traversal, the references to parameters and names of optimizers."""
    folder = ROOT / "storage"
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        for other in outside(path):
            found.setdefault(other, set()).add(name)

    assert found == OTHERS
