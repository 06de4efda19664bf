"""Tensor parallelism below: DTensors of ``parallelize_module`` in sharded units."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp import (
    Block,
    CPUOffload,
    FSDPError,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    OwnerState,
    ShardingStrategy,
    apply_activation_checkpointing,
    audit,
    clip_grad_norm_,
    describe,
    find_nonfinite,
    flat_parameters,
    fully_shard,
    get_full_grad,
    get_full_param,
    map_on_owners,
    no_sync,
    optim_state_dict,
    plan,
    set_full_grad,
    set_full_param,
    unshard_params,
)
from tests.parallel.models import (
    Model,
    Recipe,
    average,
    batch,
    block_of,
    data_rank,
    loss_of,
    mesh_of,
    norm_of,
    pair,
    sharded,
    whole,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World

# Four ranks and DTensors: a combination takes seconds.
pytestmark = pytest.mark.few(1)

RECIPES = {
    "columns and rows": Recipe(),
    "sequence": Recipe(sequence=True),
    "tied": Recipe(tied=True),
    "uneven": Recipe(hidden=9),
    "uneven sequence": Recipe(hidden=9, sequence=True),
}
recipes = pytest.mark.parametrize("kind", RECIPES)
OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"strategy": ShardingStrategy.NO_SHARD},
    "elements": {"block": Block.ELEMENT},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
}


def adam(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **how)


def train(
    model: nn.Module, plain: Model, mesh: DeviceMesh, steps: int = 3
) -> list[tuple[float, float]]:
    """Train both; return the losses side by side."""
    mine, other = adam(model), adam(plain, foreach=False)
    losses = []
    for step in range(steps):
        ids = batch(step, data_rank(mesh))
        pairs = [loss_of(each, ids) for each in (model, plain)]
        for loss in pairs:
            backward(loss)
        average(plain, mesh)
        for each in (mine, other):
            each.step()
            each.zero_grad()
        losses.append((pairs[0].item(), pairs[1].item()))
    return losses


def require_equal(model: nn.Module, plain: Model) -> None:
    """Every parameter of the plain tensor-parallel model, bit by bit."""
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        assert torch.equal(get_full_param(model, name), whole(parameter.detach())), name


@pytest.mark.few
@pytest.mark.req("M-01")
@on_ranks(4)
@recipes
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_training_is_that_of_the_plain_tensor_parallel_model(
    world: World, kind: str, dp: int
) -> None:
    """Loss and weights are those of parallelize_module alone, up to dp 2 bitwise."""
    mesh = mesh_of(world, dp)
    model, plain = pair(RECIPES[kind], mesh)

    losses = train(model, plain, mesh)

    if dp < 4:
        assert all(mine == other for mine, other in losses)
        require_equal(model, plain)
    else:
        # A reduce-scatter of four ranks sums in another order than an all-reduce.
        torch.testing.assert_close(*map(list, zip(*losses, strict=True)))


@on_ranks(4)
@pytest.mark.parametrize("options", OPTIONS)
def test_strategies_blocks_and_offload_train_alike(world: World, options: str) -> None:
    """The same under each strategy, cut anywhere, and with shards on the host."""
    mesh = mesh_of(world, 2)
    model, plain = pair(Recipe(sequence=True), mesh, **OPTIONS[options])

    losses = train(model, plain, mesh)

    assert all(mine == other for mine, other in losses)
    require_equal(model, plain)


@on_ranks(4)
def test_training_is_that_of_the_unsharded_model(world: World) -> None:
    """Against a model on a single rank that sees the data of all ranks."""
    mesh = mesh_of(world, 2)
    model, plain = sharded(Recipe().parallel(mesh), mesh), Recipe().plain()
    mine, other = adam(model), adam(plain)

    for step in range(3):
        backward(loss_of(model, batch(step, data_rank(mesh))))
        halves = [loss_of(plain, batch(step, part)) / 2 for part in range(2)]
        backward(torch.stack(halves).sum())
        norms = [
            clip_grad_norm_(model, 0.5),
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
        ]
        torch.testing.assert_close(norms[0], norms[1])
        for each in (mine, other):
            each.step()
            each.zero_grad()

    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(get_full_param(model, name), parameter.detach())


@on_ranks(8)
def test_tensor_parallelism_inside_of_hybrid_sharding(world: World) -> None:
    """Two replicas of two shards of two tensor-parallel ranks."""
    mesh = mesh_of(world, 2, replicas=2)
    model, plain = pair(
        Recipe(sequence=True), mesh, strategy=ShardingStrategy.HYBRID_SHARD
    )

    losses = train(model, plain, mesh)

    assert all(abs(mine - other) < 1e-6 for mine, other in losses)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            get_full_param(model, name), whole(parameter.detach())
        )


@on_ranks(4)
@recipes
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_the_norm_is_over_both_axes(
    world: World, kind: str, dp: int, order: float
) -> None:
    """Replicated parameters count once, cut ones over all ranks that cut them."""
    mesh = mesh_of(world, dp)
    model, plain = pair(RECIPES[kind], mesh)
    for each in (model, plain):
        backward(loss_of(each, batch(0, data_rank(mesh))))
    average(plain, mesh)
    gradients = [whole(p.grad) for p in plain.parameters() if p.grad is not None]
    expected = torch.stack([g.norm(order) for g in gradients]).norm(order)

    norm = clip_grad_norm_(model, 0.5, order)

    torch.testing.assert_close(norm, expected)
    assert world.all_equal(norm)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        clipped = whole(parameter.grad) * min(1.0, 0.5 / float(expected))
        torch.testing.assert_close(get_full_grad(model, name), clipped)


@on_ranks(4)
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_clipping_by_the_norm_of_a_rank_is_refused(world: World, dp: int) -> None:
    """torch's function sees plain parts, and would scale each rank differently."""
    mesh = mesh_of(world, dp)
    model, _ = pair(Recipe(sequence=True), mesh)
    optimizer = adam(model)
    backward(loss_of(model, batch(0, data_rank(mesh))))
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()

    audit(model)
    backward(loss_of(model, batch(1, data_rank(mesh))))

    with pytest.warns(
        UserWarning, match="composable_fsdp: shard taken for the parameter: "
    ):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@on_ranks(4)
