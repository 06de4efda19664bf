"""From a tree to units: which parameters go where, while the tree stays as it is."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.compose.registry import set_state
from composable_fsdp.config import BackwardPrefetch, Block, ShardingStrategy
from composable_fsdp.entries.plan import plan
from composable_fsdp.errors import PlanError
from composable_fsdp.planning.assign import PlanRequest, lowest_common_ancestor
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.plan import plan_modules
from composable_fsdp.planning.policies import ModuleWrapPolicy
from composable_fsdp.planning.unit_costs import traffic_of
from tests.planning.trees import linears, names_of, snapshot, units
from tests.support.models import TinyBlock, TinyGPT


def test_a_meta_model_is_planned_without_a_process_group_and_stays_as_it_was() -> None:
    """Planning needs neither values nor ranks, and leaves no trace on the tree."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = snapshot(model)

    result = plan(model, world_size=512, policy=units({"1": {}}))

    assert not dist.is_initialized()
    assert names_of(result) == {"": ["0.bias", "0.weight"], "1": ["bias", "weight"]}
    assert snapshot(model) == before


def test_each_parameter_goes_to_the_nearest_unit_above_it() -> None:
    """Blocks take what is below them, the root what is left, in order of .modules()."""
    model = TinyGPT(layers=2)

    result = plan(model, world_size=2, policy=ModuleWrapPolicy({TinyBlock}))

    inner = sorted(name for name, _ in model.blocks[0].named_parameters())
    assert list(names_of(result)) == ["", "blocks.0", "blocks.1"]
    assert names_of(result)["blocks.0"] == names_of(result)["blocks.1"] == inner
    assert names_of(result)[""] == [
        "head.weight",
        "norm.bias",
        "norm.weight",
        "positions.weight",
        "tokens.weight",
    ]
    assert [unit.class_name for unit in result.units] == ["TinyGPT"] + ["TinyBlock"] * 2


def test_units_come_in_the_order_of_modules_whatever_the_policy_says() -> None:
    """The map's own order does not matter."""
    model = linears(3)

    result = plan(model, world_size=2, policy=units({"2": {}, "0": {}, "1": {}}))

    assert [unit.fqn for unit in result.units] == ["", "0", "1", "2"]


@pytest.mark.req("S0-05")
def test_options_of_one_unit_leave_the_others_with_the_roots() -> None:
    """What a policy names is replaced for that module only; the rest is inherited."""
    root = UnitOptions(
        block=Block.ELEMENT,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    )
    policy = units({"0": {"strategy": ShardingStrategy.NO_SHARD}, "1": {}})
    request = PlanRequest(options=root, world_size=4, policy=policy)

    result, _ = plan_modules([linears(3)], request)

    assert [unit.options.strategy.name for unit in result.units] == [
        "FULL_SHARD",
        "NO_SHARD",
        "FULL_SHARD",
    ]
    assert {unit.options.block for unit in result.units} == {Block.ELEMENT}
    assert {unit.options.backward_prefetch for unit in result.units} == {
        BackwardPrefetch.BACKWARD_POST
    }
    assert root == UnitOptions(
        block=Block.ELEMENT,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    )


@pytest.mark.req("S0-05")
def test_a_policy_that_names_only_what_differs_inherits_the_rest() -> None:
    """The root's options reach a unit also if the policy does not hand them on."""

    def policy(root: nn.Module, ignored: Set[nn.Module], root_kwargs: object) -> object:
        return {root.get_submodule("0"): {"backward_prefetch": None}}

    result = plan(linears(2), world_size=4, policy=policy, block=Block.ELEMENT)

    assert result.units[1].options.block is Block.ELEMENT
    assert result.units[1].options.backward_prefetch is None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"colour": 1}, r"'colour' for module '0', which cannot be set per module"),
        ({"limit_all_gathers": False}, "limit_all_gathers must be equal in one tree"),
        ({"use_orig_params": False}, "use_orig_params must be equal in one tree"),
    ],
)
def test_options_that_no_unit_may_have_are_refused_with_its_name(
    options: dict[str, object], match: str
) -> None:
    """Unknown keys and what is equal in a whole tree cannot be set for one module."""
    with pytest.raises(PlanError, match=match):
        plan(linears(2), world_size=2, policy=units({"0": options}))


