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
    "team": {"comm", "comm.consensus", "comm.meeting", "comm.nodes"},
    # The seam to modules: which units and tensors there are, and that no step runs.
    "contents": {
        "compose.registry",
        "optim.own_state_dict",
        "optim.scalars",
        "planning",
        "planning.dtensors",
        "runtime.recover",
        "tree.state",
    },
    # The seam to DTensors: where a rank's rectangle lies.
    "tensors": {
        "optim.own_state_dict",
        "planning",
        "planning.dtensors",
        "planning.layout",
    },
    # The seams to optimizers: flat parameters and hooks that make them resumable.
    "part": {
        "optim.original_view",
        "optim.own_state_dict",
        "optim.state_dict_hooks",
    },
    "load_optim": {
        "optim.keys",
        "optim.original_view",
        "optim.own_state_dict",
        "optim.scalars",
        "optim.state_dict_hooks",
        "planning.dtensors",
    },
    "formats.nested": {"optim.scalars"},
    # Pure functions of numbers and tensors.
    "native": {"planning.boxes"},
    "formats.dcp_read": {"planning.boxes"},
    "formats.files": {"planning.boxes"},
    "same_on_ranks": {"flat.value_hash"},
    # Sizes of regions, of which replicas write shares.
    "save_parts": {"planning.layout"},
    # Buffers that have memory and no values; gathering unit by unit.
    "load": {"runtime.meta_values"},
    "export": {"state_dict.full"},
}
"""This table only gets shorter."""


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
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts): outside(path)
        for path in folder.rglob("*.py")
    }

    assert {name: others for name, others in found.items() if others} == OTHERS
