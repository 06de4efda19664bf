"""Each element-wise optimizer, over originals and flat parameters: out and in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from composable_fsdp import (
    StateDictType,
    fully_shard,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    state_dict_type,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.features import flat_parameters
from composable_fsdp.optim import get_full_optim_state, set_full_optim_state
from composable_fsdp.optim.save import local_state_dict
from tests.optim.models import (
    INPUT,
    Mixed,
    by_name,
    mixed,
    train_plain,
    train_sharded,
    two_groups,
)
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    PATHS,
    adamw,
    backward,
    differences,
    gpt_input,
    loss_of,
    tolerance_at,
    wide_input,
)
from tests.support.sharded import RankCount, both_paths, gpt, message_of, step
from tests.support.world import World

Make = Callable[[list[dict[str, Any]]], optim.Optimizer]
EVERY: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "SGD nesterov": partial(
        optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam": partial(optim.Adam, lr=0.05),
    "Adam amsgrad": partial(optim.Adam, lr=0.05, amsgrad=True, weight_decay=0.1),
    "AdamW": partial(optim.AdamW, lr=0.05),
    "AdamW amsgrad": partial(optim.AdamW, lr=0.05, amsgrad=True),
    "NAdam": partial(optim.NAdam, lr=0.05),
    "RAdam": partial(optim.RAdam, lr=0.05),
    "Adamax": partial(optim.Adamax, lr=0.05),
    "Adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "RMSprop": partial(optim.RMSprop, lr=0.05),
    "RMSprop centered": partial(optim.RMSprop, lr=0.05, centered=True, momentum=0.9),
    "Rprop": partial(optim.Rprop, lr=0.05),
    "ASGD": partial(optim.ASGD, lr=0.05, t0=2.0, weight_decay=0.1),
}
WAYS: dict[str, dict[str, bool]] = {
    "one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
FUSED = "SGD", "Adam", "AdamW amsgrad", "Adagrad"
NAMED = [
    *((name, ("one", "foreach")[at % 2]) for at, name in enumerate(EVERY)),
    *((name, "fused") for name in FUSED),
]
# Path, optimizer and kernel do not interact.
each_way = pytest.mark.parametrize(
    ("path", "name", "way"),
    [(PATHS[at // 2 % 2], *way) for at, way in enumerate(NAMED)],
)


def made(model: nn.Module, name: str, way: str) -> optim.Optimizer:
    kind: Any = EVERY[name]
    optimizer: optim.Optimizer = kind(two_groups(model), **WAYS[way])
    return optimizer


def unlike(ours: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """What of two states by name is not equal bit by bit, with the distance."""
    apart: dict[str, Any] = {}
    if ours["param_groups"] != expected["param_groups"]:
        apart["param_groups"] = (ours["param_groups"], expected["param_groups"])
    if sorted(ours["state"]) != sorted(expected["state"]):
        apart["state"] = (list(ours["state"]), list(expected["state"]))
        return apart
    for fqn, values in expected["state"].items():
        for key, value in values.items():
            found = ours["state"][fqn].get(key)
            if not _same(found, value):
                far = found
                if isinstance(value, Tensor) and found.shape == value.shape:
                    far = (found - value).abs().max().item()
                apart[f"{fqn} {key}"] = far
    return apart


def check_equal(world: World, path: str, name: str, way: str) -> Any:
    model, plain = mixed(path), Mixed()
    ours, reference = made(model, name, way), made(plain, name, way)

    train_sharded(model, ours, world, range(4))
    train_plain(plain, reference, world.world_size, range(4))
    state, weights = optim_state_dict(model, ours), model.state_dict()

    expected = by_name(plain, reference)
    assert unlike(state, expected) == {}
    assert "unused" not in state["state"] or name == "Adagrad"
    assert differences(weights, plain.state_dict()) == {}
    return state, dict(weights)


def plain_goes_on(
    name: str, way: str, state: dict[str, Any], weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The weights one step later, of a plain model that loaded the sharded state."""
    plain = Mixed(seed=3)
    reference = made(plain, name, way)
    plain.load_state_dict(weights)
    reference.load_state_dict(optim_state_dict_to_load(plain, reference, state))
    train_plain(plain, reference, 2, range(4, 5))
    return dict(plain.state_dict())