def test_a_unit_that_is_not_sharded_keeps_one_copy_per_rank() -> None:
    """NO_SHARD has a shard group of one, and every rank is a replica."""
    policy = units({"0": {"strategy": ShardingStrategy.NO_SHARD}})

    result = plan(linears(2), world_size=8, policy=policy)

    assert [(u.shard_world_size, u.replicas) for u in result.units] == [(8, 1), (1, 8)]


@pytest.mark.req("B-03")
def test_earlier_units_and_replicated_subtrees_are_left_out() -> None:
    """A state of an earlier call or a mark ends the walk, and the state is noted."""
    model, earlier = linears(3), object()
    set_state(model[0], "fully_shard", earlier)
    set_state(model[1], "replicate", object())

    result, targets = plan_modules(
        [model], PlanRequest(options=UnitOptions(), world_size=2)
    )

    assert names_of(result) == {"": ["2.weight"]}
    assert targets[0].units_below == (earlier,)


@pytest.mark.parametrize("as_states", [False, True])
def test_ignored_modules_are_left_out_with_all_below_them(as_states: bool) -> None:
    """Modules can be named in either argument."""
    model = TinyGPT(layers=1)
    left_out: dict[str, Any] = {
        "ignored_states" if as_states else "ignored_modules": [model.blocks]
    }

    result = plan(model, world_size=2, **left_out)

    assert not any("blocks" in name for name in names_of(result)[""])
    assert "head.weight" in names_of(result)[""]


def test_ignored_parameters_are_left_out_alone() -> None:
    """One parameter of a layer may stay as it is."""
    model = nn.Linear(4, 4)

    result = plan(model, world_size=2, ignored_states=[model.bias])

    assert names_of(result) == {"": ["weight"]}


@pytest.mark.req("D-08", "D-09")
def test_mixed_dtypes_and_frozen_weights_share_a_unit() -> None:
    """One unit, three regions; what is frozen has no gradient to keep or to reduce."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    model[0].to(torch.bfloat16)
    model[1].bias.requires_grad_(False)

    unit = plan(model, world_size=2).units[0]

    assert [(r.dtype, r.trainable) for r in unit.regions] == [
        (torch.bfloat16, True),
        (torch.float32, True),
        (torch.float32, False),
    ]
    assert unit.gradient_bytes == 64 * 2 // 2 + 8 * 4 // 2
    assert (
        traffic_of(unit, is_root=True, in_backward=True).reduce_scatter_bytes
        == 64 * 2 + 8 * 4
    )


@pytest.mark.req("B-03")
def test_a_module_at_two_places_is_counted_once() -> None:
    """Shared modules are held once and keep the name of the first place."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(shared))

    result, targets = plan_modules(
        [model], PlanRequest(options=UnitOptions(), world_size=2)
    )

    assert names_of(result) == {"": ["0.bias", "0.weight"]}
    assert result.numel == 20
    slots = [slot for region in result.units[0].regions for slot in region.parameters]
    assert {slot.fqns for slot in slots} == {
        ("0.weight", "1.0.weight"),
        ("0.bias", "1.0.bias"),
    }
    assert len(targets[0].places) == 2


def test_a_unit_at_two_places_is_one_unit() -> None:
    """A shared module that is a unit appears once, where .modules() meets it first."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared), shared)

    result = plan(model, world_size=2, policy=units({"0.0": {}}))

    assert names_of(result) == {"": [], "0.0": ["bias", "weight"]}


def test_a_list_of_modules_is_one_unit_with_names_from_each() -> None:
    """Names are relative to the module that holds the parameter."""
    first, second = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)
    first.register_parameter("gain", nn.Parameter(torch.ones(4)))
    del second.weight
    second.register_parameter("weight", None)

    result, targets = plan_modules(
        [first, second], PlanRequest(options=UnitOptions(), world_size=2)
    )

    assert names_of(result) == {"": ["bias", "gain", "weight"]}
    assert targets[0].modules == (first, second)


@pytest.mark.parametrize(
    ("names", "ancestor"),
    [
        (["a.b.w", "a.b.v"], "a.b"),
        (["a.b.w", "a.bc.w"], "a"),
        (["a.w", "a.b.w"], "a"),
        (["w", "a.w"], ""),
        (["a.b.w", "b.b.w"], ""),
    ],
)
def test_common_ancestors_go_by_whole_components(
    names: list[str], ancestor: str
) -> None:
    """A name that begins like another one is not below it."""
    assert lowest_common_ancestor(names) == ancestor
