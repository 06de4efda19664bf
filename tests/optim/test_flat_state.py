"""State of an optimizer over flat parameters: by originals, out and in."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from composable_fsdp import (
    CheckpointError,
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    async_save,
    flat_parameters,
    fully_shard,
    get_full_optim_state,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    set_full_optim_state,
    state_dict_type,
)
from composable_fsdp.optim.own_state_dict import local_state_dict
from composable_fsdp.optim.scalars import is_scalar
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.source import Copy
from tests.optim.models import INPUT, mixed
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    adamw,
    backward,
    differences,
    gpt_input,
    loss_of,
    tolerance_at,
    train_reference,
    wide_input,
)
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
    one_to_three_ranks,
    several_ranks,
    step,
)
from tests.support.world import World

FSDP = FullyShardedDataParallel
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
            if name in expected["state"] or values["exp_avg"].numel()
        }

    assert _same(in_order(flat, expected), expected)


def state_of(world: World, form: str) -> tuple[State, State]:
    model, optimizer = trained(world, form)
    return model.state_dict(), optim_state_dict(model, optimizer)


def go_on(world: World, form: str, saved: tuple[State, State]) -> State:
    model = gpt("composable", tied_head=True, seed=5)
    optimizer = optimizer_of(model, form)
    model.load_state_dict(saved[0])
    optim_state_dict_to_load(model, optimizer, saved[1], load_directly=True)
    assert _same(
        in_order(optim_state_dict(model, optimizer), saved[1])["state"],
        saved[1]["state"],
    )
    for at in range(2, 4):
        step(model, optimizer, at=at, rank=0)
    return model.state_dict()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "forms", [("flat", "originals"), ("originals", "flat"), ("flat", "flat")], ids=str
)
def test_a_state_goes_on_in_either_form_at_another_world_size(
    ranks: RankCount, sizes: tuple[int, int], forms: tuple[str, str]
) -> None:
    """Loaded it is the state that was saved, and trains on as one rank does alone."""
    before, after = sizes
    saved = ranks(before).run(state_of, forms[0])[0]

    ours = ranks(after).run(go_on, forms[1], saved)
    alone = ranks(1).run(go_on, "originals", saved)[0]

    for weights in ours:
        found = differences(weights, alone)
        assert max(found.values(), default=0.0) <= tolerance_at(after)


@on_ranks(1, 2, 3)
def test_a_state_of_the_first_rank_alone_is_given_to_all(world: World) -> None:
    """``rank0_only`` in both directions."""
    model, optimizer = trained(world, "flat")
    whole = optim_state_dict(model, optimizer)
    mine = copy.deepcopy(local_state_dict(optimizer))
    config = FullOptimStateDictConfig(rank0_only=True)
    with state_dict_type(
        model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config
    ):
        first = optim_state_dict(model, optimizer)
        other, fresh = trained(world, "flat", steps=0)
        with state_dict_type(
            other, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config
        ):
            optim_state_dict_to_load(other, fresh, first, load_directly=True)

    assert bool(first) == (world.rank == 0)
    assert not first or _same(first, whole)
    assert _same(local_state_dict(fresh)["state"], mine["state"])


@both_paths
@on_ranks(2, 3)
def test_the_older_functions_go_out_and_in(world: World, path: str) -> None:
    """FSDP1's full, sharded, shard, scatter and flatten."""
    model, optimizer = trained(world, "flat", path)
    mine = copy.deepcopy(local_state_dict(optimizer))
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    first = FSDP.full_optim_state_dict(model, optimizer)
    parts = FSDP.sharded_optim_state_dict(model, optimizer)
    flats = flat_parameters(model)

    for loadable in (
        FSDP.shard_full_optim_state_dict(whole, model, optim=optimizer),
        FSDP.shard_full_optim_state_dict(whole, model, flats),
        FSDP.scatter_full_optim_state_dict(first or None, model, optim=optimizer),
        FSDP.flatten_sharded_optim_state_dict(parts, model, optimizer),
    ):
        fresh = adamw(flats)
        fresh.load_state_dict(loadable)
        assert _same(local_state_dict(fresh)["state"], mine["state"])


