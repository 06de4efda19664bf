"""Claims on communication hooks: FSDP1's contract, its hooks, and its numbers."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel as TorchFSDP1,
)
from torch.distributed.fsdp import (
    ShardingStrategy as TorchStrategy,
)

from composable_fsdp import ShardingStrategy, features
from composable_fsdp.comm.collectives import record
from composable_fsdp.features import DefaultState, register_comm_hook
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import gpt_input, loss_of
from tests.support.sharded import gpt, message_of, own_gradient, own_parts
from tests.support.world import World

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


def backward(model: nn.Module, batch: int, rank: int) -> None:
    loss_of(model, gpt_input(batch, rank)).backward()  # type: ignore[no-untyped-call]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def group() -> Any:
    return torch.distributed.group.WORLD


@by_strategy
@on_ranks(2)
def test_a_hook_is_called_once_per_region_and_its_result_is_the_gradient(
    world: World, strategy: ShardingStrategy
) -> None:
    """It gets the state, the whole gradient, and the shard to fill where there is one;
    what it leaves is not divided again."""
    model: Any = gpt("wrapper", strategy=strategy)
    seen: list[tuple[int, ...]] = []

    def hook(state: list[int], gradient: Tensor, output: Tensor | None = None) -> None:
        state.append(len(seen))
        seen.append(tuple(t.numel() for t in (gradient, output) if t is not None))
        (gradient if output is None else output).fill_(world.rank + 7.0)

    mine: list[int] = []
    model.register_comm_hook(mine, hook)
    backward(model, 0, world.rank)

    regions = [r for s in _get_fsdp_states(model) for r in s.handle.layout.trainable]
    sizes = [
        (r.layout.padded_numel, r.layout.shard_numel)[: r.layout.world_size]
        for r in regions
    ]
    assert sorted(seen) == sorted(sizes)
    assert len(mine) == len(regions)
    for name, gradient in gradients(model).items():
        expected = torch.full_like(gradient, world.rank + 7.0)
        assert torch.equal(gradient, expected), name


def decompress(state: Any, gradient: Tensor) -> None:
    """Torch's, without the note for CUDA's allocator, which fails on CPU (2.13)."""
    gradient.data = gradient.data.to(state.parameter_type)


@pytest.mark.parametrize("no_shard", [False, True])
@pytest.mark.parametrize("origin", ["torch", "ours"])
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
@on_ranks(2)
def test_low_precision_hooks_give_the_bits_of_fsdp1(
    world: World, name: str, origin: str, no_shard: bool
) -> None:
    """Ours, and torch's own given to our function."""
    strategy = STRATEGIES[2 if no_shard else 0]
    model = gpt("composable", strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD
        theirs = TorchFSDP1(
            TinyGPT(),
            use_orig_params=True,
            sharding_strategy=TorchStrategy[strategy.name],
            device_id=torch.device("cpu"),
        )
    source: Any = torchs if origin == "torch" else features
    state = source.LowPrecisionState(group())

    register_comm_hook(model, state, getattr(source, name))
    theirs_state: Any = torchs.LowPrecisionState
    theirs.register_comm_hook(theirs_state(group()), getattr(torchs, name))
    with patch.object(torchs, "_decompress", decompress):
        with record() as calls:
            backward(model, 0, world.rank)
        backward(theirs, 0, world.rank)
    # Float32 gradients travel in two bytes an element.
    plan = [r for s in _get_fsdp_states(model) for r in s.handle.layout.plan.regions]
    op = "all_reduce" if no_shard else "reduce_scatter"
    sent = sum(call.nbytes for call in calls if call.op == op)
    # What torch's own hook sends is not recorded.
    assert sent == (origin == "ours") * sum(2 * each.padded_numel for each in plan)

    with TorchFSDP1.summon_full_params(theirs, with_grads=True):
        full = {
            n: p.grad.clone()
            for n, p in theirs.module.named_parameters()
            if p.grad is not None
        }
    for fqn, (leaf, part) in own_parts(model, full).items():
        gradient = own_gradient(leaf)
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, part), fqn


def shrink(_: object, gradient: Tensor, output: Tensor) -> None:
    output.data = output.data[:1]


@on_ranks(4)
def test_what_cannot_have_a_hook_is_refused_by_name(world: World) -> None:
    """Hybrid units, a second hook, no function, a result of another size, no group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = gpt("composable", strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    model, short = gpt("composable"), gpt("composable")
    register_comm_hook(model, None, print)
    register_comm_hook(short, None, shrink)
    wrong: Any = None
    for act, words in (
        (
            partial(register_comm_hook, hybrid, None, print),
            "CompositionError: register_comm_hook was called with unit (TinyGPT) of "
            "strategy HYBRID_SHARD: a hook reduces over one group",
        ),
        (partial(register_comm_hook, model, None, print), "a unit takes one hook."),
        (partial(register_comm_hook, model, None, wrong), "TypeError: register_comm_h"),
        (partial(DefaultState, wrong), "ValueError: DefaultState expects a process"),
        (
            partial(backward, short, 0, world.rank),
            "FSDPError: A communication hook left 1 elements; expected",
        ),
    ):
        assert words in message_of(act)
