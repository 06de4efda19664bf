"""Optimizer state as sharded values, and of ranks that hold none of a parameter."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import subprocess
import sys
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

import composable_fsdp as cf
from composable_fsdp import (
    FullOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    set_state_dict_type,
    state_dict_type,
)
from composable_fsdp.features import flat_parameters
from composable_fsdp.optim import get_full_optim_state
from composable_fsdp.optim.save import local_state_dict
from composable_fsdp.state_dict import ShardedValue
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    adamw,
    apply_units,
    backward,
    loss_of,
    wide_input,
)
from tests.support.sharded import (
    UNITS,
    RankCount,
    both_paths,
    gpt,
    message_of,
    step,
)
from tests.support.world import World

FULL, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT


def trained(
    world: World, path: str, steps: int = 2, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt(path, **options)
    optimizer = adamw(model.parameters())
    for at in range(steps):
        step(model, optimizer, world.rank, at)
    return model, optimizer


@pytest.mark.req("D-19")
@both_paths
@on_ranks(2)
def test_torchs_functions_give_what_their_options_ask_for(
    world: World, path: str
) -> None:
    """Full tensors on all ranks or the first, sharded values; whatever type is set."""
    model, optimizer = trained(world, path)
    whole = dict(model.state_dict()), optim_state_dict(model, optimizer)["state"]
    set_state_dict_type(model, LOCAL)

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


@pytest.mark.req("D-19", "N-05")
@on_ranks(3)
@pytest.mark.parametrize("on_meta", [False, True], ids=["", "meta"])
def test_torchs_functions_set_full_state_from_all_ranks_or_the_first(
    world: World, on_meta: bool
) -> None:
    """Each rank keeps its part, whatever type is set; a model on meta is filled."""
    path = "composable" if on_meta else "wrapper"
    model, optimizer = trained(world, path)
    whole = dict(model.state_dict()), optim_state_dict(model, optimizer)
    for from_first in (False, True):
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=from_first
        )
        fresh = apply_units(
            TinyGPT(seed=4).to("meta" if on_meta else "cpu"), UNITS, path=path
        )
        if not on_meta:
            set_state_dict_type(fresh, SHARDED)
        mine = ({}, {}) if from_first and world.rank else copy.deepcopy(whole)
        with warnings.catch_warnings():
            # torch warns of what it asks the process group itself.
            warnings.filterwarnings("ignore", message=".*(pg_default|Multiple)")
            set_model_state_dict(fresh, mine[0], options=options)
            new = adamw(fresh.parameters())
            set_optimizer_state_dict(fresh, new, mine[1], options=options)

        set_state_dict_type(fresh, FULL)
        assert _same(dict(fresh.state_dict()), whole[0])
        # The options are torch's business; it gives lists back for tuples.
        assert _same(optim_state_dict(fresh, new)["state"], whole[1]["state"])
        step(fresh, new, world.rank, 2)


@pytest.mark.parametrize("over", [nn.Module.parameters, flat_parameters])
@on_ranks(3)
def test_the_optimizers_own_state_dict_goes_through_a_file_and_back(
    world: World, over: Callable[[nn.Module], Any]
) -> None:
    """Into itself, into an optimizer that we never met, and as plain parts.

    Of flat parameters the state is that of the originals, so an optimizer over them
    has to be met first: by its first step, or by a call about it.
    """
    model = gpt("wrapper")
    optimizer, *new = (adamw(over(model)) for _ in range(3))
    for at in range(2):
        step(model, optimizer, world.rank, at)
    before = copy.deepcopy(local_state_dict(optimizer))
    whole = optim_state_dict(model, optimizer)
    file = io.BytesIO()
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(optimizer.state_dict(), file)
    file.seek(0)
    read = torch.load(file)  # weights only
    optimizer.load_state_dict(optimizer.state_dict())
    if over is not nn.Module.parameters:
        assert "parameter group" in message_of(partial(new[0].load_state_dict, read))
        for each in new:
            optim_state_dict_to_load(model, each, whole)
    new[0].load_state_dict(read)  # one that was never met
    new[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if over is nn.Module.parameters:
        new.append(adamw(over(model)))
        new[2].load_state_dict(before)

    for each in (optimizer, *new):
        assert _same(optim_state_dict(model, each), whole)
        step(model, each, world.rank, 5)
        for values in each.state.values():
            assert type(values["exp_avg"]) is torch.Tensor


@pytest.mark.req("U-02")
@on_ranks(2)
def test_state_that_does_not_fit_is_refused_by_name_on_every_rank(world: World) -> None:
    """Parts of another plan, parts where the first rank gives to all, other shapes."""
    model, optimizer = trained(world, "wrapper")
    set_state_dict_type(model, SHARDED)
    state = optim_state_dict(model, optimizer)
    raw = optimizer.state_dict()
    other = apply_units(TinyGPT(), ["blocks.0"])
    new = adamw(other.parameters())
    step(other, new, world.rank, 0)
    before = copy.deepcopy(local_state_dict(new))
    forgotten = pickle.loads(pickle.dumps(state))  # as from another run

    for act in (
        partial(optim_state_dict_to_load, other, new, forgotten),
        partial(new.load_state_dict, raw),
    ):
        text = message_of(act)
        assert text.startswith("CheckpointError: Optimizer state 'exp_avg' of '")
        assert re.search(r"got .* in shards of \d+ elements", text)
        assert "load that into this model's own state_dict()" in text
    on_first = FullOptimStateDictConfig(rank0_only=True)
    with state_dict_type(model, FULL, None, on_first):
        mine: Any = None if world.rank else state
        text = message_of(partial(optim_state_dict_to_load, model, optimizer, mine))
        assert "expected a whole tensor on the first rank, which gives it" in text
    held = next(iter(new.state))
    new.state[held]["odd"] = torch.ones(3)
    text = message_of(new.state_dict)
    assert "Optimizer state 'odd' of '" in text
    del new.state[held]["odd"]
    assert _same(local_state_dict(new), before)


@on_ranks(3)
def test_sharded_state_goes_into_another_wrapping(world: World) -> None:
    """Each value is gathered and cut anew, as FSDP1 does."""
    model, optimizer = trained(world, "wrapper")
    expected = optim_state_dict(model, optimizer)
    for units in ([], ["blocks.0", "head"]):
        other = apply_units(TinyGPT(), units, path="wrapper")
        new = adamw(other.parameters())
        with state_dict_type(model, SHARDED):
            state = optim_state_dict(model, optimizer)
        with state_dict_type(other, SHARDED):
            new.load_state_dict(optim_state_dict_to_load(other, new, state))
        assert _same(optim_state_dict(other, new)["state"], expected["state"])
        step(other, new, world.rank, 0)


class OwnBranch(nn.Module):
    """A unit that all ranks train, and a layer that only this rank has."""

    def __init__(self, rank: int, path: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = apply_units(nn.Linear(4, 4), (), path=path)
        self.add_module(f"sparse{rank}", nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        """Map ``(batch, 4)`` to the same."""
        _, own = list(self.named_children())[-1]
        return self.dense(own(x))


@on_ranks(2)
def test_state_of_parameters_that_one_rank_has_is_saved_and_loaded(
    world: World,
) -> None:
    """They are outside of units; save and load have one set of demands."""
    model = OwnBranch(world.rank, "wrapper")
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    saved = cf.optim_state_dict(model, optim)
    before = copy.deepcopy(optim.state_dict()["state"])

    optim.load_state_dict(cf.optim_state_dict_to_load(model, optim, saved))

    assert f"sparse{world.rank}.weight" in saved["state"]
    own = [model.get_parameter(f"sparse{world.rank}.{n}") for n in ("weight", "bias")]
    for each in own:
        place = next(i for i, p in enumerate(model.parameters()) if p is each)
        torch.testing.assert_close(optim.state[each], before[place])


State = dict[str, Any]


def stepped(
    world: World, path: str, *, flat: bool = False, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = apply_units(tiny_mlp(), [], path=path, **options)
    optimizer = adamw(flat_parameters(model) if flat else model.parameters())
    loss_of(model, wide_input(8)(0, world.rank)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return model, optimizer


def written(state: State) -> str:
    """What writing it raises."""
    return message_of(partial(torch.save, state, io.BytesIO()))


@pytest.mark.req("P-13")
@both_paths
@on_ranks(2)
def test_parts_that_nobody_asked_for_are_not_pickled(world: World, path: str) -> None:
    """On any rank, copied or inside other things; the ways out do."""
    model, optimizer = stepped(world, path)
    state = optimizer.state_dict()
    texts = [
        written(state),
        written({"optim": [copy.deepcopy(state)], "step": 1}),
        message_of(partial(pickle.dumps, state)),
    ]
    # The model is deleted: an optimizer that lives longer still knows its parts.
    for flat in (False, True):
        left = stepped(world, path, flat=flat)[1]
        gc.collect()
        texts.append(written(left.state_dict()))
    for text in texts[:4]:
        assert text.startswith(
            "CheckpointError: optimizer.state_dict() holds this rank's part of "
            "state 'exp_avg' of '0.weight', elements ["
        )
        assert f"on rank {world.rank} of 2, and is pickled" in text
        assert "set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)" in text
    assert "part of state 'exp_avg' of '" in texts[4]
    # What the message names.
    assert written(optim_state_dict(model, optimizer)) == "nothing was raised"
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert written(optimizer.state_dict()) == "nothing was raised"
    # What a rank holds whole.
    whole = stepped(world, path, strategy=ShardingStrategy.NO_SHARD)[1]
    assert written(whole.state_dict()) == "nothing was raised"


def steps(
    world: World, model: nn.Module, optim: torch.optim.Optimizer, first: int, last: int
) -> None:
    """Train on this rank's inputs."""
    for at in range(first, last):
        backward(loss_of(model, wide_input(4)(at, world.rank)))
        optim.step()
        optim.zero_grad()