@on_ranks(1, 2, 3)
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
    for each, optim in ((model, optimizer), (same, expected)):
        set_full_optim_state(each, optim, name, doubled)
    ours, theirs = optim_state_dict(model, optimizer), optim_state_dict(same, expected)
    text = message_of(
        partial(
            set_full_optim_state, model, optimizer, name, {"step": torch.tensor(9.0)}
        )
    )

    assert _same(ours["state"], theirs["state"])
    assert "CheckpointError: Optimizer state 'step' of " in text
    assert "the parameters of its flat parameter have one value" in text


@on_ranks(2, 3)
def test_state_can_be_put_into_a_new_optimizer_name_by_name(world: World) -> None:
    """The flat state is made of zeros and filled."""
    model, optimizer = trained(world, "flat")
    whole = optim_state_dict(model, optimizer)["state"]
    other, fresh = trained(world, "flat", steps=0)
    for name, values in whole.items():
        set_full_optim_state(other, fresh, name, values)

    assert _same(optim_state_dict(other, fresh)["state"], whole)


def test_steps_that_differ_within_a_region_are_refused_by_name(
    one_rank: World,
) -> None:
    """The message names two parameters and their values; nothing is loaded."""
    model = fully_shard(tiny_mlp())
    optimizer = adamw(flat_parameters(model))
    backward(loss_of(model, x_of(0, 0)))
    optimizer.step()
    state = optim_state_dict(model, optimizer)
    state["state"]["2.bias"]["step"] = torch.tensor(7.0)

    with pytest.raises(
        CheckpointError, match=r"'step' is 1.0 for .* 7.0 for '2\.bias'"
    ):
        optim_state_dict_to_load(model, optimizer, state, load_directly=True)

    after = optim_state_dict(model, optimizer)["state"]
    assert after["2.bias"]["step"] == 1


def with_unused(world: World, make: Any) -> tuple[nn.Module, State]:
    """``Mixed`` trained over its originals: nothing uses one of its parameters."""
    model = mixed("composable")
    optimizer = make(model.parameters())
    backward(loss_of(model, INPUT(0, world.rank)))
    optimizer.step()
    return model, optim_state_dict(model, optimizer)


def test_sharded_state_of_another_layout_is_refused(one_rank: World) -> None:
    """It has this shard's size, and the elements of another rank."""
    model, optimizer = trained(one_rank, "flat")
    given = optimizer.state_dict()
    for group in given["param_groups"]:
        group.pop("flat_parameters", None)  # the fingerprint, as a script may do
    average = given["state"][0]["exp_avg"].local
    numel = average.numel()
    given["state"][0]["exp_avg"] = ShardedValue(average, (2 * numel,), 0, numel, 1, 2)

    text = message_of(lambda: optim_state_dict(model, optimizer, given))

    assert "'exp_avg' of a flat parameter has shape" in text
    assert "Save what optim_state_dict(model, optim) returns" in text


@on_ranks(1, 2, 3)
def test_a_parameter_without_state_gets_the_zeros_that_a_flat_one_has(
    world: World,
) -> None:
    """It was never used over the originals, and is stepped with zeros from now on."""
    _, state = with_unused(world, adamw)
    assert "unused" not in state["state"]
    del state["param_groups"][0]["params"][
        state["param_groups"][0]["params"].index("fixed")
    ]
    model = mixed("composable")
    optimizer = adamw(flat_parameters(model))
    optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    loaded = optim_state_dict(model, optimizer)["state"]

    assert not loaded["unused"]["exp_avg"].any()
    assert loaded["unused"]["step"] == 1
    assert _same(loaded["scale"], state["state"]["scale"])


