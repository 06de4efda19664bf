"""``fully_shard`` from outside: one object, plain parameters, any way to apply it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from composable_fsdp import (
    ModuleWrapPolicy,
    fully_shard,
)
from composable_fsdp.naming import join_name
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyBlock, TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    assert_same_training,
    gpt_input,
    gpt_units,
    sgd,
    train,
    train_reference,
)
from tests.support.world import World


@pytest.mark.req("S1-27", "S1-25")
@pytest.mark.parametrize("style", ["manual", "auto"])
@pytest.mark.parametrize("path", PATHS)
def test_the_units_are_the_same_by_hand_and_by_policy_on_both_paths(
    one_rank: World, path: str, style: str
) -> None:
    """The model and its blocks, and each parameter in exactly one of them."""
    plain = TinyGPT()
    units = gpt_units(plain)
    names = [name for name, _ in plain.named_parameters()]
    model = apply_units(plain, units, path=path, style=style)
    model(gpt_input(0, 0))
    states = _get_fsdp_states(model)

    assert [state.fqn for state in states] == ["", *units]
    held = [join_name(s.fqn, name) for s in states for name in s.handle._fqns]
    assert sorted(held) == sorted(names)


@pytest.mark.req("B-01", "S1-35")
def test_the_same_object_comes_back_with_its_class_and_names(one_rank: World) -> None:
    """Class, parameters, buffers and modules keep their names, order and identity."""
    model = TinyGPT()
    model.register_buffer("counter", torch.zeros(2))

    def seen() -> list[object]:
        named = [model.named_parameters(), model.named_buffers(), model.named_modules()]
        return [type(model), *[(name, id(o)) for each in named for name, o in each]]

    before = seen()
    returned = fully_shard(model, policy=ModuleWrapPolicy({TinyBlock}))

    assert returned is model
    assert seen() == before
    state = fully_shard.state(model)
    assert state is not None
    assert state.module is model


@pytest.mark.req("B-24", "D-15")
@on_ranks(2)
def test_an_optimizer_made_before_sharding_trains(world: World) -> None:
    """Parameters stay the same plain objects, with the attributes set on them."""
    model = TinyGPT()
    plain = copy.deepcopy(model)
    optimizer = adamw(model.parameters())
    alias = model.head.weight
    alias.note = "mine"  # type: ignore[attr-defined]  # any attribute
    before = [id(p) for p in model.parameters()]

    apply_units(model, gpt_units(model))
    seen: list[str] = []
    model.head.register_forward_pre_hook(
        lambda module, args: seen.append(module.weight.note)
    )
    expected = train_reference(plain, world.world_size, gpt_input, adamw)
    losses = train(model, world.rank, gpt_input, lambda _: optimizer)

    assert [id(p) for p in model.parameters()] == before
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert alias is model.head.weight
    assert seen == ["mine"] * 3
    assert_same_training(model, plain, losses, [step[world.rank] for step in expected])


@pytest.mark.req("B-02")
@on_ranks(2)
def test_modules_of_a_list_may_use_the_same_names(world: World) -> None:
    """The last norm and the head are one unit although both have a ``weight``."""
    model = TinyGPT()
    plain = copy.deepcopy(model)
    fully_shard([model.norm, model.head])
    apply_units(model, gpt_units(model))

    expected = train_reference(plain, world.world_size, gpt_input, sgd)
    losses = train(model, world.rank, gpt_input, sgd)

    assert_same_training(model, plain, losses, [step[world.rank] for step in expected])


@pytest.mark.req("B-06")
@on_ranks(1, 2)
def test_a_child_may_run_before_its_parent(world: World) -> None:
    """The root is the outermost unit all the same."""
    model = TinyGPT()
    plain = copy.deepcopy(model)
    apply_units(model, gpt_units(model))
    x = torch.ones(1, 3, 8) * (world.rank + 1)

    assert torch.equal(model.blocks[1](x), plain.blocks[1](x))
    root, first, second = _get_fsdp_states(model)
    assert (root._is_root, first._is_root, second._is_root) == (True, False, False)
    expected = train_reference(plain, world.world_size, gpt_input, sgd)
    losses = train(model, world.rank, gpt_input, sgd)

    assert_same_training(model, plain, losses, [step[world.rank] for step in expected])
    assert torch.equal(model.blocks[0](x), plain.blocks[0](x))
