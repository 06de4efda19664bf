"""Every public name of torch's FSDP1 is here, under its path and with its arguments.

The names are read from torch, so one that torch adds makes a test fail. FSDP2's stand
in the same package; torch marks them by the module they say they are from.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

import composable_fsdp
from composable_fsdp import _traversal_utils
from composable_fsdp._common_utils import _get_module_fsdp_state
from composable_fsdp._composable_state import _get_module_state
from composable_fsdp._unshard_param_utils import _unshard_params_recurse
from composable_fsdp.tree.state import _RootFSDPState
from tests.support.tiny import tiny_mlp
from tests.support.world import World

TORCH = "torch.distributed.fsdp"
OURS = "composable_fsdp"
PATHS = (
    "",
    ".api",
    ".wrap",
    ".fully_sharded_data_parallel",
    ".sharded_grad_scaler",
)
DIFFERENCES = {
    # False would replace the parameters by flat ones, which are never shown here.
    ("FullyShardedDataParallel.__init__", "use_orig_params"): (False, True),
}
ADDED = {
    # Ours alone, after torch's, so that they can be given by keyword and left out.
    "FullyShardedDataParallel.__init__": [
        "tied_params",
        "check_weights",
        "wire",
        "arena",
        "if_sharded",
    ],
    # As torch.nn.utils.clip_grad_norm_ has them.
    "FullyShardedDataParallel.clip_grad_norm_": ["error_if_nonfinite", "foreach"],
    "MixedPrecision.__init__": ["output_dtype"],
    "MixedPrecision": ["output_dtype"],
    "CPUOffload.__init__": ["offload_states"],
    "CPUOffload": ["offload_states"],
}


def public_things(path: str) -> Iterator[tuple[str, Any]]:
    """What users import from torch's module ``path``: FSDP1's classes, functions."""
    module = importlib.import_module(TORCH + path)
    for name, thing in vars(module).items():
        home = getattr(thing, "__module__", None) or ""
        is_fsdp2 = home == TORCH
        if name.startswith("_") or is_fsdp2 or not home.startswith(TORCH):
            continue
        if "._" in home and name not in ("FlatParameter", "FlatParamHandle"):
            continue  # helpers that torch's own modules share
        if inspect.isclass(thing) or inspect.isfunction(thing):
            yield name, thing


THINGS = [
    pytest.param(path, name, thing, id=f"fsdp{path}.{name}")
    for path in PATHS
    for name, thing in public_things(path)
]


def arguments(function: Any) -> list[tuple[str, str, object]]:
    """Names, kinds and defaults in order; a default that is an enum's by its name."""
    return [
        (each.name, each.kind.name, getattr(each.default, "name", each.default))
        for each in inspect.signature(function).parameters.values()
    ]


def test_torch_has_the_names_that_are_compared() -> None:
    """The list is not empty because something was filtered out."""
    names = {param.values[1] for param in THINGS}
    listed = torch.distributed.fsdp.__all__
    things = {name: getattr(torch.distributed.fsdp, name) for name in listed}
    fsdp1 = {name for name, thing in things.items() if thing.__module__ != TORCH}

    assert fsdp1 <= names
    assert len(fsdp1) == 16


@pytest.mark.parametrize(("path", "name", "thing"), THINGS)
def test_each_name_is_torchs_under_its_path(path: str, name: str, thing: Any) -> None:
    """The same import line works with the package's name in the place of torch's; and
    arguments, methods, fields with defaults, bases and members of enums are equal."""
    module = importlib.import_module(OURS + path)
    ours: Any = getattr(module, name)

    assert name in module.__all__
    if inspect.isfunction(thing):
        assert arguments(ours) == arguments(thing)
    elif issubclass(thing, enum.Enum):
        theirs = list(thing.__members__)
        assert list(ours.__members__)[: len(theirs)] == theirs
    elif name not in ("FlatParamHandle", "FlatParameter"):
        for method, value in vars(thing).items():
            if method == "__init__" or (
                not method.startswith("_")
                and (callable(value) or isinstance(value, DESCRIPTORS))
                and not isinstance(value, thing)
            ):
                require_same_method(name, method, ours, thing)
    if dataclasses.is_dataclass(thing):
        require_same_fields(name, ours, thing)


DESCRIPTORS = (staticmethod, classmethod, property)


