"""Warnings are shown at the line of the user, however deep the package gives them."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from composable_fsdp import ModuleWrapPolicy, fully_shard
from tests.support.on_ranks import on_ranks
from tests.support.world import World


def other_weights(world: World) -> None:
    """Give the ranks different weights, which the first forward tells."""
    torch.manual_seed(world.rank)
    model: Any = nn.Linear(2, 2)
    fully_shard(model)
    model(torch.ones(1, 2))  # other_weights


def matches_nothing(world: World) -> None:
    """Pass a policy that matches no module."""
    fully_shard(nn.Linear(2, 2), policy=ModuleWrapPolicy({nn.Conv1d}))  # matches


@on_ranks(2)
def test_the_file_and_the_line_are_those_of_the_user(world: World) -> None:
    """In planning, and in the first forward."""
    places: list[Callable[[World], None]] = [
        other_weights,
        matches_nothing,
    ]
    for act in places:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            act(world)

        assert [each.filename for each in found] == [__file__], act
        line = linecache.getline(__file__, found[0].lineno)
        assert f"# {act.__name__}"[:9] in line, line