@pytest.mark.req("U-04")
@each_way
def test_the_state_is_the_plain_one_and_the_plain_model_goes_on_with_it(
    ranks: RankCount, path: str, name: str, way: str
) -> None:
    """Weights, state and groups bit by bit after four steps, and after one more."""
    state, weights = ranks(2).run(check_equal, path, name, way)[0]
    unbroken = Mixed()
    reference = made(unbroken, name, way)
    train_plain(unbroken, reference, 2, range(5))

    later = plain_goes_on(name, way, state, weights)

    assert differences(later, dict(unbroken.state_dict())) == {}


State = dict[str, Any]
x_of = wide_input(8)


def optimizer_of(model: nn.Module, form: str) -> torch.optim.Optimizer:
    """AdamW over ``flat`` parameters or ``originals``."""
    return adamw(flat_parameters(model) if form == "flat" else model.parameters())


def trained(
    world: World, form: str, path: str = "composable", steps: int = 2, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt(path, tied_head=True, **options)
    optimizer = optimizer_of(model, form)
    for at in range(steps):
        step(model, optimizer, world.rank, at)
    return model, optimizer


def in_order(state: State, like: State) -> State:
    """With groups that list their parameters in the order of ``like``."""
    groups = [
        {**g, "params": sorted(g["params"], key=o["params"].index)}
        for g, o in zip(state["param_groups"], like["param_groups"], strict=True)
    ]
    return {**state, "param_groups": groups}


@both_paths
@pytest.mark.parametrize(
    "kind",
    [
        StateDictType.FULL_STATE_DICT,
        StateDictType.SHARDED_STATE_DICT,
        StateDictType.LOCAL_STATE_DICT,
    ],
    ids=lambda kind: kind.name,
)
@on_ranks(1, 2, 3)
def test_optim_state_dict_is_that_of_an_optimizer_over_the_originals(
    world: World, path: str, kind: StateDictType
) -> None:
    """Names, options, ``step`` of each and every element, in all three types."""
    states = []
    for form in ("flat", "originals"):
        model, optimizer = trained(world, form, path)
        with state_dict_type(model, kind):
            states.append(optim_state_dict(model, optimizer))
            given = optimizer.state_dict()
            assert _same(optim_state_dict(model, optimizer, given), states[-1])
    flat, expected = states
    if kind is StateDictType.LOCAL_STATE_DICT:
        # Where the rank holds nothing, a flat parameter steps on padding beside it.
        flat["state"] = {
            name: values
            for name, values in flat["state"].items()
            if name in expected["state"] or values["exp_avg"].local.numel()
        }

    assert _same(in_order(flat, expected), expected)


Saved = tuple[State, State]
"""A model's state dict, and the optimizer's state by name."""


def saved_by(world: World, folder: Path, form: str, how: str) -> Saved:
    model, optimizer = trained(world, form)
    if how == "native":
        save(folder, model, optimizer)
    elif how == "dcp":
        with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"optim": optim_state_dict(model, optimizer)}
            dcp_save(state, checkpoint_id=folder)
    return model.state_dict(), optim_state_dict(model, optimizer)


def go_on(
    world: World, folder: Path, form: str, how: str, saved: Saved, stepped: bool
) -> State:
    model, optimizer = trained(world, form, steps=int(stepped), seed=5)
    before = [v["exp_avg"].data_ptr() for v in optimizer.state.values()]
    if how == "native":
        load(folder, model, optimizer)
        assert differences(model.state_dict(), saved[0]) == {}
        if stepped:
            # Read into the memory that was there.
            after = [v["exp_avg"].data_ptr() for v in optimizer.state.values()]
            assert after == before
    else:
        model.load_state_dict(saved[0])
        state = saved[1]
        if how == "dcp":
            with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                step(model, optimizer, world.rank, 0)
                model.load_state_dict(saved[0])
                read = {"optim": optim_state_dict(model, optimizer)}
                dcp_load(read, checkpoint_id=folder)
                state = read["optim"]
        optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    loaded = in_order(optim_state_dict(model, optimizer), saved[1])
    assert _same(loaded["state"], saved[1]["state"])
    for at in range(2, 4):
        step(model, optimizer, at=at, rank=0)
    return model.state_dict()


