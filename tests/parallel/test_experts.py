"""Experts on a mesh of their own: ranks hold other experts, all have data."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

from composable_fsdp import (
    Block,
    CheckpointError,
    CompositionError,
    CPUOffload,
    DesyncError,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    PhaseError,
    PlanError,
    ShardingStrategy,
    StateDictType,
    apply_activation_checkpointing,
    clip_grad_norm_,
    describe,
    export_safetensors,
    find_nonfinite,
    flat_parameters,
    fully_shard,
    get_full_grad,
    get_full_param,
    load,
    no_sync,
    open_source,
    optim_state_dict,
    optim_state_dict_to_load,
    plan,
    save,
    set_gradient_divide_factor,
    set_state_dict_type,
)
from tests.parallel.experts import (
    Layer,
    Model,
    Recipe,
    batch,
    layers_of,
    local,
    loss_of,
)
from tests.parallel.models import forget_meshes
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import message_of
from tests.support.world import World

# Four ranks and DTensors: a combination takes seconds.
pytestmark = pytest.mark.few(1)

_dcp: Any = torch.distributed.checkpoint
MIXTRAL, DEEPSEEK = Recipe(), Recipe(experts=6, top=3, shared=True)
RECIPES = {
    "mixtral": MIXTRAL,
    "each rank alone": Recipe(ep=4),
    "deepseek": DEEPSEEK,
    "uneven": Recipe(experts=3),
    "more ranks than experts": Recipe(experts=3, ep=4),
    "starved": Recipe(top=1, starved=True),
    "not divided": Recipe(ep=1),
    "listed": Recipe(listed=True, shared=True),
    "listed, each rank alone": Recipe(listed=True, ep=4),
    "listed, uneven": Recipe(listed=True, experts=3),
    "listed, starved": Recipe(listed=True, top=1, starved=True),
}
recipes = pytest.mark.parametrize("kind", RECIPES)


def data_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return all ranks of a mesh of experts as one dim."""
    return mesh._flatten("dp")


def pair(recipe: Recipe, world: World, **options: Any) -> tuple[Model, Model]:
    """Return the sharded model of divided experts, and the plain model."""
    mesh = recipe.mesh(world)
    model = recipe.sharded(mesh["ep"], mesh["edp"], data_of(mesh), **options)
    return model, recipe.plain()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that turns no rounding error into a step."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def step_gradients(model: nn.Module, plain: nn.Module, world: World, step: int) -> None:
    """Leave the gradients of a step in both; the losses must be equal."""
    loss = loss_of(model, batch(step, world.rank))
    backward(loss)
    parts = [loss_of(plain, batch(step, rank)) for rank in range(world.world_size)]
    backward(torch.stack(parts).mean())
    torch.testing.assert_close(loss, parts[world.rank], rtol=1e-5, atol=1e-6)


def train(
    model: nn.Module, plain: nn.Module, world: World, steps: int = 3
) -> torch.optim.Optimizer:
    """Train both, and compare losses, norms and in the end the parameters."""
    both = adamw(model), adamw(plain)
    for step in range(steps):
        step_gradients(model, plain, world, step)
        norm = clip_grad_norm_(model, 0.5)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
        assert world.all_equal(norm)
        for each in both:
            each.step()
            each.zero_grad()
    require_equal(model, plain)
    return both[0]


def require_equal(model: nn.Module, plain: nn.Module) -> None:
    """Every parameter of the plain model; sums are in another order."""
    own = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        # Experts in modules of their own are on their ranks alone.
        if name in own:
            torch.testing.assert_close(
                get_full_param(model, name), parameter.detach(), rtol=1e-5, atol=1e-6
            )


