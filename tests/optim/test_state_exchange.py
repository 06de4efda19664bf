"""State of parameters of which a rank holds nothing: told by the ranks that do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from composable_fsdp import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardedValue,
    StateDictType,
    async_save,
    fully_shard,
    get_full_optim_state,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    set_state_dict_type,
)
from composable_fsdp.optim.names import is_absent
from tests.optim.models import by_name
from tests.runtime.test_empty_shard_grads import INPUT, Narrow, narrow, once
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    averaged_gradients,
    backward,
    differences,
    loss_of,
)
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

FSDP = FullyShardedDataParallel
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "adam": partial(torch.optim.Adam, lr=0.05),
    "adam fused": partial(torch.optim.Adam, lr=0.05, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.001),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


def steps(
    world: World, model: nn.Module, optim: torch.optim.Optimizer, first: int, last: int
) -> None:
    """Train on this rank's inputs."""
    for at in range(first, last):
        once(world, model, at)
        optim.step()
        optim.zero_grad()


def plain_state(
    make: Make, ranks: int, count: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and state of the plain model after ``count`` steps."""
    plain = Narrow()
    optim = make(plain.parameters())
    for at in range(count):
        averaged_gradients(plain, [INPUT(at, rank) for rank in range(ranks)])
        optim.step()
    return dict(plain.state_dict()), by_name(plain, optim)["state"]


def assert_state(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    """All of it, counters included; sums over ranks may be rounded otherwise."""
    assert sorted(state) == sorted(wanted)
    for name, values in wanted.items():
        assert sorted(state[name]) == sorted(values), name
        for key, value in values.items():
            torch.testing.assert_close(
                state[name][key], value, rtol=1e-4, atol=1e-6, msg=f"{name} {key}"
            )


@pytest.mark.req("P-03", "U-02")
@pytest.mark.parametrize("name", MAKE)
@on_ranks(3)
def test_state_in_every_form_is_the_plain_ones(world: World, name: str) -> None:
    """Also after a load, behind which a rank's own counters would stay."""
    make = MAKE[name]
    model = narrow("wrapper")
    optim = make(model.parameters())
    steps(world, model, optim, 0, 2)
    if name != "adagrad":  # which makes its state before the first step
        held = {id(p) for p, values in optim.state.items() if values}
        mine = {id(p) for p in model.parameters() if not is_absent(p)}
        assert held == (set() if name == "sgd" else mine)
    whole = optim_state_dict(model, optim)
    assert_state(whole["state"], plain_state(make, world.world_size, 2)[1])
    # What is loaded stays behind where nothing is stepped on.
    optim_state_dict_to_load(model, optim, whole, load_directly=True)
    steps(world, model, optim, 2, 3)
    weights, wanted = plain_state(make, world.world_size, 3)
    whole = optim_state_dict(model, optim)
    assert_state(whole["state"], wanted)
    apart = differences(model.state_dict(), weights)
    assert all(value < 1e-5 for value in apart.values()), apart

    assert_state({n: get_full_optim_state(model, optim, n) for n in wanted}, wanted)
    numbers = FSDP.rekey_optim_state_dict(
        whole, OptimStateKeyType.PARAM_ID, model, optim=optim
    )
    assert len(numbers["state"]) == len(wanted)
    first = FSDP.full_optim_state_dict(model, optim, rank0_only=True)
    assert _same(first, whole if world.rank == 0 else {})
    legacy = FSDP.sharded_optim_state_dict(model, optim)
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    for sharded in (legacy, optim_state_dict(model, optim)):
        assert list(sharded["state"]) == list(whole["state"])
        parts = {
            fqn: {
                k: v.full_tensor() if isinstance(v, ShardedValue) else v
                for k, v in values.items()
            }
            for fqn, values in sharded["state"].items()
        }
        assert_state(parts, wanted)
    fresh = narrow("composable", 1)
    new = make(fresh.parameters())
    optim_state_dict_to_load(fresh, new, legacy, load_directly=True)
    assert _same(optim_state_dict(fresh, new)["state"], whole["state"])


def saved_with(world: World, folder: Path) -> None:
    """Three checkpoints of a third step: of ``save``, ``async_save`` and torch's."""
    model = narrow("wrapper")
    optim = MAKE["adam"](model.parameters())
    steps(world, model, optim, 0, 1)
    whole = optim_state_dict(model, optim)
    optim_state_dict_to_load(model, optim, whole, load_directly=True)
    steps(world, model, optim, 1, 3)
    save(folder / "save", model, optim)
    async_save(folder / "async", model, optim).result()
    weights, state = get_state_dict(model, optim)
    assert len(state["state"]) == len(list(model.parameters()))
    dcp_save({"model": weights, "optim": state}, checkpoint_id=folder / "dcp")


def loaded_with(world: World, folder: Path, saved_by: int) -> None:
    weights, wanted = plain_state(MAKE["adam"], saved_by, 3)
    for kind in ("save", "async", "dcp"):
        model = narrow("composable", 1)
        optim = MAKE["adam"](model.parameters())
        if kind != "save":
            steps(world, model, optim, 0, 1)  # over what is there
        if kind == "dcp":
            model_state, optim_state = get_state_dict(model, optim)
            found: Any = {"model": model_state, "optim": optim_state}
            dcp_load(found, checkpoint_id=folder / kind)
            set_state_dict(
                model,
                optim,
                model_state_dict=found["model"],
                optim_state_dict=found["optim"],
            )
        else:
            load(folder / kind, model, optim)
        assert_state(optim_state_dict(model, optim)["state"], wanted)
        apart = differences(model.state_dict(), weights)
        assert all(value < 1e-5 for value in apart.values()), apart


@pytest.mark.req("P-03", "U-04")
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(3, 2), (1, 3)])
def test_checkpoints_take_it_from_the_ranks_that_hold_elements(
    ranks: RankCount, tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    """Written by some ranks and read by others, before and after a first step."""
    ranks(saved_by).run(saved_with, tmp_path)
    ranks(loaded_by).run(loaded_with, tmp_path, saved_by)


class Single(nn.Module):
    """One element, so that all ranks but one hold nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.unused = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@on_ranks(4)
def test_a_rank_that_holds_nothing_at_all_takes_part(
    world: World, tmp_path: Path
) -> None:
    """And a parameter that no rank has state of has none."""
    model = FSDP(Single())
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1)).sum().backward()
        optim.step()
        optim.zero_grad()
    # Torch steps once where an optimizer has no state; nobody else takes part.
    there: Any = get_optimizer_state_dict(model, optim)
    state = optim_state_dict(model, optim)
    for each in (state, there):
        assert list(each["state"]) == ["weight"]
        assert each["state"]["weight"]["step"] == 3
    average = state["state"]["weight"]["exp_avg"]
    torch.testing.assert_close(average, torch.tensor([1 - 0.9**3]))
    save(tmp_path / "saved", model, optim)
    model(torch.ones(1)).sum().backward()
    optim.step()
    load(tmp_path / "saved", model, optim)
    assert optim_state_dict(model, optim)["state"]["weight"]["step"] == 3


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
    for rank, (whole, one, saved) in enumerate(
        ranks(4).run(check_differing, tmp_path, timeout=20)
    ):
        for text in (whole, one):
            assert text.startswith("DesyncError: Optimizer state differs over ranks: ")
            where = "here 'weight'" if rank < 3 else "on rank 0 of the shard group '"
            assert where in text
        assert "CheckpointError: On rank 0: Optimizer state differs over" in saved


@on_ranks(3)
def test_a_step_without_gradients_makes_no_state(world: World) -> None:
    """On any rank; nor does torch then, which would on a rank that has none.

    Steps of no gradient, before and after those that train.
    """
    model = narrow("composable")
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    optim.zero_grad()
    optim.step()
    assert not optim.state
    assert optim_state_dict(model, optim)["state"] == {}
    steps(world, model, optim, 0, 2)
    optim.step()  # the gradients are cleared
    whole = optim_state_dict(model, optim)
    _, wanted = plain_state(MAKE["adam"], world.world_size, 2)
    assert_state(whole["state"], wanted)
    asked: Any = get_optimizer_state_dict(model, optim)
    assert {values["step"].item() for values in asked["state"].values()} == {2}


def save_own(world: World, folder: Path) -> Any:
    model = fully_shard(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4)))
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    for at in range(2):
        backward(loss_of(model, INPUT(at, world.rank)))
        optim.step()
        held = optim.state_dict()["state"]
        assert len(held) == sum(p.numel() > 0 for p in model.parameters()) < 4
    dcp_save({"optim": optim.state_dict()}, checkpoint_id=folder)
    return optim_state_dict(model, optim)


def load_own(world: World, folder: Path, wanted: Any) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4)))
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    backward(loss_of(model, INPUT(0, world.rank)))
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
