"""Full parameters in host memory, and full gradients, outside the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    get_full_param,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.phases import Residency
from composable_fsdp.tree.traversal import _get_fsdp_handles, _get_fsdp_states
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    apply_units,
    averaged_gradients,
    backward,
    differences,
    gpt_input,
    loss_of,
    tolerance_at,
    wide_input,
)
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    is_full,
    message_of,
    several_ranks,
)
from tests.support.world import World

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
everywhere = pytest.mark.parametrize("rank0_only", [False, True], ids=["all", "first"])
in_host_memory = pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])


def with_gradients(
    world: World, path: str, strategy: ShardingStrategy, **options: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A sharded GPT after one backward, and the gradients it should have in full."""
    model, plain = gpt(path, strategy=strategy, **options), TinyGPT()
    inputs = [gpt_input(0, rank) for rank in range(world.world_size)]
    averaged_gradients(plain, inputs)
    backward(loss_of(model, inputs[world.rank]))
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return model, expected


def shows(model: nn.Module, world: World, *, rank0_only: bool) -> bool:
    """Whether this rank sees full parameters in a block with ``rank0_only``."""
    groups = _get_fsdp_handles(model)[0].groups
    return not rank0_only or world.rank == 0 or groups.shard is None


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.req("D-12")
@on_ranks(1, 2, 3)
@both_paths
@every_strategy
@everywhere
def test_copies_in_host_memory_are_the_full_parameters(
    world: World, path: str, strategy: ShardingStrategy, rank0_only: bool
) -> None:
    """They are shown, written back if asked for, and otherwise leave no trace."""
    model = gpt(path, strategy=strategy)
    plain: dict[str, Tensor] = dict(TinyGPT().named_parameters())
    shards = [p.detach().clone() for p in model.parameters()]
    states = _get_fsdp_states(model)
    options: dict[str, Any] = {"rank0_only": rank0_only, "offload_to_cpu": True}

    with unshard_params(model, writeback=False, **options):
        if shows(model, world, rank0_only=rank0_only):
            assert differences(dict(model.named_parameters()), plain) == {}
        allowed = Residency.SHARDED, Residency.COPIES_SHOWN
        assert all(state.handle.residency in allowed for state in states)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
    if strategy is not ShardingStrategy.NO_SHARD and rank0_only and world.rank:
        shards = [torch.full_like(shard, 7.0) for shard in shards]  # its own, written
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), shards, strict=True)
    )

    model.load_state_dict(TinyGPT().state_dict())
    with unshard_params(model, writeback=True, **options), torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if shows(model, world, rank0_only=rank0_only):
                parameter.add_(index + world.rank * (not rank0_only))
    assert is_full(model) == [False] * 3
    own = world.rank * (not rank0_only and strategy is ShardingStrategy.NO_SHARD)
    with unshard_params(model):
        for index, (name, parameter) in enumerate(model.named_parameters()):
            extra = parameter.detach() - plain[name].detach() - index
            if strategy is ShardingStrategy.NO_SHARD:
                assert extra.sub(own).abs().max() < 1e-5
            else:
                assert extra.min() > -1e-5
                assert extra.max() < (1e-5 if rank0_only else world.world_size)


def full(handle: FlatParamHandle) -> list[nn.Parameter]:
    return [leaf for region in handle.layout.regions for leaf in region.full.leaves]


