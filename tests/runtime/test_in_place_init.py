"""What was on meta and got memory alone: buffers without values, rows drawn twice."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    PlanError,
    fsdp2,
    fully_shard,
    init_weights,
    load,
    save,
    unshard_params,
)
from tests.runtime.metas import on_meta
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, apply_units, backward, differences
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
both_paths = pytest.mark.parametrize("path", PATHS)
both_doors = pytest.mark.parametrize("door", ["composable", "fsdp2"])


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


def on_shards(
    seed: int,
    init: Callable[[nn.Module], object] = reset,
    door: str = "composable",
) -> nn.Module:
    """Sharded on meta, and initialised in place under ``seed``."""
    if door == "fsdp2":
        model = on_meta(deep)
        fsdp2.fully_shard(model.get_submodule("0"))
        fsdp2.fully_shard(model)
    else:
        model = apply_units(on_meta(deep), ["0", "1"])
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        init(model)
    return model


def told(model: nn.Module) -> list[str]:
    """The error or the log lines of two forwards."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # of this handler alone
    logger = logging.getLogger("composable_fsdp")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            backward(model(torch.ones(2, 12)).sum())
    except PlanError as error:
        return [str(error)]
    finally:
        logger.removeHandler(handler)
    return lines


@pytest.mark.req("P-19")
@both_doors
@on_ranks(2, 3)
def test_torchtitans_order_is_refused_on_every_rank(world: World, door: str) -> None:
    """Meta, shard, ``to_empty``, initialise under one seed: the rows would repeat."""
    for init in (
        reset,
        lambda model: [p.data.normal_() for p in model.parameters()],
        lambda model: [nn.init.trunc_normal_(p, std=0.02) for p in model.parameters()],
    ):
        (text,) = told(on_shards(0, init, door))
        for part in ("weight' begins on rank 1 as", "init_weights(model)"):
            assert part in text


@pytest.mark.req("P-19")
@on_ranks(2)
def test_values_that_are_right_are_not_refused(world: World) -> None:
    """Other seeds, a load, constants, whole initialisation, a copy that repeats."""
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
    # The same rows on both ranks, by will: a line in the log and no error.
    for repeated in (on_shards(0), apply_units(on_meta(deep), ["0"])):
        repeated.to_empty(device="cpu")
        for parameter in repeated.parameters():
            rows = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
            parameter.data.copy_(rows)
        assert all("Shards were written to" in line for line in told(repeated))


@on_ranks(2)
def test_a_model_with_values_that_is_initialised_on_shards_is_logged(
    world: World,
) -> None:
    """A line on one rank, also after parameters were frozen; a program may be right."""
    # A write on one rank alone, in a model before, must not part the ranks.
    other = apply_units(deep(), ["0"])
    if world.rank:
        next(other.parameters()).data.mul_(1)
        next(other.parameters()).detach().mul_(1)
    other(torch.ones(2, 12))
    model = fully_shard(deep())
    torch.manual_seed(0)
    model.apply(lambda m: reset(m) if isinstance(m, nn.Linear) else None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "bias" not in name

    lines = world.gather(told(model))

    assert [len(each) for each in lines] == [0, 1]
    assert (
        "'0.0.weight' begins on this rank as a parameter does on rank 0" in lines[1][0]
    )
    assert "init_weights(model, fn)" in lines[1][0]


@pytest.mark.req("P-19")
@both_doors
@on_ranks(1, 2, 3)
def test_parameters_that_a_checkpoint_lacks_are_refused(
    world: World, door: str
) -> None:
    """On every rank, also on one without rows; a new head gets its own values."""
    model = on_shards(0, lambda model: None, door)
    values = {k: v for k, v in deep().state_dict().items() if k[0] != "2"}
    model.load_state_dict(values, strict=False)

    with pytest.raises(
        PlanError, match=r"Parameters .*'2.0.weight'.* were on meta and nothing"
    ):
        model(torch.ones(2, 12))

    torch.manual_seed(3)
    init_weights(model.get_submodule("2"))
    plain = deep()
    torch.manual_seed(3)
    reset(plain[2])
    plain.load_state_dict(values, strict=False)
    x = torch.ones(2, 12)
    assert torch.equal(model(x), plain(x))


@both_doors
@on_ranks(2)
def test_whole_values_copied_into_a_shard_are_refused_by_name(
    world: World, door: str
) -> None:
    """Torch's error of sizes would name no parameter and no way out."""
    model = on_shards(0, lambda model: None, door)
    weight = model.get_parameter("0.0.weight")
    whole = deep().get_parameter("0.0.weight")

    with (
        torch.no_grad(),
        pytest.raises(PlanError, match=r"0.weight' got values \(20, 12\) of the wh"),
    ):
        weight.copy_(whole)

    with unshard_params(model), torch.no_grad():
        for parameter, value in zip(
            model.parameters(), deep().parameters(), strict=True
        ):
            parameter.copy_(value)
    assert told(model) == []


@on_ranks(2)
def test_shards_that_got_memory_can_be_copied_and_become_plain(world: World) -> None:
    """Their class is for the time until the unit adopts them."""
    model = on_shards(0, lambda model: None)
    optimizer = torch.optim.AdamW(model.parameters())
    twin = copy.deepcopy(model)
    for each in (model, twin):
        torch.manual_seed(1)
        init_weights(each)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    x = torch.ones(2, 12)
    assert torch.equal(model(x), twin(x))
    model(x).sum().backward()
    before = model.state_dict()["0.0.weight"].clone()
    optimizer.step()
    assert not torch.equal(before, model.state_dict()["0.0.weight"])
