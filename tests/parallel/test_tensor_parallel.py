"""Tensor parallelism below: DTensors of ``parallelize_module`` in sharded units."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import (
    CPUOffload,
    FSDPError,
    MixedPrecision,
    fully_shard,
    get_full_grad,
    get_full_param,
    set_full_grad,
    set_full_param,
    unshard_params,
)
from composable_fsdp.errors import DesyncError
from composable_fsdp.features import flat_parameters, map_on_owners
from tests.parallel.models import (
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