def require_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Every gradient of the plain model that this rank has a part of."""
    own = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if name in own:
            torch.testing.assert_close(
                get_full_grad(model, name), parameter.grad, rtol=1e-5, atol=1e-6
            )


@pytest.mark.few
@pytest.mark.req("M-02")
@on_ranks(4)
@recipes
def test_training_is_that_of_the_plain_model(world: World, kind: str) -> None:
    """Losses, norms and weights of the plain model on the data of all ranks."""
    model, plain = pair(RECIPES[kind], world)

    train(model, plain, world)


OPTIONS: dict[str, dict[str, Any]] = {
    "SHARD_GRAD_OP": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"strategy": ShardingStrategy.NO_SHARD},
    "NO_SHARD experts": {"experts": {"strategy": ShardingStrategy.NO_SHARD}},
    "elements": {"block": Block.ELEMENT},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "offload of experts": {"experts": {"cpu_offload": CPUOffload(offload_params=True)}},
    "prefetch": {"forward_prefetch": True, "backward_prefetch": None},
    "reduce in float64": {
        "mixed_precision": MixedPrecision(reduce_dtype=torch.float64)
    },
    "compute in float64": {
        "mixed_precision": MixedPrecision(
            param_dtype=torch.float64, cast_forward_inputs=True
        )
    },
}


@on_ranks(4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["deepseek", "each rank alone", "listed"])
def test_strategies_precision_and_offload_train_alike(
    world: World, options: str, kind: str
) -> None:
    """The same under each option, for the experts, for the rest, for both."""
    model, plain = pair(RECIPES[kind], world, **OPTIONS[options])

    train(model, plain, world)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["deepseek", "listed"])
@pytest.mark.parametrize("experts", ["copied", "sharded"])
def test_experts_inside_of_hybrid_sharding(
    world: World, experts: str, kind: str
) -> None:
    """Experts are divided over the shard ranks, and copied or sharded by replicas."""
    recipe = RECIPES[kind]
    forget_meshes()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    own = {"copied": ShardingStrategy.NO_SHARD, "sharded": ShardingStrategy.FULL_SHARD}
    model = recipe.sharded(
        mesh["shard"],
        mesh["replicate"],
        mesh,
        strategy=ShardingStrategy.HYBRID_SHARD,
        experts={"strategy": own[experts]},
    )

    train(model, recipe.plain(), world)


@on_ranks(8)
@pytest.mark.parametrize("kind", ["deepseek", "listed"])
def test_hybrid_experts_inside_of_hybrid_sharding(world: World, kind: str) -> None:
    """Two replicas; in each, two shards of each of the two ranks' experts."""
    recipe = RECIPES[kind]
    forget_meshes()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "dp", "ep"))
    shard = mesh["dp", "ep"]._flatten("all")
    model = recipe.divided(mesh["ep"])
    rest: dict[str, Any] = {
        "process_group": (shard.get_group(), mesh["replicate"].get_group())
    }
    for layer in layers_of(model):
        fully_shard(
            layer.experts,
            device_mesh=mesh["replicate", "dp"],
            **said(recipe, mesh),
        )
        fully_shard(layer, **rest)
    fully_shard(model, **rest)

    train(model, recipe.plain(), world)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["mixtral", "each rank alone", "listed"])
def test_experts_compute_in_bfloat16(world: World, kind: str) -> None:
    """Gradients of the plain model but for the rounding, and one norm on all ranks."""
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = pair(RECIPES[kind], world, mixed_precision=low)
    backward(loss_of(model, batch(0, world.rank)))
    parts = [loss_of(plain, batch(0, rank)) for rank in range(world.world_size)]
    backward(torch.stack(parts).mean())

    norm = clip_grad_norm_(model, 1e3)

    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e3)
    torch.testing.assert_close(norm, expected, rtol=0.05, atol=0.0)
    assert world.all_equal(norm)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["mixtral", "listed"])
def test_values_of_the_first_rank_go_to_the_ranks_of_its_experts(
    world: World, kind: str
) -> None:
    """sync_module_states keeps the experts of other ranks."""
    recipe = RECIPES[kind]
    mesh = recipe.mesh(world)
    model = recipe.divided(mesh["ep"])
    first = mesh["edp"].get_local_rank() == 0
    for layer in layers_of(model):
        if not first:
            for value in layer.experts.parameters():
                local(value.detach()).zero_()
        fully_shard(
            layer.experts,
            device_mesh=mesh["edp"],
            sync_module_states=True,
            **said(recipe, mesh),
        )
    fully_shard(model, device_mesh=data_of(mesh))

    train(model, recipe.plain(), world, steps=1)


@on_ranks(4)
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
@recipes
def test_the_norm_counts_each_expert_once(
    world: World, kind: str, order: float
) -> None:
    """The norm over all experts of all ranks, and gradients scaled by one factor."""
    model, plain = pair(RECIPES[kind], world)
    step_gradients(model, plain, world, 0)

    norm = clip_grad_norm_(model, 0.5, order)

    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, order)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
    assert world.all_equal(norm)
    require_equal_gradients(model, plain)


@on_ranks(4)
def test_the_norm_of_experts_alone_is_over_all_of_them(world: World) -> None:
    """A call with the parameters of one layer's experts."""
    model, plain = pair(MIXTRAL, world)
    step_gradients(model, plain, world, 0)

    norm = clip_grad_norm_(layers_of(model)[0].experts.parameters(), 0.5)

    mine = layers_of(plain)[0].experts.parameters()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(mine, 0.5))


@on_ranks(4)
@recipes
def test_gradients_accumulate_without_sync(world: World, kind: str) -> None:
    """Two backwards, of which the first sends nothing but tokens."""
    model, plain = pair(RECIPES[kind], world)

    with no_sync(model):
        step_gradients(model, plain, world, 0)
    step_gradients(model, plain, world, 1)

    torch.testing.assert_close(
        clip_grad_norm_(model, 0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    )
    require_equal_gradients(model, plain)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["deepseek", "starved", "listed"])
def test_checkpointed_layers_train_alike(world: World, kind: str) -> None:
    """Forward runs twice, all-to-all included."""
    recipe = RECIPES[kind]
    mesh = recipe.mesh(world)
    model = recipe.divided(mesh["ep"])
    apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, Layer)
    )
    data = data_of(mesh)
    for layer in layers_of(model):
        fully_shard(layer.experts, device_mesh=mesh["edp"], **said(recipe, mesh))
        fully_shard(layer, device_mesh=data)
    fully_shard(model, device_mesh=data)

    train(model, recipe.plain(), world)


