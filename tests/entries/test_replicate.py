"""``replicate`` alone, above, inside, beside ``fully_shard``; and torch's own DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    fully_shard,
    replicate,
)
from composable_fsdp.errors import CompositionError
from tests.support.models import TinyBlock, TinyGPT, module_at, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    adamw,
    backward,
    differences,
    gpt_input,
    train,
    trained_reference,
)
from tests.support.sharded import message_of
from tests.support.world import World

Compose = Callable[[TinyGPT, str], nn.Module]


def shard(module: nn.Module, path: str) -> nn.Module:
    """Fully shard by one of the two doors."""
    return (
        fully_shard(module)
        if path == "composable"
        else FullyShardedDataParallel(module)
    )


def put(model: nn.Module, name: str, path: str) -> None:
    """Fully shard the submodule of that name, wrapped in its place or not."""
    parent, _, key = name.rpartition(".")
    setattr(module_at(model, parent), key, shard(module_at(model, name), path))


def alone(model: TinyGPT, path: str) -> nn.Module:
    """Nothing is sharded."""
    return replicate(model)


def by_policy(model: TinyGPT, path: str) -> nn.Module:
    """Nothing is sharded, and each block reduces by itself."""
    return replicate(model, policy=ModuleWrapPolicy({TinyBlock}))


def inside(model: TinyGPT, path: str) -> nn.Module:
    """A replicated block, with a sharded linear in it, in a sharded model."""
    put(model, "blocks.0.up", path)
    replicate(model.blocks[0])
    put(model, "blocks.1", path)
    return shard(model, path)


def above(model: TinyGPT, path: str) -> nn.Module:
    """Sharded blocks, the rest replicated."""
    put(model, "blocks.0", path)
    put(model, "blocks.1", path)
    return replicate(model)


def beside(model: TinyGPT, path: str) -> nn.Module:
    """Every part has one of the two, and the model itself has none."""
    replicate(model.tokens)
    replicate(model.positions)
    put(model, "blocks.0", path)
    replicate(model.blocks[1])
    put(model, "norm", path)
    replicate(model.head)
    return model


def ddp_inside(model: TinyGPT, path: str) -> nn.Module:
    """Torch's DDP around a block of a sharded model."""
    model.blocks[0] = DistributedDataParallel(model.blocks[0])
    put(model, "blocks.1", path)
    return shard(model, path)


COMPOSED = [alone, by_policy, inside, above, beside, ddp_inside]


@pytest.mark.req("S1-16")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("compose", COMPOSED, ids=lambda c: str(c.__name__))
@on_ranks(2)
def test_replicated_and_sharded_parts_train_as_the_plain_model(
    world: World, compose: Compose, path: str
) -> None:
    """In every composition, with torch's DDP as well."""
    model = TinyGPT()
    composed = compose(model, path)
    plain, expected = trained_reference(TinyGPT, world.world_size, gpt_input, adamw)
    losses = train(composed, world.rank, gpt_input, adamw)

    saved = {n.replace("module.", ""): v for n, v in composed.state_dict().items()}
    assert differences(saved, plain.state_dict()) == {}
    assert losses == [step[world.rank] for step in expected]


@on_ranks(4)
def test_a_unit_over_other_ranks_is_refused(world: World) -> None:
    """Its gradients would not be averaged over all replicas."""
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = TinyGPT()
    fully_shard(model.blocks[0], process_group=shards[world.rank // 2])
    call = partial(replicate, model, process_group=copies[world.rank % 2])
    first, pair = world.rank % 2, world.rank // 2 * 2
    assert message_of(call) == (
        f"CompositionError: replicate over ranks [{first}, {first + 2}] meets fully "
        f"sharded module (root) over ranks [{pair}, {pair + 1}]: its gradients would "
        "not be averaged over the others. Shard it over all of these ranks; to shard "
        "within groups and replicate across, pass a 2-D device_mesh (replicate, shard) "
        "to fully_shard."
    )


@pytest.mark.parametrize("init_sync", [True, False])
@on_ranks(2)
def test_replicas_start_from_the_values_of_the_first_rank(
    world: World, init_sync: bool
) -> None:
    """As with DDP; without ``init_sync`` nothing is sent and nothing changes."""
    model = tiny_mlp()
    model.register_buffer("seen", torch.full((1,), float(world.rank)))
    model.get_parameter("0.bias").data.fill_(world.rank)
    with record_steps() as calls:
        replicate(model, init_sync=init_sync)
    synced = {"all_gather_object", "broadcast"} if init_sync else set()
    assert {call.op for call in calls} == synced
    expected = 0.0 if init_sync else world.rank
    assert model.get_parameter("0.bias")[0] == model.get_buffer("seen") == expected


# ---- which units are whose --------------------------------------------------


@pytest.mark.req("S1-35")
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (replicate, replicate, "replicate was already applied"),
        (replicate, fully_shard, "replicate already manages"),
        (fully_shard, replicate, "fully_shard already manages"),
        (DistributedDataParallel, replicate, "DistributedDataParallel already manages"),
    ],
)
def test_one_module_takes_one_of_the_two(
    one_rank: World,
    first: Callable[[nn.Module], nn.Module],
    second: Callable[[nn.Module], nn.Module],
    text: str,
) -> None:
    """The second is refused by name, and the first goes on."""
    model = first(tiny_mlp())

    with pytest.raises(CompositionError, match=text):
        second(model)

    backward(model(torch.ones(1, 8)).sum())
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.req("P-13")
@on_ranks(2)
def test_ddp_around_units_is_refused(world: World) -> None:
    """Before a weight is overwritten, unless DDP was told to ignore the units."""
    model: Any = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    fully_shard(model[1])
    before = [p.detach().clone() for p in model.parameters()]

    text = message_of(lambda: DistributedDataParallel(model))

    assert text == (
        "CompositionError: DistributedDataParallel was put around a Sequential whose "
        "parameter '1.weight' is fully sharded; it would take this rank's rows for the "
        "whole parameter. Units average their gradients themselves: leave "
        "DistributedDataParallel away, and give replicate(model) of this package what "
        "no unit holds."
    )
    model._ddp_params_and_buffers_to_ignore = ["1.weight"]
    DistributedDataParallel(model)
    assert torch.equal(before[1], model[1].weight)
