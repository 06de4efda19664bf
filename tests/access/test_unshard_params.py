"""Claims on full parameters outside the step."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    fully_shard,
    optim_state_dict,
    unshard_params,
)
from composable_fsdp.flat.handle import FlatParamHandle
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    apply_units,
    backward,
    differences,
    gpt_input,
    loss_of,
)
from tests.support.sharded import gpt, is_full, message_of
from tests.support.world import World


@pytest.mark.req("S1-10")
@on_ranks(1, 2, 3)
def test_each_level_unshards_the_units_it_names_and_no_other(world: World) -> None:
    """``recurse=False`` touches one unit; each unit costs one all-gather."""
    model = gpt("wrapper")
    levels: dict[str, tuple[Any, list[bool]]] = {
        "root alone": (unshard_params(model, recurse=False), [True, False, False]),
        "block alone": (
            unshard_params(model.get_submodule("blocks")[1], recurse=False),  # type: ignore[index]
            [False, False, True],
        ),
        "root and below": (unshard_params(model), [True] * 3),
    }
    for name, (block, expected) in levels.items():
        with record_steps() as calls, block:
            shown = is_full(model)

        assert shown == expected, name
        assert is_full(model) == [False] * 3, name
        gathers = sum(expected) if world.world_size > 1 else 0
        # Ranks say on exit that none raised.
        end = ["all_reduce"] if gathers else []
        assert [call.op for call in calls] == ["all_gather"] * gathers + end, name


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(3)
def test_a_parameter_assigned_in_the_block_is_taken_up(
    world: World, rank0_only: bool
) -> None:
    """Its values are kept; the object in the module is the original one again."""
    model: Any = apply_units(tiny_mlp(), [], path="wrapper")
    leaf = model[0].weight

    with unshard_params(model, rank0_only=rank0_only):
        if world.rank == 0 or not rank0_only:
            model[0].weight = nn.Parameter(torch.full((12, 8), 7.0))
            if not rank0_only:
                assert torch.equal(model.state_dict()["0.weight"], model[0].weight)

    assert model[0].weight is leaf
    assert torch.equal(model.state_dict()["0.weight"], torch.full((12, 8), 7.0))


@on_ranks(2)
def test_a_parameter_of_another_shape_is_refused_by_name(world: World) -> None:
    """The message has name, both shapes and the way out; the model is as it was."""
    model = gpt("wrapper")
    before = model.state_dict()
    norm: Any = model.get_submodule("blocks")[1].norm_2  # type: ignore[index]

    def act(attribute: str, wrong: Tensor | None) -> None:
        with unshard_params(model):
            setattr(norm if attribute == "weight" else norm.weight, attribute, wrong)

    for attribute, wrong, found in (
        ("weight", nn.Parameter(torch.ones(3)), r"(3,) torch.float32"),
        ("data", torch.ones(3), r"(3,) torch.float32"),
        ("weight", None, "NoneType"),
    ):
        text = message_of(partial(act, attribute, wrong))
        assert text.startswith(
            "PhaseError: Inside unshard_params parameter 'blocks.1.norm_2.weight' was "
            f"replaced by {found}; expected (8,) torch.float32. Write into it in place"
        )
    assert differences(model.state_dict(), before) == {}
    assert is_full(model) == [False] * 3
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]


@on_ranks(3)
def test_state_dicts_are_given_and_taken_inside_the_block(world: World) -> None:
    """Saving copies the full parameters; what is loaded reaches the shards."""
    model, plain = gpt("wrapper"), TinyGPT()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unshard_params(model):
        saved = model.state_dict()
        model.load_state_dict(TinyGPT(seed=5).state_dict())
        text = message_of(partial(optim_state_dict, model, optimizer))
    assert "optim_state_dict was called on (root) inside unshard_params" in text

    assert differences(saved, plain.state_dict()) == {}
    assert differences(model.state_dict(), TinyGPT(seed=5).state_dict()) == {}


def full(handle: FlatParamHandle) -> list[nn.Parameter]:
    return [leaf for region in handle.layout.regions for leaf in region.full.leaves]


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Values that depend on the whole parameter's shape."""
    for parameter in module.parameters(recurse=False):
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))


@pytest.mark.req("X-07")
@on_ranks(2)
def test_an_error_in_apply_reaches_every_rank(world: World) -> None:
    """The others do not wait at the next unit, and the values stay."""
    model = gpt("wrapper")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def note(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            if world.rank == 1:
                raise ValueError("not here")
            fill(module)

    text = message_of(lambda: model.apply(note))
    assert differences(model.state_dict(), before) == {}
    told = "Rank 1 raised inside apply, so nothing was written here either"
    assert ("ValueError: not here" if world.rank == 1 else told) in text


def values(model: nn.Module) -> dict[str, Tensor]:
    """The parameters as they are now, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def write(model: nn.Module, *, add: float) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.add_(add + index)


@pytest.mark.req("S1-10")
@on_ranks(3)
def test_a_plain_module_unshards_every_tree_below_it(world: World) -> None:
    """Two trees under a module that is no unit are full together."""

    def parts() -> tuple[nn.Module, nn.Module, nn.Module]:
        return tiny_mlp(), tiny_mlp(seed=1), tiny_mlp(seed=2)

    first, middle, last = parts()
    holder = nn.Sequential(
        apply_units(first, [], path="wrapper"),
        middle,
        apply_units(last, [], path="wrapper"),
    )
    plain = nn.Sequential(*parts())

    with unshard_params(holder, writeback=True):
        inside = list(values(holder).values())
        write(holder, add=0.5)
    same = [torch.equal(a, b) for a, b in zip(inside, plain.parameters(), strict=True)]
    write(plain, add=0.5)

    assert all(same)
    assert is_full(holder) == [False, False]
    assert differences(holder.state_dict(), plain.state_dict()) == {}


@on_ranks(2)
def test_a_kept_parameter_keeps_the_gradient_of_the_block(world: World) -> None:
    """Of a backward through a part of the unit; the model's own gradients stay."""
    model = fully_shard(tiny_mlp())
    with unshard_params(model):
        kept = model[0].get_parameter("weight")
        model[0](torch.ones(2, 8)).sum().backward()

    assert kept.grad is not None
    assert torch.equal(kept.grad, torch.full((12, 8), 2.0))
    assert all(parameter.grad is None for parameter in model.parameters())


everywhere = pytest.mark.parametrize("rank0_only", [False, True], ids=["all", "first"])


def gradients(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is not None]


@pytest.mark.req("D-12")
@everywhere
@on_ranks(2)
def test_a_block_may_write_back_where_no_parameter_has_a_gradient(
    world: World, rank0_only: bool
) -> None:
    """In one unit or in all: none appears but what the block sets."""
    model: Any = apply_units(tiny_mlp(), ["0", "2"])
    for sets in (False, True):
        with unshard_params(model, rank0_only=rank0_only, with_grads=True):
            assert gradients(model) == []
            if sets and (world.rank == 0 or not rank0_only):
                model[2].bias.grad = torch.ones_like(model[2].bias)
    with unshard_params(model, writeback=False, with_grads=True):
        assert gradients(model) == ["2.bias"]


@on_ranks(2)
def test_weights_that_are_all_written_in_a_block_are_not_compared(
    world: World,
) -> None:
    """The first call that meets is the block that overwrites what ranks have made of
    seeds of their own."""
    torch.manual_seed(world.rank)
    model = fully_shard(nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unshard_params(model), torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        backward(model(torch.ones(1, 8)).sum())