def test_a_state_that_does_not_start_from_zero_may_not_be_missing(
    one_rank: World,
) -> None:
    """Rprop's step sizes begin with the learning rate: zeros would stop it."""
    _, state = with_unused(one_rank, torch.optim.Rprop)
    state["param_groups"][0]["params"].remove("fixed")
    model = mixed("composable")
    optimizer = torch.optim.Rprop(flat_parameters(model))

    with pytest.raises(CheckpointError, match=r"'prev' is there.*not for 'unused'"):
        optim_state_dict_to_load(model, optimizer, state)


def test_saved_groups_with_other_options_do_not_go_into_one_flat_parameter(
    one_rank: World,
) -> None:
    """The error says what a flat parameter cannot do; equal options are no matter."""
    model = fully_shard(tiny_mlp())
    pairs = [[p for p in model.parameters() if (p.ndim > 1) == big] for big in (0, 1)]
    other = torch.optim.AdamW([{"params": p} for p in pairs])
    backward(loss_of(model, x_of(0, 0)))
    other.step()
    state = optim_state_dict(model, other)
    optimizer = torch.optim.AdamW(flat_parameters(model))

    optim_state_dict_to_load(model, optimizer, state)
    state["param_groups"][0]["lr"] = 0.5
    with pytest.raises(CheckpointError, match="a flat parameter is in one group"):
        optim_state_dict_to_load(model, optimizer, state)


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


class Scaled(nn.Module):
    """A 0-d parameter before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


@pytest.mark.parametrize("form", ["flat", "originals"])
@on_ranks(2)
def test_a_counter_of_a_0d_parameter_is_set_as_the_optimizer_keeps_it(
    world: World, form: str
) -> None:
    """What ``get_full_optim_state`` returns is set again without a change."""
    model = fully_shard(Scaled())
    given = flat_parameters(model) if form == "flat" else model.parameters()
    optimizer = Counting(given, {})
    backward(loss_of(model, x_of(0, world.rank)))
    optimizer.step()
    before = copy.deepcopy(local_state_dict(optimizer))

    for name in ("scale", "shift"):
        state = get_full_optim_state(model, optimizer, name)
        set_full_optim_state(model, optimizer, name, state)

    assert _same(local_state_dict(optimizer), before)


@pytest.mark.parametrize(
    ("name", "value", "shape", "expected"),
    [
        ("step", 3, (), True),
        ("step", torch.ones(()), (2, 3), True),
        ("count", torch.ones(()), (2, 3), True),
        ("count", torch.ones(()), (1,), True),
        ("step", torch.ones(()), (), True),
        ("exp_avg", torch.ones(()), (), False),
        ("exp_avg", torch.ones(1), (1,), False),
        ("step", torch.ones(1), (1,), False),
        ("exp_avg", torch.ones(0), (0,), False),
        ("mean", torch.ones(1), (2, 3), False),
    ],
)
def test_what_has_no_dimension_is_a_scalar_unless_the_parameter_has_none(
    name: str, value: Any, shape: tuple[int, ...], expected: bool
) -> None:
    """Only beside a 0-d parameter does the name of a 0-d tensor decide."""
    assert is_scalar(name, value, shape) is expected


@on_ranks(1, 2, 3)
def test_a_counter_beside_a_0d_parameter_is_a_scalar_on_every_rank(
    world: World, tmp_path: Path
) -> None:
    """A 0-d state is the flat parameter's also if an original of it is 0-d."""
    states: list[State] = []
    for _ in range(2):
        model = fully_shard(Scaled())
        optimizer = Counting(flat_parameters(model), {})
        if states:
            load(tmp_path / "saved", model, optimizer)
        else:
            backward(loss_of(model, x_of(0, world.rank)))
            optimizer.step()
            optimizer.zero_grad()
            save(tmp_path / "saved", model, optimizer)
        states.append(copy.deepcopy(local_state_dict(optimizer)))
    named = optim_state_dict(model, optimizer)
    optim_state_dict_to_load(model, optimizer, named, load_directly=True)

    assert _same(states[1], states[0])
    assert _same(local_state_dict(optimizer), states[0])


