"""``FullyShardedDataParallel`` from outside: names, attributes, order of units."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from composable_fsdp import (
    FullyShardedDataParallel,
)
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    assert_same_training,
    gpt_input,
    train,
    train_reference,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


@pytest.mark.req("S0-06")
def test_use_orig_params_false_warns_once_and_is_taken_as_true(
    one_rank: World,
) -> None:
    """Parameters are the original ones whatever is asked."""
    plain = tiny_mlp()
    before = list(plain.parameters())

    with pytest.warns(UserWarning, match="use_orig_params=False is taken as True"):
        model = FullyShardedDataParallel(plain, use_orig_params=False)

    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def train_mixed(world: World, inner: str, outer: str) -> list[str]:
    """Shard the blocks on one path and the rest on the other; train."""
    model = TinyGPT()
    plain = copy.deepcopy(model)
    for index in range(2):
        model.blocks[index] = apply_units(model.blocks[index], [], path=inner)
    sharded = apply_units(model, [], path=outer)

    expected = train_reference(plain, world.world_size, gpt_input, adamw)
    losses = train(sharded, world.rank, gpt_input, adamw)

    mine = [step[world.rank] for step in expected]
    assert_same_training(sharded, plain, losses, mine)
    return [state.fqn for state in _get_fsdp_states(sharded)]


@pytest.mark.req("S1-23", "S1-22")
@pytest.mark.parametrize("outer", PATHS)
@pytest.mark.parametrize("inner", PATHS)
def test_the_paths_can_be_mixed_in_one_model(
    ranks: RankCount, inner: str, outer: str
) -> None:
    """Wrapper inside composable and the other way round: one tree, right numbers."""
    names = ranks(2).run(train_mixed, inner, outer)

    assert names == [["", "blocks.0", "blocks.1"]] * 2
