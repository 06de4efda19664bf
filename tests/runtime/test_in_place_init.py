"""What was on meta and got memory alone: buffers without values, rows drawn twice."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import PlanError, fully_shard, load, save, unshard_params
from tests.runtime.metas import on_meta
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, apply_units, differences
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
both_paths = pytest.mark.parametrize("path", PATHS)


class Rotary(nn.Module):
    """Frequencies that no checkpoint has, as Llama's; ``table`` is in checkpoints."""

    inv_freq: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.arange(4.0) + 1, persistent=False)
        self.register_buffer("table", torch.arange(3) + 1)
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.inv_freq + self.table.sum()
        return y


def rotary(path: str) -> Any:
    """A model on meta, with one unit below the root."""
    make = on_meta(lambda: nn.Sequential(Rotary(), nn.Linear(4, 4)))
    return apply_units(make, ["0"], path=path)


def constant(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.ones_(parameter)


def holder(model: nn.Module) -> Any:
    """The module that has the buffers."""
    return next(each for each in model.modules() if isinstance(each, Rotary))


@pytest.mark.req("P-19")
@on_ranks(2)
def test_buffers_that_nobody_filled_are_named_by_the_first_forward(
    world: World,
) -> None:
    """Filled in place, by ``.data``, or assigned, they are buffers like others.

    Each way to fill them, after the refusal.
    """
    path = "composable"
    ways: list[Callable[[Any], object]] = [
        lambda each: (each.inv_freq.fill_(1.0), each.table.fill_(2)),
        lambda each: (each.inv_freq.data.fill_(1.0), each.table.data.fill_(2)),
        lambda each: (
            each.register_buffer("inv_freq", torch.ones(4), persistent=False),
            each.register_buffer("table", torch.ones(3, dtype=torch.int64)),
        ),
    ]
    for fill in ways:
        model = rotary(path).to_empty(device="cpu")
        constant(model)
        for _ in range(2):
            with pytest.raises(
                PlanError, match=r"Buffers '0.inv_freq', '0.table' were on meta and no"
            ):
                model(torch.ones(2, 4))
        fill(holder(model))
        assert type(holder(model).inv_freq) is Tensor
        model(torch.ones(2, 4)).sum().backward()


def leave_buffers(module: nn.Module) -> None:
    """A ``param_init_fn`` that forgets buffers."""
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


@pytest.mark.req("P-19")
@both_paths
@on_ranks(2)
def test_buffers_that_an_initialiser_forgot_are_named(world: World, path: str) -> None:
    """``param_init_fn`` with ``to_empty`` and parameters alone."""
    model = on_meta(lambda: nn.Sequential(Rotary()))
    model = apply_units(model, [], path=path, param_init_fn=leave_buffers)

    with pytest.raises(PlanError, match=r"'0.inv_freq', '0.table' were on meta"):
        model(torch.ones(2, 4))


@pytest.mark.req("P-19")
@on_ranks(2)
def test_load_names_the_buffers_that_no_checkpoint_has(
    world: World, tmp_path: Path
) -> None:
    """A warning, for they may be set after; those that it has are loaded."""
    saved = fully_shard(nn.Sequential(Rotary(), nn.Linear(4, 4)))
    constant(saved)
    save(tmp_path / "one", saved)
    model = rotary("composable").to_empty(device="cpu")

    with pytest.warns(UserWarning, match=r"buffers '0.inv_freq' are not persistent"):
        load(tmp_path / "one", model)
    with pytest.raises(PlanError, match=r"Buffers '0.inv_freq' were on meta"):
        model(torch.ones(2, 4))
    model[0].inv_freq = torch.arange(4.0) + 1
    x = torch.ones(2, 4)
    assert torch.equal(model(x), saved(x))


@on_ranks(2)
def test_a_copy_on_meta_waits_for_its_buffers_too(world: World) -> None:
    """So does the original; names of the state dict stay."""
    model = rotary("composable")
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.to_empty(device="cpu")
        constant(each)
        with pytest.raises(PlanError, match=r"'0.inv_freq', '0.table' were on meta"):
            each(torch.ones(2, 4))
    assert list(on_meta(Rotary).state_dict()) == list(
        rotary("composable")[0].state_dict()
    )


def reset(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of parameters without elements
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


def deep() -> nn.Sequential:
    return nn.Sequential(*(tiny_mlp(12, hidden=20, seed=i) for i in range(3)))


def on_shards(seed: int) -> nn.Module:
    """Sharded on meta, and initialised in place under ``seed``."""
    model = apply_units(on_meta(deep), ["0", "1"])
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    reset(model)
    return model


def told(model: nn.Module) -> list[str]:
    """Warnings of two forwards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 12)).sum().backward()
    return [str(each.message) for each in caught]


@pytest.mark.req("P-19")
@on_ranks(2)
def test_ranks_that_drew_the_same_rows_are_told(world: World) -> None:
    """Once, and not after other seeds, a load, constants or whole initialisation.

    Under one seed a rank warns; nothing else does.
    """
    # A write on one rank alone, in a model before, must not part the ranks.
    other = apply_units(deep(), ["0"])
    if world.rank:
        next(other.parameters()).data.mul_(1)
        next(other.parameters()).detach().mul_(1)
    other(torch.ones(2, 12))

    texts = [text for each in world.gather(told(on_shards(0))) for text in each]
    assert len(texts) == 1, texts
    for part in ("drew the same numbers", "param_init_fn", "unshard_params", "rank "):
        assert part in texts[0]
    sharded = fully_shard(deep())
    torch.manual_seed(0)
    reset(sharded)
    assert [len(each) for each in world.gather(told(sharded))].count(1) == 1

    assert told(on_shards(world.rank)) == []
    loaded = on_shards(0)
    loaded.load_state_dict(deep().state_dict())
    assert told(loaded) == []
    assert told(apply_units(deep(), ["0"])) == []
    same = on_shards(0)
    for index, parameter in enumerate(same.parameters()):
        nn.init.constant_(parameter, index)
    assert told(same) == []
    whole = on_shards(0)
    torch.manual_seed(0)
    with unshard_params(whole):
        reset(whole)
    plain = deep()
    torch.manual_seed(0)
    reset(plain)
    assert differences(whole.state_dict(), plain.state_dict()) == {}
    assert told(whole) == []


@on_ranks(2)
def test_ranks_are_told_of_equal_rows_after_parameters_were_frozen(
    world: World,
) -> None:
    """Freezing rebuilds the regions, which are not newly built for that."""
    model = apply_units(deep(), ["0", "1"])
    torch.manual_seed(0)
    reset(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "bias" not in name

    texts = [text for each in world.gather(told(model)) for text in each]

    assert len(texts) == 1, texts
    assert "drew the same numbers" in texts[0]