def test_the_wrapper_trains_a_tensor_parallel_model(world: World) -> None:
    """FullyShardedDataParallel over the data dimension, as fully_shard."""
    mesh = mesh_of(world, 2)
    model, plain = Recipe(sequence=True).parallel(mesh), Recipe(True).parallel(mesh)
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=mesh["dp"],
        auto_wrap_policy=ModuleWrapPolicy({type(block_of(model))}),
    )

    losses = train(wrapped, plain, mesh)

    assert all(mine == other for mine, other in losses)
    require_equal(wrapped, plain)
    values = wrapped.state_dict()
    assert list(values) == list(Recipe().plain().state_dict())
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[name], whole(parameter.detach()))


@on_ranks(4)
def test_an_error_names_a_nonfinite_gradient_on_all_ranks(world: World) -> None:
    """A NaN on one tensor-parallel rank is known on every rank."""
    mesh = mesh_of(world, 2)
    model, _ = pair(Recipe(), mesh)
    backward(loss_of(model, batch(0, data_rank(mesh))))
    if world.rank == 3:
        gradient = block_of(model).up.weight.grad
        assert gradient is not None
        gradient[0, 0] = float("nan")

    found = find_nonfinite(model)

    assert len(found) == 1
    assert found[0].ranks == (3,)
    assert world.all_equal(found)
    with pytest.raises(RuntimeError, match="is nan in 1 of its elements"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


@pytest.mark.full_matrix("access/test_no_sync.py, without DTensors")
@on_ranks(4)
def test_accumulation_without_communication(world: World) -> None:
    """Backwards of no_sync are summed, as of the plain model."""
    mesh = mesh_of(world, 2)
    model, plain = pair(Recipe(sequence=True), mesh)
    first, second = (batch(step, data_rank(mesh)) for step in range(2))

    with no_sync(model):
        backward(loss_of(model, first))
    backward(loss_of(model, second))
    for ids in (first, second):
        backward(loss_of(plain, ids))
    average(plain, mesh)

    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(get_full_grad(model, name), whole(parameter.grad))


@on_ranks(4)
def test_mixed_precision_gathers_and_computes_in_the_narrow_dtype(world: World) -> None:
    """As torch's FSDP2 over the same mesh, bit by bit."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torchs

    mesh = mesh_of(world, 2)
    mine = sharded(
        Recipe().parallel(mesh),
        mesh,
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
    )
    other = Recipe().parallel(mesh)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    # FSDP2 shards DTensors only of modules that are DTensors as a whole.
    for block in other.blocks:
        torchs(block, mesh=mesh["dp"], mp_policy=policy)
    torchs(other, mesh=mesh["dp"], mp_policy=policy)

    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # FSDP2 warns of views that a module returns
            ids = batch(step, data_rank(mesh))
            losses = [loss_of(each, ids) for each in (mine, other)]
        for loss in losses:
            backward(loss)
        assert losses[0].item() == losses[1].item()
        for name, parameter in other.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(
                get_full_grad(mine, name), parameter.grad.full_tensor()
            )
            parameter.grad = None
        for parameter in mine.parameters():
            parameter.grad = None


@pytest.mark.full_matrix("runtime/test_freeze.py, without DTensors")
@on_ranks(4)
def test_freezing_and_unfreezing_between_steps(world: World) -> None:
    """A frozen parameter keeps its value and its form."""
    mesh = mesh_of(world, 2)
    model, plain = pair(Recipe(sequence=True), mesh)

    for frozen in (False, True, False):
        for each in (model, plain):
            each.embedding.requires_grad_(not frozen)
            block_of(each).up.weight.requires_grad_(not frozen)
        losses = train(model, plain, mesh, steps=1)
        assert all(mine == other for mine, other in losses)

    require_equal(model, plain)


@pytest.mark.full_matrix("entries/test_checkpoint.py, without DTensors")
@on_ranks(4)
def test_activation_checkpointing(world: World) -> None:
    """A recomputed forward redistributes as the first one did."""
    mesh = mesh_of(world, 2)
    model, plain = Recipe(sequence=True).parallel(mesh), Recipe(True).parallel(mesh)
    apply_activation_checkpointing(
        model, check_fn=lambda module: type(module).__name__ == "Block"
    )
    sharded(model, mesh)

    losses = train(model, plain, mesh)

    assert all(mine == other for mine, other in losses)


@on_ranks(4)
@pytest.mark.parametrize("options", OPTIONS)
def test_full_parameters_and_gradients_can_be_shown_and_written(
    world: World, options: str
) -> None:
    """Inside unshard_params the modules show the DTensors of the plain model."""
    mesh = mesh_of(world, 2)
    model, plain = pair(Recipe(sequence=True), mesh, **OPTIONS[options])
    for each in (model, plain):
        backward(loss_of(each, batch(0, data_rank(mesh))))
    average(plain, mesh)

    with unshard_params(model, with_grads=True):
        for (name, mine), (_, other) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert type(mine.data) is type(other.data), name
            assert torch.equal(whole(mine.detach()), whole(other.detach()))
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(whole(mine.grad), whole(other.grad))
            with torch.no_grad():
                mine.mul_(2.0)
                mine.grad.mul_(3.0)

    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        value, gradient = whole(parameter.detach()), whole(parameter.grad)
        found = get_full_grad(model, name)
        assert found is not None
        assert torch.equal(get_full_param(model, name), value * 2)
        assert torch.equal(found, gradient * 3)


@on_ranks(4)
def test_full_parameters_in_host_memory_and_in_full_precision(world: World) -> None:
    """Copies for the host, and copies of another dtype than compute's."""
    mesh = mesh_of(world, 2)
    half = MixedPrecision(param_dtype=torch.bfloat16)
    model, plain = pair(Recipe(), mesh, mixed_precision=half)

    with unshard_params(model, offload_to_cpu=True, writeback=False):
        shown = [whole(p.detach()) for p in model.parameters()]

    expected = [whole(p.detach()) for p in plain.parameters()]
    assert all(map(torch.equal, shown, expected))


@on_ranks(4)
def test_a_single_parameter_is_read_and_written_whole(world: World) -> None:
    """Names and shapes are those of the model without any parallelism."""
    mesh = mesh_of(world, 2)
    model, plain = sharded(Recipe(hidden=9).parallel(mesh), mesh), Recipe(hidden=9)
    backward(loss_of(model, batch(0, data_rank(mesh))))

    for name, parameter in plain.plain().named_parameters():
        assert torch.equal(get_full_param(model, name), parameter.detach())
        value = torch.arange(parameter.numel()).view(parameter.shape).float()
        set_full_param(model, name, value)
        set_full_grad(model, name, value + 1)
        assert torch.equal(get_full_param(model, name), value)
        gradient = get_full_grad(model, name)
        assert gradient is not None
        assert torch.equal(gradient, value + 1)


@pytest.mark.full_matrix("runtime/test_deepcopy.py, without DTensors")
@on_ranks(4)
def test_a_deep_copy_trains_on_its_own(world: World) -> None:
    """The copy has the same meshes, and shards of its own."""
    mesh = mesh_of(world, 2)
    model, plain = pair(Recipe(sequence=True), mesh)
    before = {n: get_full_param(model, n) for n, _ in plain.named_parameters()}

    made = copy.deepcopy(model)
    losses = train(made, plain, mesh)

    assert all(mine == other for mine, other in losses)
    require_equal(made, plain)
    for name, value in before.items():
        assert torch.equal(get_full_param(model, name), value)


@on_ranks(4)
@recipes
def test_a_full_state_dict_is_that_of_the_unsharded_model(
    world: World, kind: str
) -> None:
    """Keys, shapes and values of the plain model; and back."""
    mesh, recipe = mesh_of(world, 2), RECIPES[kind]
    model, plain = sharded(recipe.parallel(mesh), mesh), recipe.plain()

    found = model.state_dict()
    inner = block_of(model).up.state_dict()

    expected = plain.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor
        assert torch.equal(found[name], value), name
    assert torch.equal(inner["weight"], expected["blocks.0.up.weight"])
    doubled = {name: value * 2 for name, value in expected.items()}
    model.load_state_dict(doubled)
    for name, value in doubled.items():
        assert torch.equal(get_full_param(model, name), value)


@on_ranks(4)
def test_the_state_of_all_ranks_is_broadcast_first(world: World) -> None:
    """sync_module_states sends each rank the part of its own tensor-parallel rank."""
    mesh = mesh_of(world, 2)
    model, expected = Recipe().parallel(mesh), Recipe().parallel(mesh)
    if data_rank(mesh):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(world.rank)
    fully_shard(model, device_mesh=mesh["dp"], sync_module_states=True)

    require_equal(model, expected)


@on_ranks(4)
def test_optimizers_see_plain_tensors(world: World) -> None:
    """Foreach and fused steps run, and cost as those of any plain parameters."""
    mesh = mesh_of(world, 2)
    model, _ = pair(Recipe(), mesh)
    backward(loss_of(model, batch(0, data_rank(mesh))))

    assert all(type(p) is nn.Parameter for p in model.parameters())
    for how in ({"foreach": True}, {"fused": True}):
        adam(model, **how).step()


@on_ranks(4)
def test_an_optimizer_of_the_dtensors_is_refused(world: World) -> None:
    """It would step on parameters that no module uses any more."""
    mesh = mesh_of(world, 2)
    model = Recipe().parallel(mesh)
    optimizer = adam(model)
    sharded(model, mesh)
    backward(loss_of(model, batch(0, data_rank(mesh))))

    with pytest.raises(FSDPError, match="embedding"):
        optimizer.step()


@on_ranks(4)
def test_ranks_of_both_axes_are_refused(world: World) -> None:
    """A shard group with tensor-parallel ranks would mix different rows."""
    mesh = mesh_of(world, 2)
    model = Recipe().parallel(mesh)
    before = dict(model.named_parameters())

    with pytest.raises(FSDPError, match=r"is a DTensor over ranks \[\d, \d\]"):
        fully_shard(model)
    with pytest.raises(FSDPError, match="named 'tp'"):
        fully_shard(model, device_mesh=mesh)

    assert {id(p) for p in model.parameters()} == set(map(id, before.values()))


@on_ranks(4)
def test_what_does_not_know_of_the_second_axis_refuses_by_name(world: World) -> None:
    """Owners and flat parameters name the parameter."""
    mesh = mesh_of(world, 2)
    model, _ = pair(Recipe(), mesh)
    optimizer = adam(model)
    backward(loss_of(model, batch(0, data_rank(mesh))))
    optimizer.step()
    copied = copy.deepcopy(model)
    flat = torch.optim.AdamW(flat_parameters(copied))

    calls: list[Callable[[], object]] = [
        lambda: map_on_owners([model.head.weight], [None], lambda whole, _: whole),
        lambda: optim_state_dict(copied, flat),
        lambda: OwnerState([model.head.weight]).state_dict(),
    ]
    for call in calls:
        with pytest.raises(FSDPError, match="is part of") as caught:
            call()
        assert "tp 2 dim" in str(caught.value)
    dist.barrier()


@on_ranks(4)
def test_a_plan_counts_the_part_of_this_rank_and_says_so(world: World) -> None:
    """Bytes are those of a rank; the whole model's elements stand beside."""
    mesh = mesh_of(world, 2)
    model, _ = pair(Recipe(), mesh)
    whole_model = sum(p.numel() for p in Recipe().plain().parameters())

    found = plan(model)

    assert found.whole_numel == whole_model > found.numel
    assert f"on this rank (tensor parallelism cuts {whole_model:,})" in str(found)
    assert "part of (16, 8) at" in str(describe(model))


@on_ranks(4)
def test_the_norm_of_the_reference(world: World) -> None:
    """The helper of these tests agrees with torch's own function on DTensors."""
    mesh = mesh_of(world, 4)
    plain = Recipe(sequence=True).parallel(mesh)
    backward(loss_of(plain, batch(0, 0)))

    torch.testing.assert_close(
        norm_of(plain),
        whole(nn.utils.get_total_norm([whole(p.grad) for p in plain.parameters()])),  # type: ignore[arg-type]  # all have a gradient
    )
