"""Claims on values: what was saved comes back bit by bit, however memory holds it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    async_save,
    flat_parameters,
    fully_shard,
    load,
    open_source,
    save,
)
from composable_fsdp.storage.manifest import CODES
from tests.storage.training import same
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


class Holder(nn.Module):
    """A parameter and buffers."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name, value in buffers.items():
            self.register_buffer(name, value)


def copied(saved: Holder, into: Holder, folder: Path, behind: bool = False) -> Holder:
    """``into`` with what was saved of ``saved``."""
    if behind:
        async_save(folder / "run", saved).result()
    else:
        save(folder / "run", saved)
    load(folder / "run", into)
    return into


@pytest.mark.parametrize("behind", [False, True])
def test_lazily_negated_and_conjugated_buffers_keep_their_values(
    tmp_path: Path, behind: bool
) -> None:
    """Torch only notes the operation; the bytes in memory are those before it."""
    one, two = torch.tensor([1 + 2j]), torch.tensor([1 + 2j, 3 + 4j])
    buffers = {"a": one.conj().imag, "b": two.conj().imag, "c": two.conj()}
    assert buffers["a"].is_neg()
    assert buffers["c"].is_conj()
    blank = {name: torch.zeros_like(value) for name, value in buffers.items()}

    found = copied(Holder(**buffers), Holder(**blank), tmp_path, behind)

    assert found.get_buffer("a").tolist() == [-2.0]
    assert found.get_buffer("b").tolist() == [-2.0, -4.0]
    assert found.get_buffer("c").tolist() == [1 - 2j, 3 - 4j]


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

    found = copied(saved, into, tmp_path)

    for name, value in saved.named_buffers():
        there = found.get_buffer(name).reshape(-1).contiguous()
        expected = value.reshape(-1).contiguous()
        assert torch.equal(there.view(torch.uint8), expected.view(torch.uint8)), name


def test_a_buffer_whose_elements_share_memory_is_refused_before_the_copy(
    tmp_path: Path,
) -> None:
    """It can be saved; nothing can be written into it, so nothing is loaded."""
    save(tmp_path / "run", Holder(wide=torch.tensor([7.0]).expand(3)))
    model = Holder(wide=torch.zeros(1).expand(3))
    with torch.no_grad():
        model.weight.zero_()

    text = message_of(lambda: load(tmp_path / "run", model))

    assert text.startswith("CheckpointError: Elements of 'wide' share memory")
    assert model.weight.tolist() == [0.0, 0.0]


def narrow() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(nn.Linear(3, 3).bfloat16())
    return model, torch.optim.AdamW(model.parameters())


def averages(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [state["exp_avg"] for state in optimizer.state.values()]
    return [value for value in values if value.numel()]


def check_wide_state(world: World, folder: Path) -> list[bool]:
    model, optimizer = narrow()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.rand(state["exp_avg"].shape)
    saved = [value.clone() for value in averages(optimizer)]
    save(folder / "run", model, optimizer)
    results = []
    for into, other in ((model, optimizer), narrow()):
        load(folder / "run", into, other)
        results.append(same(averages(other), saved))
    return results


def test_state_in_another_dtype_than_its_parameter_keeps_its_bits(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Float32 averages of bfloat16 weights, in an optimizer that has state or not."""
    assert ranks(2).run(check_wide_state, tmp_path) == [[True, True]] * 2


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


def test_optimizers_that_load_from_one_open_source_share_no_memory(
    tmp_path: Path,
) -> None:
    """The steps of the first counted in the second."""
    models = [nn.Linear(3, 3) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for parameter in models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    save(tmp_path / "run", models[0], optimizers[0])
    with open_source(tmp_path / "run") as source:
        for model, optimizer in zip(models, optimizers, strict=True):
            load(source, model, optimizer)

    optimizers[0].step()

    steps = [[s["step"].item() for s in o.state.values()] for o in optimizers]
    assert steps == [[2.0, 2.0], [1.0, 1.0]]
