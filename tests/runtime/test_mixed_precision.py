"""Mixed precision: dtypes of compute, reduction, buffers, inputs and outputs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

from composable_fsdp import (
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
    no_sync,
)
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    sgd,
    train,
    wide_input,
)
from tests.support.world import World

BF16 = torch.bfloat16
COMPUTE = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)

both_paths = pytest.mark.parametrize("path", PATHS)


class Seen(nn.Module):
    """A linear layer that notes the dtypes its forward meets."""

    scale: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 1.001))
        self.register_buffer("count", torch.tensor(3))
        self.met: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.linear.weight, self.scale
        self.met = {"x": x.dtype, "weight": weight.dtype, "scale": scale.dtype}
        y: Tensor = self.linear(x.to(weight.dtype)) * scale.to(weight.dtype)
        return y


def fsdp2_weights(world: World) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of torch's FSDP2 after the same training."""
    model = TinyGPT()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for block in model.blocks:
        torch_fsdp2(block, mp_policy=policy)
    torch_fsdp2(model, mp_policy=policy)
    losses = train(model, world.rank, gpt_input, sgd)
    whole = {n: v.full_tensor() for n, v in model.state_dict().items()}
    return losses, whole


@pytest.mark.req("B-20")
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(2)
def test_low_precision_compute_trains_as_fsdp2_does(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """bf16 compute, fp32 reduction: losses equal to the bit, weights to rounding."""
    expected, weights = fsdp2_weights(world)
    model = TinyGPT()
    ours = apply_units(
        model, gpt_units(model), path=path, strategy=strategy, mixed_precision=COMPUTE
    )

    losses = train(ours, world.rank, gpt_input, sgd)

    assert losses == expected
    for name, value in ours.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.allclose(value, weights[name], atol=1e-6), name


@pytest.mark.req("B-20")
@on_ranks(2)
def test_a_forward_meets_the_dtypes_it_meets_under_fsdp1(world: World) -> None:
    """Input, weight and buffer, and so the output to the bit."""
    theirs = Seen()
    ours = copy.deepcopy(theirs)
    options: dict[str, Any] = {"param_dtype": BF16, "buffer_dtype": BF16}
    wrapped = TorchFSDP1(
        theirs,
        mixed_precision=TorchMixedPrecision(**options),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    fully_shard(ours, mixed_precision=MixedPrecision(**options))
    x = wide_input(8)(0, world.rank)

    expected, out = wrapped(x), ours(x)

    assert torch.equal(out, expected)
    assert out.dtype is expected.dtype
    assert ours.met == theirs.met
    # Integers stay, and the state dict gives the original dtypes.
    assert ours.count.dtype is torch.int64
    assert {v.dtype for v in ours.state_dict().values()} == {torch.float32, torch.int64}


@on_ranks(2)
def test_inputs_are_cast_at_the_root_of_each_call(world: World) -> None:
    """As in torch's composable FSDP1, also below a unit without mixed precision."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mixed_precision=MixedPrecision(param_dtype=BF16))
    fully_shard(model)

    assert model(torch.ones(2, 4)).dtype is BF16


@pytest.mark.req("B-14")
@on_ranks(2)
def test_low_precision_compute_accumulates_in_the_reduce_dtype(world: World) -> None:
    """1 + 2**-9 + 2**-9 is lost in bf16 and kept here."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mixed_precision=COMPUTE)
    small = torch.full((1, 1), 2.0**-9)

    with no_sync(model):
        backward(model(torch.ones(1, 1)).sum())
        backward(model(small).sum())
    backward(model(small).sum())

    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
    assert all(g.item() == 1.0 + 2.0**-8 for g in gradients)
    assert gradients or world.rank > 0


class NotingNorm(nn.BatchNorm1d):
    """A batch norm that notes the dtypes its forward meets."""

    met: tuple[torch.dtype, torch.dtype]

    def forward(self, x: Tensor) -> Tensor:
        self.met = (x.dtype, self.weight.dtype)
        return super().forward(x)


@pytest.mark.req("S0-08")
@both_paths
@on_ranks(2)
def test_batch_norms_keep_full_precision_under_a_policy(
    world: World, path: str
) -> None:
    """A unit of its own, inputs raised and outputs lowered; as FSDP1, and said once."""
    torch.manual_seed(0)
    norm = NotingNorm(8)
    model = nn.Sequential(nn.Linear(8, 8), norm)
    theirs = copy.deepcopy(model)
    name = "policy" if path == "composable" else "auto_wrap_policy"
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(BF16),
        name: ModuleWrapPolicy({nn.Linear}),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = apply_units(model, [], path=path, **options)
        wrapped = TorchFSDP1(
            theirs,
            mixed_precision=TorchMixedPrecision(BF16),
            auto_wrap_policy=TorchModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    x = wide_input(8)(0, world.rank)

    out, expected = sharded(x), wrapped(x)

    assert norm.met == (torch.float32, torch.float32)
    assert torch.equal(out, expected)
    assert out.dtype is BF16
    assert any("_BatchNorm" in str(w.message) for w in caught[:1])