def said(recipe: Recipe, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the argument that tells of plain experts."""
    return {"expert_mesh": mesh["ep"]} if recipe.listed else {}


@on_ranks(4)
@pytest.mark.parametrize("kind", ["mixtral", "listed"])
@pytest.mark.parametrize("frozen", ["experts", "rest", "up"])
def test_frozen_parts_train_alike(world: World, frozen: str, kind: str) -> None:
    """Frozen experts, a frozen rest, and one frozen matrix of all experts."""
    recipe = RECIPES[kind]
    mesh, plain = recipe.mesh(world), recipe.plain()
    model = recipe.divided(mesh["ep"])
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            chosen = {
                "experts": ".experts." in name,
                "rest": ".experts." not in name,
                "up": name.removesuffix(".weight").endswith(".up"),
            }[frozen]
            parameter.requires_grad_(not chosen)
    data = data_of(mesh)
    for layer in layers_of(model):
        fully_shard(layer.experts, device_mesh=mesh["edp"], **said(recipe, mesh))
    fully_shard(model, device_mesh=data)

    train(model, plain, world)


@on_ranks(4)
def test_the_wrapper_trains_alike(world: World) -> None:
    """FullyShardedDataParallel around experts and around the model."""
    recipe = DEEPSEEK
    mesh = recipe.mesh(world)
    model, plain = recipe.divided(mesh["ep"]), recipe.plain()
    for layer in layers_of(model):
        layer.experts = FullyShardedDataParallel(layer.experts, device_mesh=mesh["edp"])
    wrapped = FullyShardedDataParallel(model, device_mesh=data_of(mesh))
    both = adamw(wrapped), adamw(plain)

    for step in range(2):
        step_gradients(wrapped, plain, world, step)
        torch.testing.assert_close(
            wrapped.clip_grad_norm_(0.5),
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
        )
        for each in both:
            each.step()
            each.zero_grad()

    with FullyShardedDataParallel.state_dict_type(
        wrapped, StateDictType.FULL_STATE_DICT
    ):
        state = wrapped.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@on_ranks(4)
@pytest.mark.parametrize("ep", [2, 4])
def test_training_is_that_of_fsdp2_with_its_factor(world: World, ep: int) -> None:
    """torch's fully_shard over the same meshes, and the factor that it needs."""
    recipe = Recipe(ep=ep)
    mesh = recipe.mesh(world)
    data = data_of(mesh)
    model = recipe.sharded(mesh["ep"], mesh["edp"], data)
    torchs: Any = recipe.divided(mesh["ep"])
    for layer in layers_of(torchs):
        experts: Any = fsdp2(layer.experts, mesh=mesh["edp"])
        experts.set_gradient_divide_factor(float(world.world_size))
        # gloo has no average by another number than that of the ranks; a single rank
        # divides only if that is not said.
        if ep < world.world_size:
            experts.set_force_sum_reduction_for_comms(True)
        fsdp2(layer, mesh=data)
    fsdp2(torchs, mesh=data)
    both = (
        adamw(model),
        torch.optim.AdamW(torchs.parameters(), lr=1e-2, eps=1e-3, foreach=False),
    )

    for step in range(3):
        losses = [loss_of(each, batch(step, world.rank)) for each in (model, torchs)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss, optim in zip(losses, both, strict=True):
            backward(loss)
            optim.step()
            optim.zero_grad()

    for name, value in torchs.named_parameters():
        torch.testing.assert_close(get_full_param(model, name), value.full_tensor())


@on_ranks(4)
def test_a_divide_factor_of_the_user_goes_first(world: World) -> None:
    """As FSDP2 scripts set for experts: the number of all ranks, or any other."""
    model, plain = pair(MIXTRAL, world)
    for layer in layers_of(model):
        set_gradient_divide_factor(layer.experts, 8.0)

    step_gradients(model, plain, world, 0)

    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        factor = 0.5 if ".experts." in name else 1.0
        torch.testing.assert_close(get_full_grad(model, name), factor * parameter.grad)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["mixtral", "listed", "listed, each rank alone"])
def test_a_copy_divides_alike(world: World, kind: str) -> None:
    """A deep copy before the first forward, and one after."""
    model, plain = pair(RECIPES[kind], world)
    early = copy.deepcopy(model)
    for each in (early, model, copy.deepcopy(model)):
        plain.zero_grad()
        step_gradients(each, plain, world, 0)
        torch.testing.assert_close(
            clip_grad_norm_(each, 1e3),
            nn.utils.clip_grad_norm_(plain.parameters(), 1e3),
        )
        each.zero_grad()


@on_ranks(4)
@recipes
def test_state_dicts_hold_all_experts(world: World, kind: str) -> None:
    """Names, shapes and values of the plain model, of weights and optimizer state."""
    model, plain = pair(RECIPES[kind], world)
    optimizer = train(model, plain, world)

    state, moments = model.state_dict(), optim_state_dict(model, optimizer)

    assert set(state) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        assert world.all_equal(state[name])
    names = set(dict(plain.named_parameters()))
    assert set(moments["state"]) == names == set(moments["param_groups"][0]["params"])
    assert world.all_equal(moments["state"])
    again, _ = pair(RECIPES[kind], world)
    other = adamw(again)
    again.load_state_dict(RECIPES[kind].plain().state_dict())
    again.load_state_dict(state)
    optim_state_dict_to_load(again, other, moments, load_directly=True)
    for name, value in optim_state_dict(again, other)["state"].items():
        assert value["exp_avg"].shape == plain.get_parameter(name).shape
        assert torch.equal(value["exp_avg"], moments["state"][name]["exp_avg"])
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name])