@pytest.mark.req("D-12")
@on_ranks(1, 2, 3)
@both_paths
@every_strategy
@everywhere
@in_host_memory
def test_gradients_in_the_block_are_those_of_the_plain_model(
    world: World, path: str, strategy: ShardingStrategy, rank0_only: bool, offload: bool
) -> None:
    """They are full; what the block sets, scales or takes away reaches the shards."""
    model, expected = with_gradients(world, path, strategy)
    before = gradients(model)
    options: dict[str, Any] = {"rank0_only": rank0_only, "offload_to_cpu": offload}
    visible = shows(model, world, rank0_only=rank0_only)
    tolerance = tolerance_at(world.world_size)

    with unshard_params(model, writeback=False, with_grads=True, **options):
        inside = gradients(model)
        if visible:
            for parameter in model.parameters():
                parameter.grad = None

    if visible:
        apart = differences(inside, expected).values()
        assert max(apart, default=0.0) <= tolerance
    assert differences(gradients(model), before) == {}

    with unshard_params(model, writeback=True, with_grads=True, **options):
        if visible:
            first, second, *rest = model.parameters()
            first.grad, second.grad = None, torch.full_like(second, 3.0)
            for parameter in rest:
                assert parameter.grad is not None
                parameter.grad.mul_(2.0)

    names = list(expected)
    doubled = {n: g * 2 for n, g in before.items() if n not in names[:2]}
    second = model.get_parameter(names[1])
    if second.numel():
        doubled = {names[1]: torch.full_like(second, 3.0), **doubled}
    assert differences(gradients(model), doubled) == {}
    assert all(p.grad is None for h in _get_fsdp_handles(model) for p in full(h))


@pytest.mark.req("D-12")
@both_paths
@on_ranks(4)
def test_what_the_first_rank_writes_reaches_the_replicas(
    world: World, path: str
) -> None:
    """Parameters and gradients of all four ranks of two replicas are rank 0's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model, expected = with_gradients(world, path, strategy, device_mesh=mesh)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    with unshard_params(model, rank0_only=True, with_grads=True), torch.no_grad():
        for parameter in model.parameters():
            if world.rank == 0:
                assert parameter.grad is not None
                parameter.add_(1.0)
                parameter.grad.mul_(2.0)

    after = {name: p.detach() - 1.0 for name, p in model.named_parameters()}
    assert max(differences(after, before).values(), default=0.0) < 1e-6
    with unshard_params(model, writeback=False, with_grads=True):
        doubled = {name: gradient * 2 for name, gradient in expected.items()}
        assert max(differences(gradients(model), doubled).values()) < 1e-5


def check_some_gradients(world: World) -> list[tuple[str, int]]:
    model = apply_units(tiny_mlp(), ["0", "2"])
    backward(model[2](wide_input(12)(0, world.rank)).square().mean())  # type: ignore[index]
    model[2].bias.grad = None  # type: ignore[index]
    with record() as calls, unshard_params(model, writeback=False, with_grads=True):
        assert list(gradients(model)) == ["2.weight"]
    return [(call.op, sum(call.numel)) for call in calls]


def test_parameters_without_a_gradient_have_none_and_none_is_sent(
    ranks: RankCount,
) -> None:
    """A unit without any costs a byte per parameter, and no gather of gradients."""
    sent = ranks(2).run(check_some_gradients)[0]

    gathers = [numel for op, numel in sent if op == "all_gather"]
    asked = [numel for op, numel in sent if op == "all_reduce"]
    assert asked == [2, 2]
    assert len(gathers) == 3  # the values of both units, the gradients of one


def check_new_gradients(world: World, rank0_only: bool) -> list[str]:
    model = apply_units(tiny_mlp(), ["0", "2"])
    visible = world.rank == 0 or not rank0_only
    with unshard_params(model, rank0_only=rank0_only, with_grads=True):
        assert gradients(model) == {}
    with unshard_params(model, rank0_only=rank0_only, with_grads=True):
        if visible:
            model[2].bias.grad = torch.ones_like(model[2].bias)  # type: ignore[index]
    with unshard_params(model, writeback=False, with_grads=True):
        return list(gradients(model))


@pytest.mark.req("D-12")
@everywhere
def test_a_block_may_write_back_where_no_parameter_has_a_gradient(
    ranks: RankCount, rank0_only: bool
) -> None:
    """In one unit or in all: none appears but what the block sets."""
    found = ranks(2).run(check_new_gradients, rank0_only)

    assert found == [["2.bias"]] * 2


def check_complex(world: World) -> Tensor:
    torch.manual_seed(0)
    model = fully_shard(Complex())
    with unshard_params(model, rank0_only=True), torch.no_grad():
        if world.rank == 0:
            model.weight.mul_(1j)
    return get_full_param(model, "weight")


class Complex(nn.Module):
    """A parameter of complex numbers, which gloo does not gather."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 2, dtype=torch.complex64))

    def forward(self) -> None: ...


