"""``copy.deepcopy`` of sharded models: a model of its own, or an error in a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from composable_fsdp import unshard_params
from composable_fsdp.errors import PhaseError
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
)
from tests.support.world import World


@pytest.mark.req("D-14")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_copy_in_the_middle_of_a_step_is_refused(world: World, path: str) -> None:
    """Each moment is named; between forward and backward the shards can be copied."""
    model = apply_units(TinyGPT(), gpt_units(TinyGPT()), path=path)
    inner = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))

    def attempt(*_: object) -> None:
        with pytest.raises(PhaseError, match=r"copy\.deepcopy was called on") as error:
            copy.deepcopy(model)
        tried.append(str(error.value))

    tried: list[str] = []
    hook = inner.register_forward_hook(attempt)
    y = model(gpt_input(0, world.rank))
    hook.remove()
    between = copy.deepcopy(model)
    y.register_hook(attempt)
    backward(y.sum())
    with unshard_params(model):
        attempt()

    for text, where in zip(tried, ("forward", "backward", "unshard_par"), strict=True):
        assert f"inside {'the ' * (where == 'forward')}{where}" in text
    expected = model.state_dict()
    assert all(torch.equal(v, expected[n]) for n, v in between.state_dict().items())
