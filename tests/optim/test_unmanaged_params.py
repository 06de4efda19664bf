"""Optimizers over parameters that the model does not use, or that no unit holds."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import flat_parameters, fully_shard, replicate
from composable_fsdp.optim.unmanaged_params import _fingerprint
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.reference import gpt_input
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return fully_shard(tiny_mlp())


def give_values(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)


@pytest.mark.req("U-02")
def test_an_optimizer_from_before_to_empty_is_refused_by_name(one_rank: World) -> None:
    """``to_empty`` makes new parameters, and stepping on the old ones does nothing."""
    model = on_meta()
    optimizer = sgd(model)
    give_values(model)
    model(torch.ones(2, 8)).sum().backward()

    text = message_of(optimizer.step)

    assert text.startswith("CompositionError: SGD holds what '0.weight', '0.bias', ")
    assert "Make the optimizer after that, or of flat_parameters(module)" in text


def test_flat_parameters_from_before_to_empty_train(one_rank: World) -> None:
    """They go along with their region, so nothing is refused and the step counts."""
    model = on_meta()
    optimizer = torch.optim.SGD(flat_parameters(model), lr=0.1)
    give_values(model)
    model(torch.ones(2, 8)).sum().backward()

    optimizer.step()

    assert not all(bool((p == 1).all()) for p in model.parameters())


def test_an_optimizer_from_after_to_empty_trains(one_rank: World) -> None:
    """Made of what the model shows, before the first forward as well."""
    model = on_meta()
    give_values(model)
    optimizer = sgd(model)
    model(torch.ones(2, 8)).sum().backward()

    optimizer.step()

    assert not all(bool((p == 1).all()) for p in model.parameters())


def test_places_of_a_tied_parameter_count_as_one(one_rank: World) -> None:
    """``to_empty`` unties on meta; an optimizer that holds both objects is right."""
    with torch.device("meta"):
        model = TinyGPT(tied_head=True)
    fully_shard(model)
    give_values(model)
    optimizer = sgd(model)
    model(gpt_input(0, 0)).sum().backward()

    optimizer.step()

    assert model.head.weight is model.tokens.weight


@pytest.mark.req("U-02")
def test_an_assignment_between_steps_is_noticed_by_the_next(one_rank: World) -> None:
    """Also by an optimizer that has stepped often, whose checks are over."""
    model = fully_shard(tiny_mlp())
    optimizer = sgd(model)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    first = model.get_submodule("0")
    first.weight = nn.Parameter(torch.ones_like(first.get_parameter("weight")))
    model(torch.ones(2, 8)).sum().backward()

    assert "SGD holds what '0.weight' were before" in message_of(optimizer.step)


def exchanged_for_an_evaluation(model: nn.Sequential) -> nn.Parameter:
    """Evaluate with other weights, as averages are, and give the model its own back."""
    own = model.get_parameter("0.weight")
    assert isinstance(model[0], nn.Linear)
    model[0].weight = nn.Parameter(own.detach().clone())
    with torch.no_grad():
        model(torch.ones(2, 8))
    model[0].weight = own
    return own


def test_parameters_that_are_back_in_their_places_are_stepped(one_rank: World) -> None:
    """Whether the optimizer comes before the next forward or after."""
    model = fully_shard(tiny_mlp())
    optimizer = sgd(model)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        own = exchanged_for_an_evaluation(model)
        before = own.detach().clone()

        optimizer.step()

        assert not torch.equal(own, before)


def test_a_parameter_that_is_back_can_be_swapped(one_rank: World) -> None:
    """``swap_tensors`` takes none that something refers to weakly."""
    model = fully_shard(tiny_mlp())
    own = exchanged_for_an_evaluation(model)
    model(torch.ones(2, 8))

    swap: Any = torch.utils.swap_tensors
    swap(own, nn.Parameter(torch.ones_like(own)))


def step_without_root(world: World, how: str, steps: int = 1) -> list[str]:
    """Shard one layer, leave the others plain, step; what was said."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    rest = [p for layer in list(model.children())[1:] for p in layer.parameters()]
    if how == "replica first":
        replicate(model[0])
        rest = list(model[2].parameters())
    fully_shard(model[1] if how == "replica first" else model[0])
    if how == "ignored":
        fully_shard(model, ignored_states=rest)
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.full((2, 8), 1.0 + world.rank)).sum().backward()
            for parameter in rest if how == "reduced" else ():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
    return [str(each.message) for each in said]


@pytest.mark.req("U-02")
@pytest.mark.parametrize("how", ["left", "replica first"])
def test_a_forgotten_root_is_told_by_the_rank_that_finds_out(
    ranks: RankCount, how: str
) -> None:
    """Gradients that nothing reduces differ; the second rank to step sees it."""
    said = [text for texts in ranks(2).run(step_without_root, how) for text in texts]

    assert len(said) == 1
    assert "that no unit holds, of shapes" in said[0]
    assert "Call fully_shard on the whole model after its parts" in said[0]


@pytest.mark.req("U-02", "N-09")
def test_a_forgotten_root_is_told_by_every_rank_in_the_end(ranks: RankCount) -> None:
    """Once per rank: many users read the log of rank 0 alone, which steps first."""
    told = ranks(2).run(step_without_root, "left", 3)

    assert [len(texts) for texts in told] == [1, 1]
    assert told[0] == told[1]
    assert "ranks 0 and 1 differ" in told[0][0] or "ranks 1 and 0" in told[0][0]


@pytest.mark.filterwarnings("error")
def test_gradients_are_told_apart_by_their_imaginary_parts_too() -> None:
    """Nothing is cast to what holds less."""
    texts = []
    for value in (1 + 1j, 1 + 1j, 1 - 1j):
        parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        parameter.grad = torch.full_like(parameter, value)
        texts.append(_fingerprint([parameter]))

    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("how", ["ignored", "reduced"])
def test_parameters_that_somebody_cares_for_are_left_in_peace(
    ranks: RankCount, how: str
) -> None:
    """Those named in ``ignored_states``, and those whose gradients are equal."""
    assert ranks(2).run(step_without_root, how) == [[], []]
