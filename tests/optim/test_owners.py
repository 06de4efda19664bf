"""``map_on_owners``: whole matrices on a single rank each."""

from __future__ import annotations

import copy
import itertools
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
from composable_fsdp.features import flat_parameters, map_on_owners
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import message_of
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
