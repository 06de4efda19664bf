"""One parameter by name: value, gradient and optimizer state, read and written."""

from __future__ import annotations

from typing import Any

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
    get_full_optim_state,
    get_full_param,
    set_full_grad,
    set_full_optim_state,
    set_full_param,
    unshard_params,
)
from tests.optim.models import Mixed, by_name, mixed, train_plain, train_sharded
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.recording import record_steps
from tests.support.reference import (
    STRATEGIES,
    averaged_gradients,
    backward,
    gpt_input,
    loss_of,
    tolerance_at,
)
from tests.support.sharded import RankCount, both_paths, gpt, message_of
from tests.support.world import World

KINDS: dict[str, dict[str, Any]] = {
    **{strategy.name: {"strategy": strategy} for strategy in STRATEGIES},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "half": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
}
every_kind = pytest.mark.parametrize(
    ("world_size", "kind"),
    [(2, kind) for kind in KINDS] + [(1, "FULL_SHARD"), (3, "FULL_SHARD")],
)


def check_values(world: World, path: str, kind: str) -> None:
    model, plain = gpt(path, tied_head=True, **KINDS[kind]), TinyGPT(tied_head=True)
    expected = dict(plain.named_parameters(remove_duplicate=False))

    for name, value in expected.items():
        found = get_full_param(model, name)
        assert torch.equal(found, value), name
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


@every_kind
@both_paths
def test_a_parameters_full_value_is_read_and_written_by_its_name(
    ranks: RankCount, path: str, world_size: int, kind: str
) -> None:
    """Every one, a tied one under all its names; writing sends nothing."""
    ranks(world_size).run(check_values, path, kind)


@on_ranks(3)
def test_no_more_bytes_are_sent_than_the_parameter_has(world: World) -> None:
    """Each part once, from the rank that holds it."""
    model = gpt("composable")
    for name, value in TinyGPT().named_parameters():
        with record_steps() as calls:
            get_full_param(model, name)
        assert sum(call.nbytes for call in calls) == value.numel() * 4, name
        assert {call.op for call in calls} == {"broadcast"}


def check_gradients(world: World, path: str, kind: str) -> None:
    model, plain = gpt(path, **KINDS[kind]), TinyGPT()
    inputs = [gpt_input(0, rank) for rank in range(world.world_size)]
    assert get_full_grad(model, "norm.weight") is None
    averaged_gradients(plain, inputs)
    backward(loss_of(model, inputs[world.rank]))
    within = 0.05 if kind == "half" else tolerance_at(world.world_size)

    for name, parameter in plain.named_parameters():
        found = get_full_grad(model, name)
        assert found is not None
        assert parameter.grad is not None
        assert torch.allclose(found, parameter.grad, rtol=0, atol=within), name
        set_full_grad(model, name, torch.ones_like(parameter))
    set_full_grad(model, "norm.weight", None)
    set_full_grad(model, "norm.bias", None)
    set_full_grad(model, "norm.bias", torch.full((8,), 2.0))
    names = ("head.weight", "norm.weight", "norm.bias")
    before = [get_full_param(model, name) for name in names]
    optim.SGD(model.parameters(), lr=1.0).step()

    assert torch.equal(get_full_param(model, "head.weight"), before[0] - 1.0)
    assert torch.equal(get_full_param(model, "norm.weight"), before[1])
    assert torch.equal(get_full_param(model, "norm.bias"), before[2] - 2.0)


@every_kind
@both_paths
def test_a_parameters_full_gradient_is_read_and_written_by_its_name(
    ranks: RankCount, path: str, world_size: int, kind: str
) -> None:
    """The mean over ranks; the optimizer steps on what was written."""
    ranks(world_size).run(check_gradients, path, kind)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad, optim.Rprop, optim.ASGD])
