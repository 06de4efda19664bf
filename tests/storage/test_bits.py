"""Claims on values: what was saved comes back bit by bit, however memory holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import async_save, fully_shard, load, save
from composable_fsdp.storage.manifest import CODES
from tests.storage.training import same
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