@on_ranks(4)
@pytest.mark.parametrize("to", ["plain", "sharded", "other mesh"])
@pytest.mark.parametrize("listed", [False, True])
def test_dcp_goes_to_any_mesh(
    world: World, to: str, listed: bool, tmp_path: Path
) -> None:
    """Each rank writes its rectangle; the checkpoint has all experts."""
    recipe = Recipe(experts=8, top=3, shared=True, listed=listed)
    model, plain = pair(recipe, world)
    train(model, plain, world)
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    _dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)

    target = recipe.plain()
    for parameter in target.parameters():
        parameter.data.zero_()
    if to == "sharded":
        fully_shard(target)
    elif to == "other mesh":
        four = Recipe(experts=8, top=3, shared=True, ep=4, listed=listed)
        target, _ = pair(four, world)
    if to != "plain":
        set_state_dict_type(target, StateDictType.SHARDED_STATE_DICT)
    state = target.state_dict()
    _dcp.load({"model": state}, checkpoint_id=tmp_path)
    target.load_state_dict(state)

    if to == "plain":
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(target.state_dict()[name], value)
    else:
        require_equal(target, plain)


LISTED = Recipe(experts=8, top=3, shared=True, listed=True)
NATIVE = {
    "deepseek": DEEPSEEK,
    "uneven": RECIPES["uneven"],
    "each rank alone": RECIPES["each rank alone"],
    "listed": LISTED,
    "listed, each rank alone": replace(LISTED, ep=4),
}


@pytest.mark.req("M-02")
@on_ranks(4)
@pytest.mark.parametrize("kind", NATIVE)
def test_native_checkpoints_go_to_any_mesh(
    world: World, kind: str, tmp_path: Path
) -> None:
    """Experts and all else, with moments, each element once; bit by bit."""
    recipe = NATIVE[kind]
    model, plain = pair(recipe, world)
    optim = train(model, plain, world, steps=2)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    moments = optim_state_dict(model, optim)["state"]

    save(tmp_path / "new", model, optim)

    with open_source(tmp_path / "new") as source:
        assert {name: info.shape for name, info in source.model.items()} == {
            name: tuple(value.shape) for name, value in weights.items()
        }
        groups = source.param_groups
        assert groups is not None
        assert sorted(groups[0]["params"]) == sorted(weights)
    for ep in (1, 2, 4):
        again, _ = pair(replace(recipe, ep=ep), world)
        other = adamw(again)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        load(tmp_path / "new", again, other)
        found = optim_state_dict(again, other)["state"]
        for name, value in again.state_dict().items():
            assert torch.equal(value, weights[name]), name
            for key, moment in moments[name].items():
                assert torch.equal(found[name][key], moment), (name, key)
    alone = recipe.plain()
    save(tmp_path / "again", again, other)
    load(tmp_path / "again", alone, adamw(alone))
    for name, value in alone.named_parameters():
        assert torch.equal(value.detach(), weights[name])
    load(tmp_path / "again", model, optim)


@pytest.mark.req("K-01")
@on_ranks(4)
def test_native_checkpoints_refuse_to_lose_experts(
    world: World, tmp_path: Path
) -> None:
    """Of a name that two ranks use, and of options that rank 0 has otherwise."""
    model, _ = pair(LISTED, world)
    own = [p for n, p in model.named_parameters() if ".each." in n]
    rest = [p for n, p in model.named_parameters() if ".each." not in n]
    lr = 0.1 + 0.1 * (world.rank % 2)
    both: list[dict[str, Any]] = [{"params": rest}, {"params": own, "lr": lr}]
    options = torch.optim.SGD(both, lr=0.1)
    text = message_of(lambda: save(tmp_path / "options", model, options))
    assert "option 'lr' of 'param_groups[1]' is 0.1 on ranks 0" in text
    assert " and 0.2 on ranks 1" in text

    groups: list[dict[str, Any]] = [{"params": rest}, {"params": own}]
    if world.rank % 2:
        groups = [{"params": rest}, {"params": []}, {"params": own}]
    options = torch.optim.SGD(groups, lr=0.1)
    text = message_of(lambda: save(tmp_path / "groups", model, options))
    assert "in group 2 of the optimizer, and rank 0 has no such group" in text

    mesh = LISTED.mesh(world)
    same = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(same[0], device_mesh=mesh["edp"], expert_mesh=mesh["ep"])
    fully_shard(same, device_mesh=data_of(mesh))
    text = message_of(lambda: save(tmp_path / "names", same))
    assert "'0.weight' (and 1 more: '0.bias') is an expert on rank 0 and" in text
    text = message_of(lambda: export_safetensors(tmp_path / "files", model))
    assert "has an expert_mesh, and this rank its own experts alone" in text
    # The first rank removes its files after it has told the others.
    dist.barrier()
    assert not list(tmp_path.iterdir())


