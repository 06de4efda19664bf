"""Optimizer state as sharded values, and what torch's own functions get of it."""

from __future__ import annotations

import copy
import io
import pickle
import re
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from composable_fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    set_state_dict_type,
    state_dict_type,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.optim.own_state_dict import local_state_dict
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import STRATEGIES, adamw, apply_units, gpt_units
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
    step,
)
from tests.support.world import World

FULL, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT
TYPES = (FULL, LOCAL, SHARDED)
every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)


def trained(
    world: World, path: str, steps: int = 2, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt(path, **options)
    optimizer = adamw(model.parameters())
    for at in range(steps):
        step(model, optimizer, world.rank, at)
    return model, optimizer


@pytest.mark.few(2)
@pytest.mark.req("S1-14", "S1-32", "S1-15")
@on_ranks(1, 2, 3)
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_one_setting_gives_and_takes_sharded_values_of_model_and_optimizer(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """A round trip into another model and optimizer; no tensor is sent."""
    model, optimizer = trained(world, path, strategy=strategy)
    whole = model.state_dict(), optim_state_dict(model, optimizer)
    fresh = gpt(path, seed=4, strategy=strategy)
    new = adamw(fresh.parameters())
    for each in (model, fresh):
        set_state_dict_type(each, SHARDED)
    with record() as calls:
        saved, state = model.state_dict(), optim_state_dict(model, optimizer)
        fresh.load_state_dict(saved)
        new.load_state_dict(optim_state_dict_to_load(fresh, new, state))

    assert {call.op for call in calls} <= {"all_gather_object"}
    for values in state["state"].values():
        assert isinstance(values["exp_avg"], ShardedValue)
        assert type(values["step"]) is torch.Tensor
    set_state_dict_type(fresh, FULL)
    assert _same(dict(fresh.state_dict()), dict(whole[0]))
    assert _same(optim_state_dict(fresh, new), whole[1])


@pytest.mark.req("S1-14", "U-02")
def test_types_of_model_and_optimizer_cannot_be_mixed(one_rank: World) -> None:
    """One call names one type; a configuration of another is refused, nothing set."""
    model = apply_units(tiny_mlp(), [])
    before = set_state_dict_type(model, SHARDED)

    for wrong in (FullOptimStateDictConfig(), LocalOptimStateDictConfig()):
        with pytest.raises(TypeError, match="expects a ShardedOptimStateDictConfig"):
            set_state_dict_type(model, SHARDED, ShardedStateDictConfig(), wrong)
    with pytest.raises(ValueError, match="sharded values are ShardedValue"):
        set_state_dict_type(model, SHARDED, ShardedStateDictConfig(_use_dtensor=True))

    assert set_state_dict_type(model, SHARDED) != before


@pytest.mark.req("S1-32")
@on_ranks(2, 3)
@both_paths
def test_fsdp1s_functions_for_sharded_optimizer_state_are_there(
    world: World, path: str
) -> None:
    """Whatever type is set: out with one, back with the other."""
    model, optimizer = trained(world, path)
    saved = FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)
    fresh = adamw(model.parameters())

    fresh.load_state_dict(
        FullyShardedDataParallel.flatten_sharded_optim_state_dict(saved, model, fresh)
    )

    assert isinstance(saved["state"]["head.weight"]["exp_avg"], ShardedValue)
    assert _same(local_state_dict(fresh), local_state_dict(optimizer))


@pytest.mark.req("D-19")
@both_paths
@every_type
@on_ranks(2)
def test_torchs_functions_give_what_their_options_ask_for(
    world: World, path: str, kind: StateDictType
) -> None:
    """Full tensors on all ranks or the first, sharded values; whatever type is set."""
    model, optimizer = trained(world, path)
    whole = dict(model.state_dict()), optim_state_dict(model, optimizer)["state"]
    set_state_dict_type(model, kind)

    weights, state = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    assert _same(dict(weights), whole[0])
    assert _same(state["state"], whole[1])

    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=on_first)
    if world.rank == 0:
        assert _same(dict(weights), whole[0])
        assert _same(state["state"], whole[1])
    else:
        assert (weights, state) == ({}, {})

    for options in (None, StateDictOptions(cpu_offload=True)):
        weights, state = get_state_dict(model, optimizer, options=options)
        values = [state["state"][name]["exp_avg"] for name in whole[0]]  # type: ignore[call-overload,index]
        for value in (*weights.values(), *values):
            assert isinstance(value, ShardedValue)


