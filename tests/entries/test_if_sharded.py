"""``if_sharded="skip"``: what is in force is compared, and not how it was spelled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import CompositionError
from composable_fsdp.tree.traversal import _get_fsdp_states
from composable_fsdp.wrap import SizePolicy, lambda_auto_wrap_policy
from tests.support.on_ranks import on_ranks
from tests.support.reference import gpt_input
from tests.support.sharded import both_paths, message_of
from tests.support.tiny import TinyBlock, TinyGPT, tiny_mlp
from tests.support.world import World

Make = Callable[[nn.Module], dict[str, Any]]
BLOCKS = ModuleWrapPolicy({TinyBlock})


def is_block(module: nn.Module) -> bool:
    return isinstance(module, TinyBlock)


def by_names(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or is_block(module)


def norm(model: nn.Module) -> nn.Module:
    return model.get_submodule("blocks.1.norm_1")


SAME: dict[str, list[Make]] = {
    "defaults": [
        lambda m: {},
        lambda m: {"strategy": ShardingStrategy.FULL_SHARD, "block": Block.ROW},
        lambda m: {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE, "policy": None},
        lambda m: {"process_group": dist.group.WORLD, "ignored_modules": []},
        lambda m: {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))},
        lambda m: {"device_id": torch.device("cpu"), "tied_params": "promote"},
    ],
    "policy": [
        lambda m: {"policy": BLOCKS},
        lambda m: {"policy": ModuleWrapPolicy([TinyBlock])},
        lambda m: {"policy": CustomPolicy(is_block)},
        lambda m: {"policy": by_names},
        lambda m: {"policy": lambda root, *_: {b: {} for b in root.blocks}},
        lambda m: {
            "policy": lambda module, recurse, nonwrapped_numel: lambda_auto_wrap_policy(
                module, recurse, nonwrapped_numel, is_block
            )
        },
        lambda m: {"policy": SizePolicy(500)},
    ],
    "ignored": [
        lambda m: {"ignored_modules": [norm(m)], "policy": BLOCKS},
        lambda m: {"ignored_states": list(norm(m).parameters()), "policy": BLOCKS},
        lambda m: {"ignored_states": iter(norm(m).parameters()), "policy": BLOCKS},
        lambda m: {
            "ignored_states": [norm(m)],
            "policy": ModuleWrapPolicy({TinyBlock}),
        },
    ],
}
OTHERS: dict[str, Make] = {
    "strategy=": lambda m: {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "mixed_precision=": lambda m: {"mixed_precision": MixedPrecision(torch.float16)},
    "cpu_offload=": lambda m: {"cpu_offload": CPUOffload(offload_params=True)},
    "backward_prefetch=": lambda m: {"backward_prefetch": None},
    "forward_prefetch=": lambda m: {"forward_prefetch": True},
    "limit_all_gathers=": lambda m: {"limit_all_gathers": False},
    "block=": lambda m: {"block": Block.ELEMENT},
    "ranks [": lambda m: {"process_group": dist.new_group([dist.get_rank()])},
}


def apply(model: nn.Module, path: str, **options: Any) -> nn.Module:
    """Shard with ``fully_shard``'s names of arguments on both paths."""
    if path == "composable":
        return fully_shard(model, **options)
    for ours, theirs in (
        ("strategy", "sharding_strategy"),
        ("policy", "auto_wrap_policy"),
    ):
        if ours in options:
            options[theirs] = options.pop(ours)
    return FullyShardedDataParallel(model, **options)


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that a second application could change."""
    states = _get_fsdp_states(model)
    return [
        [id(module) for module in model.modules()],
        [(name, id(p), p.shape, p.data_ptr()) for name, p in model.named_parameters()],
        [(id(state), id(state.handle), state.name, state.parent) for state in states],
        [
            dict(module.__dict__.get("_composable_api_states", {}))
            for module in model.modules()
        ],
        [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
    ]


def spellings(path: str, family: str) -> list[Make]:
    """Those that the path has arguments for."""
    makes = SAME[family]
    if path == "composable":
        return makes
    return [m for m in makes if "block" not in m(TinyGPT())]


@pytest.mark.req("P-18", "B-01", "S3-01")
@both_paths
@on_ranks(2)
def test_equal_settings_are_skipped_however_they_are_spelled(
    world: World, path: str
) -> None:
    """A fresh policy, an explicit default, another form: nothing is sent or changed."""
    for family in SAME:
        makes = spellings(path, family)
        for first in (makes[0], makes[-1]):
            plain = TinyGPT()
            model = apply(plain, path, **first(plain))
            before = snapshot(model)
            for second in makes:
                with record() as calls:
                    found = apply(model, path, if_sharded="skip", **second(plain))
                assert found is model
                assert calls == []
                assert snapshot(model) == before, family
            model(gpt_input(0, world.rank))
            apply(model, path, if_sharded="skip", **makes[1](plain))


@pytest.mark.req("P-18", "B-01")
@both_paths
@on_ranks(2)
def test_settings_that_differ_in_force_are_refused_and_named(
    world: World, path: str
) -> None:
    """Either way round, on every rank, and the model is as it was."""
    for name, other in OTHERS.items():
        for is_first in (True, False):
            plain = TinyGPT()
            given = [other(plain), {}] if is_first else [{}, other(plain)]
            if path == "wrapper" and "block" in {*given[0], *given[1]}:
                continue
            model = apply(plain, path, **given[0])
            before = snapshot(model)
            again = partial(apply, model, path, if_sharded="skip", **given[1])
            text = message_of(again)
            assert text.startswith("CompositionError: fully_shard(if_sharded='skip')")
            assert name in text, (name, text)
            assert snapshot(model) == before


@pytest.mark.req("P-18")
def test_a_unit_that_a_policy_made_is_compared_by_what_it_has(one_rank: World) -> None:
    """Not by what was passed for it, which was nothing."""
    grad_op = ShardingStrategy.SHARD_GRAD_OP
    model = fully_shard(TinyGPT(), policy=BLOCKS, strategy=grad_op)
    block = model.blocks[0]

    assert fully_shard(block, if_sharded="skip", strategy=grad_op) is block
    with pytest.raises(CompositionError, match=r"SHARD_GRAD_OP.*FULL_SHARD"):
        fully_shard(block, if_sharded="skip")
    hand = TinyGPT()
    for each in hand.blocks:
        fully_shard(each)
    fully_shard(hand)
    assert fully_shard(hand, if_sharded="skip", policy=BLOCKS) is hand
    pair = [tiny_mlp(), tiny_mlp()]
    fully_shard(pair)
    assert fully_shard(pair, if_sharded="skip") is pair
    with pytest.raises(CompositionError, match="one unit of 2 modules"):
        fully_shard(pair[0], if_sharded="skip")


@pytest.mark.req("P-18")
@on_ranks(2)
def test_the_groups_that_were_given_are_compared(world: World) -> None:
    """By their ranks: other objects over the same ranks are equal."""
    rank = dist.get_rank()
    pair, again = ((dist.new_group([rank]), world.group) for _ in range(2))
    model = fully_shard(tiny_mlp(), process_group=pair)

    assert fully_shard(model, if_sharded="skip", process_group=again) is model
    text = message_of(
        partial(fully_shard, model, if_sharded="skip", process_group=pair[0])
    )
    assert f"it is over ranks [{rank}], copies on [0, 1], this call asks for" in text
