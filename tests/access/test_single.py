"""One parameter by name; and what is written while units are full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    get_full_grad,
    get_full_param,
    no_sync,
    set_full_grad,
    set_full_param,
    unshard,
    unshard_params,
)
from composable_fsdp.access import set_reshard_after_backward
from composable_fsdp.optim import get_full_optim_state, set_full_optim_state
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.recording import record_steps
from tests.support.reference import backward, gpt_input, loss_of
from tests.support.sharded import both_paths, gpt, message_of
from tests.support.world import World

KINDS: list[dict[str, Any]] = [
    {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    {"strategy": ShardingStrategy.NO_SHARD},
    {"cpu_offload": CPUOffload(offload_params=True)},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
]
every_kind = pytest.mark.parametrize("options", KINDS)


@every_kind
@both_paths
@on_ranks(3)
def test_a_parameters_full_value_is_read_and_written_by_its_name(
    world: World, path: str, options: dict[str, Any]
) -> None:
    """Every one, a tied one under all its names, each part sent once by its holder."""
    model, plain = gpt(path, tied_head=True, **options), TinyGPT(tied_head=True)
    expected = dict(plain.named_parameters(remove_duplicate=False))

    for name, value in expected.items():
        with record_steps() as calls:
            found = get_full_param(model, name)
        assert torch.equal(found, value), name
        cut = options.get("strategy") is not ShardingStrategy.NO_SHARD
        assert sum(call.nbytes for call in calls) == value.numel() * 4 * cut, name
        assert {call.op for call in calls} <= {"broadcast"}
        assert not found.requires_grad
        found.fill_(3.0)  # a copy
    assert _same(dict(model.state_dict()), dict(plain.state_dict()))
    with record_steps() as calls:
        for index, name in enumerate(expected):
            new = torch.full_like(expected[name], index, dtype=torch.float64)
            set_full_param(model, name, new)
            expected[name].data.fill_(index)

    assert calls == []
    assert _same(dict(model.state_dict()), dict(plain.state_dict()))
    loss_of(model, gpt_input(0, 0))


@on_ranks(2)
def test_an_assigned_parameter_is_found_also_from_inside_its_unit(world: World) -> None:
    """Before any forward has taken it up; by the name that each module gives it."""
    model = fully_shard(tiny_mlp())
    part = model[0].get_parameter("weight")
    model[0].weight = nn.Parameter(torch.full_like(part, 2.0))

    for module, name in ((model, "0.weight"), (model[0], "weight")):
        assert torch.equal(get_full_param(module, name), torch.full((12, 8), 2.0))


@pytest.mark.req("U-02")
@on_ranks(2)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(world: World) -> None:
    """With the names that come close, the shape expected, or the moment."""
    model = gpt("wrapper")
    model.get_parameter("positions.weight").requires_grad_(False)
    head = model.get_parameter("head.weight")
    optimizer = optim.AdamW([head])
    backward(loss_of(model, gpt_input(0, world.rank)))
    optimizer.step()
    before = dict(model.state_dict())
    three, wrong = torch.ones(3), cast(Tensor, 3)
    set_state = partial(set_full_optim_state, model, optimizer, "head.weight")
    acts: list[tuple[Callable[[], object], str]] = [
        (
            lambda: get_full_param(model, "blocks.0.norm.weigth"),
            "has no parameter 'blocks.0.norm.weigth' (did you mean blocks",
        ),
        (lambda: get_full_grad(model, "zzz"), "'zzz'. It has tokens.weight, "),
        (
            lambda: set_full_param(model, "head.weight", three),
            "for parameter 'head.weight' its full shape (17, 8), got (3,). Pass",
        ),
        (
            lambda: set_full_param(model, "head.weight", wrong),
            "got int. Pass the whole tensor",
        ),
        (
            lambda: set_full_grad(model, "positions.weight", torch.ones(6, 8)),
            "'positions.weight', which is frozen",
        ),
        (
            lambda: get_full_optim_state(model, optimizer, "norm.weight"),
            "'norm.weight' is not in the AdamW",
        ),
        (
            lambda: set_state({"exp": 1}),
            "AdamW keeps no 'exp' for 'head.weight' (did you mean exp_avg?)"
            if head.numel()
            else "",
        ),
        (lambda: set_state({"exp_avg": three}), "full shape (17, 8), got (3,)"),
    ]
    for act, words in acts:
        text = message_of(act)
        assert words in text
    with unshard_params(model, writeback=False):
        text = message_of(lambda: get_full_param(model, "head.weight"))
    assert "inside unshard_params of" in text
    assert _same(dict(model.state_dict()), before)
    with torch.device("meta"):
        empty = fully_shard(nn.Linear(2, 2))
    assert get_full_param(empty, "weight").is_meta
    text = message_of(lambda: set_full_param(empty, "weight", torch.ones(2, 2)))
    assert "which is on meta and has no memory yet" in text


@on_ranks(4)
def test_each_replica_reads_and_writes_by_itself(world: World) -> None:
    """Within its shard group; nothing crosses to the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = gpt("composable", strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    plain = TinyGPT()

    for name, value in plain.named_parameters():
        assert torch.equal(get_full_param(model, name), value)
        set_full_param(model, name, value.detach() + 1)
        assert torch.equal(get_full_param(model, name), value + 1)


@on_ranks(2)
def test_parameters_that_no_unit_holds_are_found_as_well(world: World) -> None:
    """A model may hold some of both."""
    model = nn.Sequential(tiny_mlp(), tiny_mlp(seed=1))
    fully_shard(model, ignored_modules=[model[1]])
    optimizer = optim.AdamW(model.parameters())
    backward(model(torch.ones(2, 8)).sum())
    optimizer.step()

    for name in ("0.0.weight", "1.0.weight"):
        value = get_full_param(model, name)
        set_full_param(model, name, value * 2)
        assert torch.equal(get_full_param(model, name), value * 2)
        gradient = get_full_grad(model, name)
        assert gradient is not None
        set_full_grad(model, name, gradient * 2)
        assert torch.equal(get_full_grad(model, name), gradient * 2)  # type: ignore[arg-type]
        state = get_full_optim_state(model, optimizer, name)
        assert state["exp_avg"].shape == (12, 8)
        set_full_optim_state(model, optimizer, name, {"exp_avg": state["exp_avg"] * 2})
        again = get_full_optim_state(model, optimizer, name)
        assert torch.equal(again["exp_avg"], state["exp_avg"] * 2)
        assert torch.equal(again["exp_avg_sq"], state["exp_avg_sq"])


def by_hand(model: nn.Module, x: Tensor) -> None:
    model(x)
    unshard(model)


def kept_by_no_sync(model: nn.Module, x: Tensor) -> None:
    with no_sync(model):
        backward(loss_of(model, x))


def kept_on_request(model: nn.Module, x: Tensor) -> None:
    set_reshard_after_backward(model, False)
    backward(loss_of(model, x))


def set_each(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        set_full_param(model, name, value)


@pytest.mark.parametrize("assign", [nn.Module.load_state_dict, set_each])
@pytest.mark.parametrize("fill", [by_hand, kept_by_no_sync, kept_on_request, loss_of])
@on_ranks(2)
def test_what_is_written_while_units_are_full_is_used(
    world: World,
    fill: Callable[[nn.Module, Tensor], object],
    assign: Callable[[nn.Module, dict[str, Tensor]], object],
) -> None:
    """Full parameters of before are given up, however they came to be left."""
    model = gpt("composable", strategy=ShardingStrategy.SHARD_GRAD_OP)
    other = TinyGPT(seed=1)
    x = gpt_input(0, world.rank)
    fill(model, x)

    assign(model, other.state_dict())

    assert torch.equal(model(x), other(x))