@on_ranks(4)
def test_a_bad_gradient_is_found_on_all_ranks(world: World) -> None:
    """An expert of a single rank, by its name, and in the error of clipping."""
    model, plain = pair(MIXTRAL, world)
    step_gradients(model, plain, world, 0)
    assert find_nonfinite(model) == ()
    # The shard of rank 2 holds the last rows of the first half of the experts.
    if world.rank == 2:
        shown = layers_of(model)[1].experts.down.grad
        assert isinstance(shown, Tensor)
        shown.view(-1)[0] = float("nan")

    found = find_nonfinite(model)

    assert [(each.parameter, each.ranks) for each in found] == [
        ("layers.1.experts.down", (2,))
    ]
    assert world.all_equal(str(found))
    with pytest.raises(RuntimeError, match=r"'layers.1.experts.down' is nan in 1 of"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


@on_ranks(4)
def test_a_bad_gradient_of_plain_experts_is_found(world: World) -> None:
    """The expert that one pair of ranks holds, by its number, on all ranks."""
    model, plain = pair(RECIPES["listed"], world)
    step_gradients(model, plain, world, 0)
    assert find_nonfinite(model) == ()
    name = "layers.0.experts.each.3.down.weight"
    own = dict(model.named_parameters())
    shown = own[name].grad if name in own else None
    if shown is not None and shown.numel():
        shown.view(-1)[0] = float("inf")

    found = find_nonfinite(model)

    assert [each.parameter for each in found] == [name]
    assert world.all_equal(str(found))
    with pytest.raises(RuntimeError, match=rf"'{name}' is inf in 1 of"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


@on_ranks(4)
def test_different_experts_are_no_different_weights(world: World) -> None:
    """No warning for experts that differ by design, an error for replicas of one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = pair(MIXTRAL, world, check_weights="error")
        loss_of(model, batch(0, world.rank))

    mesh = MIXTRAL.mesh(world)
    other = MIXTRAL.divided(mesh["ep"])
    with torch.no_grad():
        made: Any = layers_of(other)[1].experts.up
        made.to_local().add_(world.rank)
    for layer in layers_of(other):
        fully_shard(layer.experts, device_mesh=mesh["edp"], check_weights="error")
    fully_shard(other, device_mesh=data_of(mesh))
    with pytest.raises(DesyncError, match=r"parameter 'layers.1.experts.up' has other"):
        loss_of(other, batch(0, world.rank))


@on_ranks(4)
def test_experts_without_a_word_are_refused(world: World) -> None:
    """Local experts: no rank can know the norm, so no rank gets a number of its own."""
    recipe = Recipe(listed=True)
    mesh = recipe.mesh(world)
    model = recipe.sharded(
        mesh["ep"], mesh["edp"], data_of(mesh), experts={"expert_mesh": None}
    )
    backward(loss_of(model, batch(0, world.rank)))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for call in (lambda: clip_grad_norm_(model, 1.0), lambda: find_nonfinite(model)):
        with pytest.raises(CompositionError) as caught:
            call()
        text = str(caught.value)
        assert "got units with gradients over different ranks: " in text
        assert "(root) over ranks [0, 1, 2, 3], 'layers.0.experts' over ranks [" in text
        assert "pass them to fully_shard with expert_mesh=mesh['ep'], or as" in text

    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, gradients, after))
    optimizer = adamw(model)
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        set_state_dict_type(model, kind)
        takes: tuple[Callable[[], Any], ...] = (
            model.state_dict,
            lambda: optim_state_dict(model, optimizer),
        )
        for take in takes:
            with pytest.raises(CheckpointError) as told:
                take()
            text = str(told.value)
            assert "is trained by 2 ranks of 4, so other ranks have other" in text
            assert "Pass expert_mesh=mesh['ep'] to fully_shard, or DTensors" in text


@on_ranks(4)
def test_units_over_other_groups_of_the_same_ranks(world: World) -> None:
    """A hybrid unit beside one over all ranks: the data are the same, and the norm."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model = copy.deepcopy(plain)
    fully_shard(model[0], device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    fully_shard(model, device_mesh=mesh._flatten("all"))
    x = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(1))

    backward(model(x[world.rank]).square().mean())
    backward(plain(x).square().mean())

    torch.testing.assert_close(
        clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    )


@on_ranks(4)
def test_plain_units_over_the_ranks_of_experts_are_refused(world: World) -> None:
    """The same groups, and experts alone are over the data of all ranks."""
    mesh = MIXTRAL.mesh(world)
    model = MIXTRAL.divided(mesh["ep"])
    for layer in layers_of(model):
        fully_shard(layer.experts, device_mesh=mesh["edp"])
        fully_shard(layer.router, device_mesh=mesh["edp"])
    fully_shard(model, device_mesh=data_of(mesh))
    backward(loss_of(model, batch(0, world.rank)))
    chosen = [p for layer in layers_of(model) for p in layer.experts.parameters()]

    assert world.all_equal(clip_grad_norm_(chosen, 1e9))
    chosen += layers_of(model)[0].router.parameters()
    with pytest.raises(CompositionError, match=r"'layers.0.router' over ranks \["):
        clip_grad_norm_(chosen, 1.0)


@on_ranks(4)
def test_units_over_fewer_ranks_are_refused(world: World) -> None:
    """One unit is averaged over two ranks, and would be clipped by two numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    fully_shard(model[0], device_mesh=mesh["b"])
    fully_shard(model, device_mesh=mesh._flatten("all"))
    backward(model(torch.ones(2, 5)).sum())

    with pytest.raises(CompositionError, match=r"clip_grad_norm_ got units with grad"):
        clip_grad_norm_(model, 1.0)
    # Each alone has a norm of its ranks.
    assert clip_grad_norm_(model[0], 1e9) > 0
    assert clip_grad_norm_(model[1], 1e9) > 0


def alone() -> dist.ProcessGroup:
    """Return a group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    found: dist.ProcessGroup = groups[dist.get_rank()]
    return found


@on_ranks(4)
def test_meshes_that_do_not_multiply_are_refused(world: World) -> None:
    """Two ranks have the same experts and would never exchange gradients."""
    mesh = MIXTRAL.mesh(world)
    model = MIXTRAL.divided(mesh["ep"])
    one = alone()
    for layer in layers_of(model):
        fully_shard(layer.experts, process_group=one)
    fully_shard(model, device_mesh=data_of(mesh))

    with pytest.raises(CompositionError) as caught:
        loss_of(model, batch(0, world.rank))

    text = str(caught.value)
    assert "holds DTensors over 2 ranks and is sharded over 1; the model" in text
    assert "over 4. Expected that the numbers multiply" in text
    assert "pass mesh['edp'] to their fully_shard" in text


@on_ranks(4)
def test_a_plain_parameter_beside_is_refused(world: World) -> None:
    """Nobody would reduce its gradients over the ranks of other experts."""
    mesh = MIXTRAL.mesh(world)
    model = MIXTRAL.divided(mesh["ep"])
    layers_of(model)[0].experts.scale = nn.Parameter(torch.ones(1))
    for layer in layers_of(model):
        fully_shard(layer.experts, device_mesh=mesh["edp"])
    fully_shard(model, device_mesh=data_of(mesh))

    with pytest.raises(CompositionError) as caught:
        loss_of(model, batch(0, world.rank))

    text = str(caught.value)
    assert "Parameter 'layers.0.experts.scale' is plain, in a unit of DTensors" in text
    assert "Make it a DTensor over the same mesh (Replicate)" in text


@on_ranks(4)
def test_a_replicated_parameter_beside_counts_once(world: World) -> None:
    """A bias that all experts share: its gradient is a sum over all of them."""
    mesh = MIXTRAL.mesh(world)
    model, plain = MIXTRAL.divided(mesh["ep"]), MIXTRAL.plain()
    for each in (model, plain):
        for layer in layers_of(each):
            bias = torch.ones(1)
            if each is model:
                bias = distribute_tensor(bias, mesh["ep"], [Replicate()])
            layer.experts.bias = nn.Parameter(bias)
            layer.experts.register_forward_hook(_add_bias)
    for layer in layers_of(model):
        fully_shard(layer.experts, device_mesh=mesh["edp"])
    fully_shard(model, device_mesh=data_of(mesh))

    train(model, plain, world)


def _add_bias(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    bias: Any = module.bias
    if hasattr(bias, "to_local"):
        # Each rank has the gradients of its own rows: parts of a sum.
        bias = bias.to_local(grad_placements=[Partial()])
    shifted: Tensor = out + bias
    return shifted


@on_ranks(4)
def test_experts_called_outside_of_their_unit_are_refused(world: World) -> None:
    """Without the unit's forward nobody would divide the gradients of all tokens."""
    recipe = Recipe(ep=4)
    mesh = recipe.mesh(world)
    model = recipe.divided(mesh["ep"])
    for layer in layers_of(model):
        # The experts are a part of the unit, and the unit of a rank alone.
        layer.experts = nn.Sequential(layer.experts)
        fully_shard(layer.experts, device_mesh=mesh["edp"])
    fully_shard(model, device_mesh=data_of(mesh))
    rows = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(TypeError):
        loss_of(model, batch(0, world.rank))  # starts the tree; Sequential takes one

    part = layers_of(model)[0].experts[0]
    with pytest.raises(PhaseError, match=r"averages gradients over 4 ranks"):
        part(rows, [2])


@on_ranks(4)
def test_the_description_names_the_whole(world: World) -> None:
    """A reader sees that the unit is over other ranks, and holds a part."""
    model, _ = pair(MIXTRAL, world)

    text = str(describe(model))

    assert "layers.0-1.experts Stacked (2 x), sharded over 2 ranks" in text
    assert "part of (4, 8, 12) at" in text
    listed, _ = pair(RECIPES["listed"], world)
    others = [(world.rank ^ 1)]
    assert f"over 2 ranks, other experts on ranks {others}, " in str(describe(listed))
    assert describe(listed).as_dict()["units"][2]["experts"] == others
    made = str(plan(model))
    assert "2 parameters in float32, over 2 ranks" in made
    assert made.count("over 2 ranks") == 1


@on_ranks(4)
@pytest.mark.parametrize("kind", ["deepseek", "listed"])
def test_state_dicts_of_torch_hold_all_experts(world: World, kind: str) -> None:
    """get_state_dict of torch, sharded and, where torch finds the names, full."""
    model, plain = pair(RECIPES[kind], world)
    optimizer = train(model, plain, world, steps=1)
    state, moments = get_state_dict(model, optimizer)
    own = set(dict(model.named_parameters()))
    assert set(state) == set(moments["state"]) == own
    whole = StateDictOptions(full_state_dict=True)
    if kind == "listed":
        with pytest.raises(CompositionError, match=r"looks each name up in the module"):
            get_state_dict(model, optimizer, options=whole)
        return

    state, _ = get_state_dict(model, optimizer, options=whole)

    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def listed_model(world: World, **options: Any) -> tuple[Model, DeviceMesh]:
    """Return a model whose experts have the same names on all ranks."""
    recipe = Recipe(listed=True)
    mesh = recipe.mesh(world)
    model = recipe.divided(mesh["ep"])
    for layer in layers_of(model):
        layer.experts.each = nn.ModuleList(e for e in layer.experts.each if e)
        fully_shard(
            layer.experts, device_mesh=mesh["edp"], expert_mesh=mesh["ep"], **options
        )
    return fully_shard(model, device_mesh=data_of(mesh), **options), mesh


@on_ranks(4)
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_names_of_several_ranks_are_refused(world: World, kind: str) -> None:
    """Training goes, and no state dict loses an expert."""
    model, _ = listed_model(world)
    optimizer = adamw(model)
    backward(loss_of(model, batch(0, world.rank)))
    assert world.all_equal(clip_grad_norm_(model, 1.0))
    optimizer.step()
    set_state_dict_type(model, StateDictType[kind])

    takes: tuple[Callable[[], Any], ...] = (
        model.state_dict,
        lambda: optim_state_dict(model, optimizer),
    )
    for take in takes:
        with pytest.raises(CheckpointError) as caught:
            take()
        text = str(caught.value)
        assert "several ranks of the expert_mesh hold 'layers.0.experts.each." in text
        assert "nn.ModuleList with None in the places of other ranks' experts" in text
    set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    model.load_state_dict(model.state_dict())


@on_ranks(4)
def test_the_first_rank_alone_gets_no_experts(world: World) -> None:
    """rank0_only names the ways out, on all ranks."""
    model, _ = pair(Recipe(listed=True), world)
    optimizer = adamw(model)
    set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    )

    with pytest.raises(CompositionError, match="rank0_only expects experts as DTensor"):
        model.state_dict()
    with pytest.raises(CompositionError, match="rank0_only expects no expert_mesh"):
        optim_state_dict(model, optimizer)


@on_ranks(4)
def test_bad_expert_meshes_are_refused(world: World) -> None:
    """Before anything changes; each text names the argument."""
    mesh = Recipe(listed=True).mesh(world)
    data = data_of(mesh)
    bad: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"expert_mesh": mesh["ep"].get_group()}, TypeError, "expects a 1-D DeviceMe"),
        ({"expert_mesh": mesh}, PlanError, "expert_mesh expects a 1-D mesh, got 2-D"),
        (
            {"expert_mesh": mesh["ep"], "device_mesh": data},
            PlanError,
            "also share or copy this unit. Make one mesh of all data ranks",
        ),
    )
    for given, error, text in bad:
        linear = nn.Linear(3, 3)
        weight = linear.weight.detach().clone()
        given.setdefault("device_mesh", mesh["edp"])
        with pytest.raises(error, match=text):
            fully_shard(linear, **given)
        assert torch.equal(linear.weight, weight)
    with pytest.raises(PlanError, match="without parameters on this rank; expected an"):
        fully_shard(nn.ReLU(), device_mesh=mesh["edp"], expert_mesh=mesh["ep"])