@pytest.mark.parametrize(
    ("how", "forms", "sizes", "stepped"),
    [
        ("by name", ("originals", "flat"), (3, 1), True),
        ("native", ("originals", "flat"), (2, 3), False),
        ("native", ("flat", "originals"), (3, 1), True),
        ("dcp", ("originals", "flat"), (1, 2), True),
    ],
    ids=str,
)
def test_a_state_goes_on_in_either_form_at_another_world_size(
    ranks: RankCount,
    tmp_path: Path,
    how: str,
    forms: tuple[str, str],
    sizes: tuple[int, int],
    stepped: bool,
) -> None:
    """Loaded it is the state that was saved, and trains on as one rank does alone."""
    (before, after), folder = sizes, tmp_path / "saved"
    saved = ranks(before).run(saved_by, folder, forms[0], how)[0]

    ours = ranks(after).run(go_on, folder, forms[1], how, saved, stepped)
    alone = ranks(1).run(go_on, folder, "originals", "by name", saved, False)[0]

    for weights in ours:
        found = differences(weights, alone)
        assert max(found.values(), default=0.0) <= tolerance_at(after)


@on_ranks(3)
def test_state_of_one_parameter_is_read_and_written_in_the_flat_state(
    world: World,
) -> None:
    """As over the originals; a ``step`` of its own is refused."""
    model, optimizer = trained(world, "flat")
    same, expected = trained(world, "originals")
    name = "blocks.1.up.weight"
    before = get_full_optim_state(model, optimizer, name)
    assert _same(before, get_full_optim_state(same, expected, name))
    doubled = {"exp_avg": before["exp_avg"] * 2, "step": before["step"]}
    for each, own in ((model, optimizer), (same, expected)):
        set_full_optim_state(each, own, name, doubled)
    ours, theirs = optim_state_dict(model, optimizer), optim_state_dict(same, expected)
    text = message_of(
        partial(
            set_full_optim_state, model, optimizer, name, {"step": torch.tensor(9.0)}
        )
    )

    assert _same(ours["state"], theirs["state"])
    assert "CheckpointError: Optimizer state 'step' of " in text
    assert "the parameters of its flat parameter have one value" in text


def test_steps_that_differ_within_a_region_are_refused_by_name(
    one_rank: World, tmp_path: Path
) -> None:
    """In a state and in a checkpoint; nothing is loaded, of the weights neither."""
    model = fully_shard(tiny_mlp())
    optimizer = adamw(model.parameters())
    backward(loss_of(model, x_of(0, 0)))
    optimizer.step()
    optimizer.state[model[2].bias]["step"] += 6  # type: ignore[index]
    save(tmp_path / "saved", model, optimizer)
    state = optim_state_dict(model, optimizer)
    other = fully_shard(tiny_mlp(seed=3))
    before = copy.deepcopy(other.state_dict())
    flat = adamw(flat_parameters(other))

    with pytest.raises(
        CheckpointError, match=r"'step' is 1.0 for .* 7.0 for '2\.bias'"
    ):
        optim_state_dict_to_load(other, flat, state, load_directly=True)
    with pytest.raises(CheckpointError, match=r"'step' is .* flat parameter"):
        load(tmp_path / "saved", other, flat)

    assert differences(other.state_dict(), before) == {}
    assert optim_state_dict(other, flat)["state"] == {}


def with_unused(world: World, make: Any) -> tuple[nn.Module, State]:
    """``Mixed`` trained over its originals: nothing uses one of its parameters."""
    model = mixed("composable")
    optimizer = make(model.parameters())
    backward(loss_of(model, INPUT(0, world.rank)))
    optimizer.step()
    return model, optim_state_dict(model, optimizer)


@on_ranks(3)
def test_a_parameter_without_state_gets_the_zeros_that_a_flat_one_has(
    world: World,
) -> None:
    """It was never used over the originals, and is stepped with zeros from now on."""
    _, state = with_unused(world, adamw)
    assert "unused" not in state["state"]
    state["param_groups"][0]["params"].remove("fixed")
    model = mixed("composable")
    optimizer = adamw(flat_parameters(model))
    optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    loaded = optim_state_dict(model, optimizer)["state"]

    assert not loaded["unused"]["exp_avg"].any()
    assert loaded["unused"]["step"] == 1
    assert _same(loaded["scale"], state["state"]["scale"])


