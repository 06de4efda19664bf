"""Agreement: a sharded model is initialized as the plain model, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp import fully_shard, init_weights
from property_tests.live import batches, examples
from tests.support.models import legal_units, module_at
from tests.support.sharded import RankCount
from tests.support.world import World

Tree = str | list["Tree"]
Recipe = tuple[list[Tree], list[str], bool, bool]
"""Layers, paths of units, whether two layers are tied, whether built on meta."""

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 5),
    "scalar": lambda: nn.Linear(1, 1, bias=False),
    "embedding": lambda: nn.Embedding(7, 3, padding_idx=1),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "norm": lambda: nn.BatchNorm1d(3),
    "rnn": lambda: nn.Conv1d(2, 3, 3),
}
trees: st.SearchStrategy[Tree] = st.recursive(
    st.sampled_from(list(LAYERS)), lambda kids: st.lists(kids, min_size=1, max_size=3)
)
paths = st.lists(st.sampled_from(["0", "1", "0.0", "0.1", "1.0"]), unique=True)
recipes = st.tuples(
    st.lists(trees, min_size=1, max_size=3), paths, st.booleans(), st.booleans()
)


def build(tree: Tree) -> nn.Module:
    """Build a layer, or a sequence of them."""
    if isinstance(tree, str):
        return LAYERS[tree]()
    return nn.Sequential(*map(build, tree))


def model_of(recipe: Recipe) -> nn.Module:
    """Build the model of a recipe with its tie."""
    model = build(recipe[0])
    linears = [m for m in model.modules() if type(m) is nn.Linear and m.in_features > 1]
    if recipe[2] and len(linears) > 1:
        linears[-1].weight = linears[0].weight
    return model


def check(world: World, drawn: list[Recipe]) -> None:
    for recipe in drawn:
        with torch.device("meta" if recipe[3] else "cpu"):
            model = model_of(recipe)
        names = {name for name, _ in model.named_modules()}
        units = legal_units(model, [path for path in recipe[1] if path in names])
        for path in sorted(units, key=lambda path: -path.count(".")):
            fully_shard(module_at(model, path))
        fully_shard(model)
        plain = model_of(recipe)
        torch.manual_seed(len(units))
        init_weights(model)
        state = torch.get_rng_state()

        torch.manual_seed(len(units))
        plain.apply(reset)
        assert torch.equal(state, torch.get_rng_state())
        found = model.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), name


def reset(module: nn.Module) -> None:
    """Call the method that initializes what the module holds."""
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            break


@pytest.mark.req("R-03")
@given(drawn=batches(recipes), world_size=st.integers(1, 3))
@examples(6)
def test_initialised_after_sharding_a_model_is_the_plain_one(
    ranks: RankCount, drawn: list[Recipe], world_size: int
) -> None:
    """Any tree, units, ties, on meta or not; the random state is equal, too."""
    ranks(world_size).run(check, drawn)