@on_ranks(4)
def test_an_expert_mesh_has_to_reach_all_data(world: World) -> None:
    """Two ranks would have the same experts, and never exchange gradients."""
    mesh = Recipe(listed=True).mesh(world)
    one = alone()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], process_group=one, expert_mesh=mesh["ep"])
    fully_shard(model, device_mesh=data_of(mesh))

    with pytest.raises(CompositionError) as caught:
        model(torch.ones(1, 2))

    text = str(caught.value)
    assert "Unit '0' has an expert_mesh of 2 ranks and is sharded over 1" in text
    assert "pass device_mesh=mesh['edp'], expert_mesh=mesh['ep']" in text


@on_ranks(4)
def test_the_wrapper_takes_an_expert_mesh(world: World) -> None:
    """FullyShardedDataParallel around experts of this rank."""
    recipe = Recipe(listed=True)
    mesh = recipe.mesh(world)
    model, plain = recipe.divided(mesh["ep"]), recipe.plain()
    for layer in layers_of(model):
        layer.experts = FullyShardedDataParallel(
            layer.experts, device_mesh=mesh["edp"], expert_mesh=mesh["ep"]
        )
    wrapped = FullyShardedDataParallel(model, device_mesh=data_of(mesh))
    step_gradients(wrapped, plain, world, 0)

    torch.testing.assert_close(
        wrapped.clip_grad_norm_(0.5),
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
    )
    state = wrapped.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    wrapped.load_state_dict(state)