def test_complex_parameters_are_gathered_to_the_first_rank_and_written_back(
    ranks: RankCount,
) -> None:
    """As all others: what is sent are bytes."""
    torch.manual_seed(0)
    expected = torch.randn(5, 2, dtype=torch.complex64) * 1j

    for found in ranks(2).run(check_complex):
        assert torch.equal(found, expected)


def half_precision(
    root: nn.Module, ignored: object, options: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """A policy: each linear layer computes in bfloat16."""
    half = MixedPrecision(param_dtype=torch.bfloat16)
    linear = [m for m in root.modules() if isinstance(m, nn.Linear)]
    return {module: {"mixed_precision": half} for module in linear}


@on_ranks(1, 2, 3)
@everywhere
def test_outside_the_step_parameters_have_their_own_dtype(
    world: World, rank0_only: bool
) -> None:
    """Compute in half precision costs nothing of what is read and written here."""
    plain = {n: p.detach().clone() for n, p in tiny_mlp().named_parameters()}
    model = fully_shard(tiny_mlp(), policy=half_precision)
    visible = shows(model, world, rank0_only=rank0_only)

    with unshard_params(model, rank0_only=rank0_only):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        if visible:
            assert differences(dict(model.named_parameters()), plain) == {}
            with torch.no_grad():
                next(model.parameters()).mul_(1.001)

    with unshard_params(model):
        assert torch.equal(next(model.parameters()), plain["0.weight"] * 1.001)


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Values that depend on the whole parameter's shape."""
    for parameter in module.parameters(recurse=False):
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))


def check_apply(world: World) -> tuple[list[int], bool, bool]:
    model, plain = gpt("wrapper"), TinyGPT().apply(fill)
    assert isinstance(model, FullyShardedDataParallel)
    seen: list[int] = []

    def note(module: nn.Module) -> None:
        fill(module)
        seen.append(sum(is_full(model)))

    same = model.apply(note) is model
    again = FullyShardedDataParallel(nn.Sequential(model))  # no root was chosen
    state = {f"0.{name}": value for name, value in plain.state_dict().items()}
    equal = differences(again.state_dict(), state) == {}
    return sorted(set(seen)), same, equal


def check_sparse(world: World) -> list[bool]:
    model = fully_shard(nn.Linear(4, 4, bias=False))
    results = []
    for rank0_only in (False, True):
        with unshard_params(model, with_grads=True, rank0_only=rank0_only):
            if not rank0_only or world.rank == 0:
                model.weight.grad = torch.eye(4).to_sparse()
        grad = model.weight.grad
        assert grad is not None
        start = world.rank * grad.numel()
        wanted = torch.eye(4).flatten()[start : start + grad.numel()]
        results.append(bool(torch.equal(grad.flatten(), wanted)))
    return results


def test_a_sparse_gradient_is_written_back(ranks: RankCount) -> None:
    """It could not be taken back any more where it is met, and other ranks wait."""
    assert ranks(2).run(check_sparse) == [[True, True]] * 2


def check_apply_raises(world: World) -> tuple[str, bool]:
    model = gpt("wrapper")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def note(module: nn.Module) -> None:
        if world.rank == 1 and isinstance(module, nn.LayerNorm):
            raise ValueError("not here")
        if isinstance(module, nn.LayerNorm):
            fill(module)

    text = message_of(lambda: model.apply(note))
    return text, differences(model.state_dict(), before) == {}


@pytest.mark.req("X-07")
def test_an_error_in_apply_reaches_every_rank(ranks: RankCount) -> None:
    """The others do not wait at the next unit, and the values stay."""
    (told, kept), raised = ranks(2).run(check_apply_raises)

    assert "Rank 1 raised inside apply, so nothing was written here either" in told
    assert raised == ("ValueError: not here", True)
    assert kept


@several_ranks
def test_apply_shows_each_module_its_full_parameters(
    ranks: RankCount, world_size: int
) -> None:
    """One unit is full at a time; the tree can be wrapped after."""
    assert ranks(world_size).run(check_apply) == [([1], True, True)] * world_size
