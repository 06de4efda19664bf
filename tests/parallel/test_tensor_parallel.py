"""Tensor parallelism below: DTensors in sharded units, on meta and as buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from composable_fsdp import (
    CPUOffload,
    FSDPError,
    MixedPrecision,
    fsdp2,
    fully_shard,
    get_full_grad,
    get_full_param,
    load,
    save,
    set_full_grad,
    set_full_param,
    unshard_params,
)
from composable_fsdp.errors import DesyncError, PlanError
from composable_fsdp.features import flat_parameters, map_on_owners
from tests.parallel.models import (
    Model,
    Recipe,
    average,
    batch,
    block_of,
    data_rank,
    loss_of,
    mesh_of,
    pair,
    sharded,
    whole,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.world import World


def adam(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **how)


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


@on_ranks(4)
def test_full_parameters_and_gradients_can_be_shown_and_written(world: World) -> None:
    """Inside unshard_params the modules show the DTensors of the plain model."""
    mesh = mesh_of(world, 2)
    offload = CPUOffload(offload_params=True)
    model, plain = pair(Recipe(sequence=True), mesh, cpu_offload=offload)
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


@on_ranks(4)
def test_a_full_state_dict_is_that_of_the_unsharded_model(world: World) -> None:
    """Keys, shapes and values of the plain model; and back."""
    mesh, recipe = mesh_of(world, 2), Recipe(hidden=9, tied=True)
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
def test_ranks_of_both_axes_and_optimizers_of_dtensors_are_refused(
    world: World,
) -> None:
    """A shard group with tensor-parallel ranks would mix different rows."""
    mesh = mesh_of(world, 2)
    model = Recipe().parallel(mesh)
    optimizer, before = adam(model), list(model.parameters())

    with pytest.raises(FSDPError, match=r"is a DTensor over ranks \[\d, \d\]"):
        fully_shard(model)
    with pytest.raises(FSDPError, match="'tp'"):
        fully_shard(model, device_mesh=mesh)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))

    sharded(model, mesh)
    backward(loss_of(model, batch(0, data_rank(mesh))))
    # It would step on parameters that no module uses any more.
    with pytest.raises(FSDPError, match="embedding"):
        optimizer.step()


@on_ranks(4)
def test_unlike_calls_of_tensor_parallel_ranks_are_told(world: World) -> None:
    """Ranks of one part of the parameters would write, and the others would not."""
    mesh = mesh_of(world, 2)
    model, _ = pair(Recipe(), mesh)
    writes = mesh.get_local_rank("tp") == 0

    with (
        pytest.raises(DesyncError, match="writeback"),
        unshard_params(model, writeback=writes),
    ):
        pass


@on_ranks(4)
def test_what_does_not_know_of_the_second_axis_refuses_by_name(world: World) -> None:
    """Owners and flat parameters name the parameter."""
    mesh = mesh_of(world, 2)
    model, _ = pair(Recipe(), mesh)
    optimizer = adam(model)
    backward(loss_of(model, batch(0, data_rank(mesh))))
    optimizer.step()
    calls: list[Callable[[], object]] = [
        lambda: map_on_owners([model.head.weight], [None], lambda whole, _: whole),
        lambda: flat_parameters(model),
    ]
    for call in calls:
        with pytest.raises(FSDPError, match="is part of") as caught:
            call()
        assert "tp 2 dim" in str(caught.value)
    dist.barrier()


def require_plain_step(model: nn.Module, world: World, mesh: DeviceMesh) -> None:
    """Loss and gradients of a step are those of the plain model on all data."""
    plain, rank = Recipe().plain(), data_rank(mesh)
    loss: Any = loss_of(model, batch(0, rank))
    backward(loss)
    parts = [loss_of(plain, batch(0, n)) for n in range(mesh["dp"].size())]
    backward(torch.stack(parts).mean())
    found = loss.full_tensor() if isinstance(loss, DTensor) else loss
    torch.testing.assert_close(found, parts[rank], rtol=1e-5, atol=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            get_full_grad(model, name), parameter.grad, rtol=1e-4, atol=1e-6
        )


Way = Callable[[Model, DeviceMesh], Model]
PLAN: dict[str, Any] = {
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
    "head": lambda: ColwiseParallel(output_layouts=Replicate()),
    "blocks.0.up": ColwiseParallel,
    "blocks.0.down": RowwiseParallel,
}


def parallel(model: Model, mesh: DeviceMesh, **changed: Any) -> Model:
    """Cut a model over ``tp``; ``changed`` replaces styles."""
    styles = {name: made() for name, made in PLAN.items()} | changed
    parallelize_module(model, mesh["tp"], styles)
    return model


def on_meta(mesh: DeviceMesh) -> Model:
    return parallel(Recipe().plain().to("meta"), mesh)


def fill(module: nn.Module) -> None:
    """Give a module's own parameters memory and values."""
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