class Counting(torch.optim.Optimizer):
    """Momentum, and a 0-d state under a name that torch's optimizers do not use."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own = self.state[parameter]
                    if not own:
                        own["count"] = torch.zeros(())
                        own["momentum_buffer"] = torch.zeros_like(parameter)
                    own["count"] += 1
                    own["momentum_buffer"] += parameter.grad
                    parameter.sub_(own["momentum_buffer"], alpha=0.1)


@pytest.mark.parametrize("form", ["flat", "originals"])
@on_ranks(3)
def test_a_counter_beside_a_0d_parameter_is_a_scalar_on_every_rank(
    world: World, tmp_path: Path, form: str
) -> None:
    """One by one; of a flat parameter through a checkpoint and by name as well."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mixed("composable")
        given = flat_parameters(model) if form == "flat" else model.parameters()
        return model, Counting(given, {})

    model, optimizer = make()
    backward(loss_of(model, INPUT(0, world.rank)))
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(local_state_dict(optimizer))
    for name in ("scale", "first.weight"):
        state = get_full_optim_state(model, optimizer, name)
        set_full_optim_state(model, optimizer, name, state)
    assert _same(local_state_dict(optimizer), before)
    save(tmp_path / "saved", model, optimizer)
    model, optimizer = make()
    load(tmp_path / "saved", model, optimizer)
    assert _same(local_state_dict(optimizer), before)
    if form == "flat":
        # Full state of a 0-d parameter alone does not tell a counter from elements.
        named = optim_state_dict(model, optimizer)
        optim_state_dict_to_load(model, optimizer, named, load_directly=True)
        assert _same(local_state_dict(optimizer), before)


@on_ranks(2)
def test_torchs_functions_by_name_are_refused(world: World) -> None:
    """They look flat parameters up among the model's; the way out is named."""
    state = get_optimizer_state_dict(*trained(world, "originals"))
    for steps in (2, 0):
        model, optimizer = trained(world, "flat", steps=steps)
        text = message_of(partial(get_optimizer_state_dict, model, optimizer))
        assert text.startswith("CheckpointError: "), text
        assert "optim_state_dict(model, optim)" in text
        into = partial(set_optimizer_state_dict, model, optimizer, state)
        assert message_of(into) != "nothing was raised"


@on_ranks(3)
def test_state_of_retired_flat_parameters_is_not_lost(world: World) -> None:
    """It is given by name as before, and the next optimizer goes on with it."""
    model, optimizer = trained(world, "flat")
    before = optim_state_dict(model, optimizer)
    model.get_submodule("blocks.0.up").requires_grad_(False)
    loss_of(model, gpt_input(0, world.rank))

    after = optim_state_dict(model, optimizer)
    assert _same(after, before)

    (group,) = after["param_groups"]
    for frozen in ("blocks.0.up.weight", "blocks.0.up.bias"):
        del after["state"][frozen]
        group["params"].remove(frozen)
    fresh = adamw(flat_parameters(model))
    optim_state_dict_to_load(model, fresh, after, load_directly=True)
    step(model, fresh, world.rank, 3)

    loaded = optim_state_dict(model, fresh)["state"]
    assert {float(values["step"]) for values in loaded.values()} == {3.0}


@pytest.mark.parametrize(
    "name", ["SGD momentum", "Adam amsgrad", "NAdam", "Adagrad", "Rprop", "ASGD"]
)
@on_ranks(2)
def test_every_element_wise_optimizer_trains_and_goes_over_in_both_forms(
    world: World, name: str
) -> None:
    """Bit by bit as one that is over the originals all the time."""
    results = []
    for forms in (("flat", "originals"), ("originals", "flat"), ("originals",) * 2):
        state: Any = None
        weights: Any = None
        for turn, form in enumerate(forms):
            model = fully_shard(tiny_mlp())
            held = flat_parameters(model) if form == "flat" else model.parameters()
            optimizer = EVERY[name]([{"params": list(held)}])
            if state is not None:
                model.load_state_dict(weights)
                optim_state_dict_to_load(model, optimizer, state, load_directly=True)
            for at in range(2 * turn, 2 * turn + 2):
                backward(loss_of(model, x_of(at, world.rank)))
                optimizer.step()
                optimizer.zero_grad()
            weights, state = model.state_dict(), optim_state_dict(model, optimizer)
        results.append(weights)

    assert differences(results[0], results[2]) == {}
    assert differences(results[1], results[2]) == {}
