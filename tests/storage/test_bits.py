"""Claims on values: what was saved comes back bit by bit, however memory holds it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    flat_parameters,
    fully_shard,
    load,
    save,
)
from composable_fsdp.storage.manifest import CODES
from tests.support.on_ranks import on_ranks
from tests.support.world import World


class Holder(nn.Module):
    """A parameter and buffers."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name, value in buffers.items():
            self.register_buffer(name, value)


@pytest.mark.parametrize("dtype", [d for d in CODES if d != torch.bool], ids=str)
def test_every_bit_of_every_dtype_comes_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Also of what is no number, in 0-d, strided and empty buffers."""
    numbers = torch.arange(256 * dtype.itemsize) * 37 % 256
    bits = numbers.to(torch.uint8).view(dtype)
    blank = torch.zeros(256 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    saved = Holder(all=bits, one=bits[255], some=bits[::5], none=bits[:0])
    into = Holder(
        all=blank, one=blank[0].clone(), some=blank[::5].clone(), none=bits[:0]
    )

    save(tmp_path / "run", saved)
    load(tmp_path / "run", into)

    for name, value in saved.named_buffers():
        there = into.get_buffer(name).reshape(-1).contiguous()
        expected = value.reshape(-1).contiguous()
        assert torch.equal(there.view(torch.uint8), expected.view(torch.uint8)), name


NESTED = {
    "precise": torch.tensor(1 / 3, dtype=torch.float64),
    "list": [torch.tensor([1 / 3]), (torch.tensor(0.1), 2)],
    "dict": {"deep": {"a": torch.tensor([0.3], dtype=torch.float64)}, "step": 3},
    "text": "warming up",
}


@on_ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_wide_state_and_containers_come_back_as_they_were_saved(
    world: World, tmp_path: Path, flat: bool
) -> None:
    """``Optimizer.load_state_dict`` casts to bfloat16 what an optimizer keeps wide.

    And it made a text the name of a generator.
    """

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        # Without padding, which has no values to come back.
        model = fully_shard(nn.Linear(8, 8, bias=False).bfloat16())
        given = flat_parameters(model) if flat else model.parameters()
        return model, torch.optim.NAdam(given, foreach=False)

    model, optimizer = made()
    for _ in range(3):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for state in optimizer.state.values():
        state["nested"] = copy.deepcopy(NESTED)
        # Wider than the parameter, in all elements.
        state["exp_avg"] = torch.rand(state["exp_avg"].shape)
    expected = told(optimizer)
    save(tmp_path / "run", model, optimizer)
    for into, other in ((model, optimizer), made()):
        load(tmp_path / "run", into, other)
        assert told(other) == expected


def told(optimizer: torch.optim.Optimizer) -> list[str]:
    """State with dtypes, of parameters with elements here."""
    names = ("step", "mu_product", "nested", "exp_avg")
    return [
        str({name: (state[name], getattr(state[name], "dtype", 0)) for name in names})
        for parameter, state in optimizer.state.items()
        if parameter.numel()
    ]