def initialised(model: Model, mesh: DeviceMesh) -> Model:
    sharded(model, mesh, param_init_fn=fill)
    for name, parameter in Recipe().plain().named_parameters():
        assert (get_full_param(model, name) == 0.5).all()
        set_full_param(model, name, parameter.detach())
    return model


def broadcast(model: Model, mesh: DeviceMesh) -> Model:
    # On meta on all data ranks but the first, which has values.
    if mesh["dp"].get_local_rank() == 0:
        model = parallel(Recipe().plain(), mesh)
    return sharded(model, mesh, sync_module_states=True)


@pytest.mark.req("M-01")
@pytest.mark.parametrize("way", [initialised, broadcast])
@on_ranks(4)
def test_dtensors_on_meta_train_once_they_have_values(world: World, way: Way) -> None:
    """Sharded on meta, a step is that of the plain model, however values came."""
    mesh = mesh_of(world, 2)

    model = way(on_meta(mesh), mesh)

    require_plain_step(model, world, mesh)


@pytest.mark.req("M-01")
@on_ranks(4)
def test_dtensors_on_meta_load_a_checkpoint(world: World, tmp_path: Path) -> None:
    """Names and shapes are whole; a forward without values names the parameters."""
    mesh = mesh_of(world, 2)
    save(tmp_path / "step-1", sharded(parallel(Recipe().plain(), mesh), mesh))
    model = sharded(on_meta(mesh), mesh)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    plain = Recipe().plain().state_dict()
    assert shapes == {name: value.shape for name, value in plain.items()}
    with pytest.raises(PlanError, match="still on the meta device"):
        model(batch(0, 0))

    model.to_empty(device="cpu")
    load(tmp_path / "step-1", model)

    require_plain_step(model, world, mesh)


@pytest.mark.req("M-01")
@on_ranks(4)
def test_loss_parallel_is_the_loss_of_the_plain_model(world: World) -> None:
    """Logits stay cut over the vocabulary; loss and gradients are the plain ones."""
    mesh = mesh_of(world, 2)
    cut = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = sharded(parallel(Recipe().plain(), mesh, head=cut), mesh)

    with loss_parallel():
        require_plain_step(model, world, mesh)


class Block(nn.Module):
    """Two matrices that are cut, and two buffers that are on the mesh whole."""

    scale: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        result: Tensor = x + self.down(torch.relu(self.up(x))) * scale.to_local()
        return result


def trained(apply: Any, mesh: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and full state dict of a model that is filled after meta."""
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
        for name, buffer in list(block.named_buffers()):
            whole = distribute_tensor(buffer, mesh["tp"], [Replicate()])
            setattr(block, name, whole)
        apply(block)
    apply(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.02 * (number + 1))
        for buffer in model.buffers():
            assert isinstance(buffer, DTensor)
            buffer.fill_(1.5)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for step in range(2):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state: dict[str, Any] = model.state_dict()
    return losses, {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in state.items()
    }


@on_ranks(4)
def test_dtensor_buffers_on_meta_train_as_under_fsdp2(world: World) -> None:
    """Losses, weights and buffers are those of torch's FSDP2."""
    mesh = init_device_mesh(
        "cpu", (world.world_size // 2, 2), mesh_dim_names=("dp", "tp")
    )
    dp = mesh["dp"]
    losses, state = trained(lambda module: fsdp2.fully_shard(module, mesh=dp), mesh)
    expected, theirs = trained(
        lambda module: torch.distributed.fsdp.fully_shard(module, mesh=dp), mesh
    )

    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[0] > losses[-1]
    for name, value in theirs.items():
        torch.testing.assert_close(state[name], value)
