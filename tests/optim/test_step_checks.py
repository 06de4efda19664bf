"""What is checked at a step: state, whole parameters, and weights that are full."""

from __future__ import annotations

import copy
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from composable_fsdp import (
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    replicate,
    reshard,
    state_dict_type,
    unshard,
    unshard_params,
)
from composable_fsdp.access import set_reshard_after_backward
from composable_fsdp.features import flat_parameters
from tests.optim.models import INPUT, Mixed, by_name, mixed, train_plain, train_sharded
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    apply_units,
    averaged_gradients,
    backward,
    differences,
    loss_of,
)
from tests.support.sharded import RankCount, both_paths, message_of
from tests.support.world import World

Make = Callable[[list[nn.Parameter]], optim.Optimizer]
WHOLE: dict[str, Make] = {
    "Muon": lambda ps: optim.Muon([p for p in ps if p.ndim == 2], lr=0.1),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.1),
    "LBFGS": lambda ps: optim.LBFGS(ps, lr=0.1),
    "SparseAdam": lambda ps: optim.SparseAdam(ps, lr=0.1),
}


REASONS = {
    "Muon": "orthogonalises",
    "Adafactor": "scales by means",
    "LBFGS": "takes inner products",
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.req("U-04")
@pytest.mark.parametrize("name", WHOLE)
@on_ranks(2)
def test_an_optimizer_that_needs_whole_parameters_is_refused_at_its_first_step(
    world: World, name: str
) -> None:
    """And where its state is asked for: reason, parameter, way out; nothing changed."""
    model = mixed("wrapper")
    optimizer = WHOLE[name](trainable(model))
    model(torch.ones(2, 8)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    empty: dict[str, Any] = {"state": {}, "param_groups": []}
    for act in (
        partial(optimizer.step, (lambda: 0.0) if name == "LBFGS" else None),
        partial(optim_state_dict, model, optimizer),
        partial(optim_state_dict_to_load, model, optimizer, empty),
    ):
        text = message_of(act)
        assert text.startswith(f"CompositionError: {name} {REASONS.get(name, '')}")
        assert re.search(r"and of '(first.weight|scale)' each rank holds a part", text)
        assert "Use an element-wise optimizer" in text
        assert "replicate(module), strategy=ShardingStrategy.NO_SHARD" in text
    assert _same([p.detach() for p in model.parameters()], before)


def whole(way: str) -> nn.Module:
    if way == "replicate":
        model = Mixed()
        replicate(model)
        return model
    return apply_units(
        Mixed(), ["first"], path="wrapper", strategy=ShardingStrategy.NO_SHARD
    )


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


@pytest.mark.req("U-04")
@pytest.mark.parametrize("way", ["replicate", "NO_SHARD"])
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LBFGS"])
@on_ranks(2)
def test_whole_parameters_are_trained_by_any_optimizer(
    world: World, name: str, way: str
) -> None:
    """As on the plain model, and its state goes out and in as it is."""
    model, plain = whole(way), Mixed()
    ours, reference = (WHOLE[name](trainable(m)) for m in (model, plain))
    closure: Any = None
    for at in range(2):
        torch.autograd.backward(model(torch.ones(2, 8) * at).square().mean())
        averaged_gradients(plain, [torch.ones(2, 8) * at], square)
        if name == "LBFGS":
            closure = lambda: 1.0  # noqa: E731  # gradients stay as they are
        ours.step(closure)
        reference.step(closure)
        ours.zero_grad()
    state = optim_state_dict(model, ours)
    part = optim_state_dict_to_load(model, ours, by_name(plain, reference))

    assert _same(state["state"], by_name(plain, reference)["state"])
    assert _same(part["state"], reference.state_dict()["state"])
    # Adafactor's rows and columns go out and in, whatever the type of state dict.
    for kind in StateDictType if way == "NO_SHARD" else ():
        with state_dict_type(model, kind):
            given = optim_state_dict(model, ours)
            ours.load_state_dict(optim_state_dict_to_load(model, ours, given))
        assert _same(optim_state_dict(model, ours)["state"], state["state"])


class RowMeans(optim.Optimizer):
    """Keeps a mean per row, and says so nowhere."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.ndim > 1 and p.grad is not None:
                self.state[p]["row_means"] = p.grad.mean(1)


@pytest.mark.req("U-04")
@on_ranks(2)
def test_state_that_is_not_element_wise_is_noticed_by_its_shape(world: World) -> None:
    """At the step after the one that made it, and by ``optim_state_dict``."""
    model = fully_shard(tiny_mlp())
    optimizer = RowMeans(model.parameters(), {})
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    at_step = message_of(lambda: optimizer.step())
    at_save = message_of(lambda: optim_state_dict(model, optimizer))

    assert "RowMeans's state 'row_means' of '0.weight' has shape (" in at_step
    assert "expected a scalar or this rank's shard, (" in at_step
    assert "Use an element-wise optimizer" in at_save


@pytest.mark.req("S3-11")
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad])
@both_paths
@on_ranks(2)
def test_full_state_from_before_sharding_is_refused_with_a_way_out_that_works(
    world: World, path: str, kind: type[optim.Optimizer]
) -> None:
    """Adagrad makes its state when it is made; Adam at its first step."""
    model, plain = Mixed(), Mixed()
    make: Any = kind
    ours, reference = make(trainable(model)), make(trainable(plain))
    if kind is optim.AdamW:
        train_plain(model, ours, world.world_size, range(2))
        train_plain(plain, reference, world.world_size, range(2))
    saved = optim_state_dict(model, ours)
    sharded = apply_units(model, ["first"], path=path)
    text = message_of(lambda: train_sharded(sharded, ours, world, range(2, 3)))
    assert text.startswith("CompositionError: ")
    assert "has the full shape (" in text
    assert "expected a scalar or this rank's shard, (" in text
    assert "state = optim_state_dict(model, optim) while the model is" in text
    for p in sharded.parameters():
        p.grad = None

    # The way out that the message names.
    optim_state_dict_to_load(sharded, ours, saved, load_directly=True)
    train_sharded(sharded, ours, world, range(2, 4))
    train_plain(plain, reference, world.world_size, range(2, 4))

    assert _same(optim_state_dict(sharded, ours), by_name(plain, reference))
    assert _same(dict(sharded.state_dict()), dict(plain.state_dict()))


@on_ranks(2)
@pytest.mark.parametrize("rows", [8, 7, 1])
def test_state_that_a_constructor_made_is_right_or_refused_if_rank_0_wrote_it(
    world: World, rows: int
) -> None:
    """No hook of torch shows Adagrad's state dict to the package before a step."""
    torch.manual_seed(0)
    plain = nn.Linear(8, rows, bias=False)
    model = fully_shard(copy.deepcopy(plain))
    make = partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)
    ours, reference = make(model.parameters()), make(plain.parameters())
    raw = ours.state_dict()["state"]
    assert type(raw[0]["sum"]) is torch.Tensor
    assert raw[0]["sum"].shape == model.weight.shape

    file = [ours.state_dict()]
    dist.broadcast_object_list(file, src=0)
    ours.load_state_dict(file[0])
    inputs = [torch.rand(2, 8) for _ in range(world.world_size)]
    averaged_gradients(plain, inputs, lambda each, x: each(x).square().sum())
    reference.step()
    model(inputs[world.rank]).square().sum().backward()

    if rows == 8:
        ours.step()
        assert _same(dict(model.state_dict()), dict(plain.state_dict()))
        assert _same(optim_state_dict(model, ours), by_name(plain, reference))
    else:
        text = message_of(ours.step)
        assert text.startswith("CompositionError: ")
        assert "Adagrad's state 'sum' of 'weight'" in text


HALF = MixedPrecision(param_dtype=torch.bfloat16)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def in_block(**how: bool) -> Callable[[nn.Module], list[nn.Parameter]]:
    def collect(model: nn.Module) -> list[nn.Parameter]:
        with unshard_params(model, **how):
            return trainable(model)

    return collect


def unsharded_first(model: nn.Module) -> list[nn.Parameter]:
    unshard(model.get_submodule("first"))
    return trainable(model)


WAYS: dict[str, tuple[Callable[[nn.Module], list[nn.Parameter]], dict[str, Any]]] = {
    "in a block": (in_block(), {}),
    "in a block, half precision": (in_block(), {"mixed_precision": HALF}),
    "in a block, not cut": (in_block(), {"strategy": ShardingStrategy.NO_SHARD}),
    "after unshard": (unsharded_first, {}),
    "after unshard, half precision": (unsharded_first, {"mixed_precision": HALF}),
}


@pytest.mark.req("P-14")
@on_ranks(2)
def test_an_optimizer_of_full_parameters_is_refused_at_each_step(world: World) -> None:
    """By name, of whatever form and door; also in a group that was added later."""
    for way, (collect, options) in WAYS.items():
        model: Any = mixed("wrapper", **options)
        model(INPUT(0, world.rank))
        ours = optim.AdamW(collect(model.module), lr=0.1)
        late = optim.AdamW([{"params": trainable(model)[:0]}], lr=0.1)
        backward(loss_of(model, INPUT(0, world.rank)))
        before = copied(model)

        texts = [message_of(ours.step) for _ in range(3)]
        late.step()
        late.add_param_group({"params": ours.param_groups[0]["params"]})
        texts.append(message_of(late.step))

        for text in texts:
            assert text.startswith("CompositionError: AdamW holds the full "), way
            assert "'first.weight'" in text, (way, text)
            assert "after reshard(module)" in text
        assert differences(copied(model), before) == {}


@pytest.mark.req("P-14")
def test_a_step_inside_a_block_is_refused(one_rank: World) -> None:
    """With the moment to call it; `property_tests/test_programs.py` steps after it."""
    model = fully_shard(tiny_mlp())
    optimizer = sgd(model)
    with unshard_params(model):
        text = message_of(optimizer.step)

    assert text.startswith("PhaseError: SGD.step() was called inside unshard_")
    assert "Call it after the block" in text


@on_ranks(2)
def test_parameters_that_are_not_shown_are_stepped(world: World) -> None:
    """A block over one unit and an earlier ``unshard`` are nobody else's business."""
    model = mixed("composable")
    first, second = model.get_submodule("first"), model.get_submodule("second")
    ours = optim.SGD(second.parameters(), lr=0.1)
    backward(loss_of(model, INPUT(0, world.rank)))
    before = copied(model)
    with unshard_params(first):
        ours.step()
    unshard(first)
    reshard(first)
    late = optim.SGD(first.parameters(), lr=0.1)
    late.step()

    assert set(differences(copied(model), before)) == {
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    }


STALE = "PhaseError: The shards of fully sharded module "


def pair() -> Any:
    """Two units of which each may be trained alone; one rank holds none of ``gain``."""
    layers = {"body": nn.Linear(8, 1), "gain": nn.Linear(1, 1, bias=False)}
    model = apply_units(nn.Sequential(OrderedDict(layers)), [*layers])
    model(torch.ones(1, 8))
    return model


@pytest.mark.req("P-02")
@on_ranks(2)
def test_a_step_counts_for_the_units_whose_leaves_it_holds(world: World) -> None:
    """Not for others; on every rank alike; also by a closure and in a late group."""
    x = torch.ones(2, 8)

    # One rank holds nothing of ``gain``.
    for shown, text in (("body", "nothing was raised"), ("gain", STALE)):
        model = pair()
        own = optim.AdamW(model.gain.parameters(), fused=True)
        backward(loss_of(model, x))
        unshard(getattr(model, shown))
        own.step()
        assert message_of(partial(model, x)).startswith(text)

    for over in (nn.Module.parameters, flat_parameters):
        model = pair()
        set_reshard_after_backward(model, False)
        fused = optim.SGD(over(model), lr=0.1, fused=True)

        def closure(model: nn.Module = model) -> Tensor:
            loss = loss_of(model, x)
            backward(loss)
            return loss

        fused.step(closure)
        assert message_of(partial(model, x)).startswith(STALE)

    model = pair()
    late = optim.SGD(model.gain.parameters(), lr=0.1, fused=True)
    backward(loss_of(model, x))
    late.step()
    late.add_param_group({"params": list(model.body.parameters())})
    unshard(model.body)
    late.step()
    assert message_of(partial(model, x)).startswith(STALE)


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


def step_without_root(world: World, how: str) -> list[str]:
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
        model(torch.full((2, 8), 1.0 + world.rank)).sum().backward()
        for parameter in rest if how == "reduced" else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return [str(each.message) for each in said]


@pytest.mark.req("U-02", "N-09")
@pytest.mark.parametrize("how", ["left", "replica first"])
def test_a_forgotten_root_is_told_by_the_rank_that_finds_out(
    ranks: RankCount, how: str
) -> None:
    """Gradients that nothing reduces differ; the second rank to step sees it."""
    said = [text for texts in ranks(2).run(step_without_root, how) for text in texts]

    assert len(said) == 1
    assert "that no unit holds, of shapes" in said[0]
    assert "Call fully_shard on the whole model after its parts" in said[0]


@pytest.mark.parametrize("how", ["ignored", "reduced"])
def test_parameters_that_somebody_cares_for_are_left_in_peace(
    ranks: RankCount, how: str
) -> None:
    """Those named in ``ignored_states``, and those whose gradients are equal."""
    assert ranks(2).run(step_without_root, how) == [[], []]


@pytest.mark.req("X-32")
@on_ranks(2)
def test_a_step_of_other_ranks_counts_where_this_one_holds_nothing(
    world: World,
) -> None:
    """A backward through the weights of before raises on both, so that none waits."""
    model = fully_shard(nn.Linear(4, 1, bias=False))
    optimizer = sgd(model)
    x = torch.ones(2, 4, requires_grad=True)
    backward(model(x).sum())
    loss = model(x).square().sum()
    optimizer.step()

    assert model.weight.numel() == 4 * (world.rank == 0)
    assert "Backward needs a tensor as it was" in message_of(lambda: backward(loss))
