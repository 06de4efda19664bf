"""How much memory a full state takes while it is put together: one unit's, besides it.

Counted op by op on one rank of two, whose peer is not there: bytes are those of a real
run, values are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
    optim_state_dict,
    set_state_dict_type,
)
from tests.support.memory import LiveBytes
from tests.support.reference import apply_units
from tests.support.sharded import both_paths
from tests.support.world import fake_world

UNITS = 6
WIDTH = 32
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4
SLACK = 512
"""Counters and padding."""


def build(path: str) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
    return apply_units(model, [str(i) for i in range(UNITS)], path=path)


def of_model(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return dict(model.state_dict())


def of_optimizer(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return optim_state_dict(model, optimizer)


def touch(values: list[Any]) -> int:
    """Have ``LiveBytes`` know of tensors that were made outside; their bytes."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(tensor.detach().numel() * tensor.itemsize for tensor in tensors)


def measured(
    rank: int, path: str, take: Callable[..., dict[str, Any]]
) -> tuple[int, dict[str, Any]]:
    """Bytes beyond those before at the peak of ``take``, and what it gave."""
    with fake_world(2, rank=rank):
        model = build(path)
        optimizer = optim.AdamW(model.parameters())
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
            FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
        )
        with LiveBytes() as live:
            touch(list(model.parameters()))
            for state in optimizer.state.values():
                touch(list(state.values()))
            before = live.now
            live.reset()
            given = take(model, optimizer)
            return live.peak - before, given


TAKE = {"model": (of_model, 1), "optimizer": (of_optimizer, 2)}


@pytest.mark.req("U-04")
@pytest.mark.parametrize("what", TAKE)
@both_paths
def test_a_state_is_put_together_unit_by_unit(path: str, what: str) -> None:
    """The first rank holds the result and one unit: all units at once in device memory
    would be twice as much. Others, which have nothing to return, hold a shard more."""
    take, copies = TAKE[what]

    first, given = measured(0, path, take)
    other, nothing = measured(1, path, take)

    assert first >= copies * UNITS * UNIT_BYTES
    assert first <= (copies * UNITS + 2) * UNIT_BYTES + SLACK * UNITS
    assert len(given) > 0
    assert other <= UNIT_BYTES + SLACK * UNITS
    assert nothing == {}
