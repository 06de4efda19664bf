"""Names and arguments of torch's FSDP2; and scripts whose imports alone change."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from composable_fsdp import (
    fsdp2,
)
from tests.support.sharded import RankCount
from tests.support.world import World

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


# ---- scripts with other imports ----


def run_script(world: World, name: str, package: str, *arguments: Any) -> Any:
    """Run the script's text with its imports from ``package``; what it returns."""
    text = Path(__file__).with_name(name).read_text().replace(TORCH, package)
    names: dict[str, Any] = {"__name__": f"script_for_{package}"}
    with warnings.catch_warnings():
        if package == TORCH:
            warnings.simplefilter("ignore")  # torch's own of what it deprecates
        exec(compile(text, name, "exec"), names)
        return names["main"](*arguments)


def numbers(value: Any) -> Any:
    """``value`` with floats that compare within a tolerance."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-4, abs=1e-5)
    if isinstance(value, list):
        return [numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: numbers(each) for key, each in value.items()}
    return value


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_script_for_fsdp1_runs_with_its_imports_changed(
    ranks: RankCount, strategy: str
) -> None:
    """Losses, norms, scales, sums of values and gradients, names: all are equal."""
    script = "fsdp1_script.py"
    theirs = ranks(2).run(run_script, script, TORCH, strategy, False)
    ours = ranks(2).run(run_script, script, "composable_fsdp", strategy, True)

    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            assert mine[key] == numbers(value), key


def assert_same(ranks: RankCount, world_size: int, case: str) -> None:
    script = "fsdp2_script.py"
    theirs = ranks(world_size).run(run_script, script, TORCH, case)
    ours = ranks(world_size).run(run_script, script, "composable_fsdp.fsdp2", case)

    tolerance = 2e-2 if "bf16" in case else 1e-5
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(other["losses"], rel=tolerance)
        assert list(mine["state"]) == list(other["state"])
        for name, value in other["state"].items():
            torch.testing.assert_close(
                torch.tensor(mine["state"][name]),
                torch.tensor(value),
                rtol=tolerance,
                atol=tolerance,
            )


CASES = [
    "plain",
    "bf16",
    "bf16 reduced in fp32",
    "fp32 out of bf16",
    "kept",
    "resharded",
    "number of ranks",
    "one rank",
    "offload",
    "ignored",
    "placed",
    "list",
    "prefetch",
    "factor",
    "hook",
    "set resharding",
    "method",
    "shared",
    "event",
    "accumulate",
    "keep and accumulate",
    "by hand",
    "clipped",
    "recovered",
]


@pytest.mark.few(6)
@pytest.mark.req("N-05")
@pytest.mark.parametrize("case", CASES)
def test_a_script_for_fsdp2_runs_with_its_import_changed(
    ranks: RankCount, case: str
) -> None:
    """Losses and full state dicts are equal."""
    assert_same(ranks, 2, case)


@pytest.mark.req("N-05")
def test_a_script_for_two_dims_runs_with_its_import_changed(ranks: RankCount) -> None:
    """Two replicas of two shards, whose sums wait."""
    assert_same(ranks, 4, "replicas, accumulate shards")
