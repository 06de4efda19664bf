"""Laws of planning on random trees: who owns what, tied parameters, no trace."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp.config import Block
from composable_fsdp.errors import PlanError
from composable_fsdp.tools.plan import plan
from composable_fsdp.tools.sharding_plan import ShardingPlan
from tests.planning.trees import snapshot
from tests.support.models import build, module_at
from tests.support.recipes import ModelRecipe, ModuleRecipe
from tests.support.strategies import FEATURES, model_recipes, world_sizes

Choice = dict[nn.Module, dict[str, Any]]

INNER_TIE = ModelRecipe(
    ModuleRecipe(
        "plain",
        children=(
            ModuleRecipe(
                "plain",
                "outer",
                (ModuleRecipe("linear", "a"), ModuleRecipe("linear", "b")),
                tied=True,
            ),
        ),
    ),
    sharded=("outer", "outer.a", "outer.b"),
)
"""Two units with one weight, below a unit that is not the root."""


class ByName:
    """A policy that picks modules by their names, without options."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(
        self, root: nn.Module, ignored: Set[nn.Module], root_kwargs: Mapping[str, Any]
    ) -> Choice:
        return {root.get_submodule(name): {} for name in self.names}


# ---- the oracle: every path of every parameter, and the units above it --------------


@dataclass(frozen=True)
class Tied:
    """One parameter by its names, each with the units above it, outermost first."""

    names: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]

    @property
    def owner(self) -> str | None:
        nearest = {chain[-1] for chain in self.chains}
        return nearest.pop() if len(nearest) == 1 else None

    @property
    def ancestor(self) -> str:
        """The longest module name that begins, by components, every name."""
        first = self.names[0].split(".")
        for length in range(len(first) - 1, -1, -1):
            prefix = first[:length]
            if all(
                name.split(".")[:length] == prefix and name.count(".") >= length
                for name in self.names
            ):
                return ".".join(prefix)
        raise AssertionError("the empty name begins every name")


def parameters_by_path(model: nn.Module, chosen: tuple[str, ...]) -> list[Tied]:
    """What plain names say: no chain, no walk, only prefixes of dotted names."""
    first_name = {
        id(m): name
        for name, m in reversed(list(model.named_modules()))
        if m is not None
    }
    unit_ids = {id(model), *(id(module_at(model, name)) for name in chosen)}
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)

    def units_above(name: str) -> tuple[str, ...]:
        parts = name.split(".")
        paths = [".".join(parts[:n]) for n in range(len(parts))]
        above = [model.get_submodule(path) for path in paths]
        return tuple(first_name[id(m)] for m in above if id(m) in unit_ids)

    return [
        Tied(tuple(names), tuple(units_above(name) for name in names))
        for names in found.values()
    ]


def owners(result: ShardingPlan) -> dict[str, str]:
    """The unit of each parameter, by all of its names from the root."""
    return {
        f"{unit.fqn}.{name}" if unit.fqn else name: unit.fqn
        for unit in result.units
        for region in unit.regions
        for slot in region.parameters
        for name in slot.fqns
    }


@pytest.mark.req("S0-01", "S0-07", "D-10")
@given(
    recipe=model_recipes(max_children=4),
    world_size=world_sizes(),
    block=st.sampled_from([*Block, Block.rows(3)]),
)
def test_the_verdict_on_tied_parameters_is_the_brute_force_one(
    recipe: ModelRecipe, world_size: int, block: Block
) -> None:
    """A plan exists iff each parameter has one nearest unit above all its places; the
    model is as before, and planning again says the same."""
    model = build(recipe)
    before, said = snapshot(model), []
    for _ in range(2):
        try:
            policy = ByName(recipe.sharded)
            made = plan(model, world_size=world_size, policy=policy, block=block)
            said.append(repr(made))
        except PlanError as error:
            said.append(str(error))
    assert snapshot(model) == before
    assert said[0] == said[1]
    expected = parameters_by_path(model, recipe.sharded)
    parted = [tied for tied in expected if tied.owner is None]

    try:
        result = plan(model, world_size=world_size, policy=ByName(recipe.sharded))
    except PlanError as error:
        text = str(error)
        assert any(
            f"Parameter '{tied.names[0]}' of unit" in text
            and any(
                f"the same object as '{name}' of" in text for name in tied.names[1:]
            )
            and f"ancestor is {tied.ancestor!r}" in text.replace("(root)", "''")
            for tied in parted
        )
    else:
        assert parted == []
        got = owners(result)
        for tied in expected:
            assert got[tied.names[0]] == tied.owner


@pytest.mark.req("S0-07")
@given(recipe=model_recipes(features=FEATURES - {"shared"}, max_children=4))
@example(INNER_TIE)
def test_promotion_gives_a_tied_parameter_to_the_lowest_unit_above_all_places(
    recipe: ModelRecipe,
) -> None:
    """Whatever is tied, its owner is the deepest unit that is above each place."""
    model = build(recipe)

    result = plan(
        model, world_size=2, policy=ByName(recipe.sharded), tied_params="promote"
    )
    got = owners(result)

    for tied in parameters_by_path(model, recipe.sharded):
        common = set.intersection(*(set(chain) for chain in tied.chains))
        deepest = max(common, key=lambda unit: len(unit.split(".")) if unit else 0)
        assert got[tied.names[0]] == deepest
    assert result.numel == sum(p.numel() for p in model.parameters())
