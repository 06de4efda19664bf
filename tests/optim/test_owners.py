"""``map_on_owners``, whose matrices are whole on one rank; and replicas that join."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import _muon

from composable_fsdp import (
    Block,
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    get_full_grad,
    get_full_param,
    optim_state_dict,
    plan,
)
from composable_fsdp.access import full_shape
from composable_fsdp.comm.collectives import record
from composable_fsdp.config import RowBlock
from composable_fsdp.errors import CheckpointError
from composable_fsdp.features import (
    ReplicaState,
    flat_parameters,
    load_replica_state_dict,
    map_on_owners,
    register_comm_hook,
    replica_hook,
    replica_state_dict,
)
from tests.support.on_ranks import on_ranks
from tests.support.reference import adamw, backward, gpt_input, loss_of
from tests.support.sharded import gpt, message_of
from tests.support.tiny import tiny_mlp
from tests.support.world import World

LR, STEPS = 0.05, 4


class ShardedMuon(torch.optim.Muon):
    """torch's Muon, whose matrices are whole on their owners."""

    works_on_shards = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            updates: list[Tensor | None] = []
            for p in group["params"]:
                if p.grad is None:
                    updates.append(None)
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                held = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                updates.append(p.grad.lerp(held, group["momentum"]))
            orthogonal = map_on_owners(
                group["params"],
                updates,
                partial(_orthogonal, group),
                dtype=torch.bfloat16,
            )
            for p, update in zip(group["params"], orthogonal, strict=True):
                if update is not None:
                    rate = _muon._adjust_lr(group["lr"], None, full_shape(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-rate)


def _orthogonal(group: dict[str, Any], whole: Tensor, _: Tensor) -> Tensor:
    return _muon._zeropower_via_newtonschulz(
        whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )


class Matrices(nn.Module):
    """Units of matrices that are cut, whole on a rank, or of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sides = (12, 7, 20, 3, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(m, n, bias=False), nn.Linear(n, n, bias=False))
            for m, n in itertools.pairwise(sides)
        )
        # Of this matrix no loss has a gradient.
        self.unused = nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if x.shape == layer(x).shape else layer(x)
        return x


def sharded(path: str, **options: Any) -> nn.Module:
    model = Matrices()
    if path == "wrapper":
        if "strategy" in options:
            options["sharding_strategy"] = options.pop("strategy")
        for i, layer in enumerate(model.layers):
            model.layers[i] = FullyShardedDataParallel(
                layer, use_orig_params=True, **options
            )
        return FullyShardedDataParallel(model, use_orig_params=True, **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(
    world: World, model: nn.Module, plain: nn.Module, optims: Any, steps: range
) -> None:
    """Step both models; the plain model takes the gradients of the sharded model."""
    ours, theirs = optims
    for step in steps:
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(step))
        backward(model(x + world.rank).square().mean())
        for name, p in plain.named_parameters():
            p.grad = None
            if name != "unused":
                p.grad = get_full_grad(model, name)
        ours.step()
        theirs.step()
        ours.zero_grad()


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for name, p in plain.named_parameters():
        assert torch.equal(get_full_param(model, name), p), name


def hybrid(world: World) -> dict[str, Any]:
    return {
        "strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": init_device_mesh("cpu", (2, 2)),
    }


OPTIONS: dict[str, Callable[[World], dict[str, Any]]] = {
    "full_shard": lambda _: {},
    "no_shard": lambda _: {"strategy": ShardingStrategy.NO_SHARD},
    "hybrid": hybrid,
    "offload": lambda _: {"cpu_offload": CPUOffload(offload_params=True)},
}


def optimizers(model: nn.Module, plain: nn.Module) -> Any:
    ours = ShardedMuon(model.parameters(), lr=LR)
    return ours, torch.optim.Muon(plain.parameters(), lr=LR)


@pytest.mark.parametrize(
    ("path", "name"),
    [("wrapper", "full_shard"), ("composable", "no_shard"), ("composable", "offload")],
)
@on_ranks(2)
def test_muon_steps_as_torch_on_the_whole_model(
    world: World, path: str, name: str
) -> None:
    """Bit by bit, given the same gradients; and the momentum is that of the whole."""
    require_muon(world, path, name)


@on_ranks(4)
def test_muon_steps_as_torch_over_replicas(world: World) -> None:
    """Each matrix has its owner in one of the replicas."""
    require_muon(world, "wrapper", "hybrid")


def require_muon(world: World, path: str, name: str) -> None:
    model, plain = sharded(path, **OPTIONS[name](world)), Matrices()
    optims = optimizers(model, plain)

    train(world, model, plain, optims, range(STEPS))

    assert_equal(model, plain)
    state = optim_state_dict(model, optims[0])["state"]
    theirs = optims[1].state_dict()["state"]
    for number, (fqn, _) in enumerate(plain.named_parameters()):
        if fqn != "unused":
            ours = state[fqn]["momentum_buffer"]
            assert torch.equal(ours, theirs[number]["momentum_buffer"]), fqn


@pytest.mark.req("M-05")
@pytest.mark.parametrize("block", [Block.TENSOR, Block.rows(4)], ids=repr)
@on_ranks(2, 4)
def test_muon_is_muon_whatever_shards_may_not_cut(
    world: World, block: Block | RowBlock
) -> None:
    """A unit whose matrices each lie on a single rank exchanges nothing."""
    model: Any = Matrices()
    plain = copy.deepcopy(model)
    fully_shard(model, block=block)
    optims = optimizers(model, plain)
    train(world, model, plain, optims, range(2))
    with record() as calls:
        train(world, model, plain, optims, range(2, STEPS))

    assert_equal(model, plain)
    sent = [call for call in calls if call.op == "all_to_all"]
    cut = [
        slot.fqn
        for region in plan(model).units[0].regions
        for slot in region.parameters
        if len(region.holders(slot)) > 1
    ]
    assert bool(sent) == bool(cut)
    # The largest of eight matrices is less than half of all elements.
    if block is Block.TENSOR and world.world_size == 2:
        assert cut == []
    if isinstance(block, RowBlock):
        held = [full_shape(p)[0] for p in model.parameters()]
        for rows, parameter in zip(held, model.parameters(), strict=True):
            # Only the last block of a matrix has fewer rows.
            assert parameter.shape[0] % block.n in (0, rows % block.n)


@on_ranks(2)
def test_wrong_arguments_are_refused(world: World) -> None:
    """Expected, got, parameter and way out, on every rank and before any exchange."""
    # A dropped model would leave plain parameters, once it is collected.
    model = sharded("composable")
    parameters = list(model.parameters())
    values = [p.detach() for p in parameters]
    apply = partial(map_on_owners, parameters)

    text = message_of(lambda: apply(values[1:], lambda w, _: w))
    assert text.startswith("ValueError: map_on_owners() takes a value for each param")
    text = message_of(lambda: apply([torch.ones(9, 9), *values[1:]], lambda w, _: w))
    assert "parameter 'unused'" in text
    assert "(9, 9)" in text
    kept = fully_shard(nn.Linear(4, 4))
    (joined,) = flat_parameters(kept)
    text = message_of(lambda: map_on_owners([joined], [joined], lambda w, _: w))
    assert text.startswith("CompositionError: map_on_owners() needs original param")
    fewer = slice(world.rank, None)
    ask = partial(map_on_owners, parameters[fewer], values[fewer], lambda w, _: w)
    text = message_of(ask)
    assert text.startswith("DesyncError: Ranks disagree: "), text


@on_ranks(2)
def test_plain_parameters_are_computed_on_every_rank(world: World) -> None:
    """Beside sharded parameters, in their own order, in the dtype asked for."""
    model, plain = fully_shard(nn.Linear(3, 5)), nn.Parameter(torch.ones(2, 2))
    parameters = [plain, *model.parameters()]
    values = [p.detach() for p in parameters]

    found = map_on_owners(parameters, values, lambda w, _: 2 * w, dtype=torch.float64)

    for value, result in zip(values, found, strict=True):
        assert result is not None
        assert torch.equal(result, 2 * value.double())
    assert full_shape(plain) == (2, 2)
    assert [full_shape(p) for p in model.parameters()] == [(5, 3), (5,)]


class Manager:
    """Averages with another replica, whose gradients are three times ours."""

    def __init__(self) -> None:
        self.waited = 0

    def allreduce(self, tensor: Tensor) -> Any:
        tensor.add_(3 * tensor).div_(2)
        return self

    def wait(self) -> bool:
        self.waited += 1
        return True


def group() -> Any:
    return torch.distributed.group.WORLD


@pytest.mark.req("M-08")
@on_ranks(1, 3)
def test_gradients_are_averaged_over_ranks_and_then_by_the_manager(
    world: World,
) -> None:
    """Once per unit; on a single rank by the manager alone."""
    exact, model = gpt("composable"), gpt("composable")
    manager = Manager()
    register_comm_hook(model, ReplicaState(group(), manager), replica_hook)
    for each in (exact, model):
        backward(loss_of(each, gpt_input(0, world.rank)))

    for name, _ in model.named_parameters():
        ours, theirs = get_full_grad(model, name), get_full_grad(exact, name)
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, 2 * theirs)
    assert manager.waited == 3


def train_on(world: World, model: nn.Module, optim: Any, steps: range) -> None:
    for step in steps:
        backward(loss_of(model, gpt_input(step, world.rank)))
        optim.step()
        optim.zero_grad()


@pytest.mark.req("M-08")
@on_ranks(3)
def test_a_replica_goes_on_where_the_other_is(world: World) -> None:
    """Bit by bit, also if it has run no step; tensors are copied, and stay objects."""
    first, second = gpt("wrapper"), gpt("wrapper", seed=5)
    theirs, ours = adamw(first.parameters()), adamw(second.parameters())
    train_on(world, first, theirs, range(2))
    kept = [p.data_ptr() for p in second.parameters()]

    load_replica_state_dict(second, ours, replica_state_dict(first, theirs))

    assert [p.data_ptr() for p in second.parameters()] == kept
    train_on(world, first, theirs, range(2, 4))
    train_on(world, second, ours, range(2, 4))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        found, expected = ours.state.get(q, {}), theirs.state.get(p, {})
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value)
            assert not value.numel() or found[key].data_ptr() != value.data_ptr()


@pytest.mark.req("M-08")
@on_ranks(2)
def test_another_thread_reads_the_state_while_a_forward_runs(world: World) -> None:
    """Shards, although the modules show full parameters at that time."""
    model: Any = gpt("composable")
    optim = adamw(model.parameters())
    train_on(world, model, optim, range(1))
    before = replica_state_dict(model, optim)
    read: list[dict[str, Any]] = []

    def reads(*_: object) -> None:
        get = threading.Thread(
            target=lambda: read.append(replica_state_dict(model, optim))
        )
        get.start()
        get.join()

    model.blocks[1].down.register_forward_pre_hook(reads)
    backward(loss_of(model, gpt_input(1, world.rank)))

    assert len(read) == 1
    assert list(read[0]["tensors"]) == list(before["tensors"])
    for name, value in read[0]["tensors"].items():
        assert torch.equal(value, before["tensors"][name]), name


@on_ranks(1)
def test_replicas_that_differ_are_refused_and_nothing_changes(world: World) -> None:
    """With the name and both forms; and optimizers with both counts."""
    model = fully_shard(tiny_mlp())
    optim = adamw(model.parameters())
    wide = fully_shard(tiny_mlp(hidden=16))
    before = [p.clone() for p in model.parameters()]

    given = replica_state_dict(wide, adamw(wide.parameters()))
    text = message_of(lambda: load_replica_state_dict(model, optim, given))
    assert text.startswith("CheckpointError: load_replica_state_dict got (16, 8)")
    assert "'0.weight (unit 0, parameter 0)' of this rank; this replica has" in text
    fewer = adamw(list(model.parameters())[:1])
    with pytest.raises(CheckpointError, match="of 1 groups and 1 parameters; this"):
        load_replica_state_dict(model, optim, replica_state_dict(model, fewer))
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_a_manager_without_allreduce_is_refused(one_rank: World) -> None:
    """With its class."""
    wrong: Any = object()
    with pytest.raises(TypeError, match=r"method allreduce, such as .* got a object"):
        ReplicaState(group(), wrong)