@on_ranks(4)
def test_ranks_have_equal_numbers_of_units_of_experts(world: World) -> None:
    """A unit per expert: other numbers of experts would meet in other calls."""
    recipe = Recipe(listed=True, experts=3)
    mesh = recipe.mesh(world)
    model = recipe.divided(mesh["ep"])
    for layer in layers_of(model):
        for each in filter(None, layer.experts.each):
            fully_shard(each, device_mesh=mesh["edp"], expert_mesh=mesh["ep"])
    fully_shard(model, device_mesh=data_of(mesh))

    with pytest.raises(DesyncError) as caught:
        loss_of(model, batch(0, world.rank))

    text = str(caught.value)
    assert "the option units with an expert_mesh of unit (root): 4 on ranks" in text


@on_ranks(4)
@pytest.mark.parametrize("ep", [2, 4])
def test_each_expert_may_be_a_unit(world: World, ep: int) -> None:
    """One expert is gathered at a time; state dicts hold the experts of all ranks."""
    recipe = Recipe(listed=True, ep=ep, shared=True)
    mesh, plain = recipe.mesh(world), recipe.plain()
    model = recipe.divided(mesh["ep"])
    for layer in layers_of(model):
        for each in filter(None, layer.experts.each):
            fully_shard(each, device_mesh=mesh["edp"], expert_mesh=mesh["ep"])
    fully_shard(model, device_mesh=data_of(mesh))

    optimizer = train(model, plain, world)

    state = model.state_dict()
    assert set(state) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    moments = optim_state_dict(model, optimizer)
    assert set(moments["state"]) == set(dict(plain.named_parameters()))
    model.load_state_dict(state)
    optim_state_dict_to_load(model, optimizer, moments, load_directly=True)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["mixtral", "each rank alone", "listed"])