def require_same_method(cls: str, name: str, ours: Any, theirs: Any) -> None:
    """Kind of method, and names, kinds and defaults of its arguments, in order."""
    kinds = [type(inspect.getattr_static(each, name)) for each in (ours, theirs)]
    assert kinds[0] is kinds[1], name
    if property in kinds:
        return
    given, expected = (arguments(getattr(each, name)) for each in (ours, theirs))
    more = [argument[0] for argument in given[len(expected) :]]
    assert more == ADDED.get(f"{cls}.{name}", [])
    for mine, other in zip(given, expected, strict=False):
        allowed = DIFFERENCES.get((f"{cls}.{name}", other[0]), (other[2], other[2]))
        assert mine[:2] == other[:2], name
        assert (other[2], mine[2]) == allowed, name


def require_same_fields(name: str, ours: Any, theirs: Any) -> None:
    """So they can be made by position; and the bases have equal names."""
    given, expected = (
        [(f.name, f.default is dataclasses.MISSING) for f in dataclasses.fields(c)]
        for c in (ours, theirs)
    )
    assert given == expected + [(added, False) for added in ADDED.get(name, [])]
    if name != "StateDictSettings":
        made = dataclasses.astuple(theirs())
        assert dataclasses.astuple(ours())[: len(made)] == made
    assert [c.__name__ for c in ours.__mro__] == [c.__name__ for c in theirs.__mro__]


@pytest.mark.req("S2-06")
def test_cpu_offload_can_be_imported_from_each_of_its_places() -> None:
    """From the package, from ``api`` and beside the wrapper: one class."""
    places = [
        importlib.import_module(OURS + path).CPUOffload
        for path in ("", ".api", ".fully_sharded_data_parallel")
    ]

    assert len(set(places)) == 1
    assert places[0](offload_params=True) != places[0]()


PRIVATE = {
    "_traversal_utils": (
        "_get_fsdp_handles",
        "_get_fsdp_states",
        "_get_fsdp_states_with_modules",
    ),
    "_runtime_utils": ("_get_fsdp_root_states",),
    "_common_utils": ("_get_module_fsdp_state",),
    "_composable_state": ("_get_module_state",),
}
RECURSE = "module state recurse writeback rank0_only offload_to_cpu with_grads"
"""Arguments of ``_unshard_params_recurse``, which torch 2.13 has no more."""


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file in PRIVATE for name in PRIVATE[file]]
)
def test_private_names_stand_in_the_files_of_fsdp1(file: str, name: str) -> None:
    """With its arguments, by position and by name."""
    home = "torch.distributed" if file == "_composable_state" else TORCH
    theirs = getattr(importlib.import_module(f"{home}.{file}"), name)
    ours = getattr(importlib.import_module(f"{OURS}.{file}"), name)

    assert arguments(ours) == arguments(theirs)
    if file == "_runtime_utils":  # beside the other ways through a tree, as well
        traversal = importlib.import_module(f"{OURS}._traversal_utils")
        assert getattr(traversal, name) is ours


@pytest.mark.parametrize("path", ["composable", "wrapper"])
def test_private_names_find_what_a_model_has(one_rank: World, path: str) -> None:
    """States, their modules, handles and roots, and the owner of any part of a unit."""
    model = tiny_mlp()
    block, last = model[0], model[2]
    top: Any
    if path == "wrapper":
        model[0] = composable_fsdp.FullyShardedDataParallel(block)
        top = composable_fsdp.FullyShardedDataParallel(model)
    else:
        composable_fsdp.fully_shard(block)
        top = composable_fsdp.fully_shard(model)
    top(torch.ones(2, 8)).sum().backward()

    states, modules = _traversal_utils._get_fsdp_states_with_modules(top)
    root, below = states
    assert isinstance(root, _RootFSDPState)
    assert modules == [model, block]
    assert _traversal_utils._get_fsdp_states(top) == states
    assert _traversal_utils._get_fsdp_root_states(top) == [root]
    assert _traversal_utils._get_fsdp_handles(top) == [s.handle for s in states]
    assert list(root._all_fsdp_states) == states
    assert list(root._all_handles) == [s.handle for s in states]
    for find in (_get_module_fsdp_state, _get_module_state):
        assert [find(m) for m in (top, last, block)] == [root, root, below]
        assert find(torch.nn.Linear(2, 2)) is None
    names = list(inspect.signature(_unshard_params_recurse).parameters.values())
    assert [each.name for each in names] == RECURSE.split()
    assert {each.kind.name for each in names} == {"POSITIONAL_OR_KEYWORD"}
    with _unshard_params_recurse(block, below, False, True, False, False, False):
        torch.nn.init.constant_(block.get_parameter("weight"), 3)
    assert torch.equal(block.get_parameter("weight"), torch.full((12, 8), 3.0))
