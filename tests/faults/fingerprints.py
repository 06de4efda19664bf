"""Models that one rank builds or shards otherwise, for tests of the comparison.

``CHANGES`` names the faults; the text is in the error that all ranks raise. Raw torch
says nothing to most of them and goes on with values of other parameters.
"""

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
    DesyncError,
    FullyShardedDataParallel,
    Int8Wire,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    register_comm_hook,
    set_gradient_divide_factor,
)
from composable_fsdp.access.settings import (
    set_all_reduce_hook,
    set_custom_all_gather,
)

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
    """Return layers whose values ``seed`` decides."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are sharded, inner ones first."""
    return [*model.children(), model]


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each layer and the root."""
    for each in units(model):
        fully_shard(each, **options)
    return model


def step(model: nn.Module) -> float:
    """Return the loss of a forward and a backward."""
    dtype = next(model.parameters()).dtype
    loss = model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean()
    loss.backward()
    return float(loss.detach())


class Change(NamedTuple):
    """What one rank does otherwise."""

    told: str
    """A part of the error, which names the place and both values."""
    edit: Callable[[nn.Sequential], object] = lambda model: None
    """Changes the plain model in place."""
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed
    leave_out: int | None = None
    """Index of a layer that does not become a unit."""
    after: Callable[[nn.Module], object] = lambda model: None
    """Changes the sharded model."""


def _swap(model: nn.Sequential) -> None:
    """Register equal modules in the other order."""
    modules = model[1]._modules
    modules["first"] = modules.pop("first")


def _rename(model: nn.Sequential) -> None:
    model[1]._modules["third"] = model[1]._modules.pop("second")


def _split_otherwise(model: nn.Sequential) -> None:
    model[1].scale = nn.Parameter(torch.ones(WIDTH, 2))


def _tie(model: nn.Sequential) -> None:
    linear = model.get_submodule("1.second")
    linear.weight = model.get_parameter("1.first.weight")


def _hook(state: object, grad: Tensor, output: Tensor | None = None) -> None:
    """Reduce nothing."""


def _double(sums: Tensor) -> None:
    sums.mul_(2)


class _Gather:
    """Stands in for an all-gather, which no rank comes to."""

    def allocate(self, *_: Any, **__: Any) -> Tensor:
        """Allocate nothing."""
        raise NotImplementedError

    __call__: Any = allocate


def _by_kind(name: str, parameter: nn.Parameter) -> str:
    return "vector" if parameter.dim() < 2 else "matrix"


BF16, FP16 = torch.bfloat16, torch.float16

CHANGES = {
    "shape": Change(
        "the shape of parameter '1.scale': (8,) on rank 0, (4, 2) on rank 1",
        _split_otherwise,
    ),
    "dtype": Change(
        "the dtype of parameter '1.scale': float32 on rank 0, float16 on rank 1",
        lambda model: model[1].to(FP16),
    ),
    "order": Change(
        "parameter 2 of unit '1': '1.first.weight' on rank 0, '1.second.weight' on "
        "rank 1",
        _swap,
    ),
    "name": Change(
        "parameter 4 of unit '1' (rank 1 without a parameter '1.second.weight'; "
        "rank 0 without a parameter '1.third.weight')",
        _rename,
    ),
    "requires_grad": Change(
        "requires_grad of parameter '1.first.bias': True on rank 0, False on rank 1",
        lambda model: model.get_parameter("1.first.bias").requires_grad_(False),
    ),
    "tie": Change("'1.first.weight' (tied to '1.second.weight') on rank 1", _tie),
    "buffer": Change(
        "buffer 2 of unit '2': nothing on rank 0, '2.cache' on rank 1",
        lambda model: model[2].register_buffer("cache", torch.zeros(1)),
    ),
    "extra layer": Change(
        "unit number 5 of the model (rank 0 without a unit '3'): nothing on rank 0, "
        "'3' on rank 1",
        lambda model: model.append(Layer()),
    ),
    "extra parameter": Change(
        "parameter 1 of unit (root) (rank 0 without a parameter 'bias'): nothing on "
        "rank 0, 'bias' on rank 1",
        lambda model: model.register_parameter("bias", nn.Parameter(torch.ones(1))),
    ),
    "units": Change(
        "unit number 3 of the model (rank 1 without a unit '1'): '1' on rank 0, '2' on "
        "rank 1",
        leave_out=1,
    ),
    "strategy": Change(
        "the option strategy of unit (root): FULL_SHARD on rank 0, SHARD_GRAD_OP on "
        "rank 1",
        options={"strategy": ShardingStrategy.SHARD_GRAD_OP},
    ),
    "replication": Change(
        "the option strategy of unit (root): FULL_SHARD on rank 0, NO_SHARD on rank 1",
        options={"strategy": ShardingStrategy.NO_SHARD},
    ),
    "mixed precision": Change(
        "the option mixed_precision.param_dtype of unit (root): None on rank 0, "
        "bfloat16 on rank 1",
        options={"mixed_precision": MixedPrecision(param_dtype=BF16)},
    ),
    "reduce dtype": Change(
        "the option mixed_precision.reduce_dtype of unit (root): None on rank 0, "
        "float16 on rank 1",
        options={"mixed_precision": MixedPrecision(reduce_dtype=FP16)},
    ),
    "prefetch": Change(
        "the option backward_prefetch of unit (root): BACKWARD_PRE on rank 0, "
        "BACKWARD_POST on rank 1",
        options={"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    ),
    "forward prefetch": Change(
        "the option forward_prefetch of unit (root): False on rank 0, True on rank 1",
        options={"forward_prefetch": True},
    ),
    "offload": Change(
        "the option cpu_offload of unit (root): False on rank 0, True on rank 1",
        options={"cpu_offload": CPUOffload(offload_params=True)},
    ),
    "block": Change(
        "the option block of unit (root): ROW on rank 0, ELEMENT on rank 1",
        options={"block": Block.ELEMENT},
    ),
    "group_by": Change(
        "the flat buffer of parameter '0.scale' (group_by): number 1 from element",
        options={"group_by": _by_kind},
    ),
    "check_weights": Change(
        "the option check_weights of unit (root): warn on rank 0, error on rank 1",
        options={"check_weights": "error"},
    ),
    "divide factor": Change(
        "the option gradient divide factor of unit '1': None on rank 0, 3.0 on rank 1",
        after=lambda model: set_gradient_divide_factor(model.get_submodule("1"), 3.0),
    ),
    "hook": Change(
        "the option communication hook of unit (root): None on rank 0, _hook on rank 1",
        after=lambda model: register_comm_hook(model, None, _hook),
    ),
    "wire": Change(
        "the option wire of unit (root): None on rank 0, Int8Wire(block=128) on rank 1",
        options={"wire": Int8Wire()},
    ),
    "rows of a block": Change(
        "the option block of unit (root): ROW on rank 0, Block.rows(2) on rank 1",
        options={"block": Block.rows(2)},
    ),
    "all-reduce hook": Change(
        "the option all-reduce hook of unit '1': None on rank 0, _double on rank 1",
        after=lambda model: set_all_reduce_hook(model.get_submodule("1"), _double),
    ),
    "custom all-gather": Change(
        "the option custom all-gather of unit '1': None on rank 0, _Gather on rank 1",
        after=lambda model: set_custom_all_gather(model.get_submodule("1"), _Gather()),
    ),
}


def changed_model(is_changed: bool, name: str, **options: Any) -> nn.Module:
    """Return the sharded model, with the change ``name`` if ``is_changed``."""
    model = build()
    change = CHANGES[name] if is_changed else Change("")
    change.edit(model)
    for index, each in enumerate(units(model)):
        if index != change.leave_out:
            fully_shard(each, **{**options, **change.options})
    change.after(model)
    return model


def wrapped_model(is_changed: bool, name: str) -> nn.Module:
    """Return the same through the wrapper."""
    model = build()
    change = CHANGES[name] if is_changed else Change("")
    change.edit(model)
    for index in range(len(model)):
        if index != change.leave_out:
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
