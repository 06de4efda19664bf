"""Ignored modules and parameters, also under a policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import ModuleWrapPolicy, unshard_params
from composable_fsdp.flat.handle import find_leaf
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import PATHS, apply_units, backward, gpt_input, loss_of
from tests.support.tiny import TinyBlock, TinyGPT, tiny_mlp
from tests.support.world import World

IGNORED = ("blocks.0.up.weight", "blocks.1.norm_1.weight", "blocks.1.norm_1.bias")


def ignoring(model: TinyGPT, path: str, *, by_policy: bool) -> nn.Module:
    """Shard all but one weight, given as a parameter, and one norm, as a module."""
    states: Any = [model.get_parameter(IGNORED[0])]
    modules = [model.get_submodule("blocks.1.norm_1")]
    options: dict[str, Any] = {"ignored_states": states, "ignored_modules": modules}
    if by_policy:
        options["ignored_states"] = iter(states)
        name = "policy" if path == "composable" else "auto_wrap_policy"
        options[name] = ModuleWrapPolicy({TinyBlock})
        return apply_units(model, [], path=path, **options)
    return apply_units(model, ["blocks.0", "blocks.1"], path=path, **options)


def model_parameter(model: nn.Module, name: str) -> nn.Parameter:
    return dict(model.named_parameters())[name]


@pytest.mark.req("S0-11")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("by_policy", [False, True])
@on_ranks(2)
def test_what_is_ignored_stays_as_it_is(
    world: World, path: str, by_policy: bool
) -> None:
    """Never flattened, gathered or reduced; the state dict has it as it is."""
    model = TinyGPT()
    plain = copy.deepcopy(model)
    ignored = {name: model.get_parameter(name) for name in IGNORED}
    shapes = {name: p.shape for name, p in ignored.items()}
    pointers = {name: p.data_ptr() for name, p in ignored.items()}
    sharded = ignoring(model, path, by_policy=by_policy)

    with record_steps() as calls:
        backward(loss_of(sharded, gpt_input(0, world.rank)))
    with unshard_params(sharded):
        inside = {name: model_parameter(sharded, name) for name in IGNORED}

    for name, p in ignored.items():
        assert find_leaf(p) is None, name
        assert inside[name] is p
        assert p.shape == shapes[name]
        assert p.data_ptr() == pointers[name]
        # This rank's own gradient: nobody averages it.
        assert p.grad is not None
    state = sharded.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value)
    gathered = sum(sum(c.numel) for c in calls if c.op == "reduce_scatter")
    kept = sum(p.numel() for n, p in plain.named_parameters() if n not in IGNORED)
    assert kept <= gathered < kept + sum(p.numel() for p in ignored.values())


@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_module_that_ignores_itself_keeps_all_its_parameters(
    world: World, path: str
) -> None:
    """Its own and those below it, with a warning, as FSDP1 does it."""
    mlp, linear = tiny_mlp(), nn.Linear(3, 2)
    for plain in (mlp, linear):
        x = torch.ones(2, 8 if plain is mlp else 3)
        expected = plain(x)
        leaves = dict(plain.named_parameters())
        with pytest.warns(UserWarning, match="so none of its parameters is") as told:
            model = apply_units(plain, [], path=path, ignored_modules=[plain])
        assert len(told) == 1
        with record_steps() as calls:
            y = model(x)
            backward(y.sum())

        assert torch.equal(y, expected)
        assert {n: p for n, p in model.named_parameters() if p is leaves[n]} == leaves
        assert all(find_leaf(p) is None for p in leaves.values())
        assert not [call for call in calls if call.op != "all_reduce"]