@pytest.mark.few(2)
@pytest.mark.req("D-19")
@on_ranks(2, 3)
@both_paths
@every_type
def test_torchs_functions_set_full_state_from_all_ranks_or_the_first(
    world: World, path: str, kind: StateDictType
) -> None:
    """Each rank keeps its part; whatever type is set."""
    model, optimizer = trained(world, path)
    whole = dict(model.state_dict()), optim_state_dict(model, optimizer)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for options in (StateDictOptions(full_state_dict=True), from_first):
        fresh = gpt(path, seed=4)
        new = adamw(fresh.parameters())
        set_state_dict_type(fresh, kind)
        mine = copy.deepcopy(whole)
        if options is from_first and world.rank:
            mine = {}, {}
        set_model_state_dict(fresh, mine[0], options=options)
        set_optimizer_state_dict(fresh, new, mine[1], options=options)

        set_state_dict_type(fresh, FULL)
        assert _same(dict(fresh.state_dict()), whole[0])
        # The options are torch's business; it gives lists back for tuples.
        assert _same(optim_state_dict(fresh, new)["state"], whole[1]["state"])


@pytest.mark.req("D-19", "N-05")
@on_ranks(2)
@pytest.mark.parametrize("from_first", [False, True])
def test_torchs_functions_fill_a_model_on_meta_and_its_optimizer(
    world: World, from_first: bool
) -> None:
    """The optimizer is made of the parameters that the load has assigned."""
    model, optimizer = trained(world, "composable")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
    weights, state = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    fresh = TinyGPT().to("meta")
    apply_units(fresh, gpt_units(fresh))
    if from_first and world.rank:
        weights, state = {}, {}
    with warnings.catch_warnings():
        # torch warns of what it asks the process group itself.
        warnings.filterwarnings("ignore", message=".*(pg_default|Multiple backends)")
        set_model_state_dict(fresh, weights, options=options)
        new = adamw(fresh.parameters())
        set_optimizer_state_dict(fresh, new, state, options=options)

    for each, own in ((model, optimizer), (fresh, new)):
        step(each, own, world.rank, 2)
    assert _same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert _same(
        optim_state_dict(fresh, new)["state"],
        optim_state_dict(model, optimizer)["state"],
    )


@pytest.mark.req("D-19")
@both_paths
@on_ranks(2)
def test_torchs_flat_optimizer_state_goes_out_and_in(
    world: World, path: str, tmp_path: Path
) -> None:
    """One key per parameter and state, through a checkpoint."""
    model, optimizer = trained(world, path)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    dcp_save({"optim": saved}, checkpoint_id=tmp_path)
    fresh = adamw(model.parameters())
    found: Any = get_optimizer_state_dict(model, fresh, options=flat)
    dcp_load({"optim": found}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, fresh, found, options=flat)

    assert _same(local_state_dict(fresh)["state"], local_state_dict(optimizer)["state"])


def save_raw(world: World, folder: Path) -> Any:
    model, optimizer = trained(world, "composable")
    dcp_save({"optim": optimizer.state_dict()}, checkpoint_id=folder)
    return optim_state_dict(model, optimizer)


def load_raw(world: World, folder: Path, expected: Any) -> None:
    model, optimizer = trained(world, "wrapper", steps=1, seed=4)
    found = {"optim": optimizer.state_dict()}
    dcp_load(found, checkpoint_id=folder)
    optimizer.load_state_dict(found["optim"])

    assert _same(optim_state_dict(model, optimizer)["state"], expected["state"])


@pytest.mark.req("D-19")
def test_the_optimizers_own_state_dict_may_be_given_to_torchs_checkpoint(
    ranks: RankCount, tmp_path: Path
) -> None:
    """It says what part it is, so no rank's part is given to the others."""
    expected = ranks(3).run(save_raw, tmp_path)[0]

    for after in (1, 2, 4):
        ranks(after).run(load_raw, tmp_path, expected)


@on_ranks(2, 3)
@both_paths
def test_the_optimizers_own_state_dict_goes_through_a_file_and_back(
    world: World, path: str
) -> None:
    """Into itself, into an optimizer that we never met, and as plain parts."""
    model, optimizer = trained(world, path)
    before = copy.deepcopy(local_state_dict(optimizer))
    file = io.BytesIO()
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(optimizer.state_dict(), file)
    file.seek(0)
    read = torch.load(file)  # weights only
    new = [adamw(model.parameters()) for _ in range(3)]
    optimizer.load_state_dict(optimizer.state_dict())
    new[0].load_state_dict(read)  # one that was never met
    new[1].load_state_dict(copy.deepcopy(before))
    new[2].load_state_dict(copy.deepcopy(optimizer.state_dict()))

    for each in (optimizer, *new):
        assert _same(local_state_dict(each)["param_groups"], before["param_groups"])
        whole = optim_state_dict(model, each)
        step(model, each, world.rank, 5)
        assert whole["state"]["head.weight"]["step"].item() == 2
        for values in each.state.values():
            assert type(values["exp_avg"]) is torch.Tensor


