"""One change on one rank: every rank raises the same error, which names the change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import ShardingStrategy
from composable_fsdp.comm import collectives
from property_tests.live import batches, examples
from tests.faults.fingerprints import Outcome, outcome
from tests.support.models import build, legal_units
from tests.support.recipes import ModelRecipe
from tests.support.reference import apply_units
from tests.support.sharded import RankCount
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import World

KINDS = (
    *("nothing", "name", "order", "shape", "dtype", "requires_grad"),
    *("tie", "extra", "buffer", "option", "unit", "weights"),
)


class Fault(NamedTuple):
    """A model, and what the last rank does otherwise; ``at`` chooses where."""

    recipe: ModelRecipe
    kind: str
    at: int


class Found(NamedTuple):
    """What a rank saw."""

    outcome: Outcome
    names: tuple[str, ...] | None
    """Names of which the error holds one; None if the model offers no such change."""
    exchanges: int


def places_of(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the full name, the module and the key of each parameter, once."""
    found, seen = [], set()
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{path}.{key}".lstrip("."), module, key))
    return found


def names_of(model: nn.Module, parameter: nn.Parameter) -> tuple[str, ...]:
    every = model.named_parameters(remove_duplicate=False)
    return tuple(name for name, each in every if each is parameter)


def rename(model: nn.Module, module: nn.Module, key: str) -> tuple[str, ...]:
    """Rename a parameter, at its place in the order."""
    parameter = module._parameters[key]
    assert parameter is not None
    pairs = [("renamed" if k == key else k, p) for k, p in module._parameters.items()]
    module._parameters.clear()
    module._parameters.update(pairs)
    return names_of(model, parameter)


def reorder(model: nn.Module, at: int) -> tuple[str, ...] | None:
    """Turn round the parameters of a module that has several."""
    several = [m for m in model.modules() if len(m._parameters) > 1]
    if not several:
        return None
    table = several[at % len(several)]._parameters
    names = [n for p in table.values() if p is not None for n in names_of(model, p)]
    pairs = list(table.items())[::-1]
    table.clear()
    table.update(pairs)
    return tuple(names)


def tie(model: nn.Module, units: Sequence[str]) -> tuple[str, ...] | None:
    """Tie two parameters of one unit."""

    def unit_of(name: str) -> str:
        above = [u for u in units if name.startswith(f"{u}.")]
        return max(above, key=len, default="")

    found = [
        (name, module, key)
        for name, module, key in places_of(model)
        if len(names_of(model, module.get_parameter(key))) == 1
    ]
    for i, (name, module, key) in enumerate(found):
        one = module.get_parameter(key)
        for other, holder, into in found[i + 1 :]:
            two = holder.get_parameter(into)
            alike = one.shape == two.shape and one.dtype == two.dtype
            if alike and unit_of(name) == unit_of(other):
                setattr(holder, into, one)
                return (name, other)
    return None


def edit(
    model: nn.Module, fault: Fault, units: Sequence[str]
) -> tuple[str, ...] | None:
    """Change the plain model; return names of which an error holds one."""
    places = places_of(model)
    if fault.kind == "order":
        return reorder(model, fault.at)
    if fault.kind == "tie":
        return tie(model, units)
    if fault.kind in ("extra", "buffer"):
        modules = list(model.modules())
        module = modules[fault.at % len(modules)]
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            module = model
        if fault.kind == "extra":
            module.register_parameter("added", nn.Parameter(torch.ones(1)))
        else:
            module.register_buffer("added", torch.ones(1))
        return ("added",)
    if not places:
        return None
    _, module, key = places[fault.at % len(places)]
    old = module.get_parameter(key)
    names = names_of(model, old)
    if fault.kind == "name":
        return rename(model, module, key)
    if fault.kind == "requires_grad":
        old.requires_grad_(not old.requires_grad)
    elif fault.kind == "shape":
        old.data = old.data.unsqueeze(-1)
    elif fault.kind == "dtype":
        old.data = old.data.half()
    elif fault.kind == "weights":
        if not old.numel():
            return None
        old.data = old.data + 1
    return names


def check_faults(world: World, faults: list[Fault]) -> list[Found]:
    return [check_fault(world, fault) for fault in faults]


def check_fault(world: World, fault: Fault) -> Found:
    model = build(fault.recipe)
    units: Sequence[str] = legal_units(model, fault.recipe.sharded)
    odd = world.rank == world.world_size - 1
    options: dict[str, Any] = {}
    names: tuple[str, ...] | None = ()
    if fault.kind == "option":
        names = ("the option strategy",)
        options = {"strategy": ShardingStrategy.SHARD_GRAD_OP} if odd else {}
    elif fault.kind == "unit":
        names = ("unit number",) if units else None
        units = [u for u in units if not odd or u != units[fault.at % len(units)]]
    elif fault.kind != "nothing":
        # Every rank asks which names to expect, of a model of its own.
        other = model if odd else build(fault.recipe)
        names = edit(other, fault, units)
    sharded = apply_units(model, units, tied_params="promote", **options)
    with collectives.record() as calls:
        found = outcome(sharded.state_dict)
    exchanges = sum(call.op == "all_gather_digests" for call in calls)
    return Found(found, names, exchanges)


@pytest.mark.req("X-09", "X-10", "X-11", "X-13")
@pytest.mark.parametrize("world_size", [2, 3])
@examples(20)
@given(
    faults=batches(
        st.builds(
            Fault,
            model_recipes(2, 3, FEATURES - {"replicate"}),
            st.sampled_from(KINDS),
            st.integers(0, 20),
        )
    )
)
def test_one_change_on_one_rank_is_one_error_that_names_it(
    ranks: RankCount, world_size: int, faults: list[Fault]
) -> None:
    """No change: no error, and one exchange."""
    rows = zip(*ranks(world_size).run(check_faults, faults), strict=True)
    for fault, found in zip(faults, rows, strict=True):
        first = found[0]
        assert all(each == first for each in found), found
        assert first.exchanges == 1
        error, warned = first.outcome
        if not first.names:
            assert (error, warned) == (None, ())
            continue
        text = " ".join(warned) if fault.kind == "weights" else error
        assert text is not None
        assert any(name in text for name in first.names), (text, first.names)
        assert fault.kind != "weights" or error is None