def test_clipping_by_the_norm_of_a_rank_is_told(world: World, kind: str) -> None:
    """torch's function sees this rank's shards, and each rank is told."""
    model, plain = pair(RECIPES[kind], world)
    step_gradients(model, plain, world, 0)

    with pytest.warns(
        UserWarning, match="composable_fsdp: shard taken for the parameter: "
    ):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["mixtral", "each rank alone", "listed"])
def test_flat_parameters_of_experts_step_alike(world: World, kind: str) -> None:
    """An optimizer with a tensor per unit, clipped by the same norm."""
    model, plain = pair(RECIPES[kind], world)
    both = [
        torch.optim.AdamW(given, lr=1e-2, eps=1e-3)
        for given in (flat_parameters(model), plain.parameters())
    ]
    for step in range(2):
        step_gradients(model, plain, world, step)
        torch.testing.assert_close(
            clip_grad_norm_(model, 0.5),
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
            rtol=1e-5,
            atol=1e-6,
        )
        for each in both:
            each.step()
            each.zero_grad()

    require_equal(model, plain)


@pytest.mark.full_matrix("test_native_checkpoints_go_to_any_mesh has the state")
@on_ranks(4)
@pytest.mark.parametrize("kind", ["mixtral", "listed"])
def test_dcp_takes_optimizer_state_to_another_mesh(
    world: World, kind: str, tmp_path: Path
) -> None:
    """Moments of all experts, in groups whose names are in one order on all ranks."""
    recipe = RECIPES[kind]
    model, plain = pair(recipe, world)
    optimizer = train(model, plain, world, steps=2)
    whole = optim_state_dict(model, optimizer)
    assert world.all_equal(whole["param_groups"])
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    _dcp.save({"optim": optim_state_dict(model, optimizer)}, checkpoint_id=tmp_path)

    again, other_plain = pair(replace(recipe, ep=4), world)
    other = train(again, other_plain, world, steps=1)
    set_state_dict_type(again, StateDictType.SHARDED_STATE_DICT)
    state = {"optim": optim_state_dict(again, other)}
    _dcp.load(state, checkpoint_id=tmp_path)
    optim_state_dict_to_load(again, other, state["optim"], load_directly=True)

    set_state_dict_type(again, StateDictType.FULL_STATE_DICT)
    found = optim_state_dict(again, other)["state"]
    assert set(found) == set(whole["state"])
    for name, values in whole["state"].items():
        for key, value in values.items():
            assert torch.equal(found[name][key], value), (name, key)