def save_native(world: World, folder: Path, form: str, how: str) -> tuple[State, State]:
    model, optimizer = trained(world, form)
    if how == "async":
        async_save(folder / "saved", model, optimizer).result()
    else:
        save(folder / "saved", model, optimizer)
    return model.state_dict(), optim_state_dict(model, optimizer)["state"]


def load_native(
    world: World, folder: Path, form: str, saved: tuple[State, State], stepped: bool
) -> None:
    model, optimizer = trained(world, form, steps=int(stepped), seed=5)
    before = [v["exp_avg"].data_ptr() for v in optimizer.state.values()]
    load(folder / "saved", model, optimizer)

    values = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    assert form != "flat" or any(isinstance(value, ShardedValue) for value in values)
    assert differences(model.state_dict(), saved[0]) == {}
    assert _same(optim_state_dict(model, optimizer)["state"], saved[1])
    if stepped:
        after = [v["exp_avg"].data_ptr() for v in optimizer.state.values()]
        assert after == before  # read into the memory that was there


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("sizes", [(1, 3), (2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize(
    "forms", [("flat", "originals"), ("originals", "flat"), ("flat", "flat")], ids=str
)
def test_a_native_checkpoint_is_of_originals_whatever_the_optimizer_steps_on(
    ranks: RankCount,
    tmp_path: Path,
    sizes: tuple[int, int],
    forms: tuple[str, str],
    stepped: bool,
) -> None:
    """Saved in one form and loaded in either, at another world size."""
    how = "async" if stepped else "save"
    saved = ranks(sizes[0]).run(save_native, tmp_path, forms[0], how)[0]

    ranks(sizes[1]).run(load_native, tmp_path, forms[1], saved, stepped)


def test_new_flat_state_is_the_memory_that_a_checkpoint_was_read_into(
    one_rank: World, tmp_path: Path
) -> None:
    """Not a copy of it: a state is never there twice."""
    model = fully_shard(tiny_mlp())
    optimizer = adamw(flat_parameters(model))
    backward(loss_of(model, x_of(0, 0)))
    optimizer.step()
    save(tmp_path / "saved", model, optimizer)
    fresh = adamw(flat_parameters(model))
    prepare, read = NativeSource.prepare, set[int]()

    def noted(source: NativeSource, copies: Sequence[Copy]) -> None:
        read.update(c.into.untyped_storage().data_ptr() for c in copies if c.is_new)
        prepare(source, copies)

    with mock.patch.object(NativeSource, "prepare", noted):
        load(tmp_path / "saved", model, fresh)

    (state,) = fresh.state.values()
    assert read == {state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()}
    assert torch.equal(
        state["exp_avg"], next(iter(optimizer.state.values()))["exp_avg"]
    )


def test_a_native_checkpoint_with_other_steps_in_a_region_is_refused_before_a_write(
    one_rank: World, tmp_path: Path
) -> None:
    """The weights stay as they were, too."""
    model = fully_shard(tiny_mlp())
    optimizer = adamw(model.parameters())
    backward(loss_of(model, x_of(0, 0)))
    optimizer.step()
    optimizer.state[model[0].weight]["step"] += 3  # type: ignore[index]
    save(tmp_path / "saved", model, optimizer)
    other = fully_shard(tiny_mlp(seed=3))
    before = copy.deepcopy(other.state_dict())

    with pytest.raises(CheckpointError, match=r"'step' is .* flat parameter"):
        load(tmp_path / "saved", other, adamw(flat_parameters(other)))

    assert differences(other.state_dict(), before) == {}


def pickled(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Its state dict, through a file of this rank."""
    file = io.BytesIO()
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: State = torch.load(file, weights_only=True)
    return state


@on_ranks(2, 3)
def test_the_optimizers_own_state_dict_can_be_pickled_and_loaded(world: World) -> None:
    """By this rank, under an equal plan, before and after the first step."""
    model, optimizer = trained(world, "flat")
    state = pickled(model, optimizer)
    values = [v for s in state["state"].values() for v in s.values()]
    other, unmet = trained(world, "flat", steps=0)
    met = adamw(flat_parameters(other))
    step(other, met, world.rank, 0)
    for fresh in (unmet, met):
        fresh.load_state_dict(copy.deepcopy(state))
        other.load_state_dict(model.state_dict())
        step(other, fresh, world.rank, 5)
    step(model, optimizer, world.rank, 5)

    assert any(isinstance(value, ShardedValue) for value in values)
    assert differences(model.state_dict(), other.state_dict()) == {}
    assert _same(optim_state_dict(other, unmet), optim_state_dict(model, optimizer))


def save_dcp(world: World, folder: Path) -> State:
    model, optimizer = trained(world, "flat")
    dcp_save({"optim": optimizer.state_dict()}, checkpoint_id=folder)
    return optim_state_dict(model, optimizer)["state"]  # type: ignore[no-any-return]


def load_dcp(world: World, folder: Path, form: str) -> tuple[str, State]:
    model, optimizer = trained(world, form, steps=1)

    def read() -> None:
        state = {"optim": optimizer.state_dict()}
        dcp_load(state, checkpoint_id=folder)
        optimizer.load_state_dict(state["optim"])

    try:
        read()
        text = "nothing was raised"
    except BaseException as error:  # torch's own derives from that
        text = repr(error)
    return text, optim_state_dict(model, optimizer)["state"]


def test_torchs_checkpoint_keeps_the_parts_of_all_ranks(
    ranks: RankCount, tmp_path: Path
) -> None:
    """``optim.state_dict()`` through it is right at an equal plan, else refused."""
    saved = ranks(2).run(save_dcp, tmp_path)[0]

    for text, loaded in ranks(2).run(load_dcp, tmp_path, "flat"):
        assert text == "nothing was raised"
        assert _same(loaded, saved)
    for size, form in ((3, "flat"), (1, "flat"), (2, "originals")):
        for text, _ in ranks(size).run(load_dcp, tmp_path, form, retire=True):
            assert text != "nothing was raised", (size, form)


def save_named(world: World, folder: Path, form: str) -> State:
    model, optimizer = trained(world, form)
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"optim": optim_state_dict(model, optimizer)}
        dcp_save(state, checkpoint_id=folder)
    return optim_state_dict(model, optimizer)["state"]  # type: ignore[no-any-return]


def load_named(world: World, folder: Path, form: str) -> State:
    model, optimizer = trained(world, form, steps=1)
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"optim": optim_state_dict(model, optimizer)}
        dcp_load(state, checkpoint_id=folder)
        optim_state_dict_to_load(model, optimizer, state["optim"], load_directly=True)
    return optim_state_dict(model, optimizer)["state"]  # type: ignore[no-any-return]


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "forms", [("flat", "originals"), ("originals", "flat"), ("flat", "flat")], ids=str
)
def test_torchs_checkpoint_of_the_state_by_name_goes_anywhere(
    ranks: RankCount,
    tmp_path: Path,
    sizes: tuple[int, int],
    forms: tuple[str, str],
) -> None:
    """Sharded values of originals, into either form and at another world size."""
    saved = ranks(sizes[0]).run(save_named, tmp_path, forms[0])[0]

    for loaded in ranks(sizes[1]).run(load_named, tmp_path, forms[1]):
        assert _same(loaded, saved)


def check_torchs_functions(world: World) -> list[str]:
    model, optimizer = trained(world, "flat")
    other, fresh = trained(world, "flat", steps=0)
    state = get_optimizer_state_dict(*trained(world, "originals"))
    return [
        message_of(lambda: get_optimizer_state_dict(model, optimizer)),
        message_of(lambda: get_optimizer_state_dict(other, fresh)),
        message_of(lambda: set_optimizer_state_dict(other, fresh, state)),
    ]


@one_to_three_ranks
def test_torchs_functions_by_name_are_refused(
    ranks: RankCount, world_size: int
) -> None:
    """They look flat parameters up among the model's; the way out is named."""
    for *gets, into in ranks(world_size).run(check_torchs_functions):
        assert into != "nothing was raised"
        for text in gets:
            assert text.startswith("CheckpointError: "), text
            assert "optim_state_dict(model, optim)" in text


def check_layouts(world: World) -> list[str]:
    model, optimizer = trained(world, "flat")
    state = optimizer.state_dict()
    other = gpt("composable", tied_head=True)
    texts = []
    for wrong in (
        adamw(reversed(flat_parameters(model))),
        adamw(other.parameters()),
    ):
        held = wrong.param_groups[0]["params"][0]
        held.grad = torch.zeros_like(held)

        def act(wrong: torch.optim.Optimizer = wrong) -> None:
            wrong.load_state_dict(state)
            wrong.step()

        texts.append(message_of(act))
    return texts


@several_ranks
def test_a_state_in_flat_form_is_refused_by_an_optimizer_of_other_parameters(
    ranks: RankCount, world_size: int
) -> None:
    """In another order, or over originals; before the first step at the latest."""
    for flat, originals in ranks(world_size).run(check_layouts):
        assert "laid out otherwise than its own" in flat
        assert originals != "nothing was raised"


@on_ranks(2, 3)
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


EVERY: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.1),
    "Adamax": partial(torch.optim.Adamax, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
    "Rprop": partial(torch.optim.Rprop, lr=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
}


@pytest.mark.parametrize("name", EVERY)
@on_ranks(1, 2)
def test_every_element_wise_optimizer_trains_and_goes_over_in_both_forms(
    world: World, name: str
) -> None:
    """Bit by bit as one that is over the originals all the time.

    Two steps, state out, into the other form, two steps more.
    """
    make = EVERY[name]
    results = []
    for forms in (("flat", "originals"), ("originals", "flat"), ("originals",) * 2):
        model = fully_shard(tiny_mlp())
        parameters: dict[str, Any] = {
            "flat": flat_parameters,
            "originals": nn.Module.parameters,
        }
        optimizer = make(list(parameters[forms[0]](model)))
        for at in range(2):
            backward(loss_of(model, x_of(at, world.rank)))
            optimizer.step()
            optimizer.zero_grad()
        state = optim_state_dict(model, optimizer)
        other = fully_shard(tiny_mlp(seed=4))
        other.load_state_dict(model.state_dict())
        second = make(list(parameters[forms[1]](other)))
        optim_state_dict_to_load(other, second, state, load_directly=True)
        for at in range(2, 4):
            backward(loss_of(other, x_of(at, world.rank)))
            second.step()
            second.zero_grad()
        results.append(other.state_dict())

    assert differences(results[0], results[2]) == {}
    assert differences(results[1], results[2]) == {}


def test_an_unmet_optimizer_over_flat_parameters_has_no_state_to_lose(
    one_rank: World,
) -> None:
    """Before its first step its state dict is torch's own, and loads again."""
    model = gpt("composable", strategy=ShardingStrategy.FULL_SHARD)
    optimizer = adamw(flat_parameters(model))

    state = optimizer.state_dict()
    optimizer.load_state_dict(state)

    assert state["state"] == {}


@on_ranks(1, 2, 3)
def test_the_model_of_these_tests_trains_as_the_plain_one(world: World) -> None:
    """So the states compared above are those of right training."""
    plain = TinyGPT(tied_head=True)
    train_reference(plain, world.world_size, gpt_input, adamw, steps=2)
    model, _ = trained(world, "flat")

    found = differences(model.state_dict(), plain.state_dict())
    assert max(found.values(), default=0.0) <= tolerance_at(world.world_size)