def check_differing(world: World, folder: Path) -> list[str]:
    model = fully_shard(nn.Linear(8, 3))
    optim = torch.optim.Adam(model.parameters())
    backward(loss_of(model, torch.ones(2, 8)))
    optim.step()
    weight, _ = model.parameters()
    if world.rank == 1:
        assert weight.numel()
        del optim.state[weight]
    return [
        message_of(lambda: optim_state_dict(model, optim)),
        message_of(lambda: get_full_optim_state(model, optim, "weight")),
        message_of(lambda: save(folder / "x", model, optim)),
    ]


def test_state_that_a_rank_with_elements_lacks_is_refused_on_all(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Also on the rank that holds none of the parameter."""
    for whole, one, saved in ranks(4).run(check_differing, tmp_path, timeout=20):
        for text in (whole, one):
            assert text.startswith("DesyncError: Optimizer state differs over ranks: ")
            assert "on rank 0 and [] on rank 1 of the shard group" in text
        assert "Optimizer state 'exp_avg' of 'weight' is torch.float32" in saved


def save_own(world: World, folder: Path) -> Any:
    model = fully_shard(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4)))
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    for at in range(2):
        backward(loss_of(model, wide_input(4)(at, world.rank)))
        optim.step()
        held = optim.state_dict()["state"]
        assert len(held) == sum(p.numel() > 0 for p in model.parameters()) < 4
    dcp_save({"optim": optim.state_dict()}, checkpoint_id=folder)
    return optim_state_dict(model, optim)


def load_own(world: World, folder: Path, wanted: Any) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4)))
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    backward(loss_of(model, wide_input(4)(0, world.rank)))
    optim.step()
    found = {"optim": optim.state_dict()}
    dcp_load(found, checkpoint_id=folder)
    optim.load_state_dict(found["optim"])
    assert _same(optim_state_dict(model, optim), wanted)


@pytest.mark.req("D-19")
def test_a_checkpoint_of_ranks_own_state_dicts_has_every_entry(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Also of parameters of which rank 0 holds nothing, at any number of ranks."""
    wanted = ranks(3).run(save_own, tmp_path)[0]

    for after in (2, 3):
        ranks(after).run(load_own, tmp_path, wanted)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_dcps_step_that_makes_state_is_a_step_on_every_rank(
    world: World, fused: bool
) -> None:
    """Also where a rank holds nothing: all ranks refuse the backward, or none."""
    model = fully_shard(nn.Linear(4, 1, bias=False))
    assert (model.weight.numel() == 0) == (world.rank == 1)
    loss = model(torch.ones(2, 4, requires_grad=True)).square().sum()
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    get_optimizer_state_dict(model, fresh)
    assert "as it was" in message_of(lambda: backward(loss))


LATE = """
import torch, torch.distributed as dist
from composable_fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(4, 4))
optim = torch.optim.Adagrad(model.parameters())
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
print(type(get_optimizer_state_dict(model, optim)["state"]["weight"]["sum"]).__name__)
"""


def test_dcp_may_be_imported_after_a_model_was_sharded() -> None:
    """Adagrad has state before its first step, which would give it the hooks."""
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    assert run([sys.executable, "-c", LATE]).stdout == "ShardedValue\n"