@both_paths
@on_ranks(2)
def test_a_parameters_optimizer_state_is_read_and_written_by_its_name(
    world: World, path: str, kind: type[optim.Optimizer]
) -> None:
    """Tensors in full shapes and counters, also of a parameter without dimensions."""
    make: Any = kind
    model, plain = mixed(path), Mixed()
    ours, reference = (make(m.parameters(), lr=0.05) for m in (model, plain))
    empty = get_full_optim_state(model, ours, "first.weight")
    assert (empty == {}) == (kind is not optim.Adagrad)
    train_sharded(model, ours, world, range(2))
    train_plain(plain, reference, world.world_size, range(2))

    expected = by_name(plain, reference)["state"]
    for name, _ in plain.named_parameters():
        found = get_full_optim_state(model, ours, name)
        assert _same(found, expected.get(name, {})), name
        new = {key: torch.full_like(value, 4.0) for key, value in found.items()}
        with record_steps() as calls:
            set_full_optim_state(model, ours, name, new)
        assert calls == []
        assert _same(get_full_optim_state(model, ours, name), new)
    train_sharded(model, ours, world, range(2, 3))  # it still fits


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


def check_refused(world: World) -> dict[str, str]:
    model = gpt("wrapper")
    model.get_parameter("positions.weight").requires_grad_(False)
    optimizer = optim.AdamW([model.get_parameter("head.weight")])
    backward(loss_of(model, gpt_input(0, world.rank)))
    optimizer.step()
    before = dict(model.state_dict())

    def inside() -> Tensor:
        with unshard_params(model, writeback=False):
            return get_full_param(model, "head.weight")

    texts = {
        "name": message_of(lambda: get_full_param(model, "blocks.0.norm.weigth")),
        "far": message_of(lambda: get_full_grad(model, "zzz")),
        "shape": message_of(
            lambda: set_full_param(model, "head.weight", torch.ones(3))
        ),
        "kind": message_of(lambda: set_full_param(model, "head.weight", 3)),  # type: ignore[arg-type]
        "frozen": message_of(
            lambda: set_full_grad(model, "positions.weight", torch.ones(6, 8))
        ),
        "other": message_of(
            lambda: get_full_optim_state(model, optimizer, "norm.weight")
        ),
        "key": message_of(
            lambda: set_full_optim_state(model, optimizer, "head.weight", {"exp": 1})
        ),
        "state": message_of(
            lambda: set_full_optim_state(
                model, optimizer, "head.weight", {"exp_avg": torch.ones(3)}
            )
        ),
        "inside": message_of(inside),
        "meta": message_of(on_meta),
        "holds": "yes" * bool(model.get_parameter("head.weight").numel()),
    }
    assert _same(dict(model.state_dict()), before)
    return texts


def on_meta() -> None:
    with torch.device("meta"):
        model = fully_shard(nn.Linear(2, 2))
    assert get_full_param(model, "weight").is_meta
    set_full_param(model, "weight", torch.ones(2, 2))


@pytest.mark.req("U-02")
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(
    ranks: RankCount,
) -> None:
    """With the names that come close, the shape expected, or the moment."""
    found = ranks(2).run(check_refused)
    assert any(texts["holds"] for texts in found)
    for texts in found:
        assert (
            "has no parameter 'blocks.0.norm.weigth'. Close to it are 'bloc"
            in (texts["name"])
        )
        assert "has no parameter 'zzz'. It has 29" in texts["far"]
        assert "the first are [" in texts["far"]
        assert (
            "expects for parameter 'head.weight' its full shape (17, 8), got (3,). Pass"
            in texts["shape"]
        )
        assert "got int. Pass the whole tensor" in texts["kind"]
        assert "'positions.weight', which is frozen" in texts["frozen"]
        assert "'norm.weight' is not in the AdamW" in texts["other"]
        if texts["holds"]:
            assert (
                "AdamW keeps no 'exp' for 'head.weight'. Close to it are 'exp_avg'"
                in texts["key"]
            )
        assert "full shape (17, 8), got (3,)" in texts["state"]
        assert "inside unshard_params of" in texts["inside"]
        assert "which is on meta and has no memory yet" in texts["meta"]
