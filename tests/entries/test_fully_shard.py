"""``fully_shard`` from outside: one object, plain parameters, any way to apply it."""

from __future__ import annotations

import copy
import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import composable_fsdp
from composable_fsdp import (
    ModuleWrapPolicy,
    fully_shard,
    replicate,
)
from composable_fsdp.comm.meshes import groups_for, resolve_ranks
from composable_fsdp.compose.registry import API
from composable_fsdp.config import ShardingStrategy
from composable_fsdp.flat.build import build_handle
from composable_fsdp.planning.assign import PlanRequest, assign_units
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.planner import plan_targets
from composable_fsdp.runtime.build import build_units
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.runtime.parity import trains_as
from tests.support.models import TinyBlock, TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    assert_same_training,
    gpt_input,
    gpt_units,
    train,
    train_reference,
)
from tests.support.world import World


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
    trains_as(world, model, plain, gpt_input)
    assert torch.equal(model.blocks[0](x), plain.blocks[0](x))


@pytest.mark.req("S1-23", "S1-22")
@pytest.mark.parametrize("outer", PATHS)
@pytest.mark.parametrize("inner", PATHS)
@on_ranks(2)
def test_the_paths_can_be_mixed_in_one_model(
    world: World, inner: str, outer: str
) -> None:
    """Wrapper inside composable and the other way round: one tree, right numbers."""
    model = TinyGPT()
    for index in range(2):
        model.blocks[index] = apply_units(model.blocks[index], [], path=inner)
    sharded = apply_units(model, [], path=outer)

    trains_as(world, sharded, TinyGPT(), gpt_input, adamw)
    names = [state.fqn for state in _get_fsdp_states(sharded)]
    assert names == ["", "blocks.0", "blocks.1"]


@pytest.mark.req("N-04")
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_help_shows_every_argument_and_the_result(api: Callable[..., Any]) -> None:
    """As for a plain function: one signature, then the docstring."""
    signature = inspect.signature(api)
    names = list(signature.parameters)

    assert names[0] == "module"
    assert signature.return_annotation == signature.parameters["module"].annotation
    assert not any(
        each.kind is each.VAR_KEYWORD for each in signature.parameters.values()
    )
    shown = pydoc.plain(pydoc.render_doc(api))
    assert f"{api.__name__}(" in shown
    head, body = shown.split("->", 1)
    for name in names:
        assert f"{name}:" in head
        assert name in body
    assert "composable API" not in shown


@pytest.mark.req("S1-39")
def test_the_stages_of_an_application_can_run_alone(one_rank: World) -> None:
    """Options without a module, units without ranks, buffers without a state; hooks
    come last."""
    model, request = nn.Linear(2, 2), PlanRequest(UnitOptions(), world_size=1)
    before = [id(p) for p in model.parameters()]

    ranks = resolve_ranks(None, None, "fully_shard")
    (unit,) = assign_units([model], PlanRequest(UnitOptions(), world_size=4))
    assert [id(p) for p, _ in unit.parameters] == before
    (target,) = plan_targets([model], request)
    groups = groups_for(ranks, ShardingStrategy.FULL_SHARD)
    handle = build_handle(target, groups=groups, device=one_rank.device)
    assert handle.leaves == (model.weight, model.bias)
    assert not model._forward_pre_hooks

    other, state = nn.Linear(2, 2), _FSDPState()
    targets = plan_targets([other], request)
    states = build_units(
        targets,
        state,
        ranks=ranks,
        device=one_rank.device,
        before=None,
        awaiting=(),
        synced=False,
        api=API,
    )
    assert states == [state]
    assert len(other._forward_pre_hooks) == 1


@pytest.mark.req("S1-29")
def test_the_public_surface_uses_one_term_for_names() -> None:
    """No HandleConfig, no module-to-handles map, no word for a name but ``fqn``."""
    gone = {"HandleConfig", "_module_to_handles", "_module_to_handle", "prefixed_name"}

    assert not gone & {*_FSDPState.__slots__, *vars(composable_fsdp)}
    assert "fqn" in _FSDPState.__slots__
