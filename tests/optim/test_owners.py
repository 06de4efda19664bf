"""``map_on_owners``: whole values on a single rank each, and Muon on top of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
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
    PlanError,
    ShardingStrategy,
    flat_parameters,
    full_shape,
    fully_shard,
    get_full_grad,
    get_full_param,
    load,
    map_on_owners,
    optim_state_dict,
    plan,
    save,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.config import RowBlock
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.traffic import counts
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import RankCount, message_of
from tests.support.short_waits import shorten_waits
from tests.support.world import RankPool, World

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


def plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


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


def muon_is_muon(world: World, path: str, name: str) -> None:
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


@pytest.mark.parametrize(
    ("world_size", "path", "name"),
    [
        (1, "composable", "full_shard"),
        (2, "composable", "full_shard"),
        (2, "wrapper", "full_shard"),
        (2, "composable", "no_shard"),
        (2, "composable", "offload"),
        (4, "composable", "full_shard"),
        (4, "composable", "hybrid"),
        (4, "wrapper", "hybrid"),
    ],
)
def test_muon_steps_as_torch_on_the_whole_model(
    ranks: RankCount, world_size: int, path: str, name: str
) -> None:
    """Bit by bit, given the same gradients; and the momentum is that of the whole."""
    ranks(world_size).run(muon_is_muon, path, name)


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


def begin(world: World, folder: Path) -> None:
    model, plain = sharded("composable"), Matrices()
    optims = optimizers(model, plain)
    train(world, model, plain, optims, range(2))
    save(folder / "saved", model, optims[0])
    if world.rank == 0:
        torch.save((plain.state_dict(), optims[1].state_dict()), folder / "plain.pt")


def go_on(world: World, folder: Path) -> None:
    model, plain = sharded("composable"), Matrices()
    optims = optimizers(model, plain)
    load(folder / "saved", model, optims[0])
    weights, state = torch.load(folder / "plain.pt")
    plain.load_state_dict(weights)
    optims[1].load_state_dict(state)
    train(world, model, plain, optims, range(2, 4))
    assert_equal(model, plain)


def test_muon_goes_on_at_another_world_size(ranks: RankCount, tmp_path: Path) -> None:
    """Saved by two ranks, loaded by three: bit by bit as the whole model goes on."""
    ranks(2).run(begin, tmp_path)
    ranks(3).run(go_on, tmp_path)


def exchanged(world: World, name: str) -> tuple[list[int], int]:
    model = sharded("composable", **OPTIONS[name](world))
    parameters = list(model.parameters())
    seen: list[int] = []

    def note(whole: Tensor, parameter: Tensor) -> Tensor:
        assert whole.shape == full_shape(parameter)
        seen.append(whole.numel())
        return whole

    with record() as calls:
        found = map_on_owners(parameters, [p.detach() for p in parameters], note)
    for p, value in zip(parameters, found, strict=True):
        assert value is not None
        assert torch.equal(p, value)
    return seen, sum(sum(call.numel) for call in calls if call.op == "all_to_all")


@pytest.mark.parametrize("name", ["full_shard", "hybrid"])
def test_each_matrix_is_computed_on_a_single_rank(ranks: RankCount, name: str) -> None:
    """Replicas share the matrices, too; each element travels there and back once."""
    sizes = sorted(p.numel() for p in Matrices().parameters())

    found = ranks(4).run(exchanged, name)

    assert sorted(n for seen, _ in found for n in seen) == sizes
    # No rank has most of the work.
    assert max(sum(seen) for seen, _ in found) < 0.6 * sum(sizes)
    assert 0 < sum(sent for _, sent in found) <= 2 * sum(sizes)


PLANNED: dict[str, Callable[[World], dict[str, Any]]] = {
    **OPTIONS,
    "whole": lambda _: {"block": Block.TENSOR},
    "rows": lambda _: {"block": Block.rows(4)},
}


@pytest.mark.req("M-05")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLANNED)
@on_ranks(4)
def test_the_plan_knows_owners_and_bytes(
    world: World, name: str, dtype: torch.dtype | None
) -> None:
    """What a call sends from this rank, and which matrices this rank computes."""
    model = sharded("composable", **PLANNED[name](world))
    named = dict(model.named_parameters())
    owners = plan(model).owners(named, dtype=dtype)
    names = {id(p): fqn for fqn, p in named.items()}
    seen: list[str] = []

    def note(whole: Tensor, parameter: Tensor) -> Tensor:
        seen.append(names[id(parameter)])
        return whole

    with record() as calls:
        map_on_owners(
            named.values(), [p.detach() for p in named.values()], note, dtype=dtype
        )

    groups = _get_fsdp_handles(model)[0].groups
    replica = 0 if groups.replicate is None else groups.replicate.rank()
    here = replica, groups.rank
    assert set(seen) == {fqn for fqn, owner in owners.owners.items() if owner == here}
    sent, found = counts(calls), owners.traffic(groups.rank, replica=replica)
    assert sent.get("all_to_all", (0, 0)) == (
        found.all_to_all_calls,
        found.all_to_all_bytes,
    )
    assert sent.get("broadcast", (0, 0)) == (
        found.broadcast_calls,
        found.broadcast_bytes,
    )
    assert found.all_to_all_bytes <= owners.most.all_to_all_bytes


def test_a_plan_with_whole_matrices_tells_what_owners_send() -> None:
    """Nothing, if none is cut; else calls and bytes. Unknown names are refused."""
    told = str(plan(nn.Linear(8, 8), world_size=2, block=Block.TENSOR))
    assert "map_on_owners over 1 matrix: 2 all-to-alls, of at most 384 B" in told
    layers = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    found = plan(layers, world_size=2, block=Block.TENSOR)
    assert "map_on_owners over 4 matrices: no communication" in str(found)
    assert sorted(found.owners().owners.values()) == [(0, 0), (0, 0), (0, 1), (0, 1)]
    with pytest.raises(PlanError, match=r"got '4\.weight'"):
        found.owners(["4.weight"])


class BrokenError(Exception):
    """What the function of a user raises."""


def raise_on_owner(world: World) -> str:
    shorten_waits()
    model = sharded("composable")
    parameters = list(model.parameters())

    def broken(whole: Tensor, parameter: Tensor) -> Tensor:
        if parameter is parameters[-1]:
            raise BrokenError("this is no matrix")
        return whole

    backward(model(torch.ones(6, 12)).sum())
    values = [p.detach() for p in parameters]
    return message_of(lambda: map_on_owners(parameters, values, broken))


@pytest.mark.req("X-01")
def test_what_an_owner_raises_is_told_to_the_others() -> None:
    """The others name the parameter and the error instead of waiting."""
    with RankPool(2, "gloo") as pool:
        texts = pool.run(raise_on_owner, timeout=60.0, retire=True)

    own = [text for text in texts if text.startswith("BrokenError")]
    assert len(own) == 1
    (other,) = (text for text in texts if text not in own)
    assert "this is no matrix" in other
    assert "map_on_owners() for parameter 'layers.3.1.weight'" in other


@on_ranks(2)
def test_wrong_arguments_are_refused(world: World) -> None:
    """Expected, got, parameter and way out, on every rank and before any exchange."""
    model = sharded("composable")
    parameters = list(model.parameters())
    values = [p.detach() for p in parameters]
    apply = partial(map_on_owners, parameters)

    text = message_of(lambda: apply(values[1:], lambda w, _: w))
    assert text.startswith("ValueError: map_on_owners() takes a value for each param")
    text = message_of(lambda: apply([torch.ones(9, 9), *values[1:]], lambda w, _: w))
    assert "parameter 'unused'" in text
    assert "(9, 9)" in text
    (joined,) = flat_parameters(fully_shard(nn.Linear(4, 4)))
    text = message_of(lambda: map_on_owners([joined], [joined], lambda w, _: w))
    assert text.startswith("CompositionError: map_on_owners() needs original param")


@on_ranks(2)
def test_another_number_of_parameters_on_a_rank_is_told(world: World) -> None:
    """Before data moves."""
    parameters = list(sharded("composable").parameters())[world.rank :]
    values = [p.detach() for p in parameters]

    text = message_of(lambda: map_on_owners(parameters, values, lambda w, _: w))

    assert text.startswith("DesyncError: Ranks make different calls"), text


@on_ranks(1, 2)
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
