"""The plan's peak is what a step takes, counted op by op."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    Placement,
    ShardingStrategy,
    fully_shard,
    plan,
)
from composable_fsdp.tools.memory import Memory
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.planning.trees import Text
from tests.support.memory import LiveBytes, cuda_order, fake_tensors
from tests.support.reference import backward
from tests.support.world import fake_world

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Reduced in another dtype than ``.grad`` has: a reduction needs a buffer to land in.
LOWER = MixedPrecision(param_dtype=torch.bfloat16)
LOWER_KEPT = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)


class Chain(nn.Module):
    """Linear layers of the given widths, one after the other."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)
        self.example = torch.zeros(1, widths[0])

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, first width)`` to ``(batch, last width)``."""
        for layer in self.layers:
            x = layer(x)
        return x


def equal() -> Chain:
    """Five units of one size."""
    return Chain(*[2048] * 6)


def unequal() -> Chain:
    """Five units of five sizes."""
    return Chain(2048, 1024, 4096, 2048, 512, 3072)


def text(*, tied: bool = False) -> Text:
    """A small GPT, whose root holds an embedding and a head."""
    model: Any = Text(5000, 1024, 3)
    if tied:
        model.head.weight = model.tokens.weight
    model.layers, model.example = model.blocks, torch.zeros(1, 1, dtype=torch.long)
    return cast(Text, model)


class Nested(nn.Module):
    """Three units, each a layer of its own and a chain of two units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2048, 1024), Chain(1024, 3072, 2048))
            for _ in range(3)
        )
        chains = [module for module in self.modules() if isinstance(module, Chain)]
        self.layers = [*self.blocks, *(x for chain in chains for x in chain.layers)]
        self.example = torch.zeros(1, 2048)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 2048)`` to the same."""
        for block in self.blocks:
            x = block(x)
        return x


def frozen() -> Chain:
    """Only the last of five units trains, so the peak is one of forward."""
    model = Chain(2048, 2048, 1024, 4096, 2048, 512)
    model.layers[:-1].requires_grad_(False)
    return model


def peak_of(
    make: Callable[[], Any],
    world_size: int,
    order: str,
    *,
    shard_world_size: int | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> tuple[Memory, int, int]:
    """The planned peak of a step, and the bytes that were alive in the second; and the
    bytes of the largest unit.

    ``order`` is that of "cpu" or "cuda"; ``prepare`` changes the sharded model, whose
    plan then counts.
    """
    with ExitStack() as stack:
        stack.enter_context(fake_world(world_size))
        mesh = None
        if shard_world_size is not None:
            shape = (world_size // shard_world_size, shard_world_size)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        stack.enter_context(fake_tensors())
        live = stack.enter_context(LiveBytes())
        model = make()
        options["policy"] = CustomPolicy(lambda m: any(m is x for x in model.layers))
        plan_ = plan(
            model, world_size=world_size, shard_world_size=shard_world_size, **options
        )
        fully_shard(model, device_mesh=mesh, **options)
        if prepare is not None:
            prepare(model)
            plan_ = plan(model)
        handles = _get_fsdp_handles(model)
        if order == "cuda":
            stack.enter_context(cuda_order(handles))
        for _ in range(2):
            live.reset()
            backward(model(model.example).float().sum())
            model.zero_grad()
    peak = plan_.peak(device_type=order)
    # Both places are counted together here: the device stands for the GPU, too.
    on_host = plan_.host_bytes if order == "cuda" else 0
    peak = peak._replace(parameters=peak.parameters + on_host)
    return peak, live.peak, max(unit.full_bytes for unit in plan_.units)


PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
OFFLOAD = CPUOffload(offload_params=True)
GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
SHARD = ("shard",)
ONE_BY_ONE = partial(Chain, 4096, 2048, 512, 256)
"""Its first unit, the largest, is done at the end of backward alone."""
CASES: list[tuple[Callable[[], nn.Module], int, dict[str, Any]]] = [
    (unequal, 1, {}),
    (unequal, 1, {"mixed_precision": LOW}),
    (equal, 2, {"strategy": GRAD_OP}),
    (unequal, 8, {"mixed_precision": LOW, "strategy": GRAD_OP}),
    (unequal, 64, {"mixed_precision": LOWER}),
    (unequal, 8, {"backward_prefetch": POST, "forward_prefetch": True}),
    (unequal, 8, {"backward_prefetch": None}),
    (frozen, 8, {"forward_prefetch": True}),
    # The largest all-gather is the peak: with the copies of the shards that it casts.
    (frozen, 8, {"cpu_offload": OFFLOAD, "mixed_precision": LOW}),
    (ONE_BY_ONE, 8, {"backward_prefetch": PRE}),
    (ONE_BY_ONE, 8, {"backward_prefetch": None}),
    (equal, 8, {"limit_all_gathers": False}),
    (unequal, 1, {"cpu_offload": OFFLOAD, "mixed_precision": LOWER}),
    (unequal, 2, {"cpu_offload": OFFLOAD, "backward_prefetch": POST}),
    (unequal, 8, {"cpu_offload": OFFLOAD, "mixed_precision": LOW}),
    (unequal, 8, {"cpu_offload": OFFLOAD, "mixed_precision": LOWER_KEPT}),
    *(
        (unequal, 8, {"strategy": s, "shard_world_size": 4, "mixed_precision": LOWER})
        for s in ShardingStrategy
    ),
    (unequal, 8, {"strategy": ShardingStrategy.HYBRID_SHARD, "shard_world_size": 1}),
    (unequal, 8, {"placement": Placement(SHARD, ("shard:4",), SHARD, SHARD)}),
    (Nested, 8, {"rel": 0.005}),
    (Nested, 8, {"rel": 0.005, "strategy": GRAD_OP, "backward_prefetch": None}),
    (text, 8, {"rel": 0.005, "mixed_precision": LOW}),
    (partial(text, tied=True), 8, {"rel": 0.005}),
]


@pytest.mark.req("U-03", "M-07")
@pytest.mark.parametrize(
    ("case", "order"),
    [
        (number, order)
        for number in range(len(CASES))
        for order in ("cpu", "cuda")
        if (number % 2 == 0) is (order == "cpu")
    ],
)
def test_the_planned_peak_is_that_of_a_step(case: int, order: str) -> None:
    """Small activations, which are left out, are all that is missing: under 0.2 %, or
    0.5 % of models with units inside of units or a root with parameters of its own."""
    make, world_size, given = CASES[case]
    options = dict(given)
    rel = options.pop("rel", 0.002)

    peak, measured, _ = peak_of(make, world_size, order, **options)

    assert peak.total == pytest.approx(measured, rel=rel)
    assert peak.total <= measured or rel > 0.002
