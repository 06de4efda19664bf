"""FSDP2's door has the names of torch, with their arguments."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from composable_fsdp import (
    fsdp2,
)

TORCH = "torch.distributed.fsdp"
NAMES = [
    name
    for name in torch.distributed.fsdp.__all__
    if getattr(torch.distributed.fsdp, name).__module__ == TORCH
]
"""FSDP2's names in torch; torch marks them by the module they say they are from."""


def plain(value: object) -> object:
    """A default as it can be compared: dataclasses by name and fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, dataclasses.astuple(value)
    return value


def arguments(function: Any) -> list[tuple[str, str, object]]:
    return [
        (each.name, each.kind.name, plain(each.default))
        for each in inspect.signature(function).parameters.values()
    ]


def test_the_door_has_the_names_of_torch_and_no_other() -> None:
    """A name that torch adds makes this test fail."""
    assert len(NAMES) == 9
    assert fsdp2.__all__ == sorted(NAMES)
    assert all(getattr(fsdp2, name).__doc__ for name in NAMES)


@pytest.mark.parametrize("name", [n for n in NAMES if not n[0].isupper()])
def test_functions_take_the_arguments_of_torch(name: str) -> None:
    """Names, kinds and defaults, in order."""
    ours, theirs = getattr(fsdp2, name), getattr(torch.distributed.fsdp, name)

    assert arguments(ours) == arguments(theirs)
    assert hasattr(ours, "state") == hasattr(theirs, "state")


METHODS = [
    (cls, name)
    for cls in NAMES
    if isinstance(vars(torch.distributed.fsdp)[cls], type)
    for name, value in vars(vars(torch.distributed.fsdp)[cls]).items()
    if not name.startswith("_") and (callable(value) or isinstance(value, property))
]


@pytest.mark.parametrize(("cls", "name"), METHODS)
def test_methods_take_the_arguments_of_torch(cls: str, name: str) -> None:
    """Every public method that torch's class has, with its arguments."""
    theirs = inspect.getattr_static(getattr(torch.distributed.fsdp, cls), name)
    ours = inspect.getattr_static(getattr(fsdp2, cls), name)

    assert isinstance(ours, property) == isinstance(theirs, property)
    assert (ours.fget if isinstance(ours, property) else ours).__doc__
    if not isinstance(ours, property):
        # Of functions that are methods, the first argument has another name.
        assert arguments(ours)[1:] == arguments(theirs)[1:]


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(("Policy", "Dims"))])
def test_policies_have_the_fields_of_torch(name: str) -> None:
    """So they can be made by position, and are frozen alike."""
    ours, theirs = getattr(fsdp2, name), getattr(torch.distributed.fsdp, name)

    assert [(f.name, f.default) for f in dataclasses.fields(ours)] == [
        (f.name, f.default) for f in dataclasses.fields(theirs)
    ]
    for setting in ("frozen", "eq", "order"):
        given, expected = (vars(c)["__dataclass_params__"] for c in (ours, theirs))
        assert getattr(given, setting) == getattr(expected, setting)
    assert [c.__name__ for c in ours.__mro__] == [c.__name__ for c in theirs.__mro__]


def test_the_dims_of_a_mesh_are_named_as_in_torch() -> None:
    """One name or several; neither is refused."""
    dims = fsdp2.DataParallelMeshDims(shard=("a", "b"), replicate="c")

    assert (dims.shard_names, dims.replicate_names) == (("a", "b"), ("c",))
    with pytest.raises(ValueError, match="expects shard or replicate"):
        fsdp2.DataParallelMeshDims()
