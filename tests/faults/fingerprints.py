"""Models that one rank builds or shards otherwise, for tests of the comparison."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from composable_fsdp.access import set_gradient_divide_factor
from composable_fsdp.access.settings import set_all_reduce_hook
from composable_fsdp.errors import DesyncError
from composable_fsdp.features import Int8Wire, register_comm_hook

WIDTH = 4


class Layer(nn.Module):
    """Two equal linear modules, a scale and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(2 * WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Run all modules in the order in which they are registered."""
        for module in self.children():
            x = module(x)
        return x * self.scale.sum()


def build(seed: int = 0, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each layer and the root."""
    for each in (*model.children(), model):
        fully_shard(each, **options)
    return model


def step(model: nn.Module) -> float:
    """Return the loss of a forward and a backward."""
    dtype = next(model.parameters()).dtype
    loss = model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean()
    loss.backward()
    return float(loss.detach())


def _hook(state: object, grad: Tensor, output: Tensor | None = None) -> None:
    """Reduce nothing."""


def _double(sums: Tensor) -> None:
    sums.mul_(2)


BF16 = torch.bfloat16
OPTIONS: dict[str, dict[str, Any]] = {
    "the option strategy of": {"strategy": ShardingStrategy.NO_SHARD},
    "of unit (root): None on rank 0, MixedPrecision(param_dtype=torch.bfloat16": {
        "mixed_precision": MixedPrecision(param_dtype=BF16)
    },
    "None on rank 0, MixedPrecision(param_dtype=None, reduce_dtype=torch.bfloat16": {
        "mixed_precision": MixedPrecision(reduce_dtype=BF16)
    },
    "the option backward_prefetch of": {
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST
    },
    "the option forward_prefetch of": {"forward_prefetch": True},
    "the option cpu_offload of": {"cpu_offload": CPUOffload(offload_params=True)},
    "the option block of unit (root): ROW on rank 0, Block.rows(2) on rank 1": {
        "block": Block.rows(2)
    },
    "the option check_weights of": {"check_weights": "error"},
    "the option wire of": {"wire": Int8Wire()},
}
"""A part of the error, and what one rank passes otherwise."""
SETTINGS: dict[str, Callable[[nn.Module], object]] = {
    "the option gradient divide factor of unit '1': None on rank 0, 3.0 on rank 1": (
        lambda model: set_gradient_divide_factor(model.get_submodule("1"), 3.0)
    ),
    "the option communication hook of unit (root)": (
        lambda model: register_comm_hook(model, None, _hook)
    ),
    "the option all-reduce hook of unit '1'": (
        lambda model: set_all_reduce_hook(model.get_submodule("1"), _double)
    ),
}
"""A part of the error, and what one rank sets after sharding."""
SHAPE = "the shape of parameter '1.scale': (8,) on rank 0, (4, 2) on rank 1"


def with_other_shape(*, is_changed: bool, **options: Any) -> nn.Module:
    """Return the sharded model, with another shape of ``1.scale`` if ``is_changed``."""
    model = build()
    if is_changed:
        model[1].scale = nn.Parameter(torch.ones(WIDTH, 2))
    return shard(model, **options)


def wrapped() -> nn.Module:
    """Return the model that the wrapper has sharded."""
    model = build()
    for index in range(len(model)):
        model[index] = FullyShardedDataParallel(model[index])
    return FullyShardedDataParallel(model)


class Outcome(NamedTuple):
    """What a rank saw."""

    error: str | None
    warnings: tuple[str, ...]


def outcome(act: Callable[[], object]) -> Outcome:
    """Return the ``DesyncError`` and the warnings of ``act``, without the rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = None
        try:
            act()
        except DesyncError as raised:
            error = str(raised.args[0])
    return Outcome(error, tuple(str(each.message) for each in caught))