def misfits(world: World, path: str) -> list[str]:
    model, optimizer = trained(world, path)
    set_state_dict_type(model, SHARDED)
    state = optim_state_dict(model, optimizer)
    raw = optimizer.state_dict()
    other = apply_units(TinyGPT(), ["blocks.0"], path=path)
    new = adamw(other.parameters())
    step(other, new, world.rank, 0)
    before = copy.deepcopy(local_state_dict(new))
    forgotten = pickle.loads(pickle.dumps(state))  # as from another run
    texts = [
        message_of(lambda: optim_state_dict_to_load(other, new, forgotten)),
        message_of(lambda: new.load_state_dict(raw)),
    ]
    on_first = FullOptimStateDictConfig(rank0_only=True)
    with state_dict_type(model, FULL, None, on_first):
        mine: Any = None if world.rank else state
        load = partial(optim_state_dict_to_load, model, optimizer, mine)
        texts.append(message_of(load))
    new.state[next(iter(new.state))]["odd"] = torch.ones(3)
    texts.append(message_of(new.state_dict))
    del new.state[next(iter(new.state))]["odd"]
    assert _same(local_state_dict(new), before)
    return texts


@pytest.mark.req("U-02")
@both_paths
def test_state_that_does_not_fit_is_refused_by_name_on_every_rank(
    ranks: RankCount, path: str
) -> None:
    """Parts of another plan, parts where the first rank gives to all, other shapes."""
    for plan, raw, on_first, odd in ranks(2).run(misfits, path):
        for text in (plan, raw):
            assert text.startswith("CheckpointError: Optimizer state 'exp_avg' of '")
            assert re.search(r"got .* in shards of \d+ elements", text)
            assert "load that into this model's own state_dict()" in text
        assert "expected a whole tensor on the first rank, which gives it" in on_first
        assert "optim.state_dict() was called with state 'odd' of '" in odd


@on_ranks(2, 3)
@both_paths
def test_sharded_state_goes_into_another_wrapping(world: World, path: str) -> None:
    """Each value is gathered and cut anew, as FSDP1 does."""
    model, optimizer = trained(world, path)
    expected = optim_state_dict(model, optimizer)
    for units in ([], ["blocks.0"], ["blocks.0", "blocks.1", "head"]):
        other = apply_units(TinyGPT(), units, path=path)
        new = adamw(other.parameters())
        with state_dict_type(model, SHARDED):
            state = optim_state_dict(model, optimizer)
        with state_dict_type(other, SHARDED):
            new.load_state_dict(optim_state_dict_to_load(other, new, state))
        assert _same(optim_state_dict(other, new)["state"], expected["state"])
        step(other, new, world.rank, 0)


def newer_torchs(act: Callable[[], object]) -> Callable[[], object]:
    """``act`` called from torch's module by a function that tells no options."""

    def get(act: Callable[[], object]) -> object:
        return act()

    module = {"__name__": "torch.distributed.checkpoint.state_dict"}
    return partial(types.FunctionType(get.__code__, module), act)


def check_newer_torch(world: World) -> list[str]:
    model, optimizer = trained(world, "composable")
    return [
        message_of(newer_torchs(model.state_dict)),
        message_of(newer_torchs(optimizer.state_dict)),
    ]


@pytest.mark.req("D-19")
def test_options_that_cannot_be_read_are_refused(ranks: RankCount) -> None:
    """A torch that calls us in another way gets an error, not one rank's part."""
    for texts in ranks(2).run(check_newer_torch):
        for text in texts:
            assert text.startswith("CheckpointError: torch.distributed.checkpoint.")
            assert "Use module.state_dict() under state_dict_type(...)" in text


def check_never_met(world: World) -> str:
    optim = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    before = len(optim._optimizer_state_dict_post_hooks)
    fully_shard(tiny_mlp())
    optim.step()
    assert len(optim._optimizer_state_dict_post_hooks) == before
    model = gpt("composable")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for at in range(3):
        step(model, optimizer, world.rank, at)
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1
    return "done"


def test_only_optimizers_of_sharded_parameters_get_hooks_and_get_them_once(
    ranks: RankCount,
) -> None:
    """Others in the process are left as they are."""
    assert ranks(2).run(check_never_met) == ["done"] * 2
