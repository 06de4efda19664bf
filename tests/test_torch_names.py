"""The private names of torch that the package uses are in the torch that is installed.

On a new version of torch this is the first test to run: it names what is missing, and
the modules that use it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import composable_fsdp
from tests import import_graph, source_rules
from tests.import_graph import Module

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "torch.Tensor": ("_backward_hooks", "_cdata", "_post_accumulate_grad_hooks"),
    "torch.UntypedStorage": ("_cdata",),
    "torch.nn.Module": ("_load_from_state_dict", "_register_state_dict_hook"),
    "torch.nn.Module()": (
        *("_backward_hooks", "_forward_hooks", "_forward_hooks_always_called"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_modules"),
        *("_load_state_dict_post_hooks", "_load_state_dict_pre_hooks"),
        *("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"),
    ),
    "torch.autograd.graph": ("_engine_run_backward",),
    "torch.autograd.graph.Node()": ("_register_hook_dict", "_sequence_nr"),
    "torch.autograd.profiler": ("_is_profiler_enabled",),
    "torch.distributed.ProcessGroup": (
        *("_device_types", "_get_backend", "_register_backend"),
        "_set_default_backend",
    ),
    "torch.distributed.device_mesh.DeviceMesh": ("_flatten", "_get_root_mesh"),
    "torch.distributed.tensor.DTensor": ("_local_tensor",),
    "torch.optim.SGD()": ("_optimizer_state_dict_post_hooks",),
    "torch.ops.aten.add.Tensor": ("_opname", "_overloadpacket", "_schema"),
    "torch.ops.aten": ("_to_copy",),
}
"""Private attributes of torch's objects, by the class or by how an object is made."""
_LEAF = torch.ones(1, requires_grad=True)
MADE: dict[str, Callable[[], Any]] = {
    "torch.nn.Module()": nn.Module,
    "torch.autograd.graph.Node()": lambda: _LEAF.neg().grad_fn,
    "torch.optim.SGD()": lambda: torch.optim.SGD([_LEAF]),
}
OF_OTHERS = {
    # Of the standard library, of dicts that torch returns, and of parameters that DDP
    # or a subclass marks.
    *("_asdict", "_fields", "_metadata"),
    *("_in_backward_optimizers", "_is_param", "_timeout"),
    # Of Lightning and accelerate, whose tests have an environment of their own.
    *("_checkpoint_io", "_compiler_ctx", "_layer_sync", "_redirection_through_forward"),
    "_reset_optimizers_and_schedulers",
}


@pytest.fixture(scope="module")
def package() -> dict[str, Module]:
    return import_graph.read_package(Path(composable_fsdp.__file__).parent)


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def resolved(name: str) -> Any:
    """Return what a dotted name means, or the object that it makes."""
    if name in MADE:
        return MADE[name]()
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


def test_torch_has_every_private_name_that_a_module_imports(
    package: dict[str, Module],
) -> None:
    """Functions, classes and modules with an underscore in their path."""
    users: dict[str, list[str]] = {}
    for module in package.values():
        for _, name in source_rules.uses(module):
            # Builds of torch for the CPU have no functions of CUDA.
            here = torch.cuda.is_available() or "._cuda_" not in name
            if (
                name.startswith("torch.")
                and any(map(private, name.split(".")))
                and here
            ):
                users.setdefault(name, []).append(module.name)

    missing = []
    for name in sorted(users):
        try:
            resolved(name)
        except (AttributeError, ImportError):
            missing.append(f"{name}, used in {', '.join(sorted(set(users[name])))}")

    assert len(users) > 20
    assert not missing, f"torch {torch.__version__} has no {'; no '.join(missing)}"


def test_torch_has_every_private_attribute_of_objects(
    package: dict[str, Module],
) -> None:
    """Attributes that no file of the package defines belong to someone else."""
    own: set[str] = set()
    for module in package.values():
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
                "self."
            ):
                own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    used = {
        node.attr
        for module in package.values()
        for node in module.nodes
        if isinstance(node, ast.Attribute) and private(node.attr)
        if ast.unparse(node).split(".")[0] not in source_rules.aliases(module)
    }
    listed = {each for names in ATTRIBUTES.values() for each in names}

    assert used - own - OF_OTHERS <= listed, "an attribute of torch is not listed"
    assert listed | OF_OTHERS <= used - own, "a listed attribute is not used"
    missing = [
        f"{owner}.{each}"
        for owner, names in ATTRIBUTES.items()
        for each in names
        if not hasattr(resolved(owner), each)
    ]
    assert not missing, f"torch {torch.__version__} has no {missing}"
