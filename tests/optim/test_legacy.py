"""FSDP1's older functions on optimizer states, and names to numbers and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from composable_fsdp import (
    CheckpointError,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    fully_shard,
    optim_state_dict,
    rekey_optim_state_dict,
    set_state_dict_type,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.optim.own_state_dict import local_state_dict
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import adamw
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
    several_ranks,
    step,
)
from tests.support.world import World

FSDP = FullyShardedDataParallel
NAME, ID = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": rest, "lr": 0.02}, {"params": decayed, "lr": 0.05}]


@on_ranks(1, 2, 3)
@both_paths
def test_full_state_is_taken_apart_as_it_was_put_together(
    world: World, path: str
) -> None:
    """From every rank or from the first, with the optimizer or what it is made from."""
    model = gpt(path)
    optimizer = torch.optim.AdamW(two_groups(model))
    step(model, optimizer, world.rank, 0)
    whole = optim_state_dict(model, optimizer)
    set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)  # not looked at

    on_first = FSDP.full_optim_state_dict(model, optimizer)
    everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    mine = local_state_dict(optimizer)
    with record() as calls:
        parts = [
            FSDP.shard_full_optim_state_dict(whole, model, optim=optimizer),
            FSDP.shard_full_optim_state_dict(whole, model, two_groups(model)),
        ]
    assert calls == []
    parts.append(FSDP.scatter_full_optim_state_dict(on_first, model, optim=optimizer))
    parts.append(
        FSDP.scatter_full_optim_state_dict(
            on_first or None, model, two_groups(model), group=world.group
        )
    )

    assert _same(everywhere, whole)
    assert _same(on_first, whole if world.rank == 0 else {})
    for part in parts:
        assert _same(part, mine)


def check_bad_scatter(world: World) -> str:
    model = gpt("wrapper")
    optimizer = adamw(model.parameters())
    return message_of(
        lambda: FSDP.scatter_full_optim_state_dict(None, model, optim=optimizer)
    )


@several_ranks
def test_a_first_rank_without_a_state_is_told_to_all(
    ranks: RankCount, world_size: int
) -> None:
    """Nobody waits for tensors that do not come."""
    texts = ranks(world_size).run(check_bad_scatter)

    assert len(set(texts)) == 1
    assert "'state' and 'param_groups', got NoneType" in texts[0]


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(two_groups(model))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return optimizer


def torchs(key_type: OptimStateKeyType) -> Any:
    return torch_fsdp.OptimStateKeyType[key_type.name]


def test_names_become_numbers_and_numbers_names_as_with_torch() -> None:
    """On a plain model; what has such keys already comes back as it is."""
    model = tiny_mlp()
    optimizer = stepped(model)
    numbered = optimizer.state_dict()
    before = copy.deepcopy(numbered)

    named = rekey_optim_state_dict(numbered, NAME, model, optim=optimizer)

    theirs = torch_fsdp.FullyShardedDataParallel.rekey_optim_state_dict(
        numbered, torchs(NAME), model, optim=optimizer
    )
    assert _same(named, theirs)
    assert named["param_groups"][1]["params"] == ["0.weight", "2.weight"]
    assert _same(numbered, before)
    assert rekey_optim_state_dict(named, NAME, model, optim=optimizer) is named
    back = rekey_optim_state_dict(named, torchs(ID), model, two_groups(model))
    assert _same(back, numbered)


def test_all_parameters_in_order_stand_in_for_an_optimizer() -> None:
    """As in FSDP1, with neither an optimizer nor what it is made from."""
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()

    named = rekey_optim_state_dict(optimizer.state_dict(), NAME, model)

    assert list(named["state"]) == [name for name, _ in model.named_parameters()]


@pytest.mark.req("U-02")
def test_keys_that_nobody_knows_are_refused() -> None:
    """The message has some of both, and what to pass."""
    model = tiny_mlp()
    optimizer = stepped(model)
    state = optimizer.state_dict()
    other = {"state": {"norm.weight": {}}, "param_groups": state["param_groups"]}
    wrong: Any = "names"

    with pytest.raises(
        CheckpointError,
        match=r"to PARAM_NAME expects the keys \[0, 1, 2\] and so on, 4 in all; got "
        r"\['norm.weight'\] besides. Pass the model and the optimizer",
    ):
        rekey_optim_state_dict(other, NAME, model, optim=optimizer)
    with pytest.raises(TypeError, match=r"one of OptimStateKeyType\.PARAM_NAME"):
        rekey_optim_state_dict(state, wrong, model, optim=optimizer)


@both_paths
@on_ranks(2)
def test_a_plain_models_state_moves_to_a_sharded_model_and_back(
    world: World, path: str
) -> None:
    """Names are the bridge; numbers are the optimizer's own on both sides.

    From a plain model to a sharded one, by way of names; and back.
    """
    plain, model = TinyGPT(), gpt(path)
    reference = torch.optim.AdamW(two_groups(plain))
    plain(torch.zeros(1, 5, dtype=torch.long)).square().mean().backward()
    reference.step()
    numbered = reference.state_dict()
    optimizer = torch.optim.AdamW(two_groups(model))
    named = FSDP.rekey_optim_state_dict(numbered, NAME, plain, optim=reference)

    FSDP.optim_state_dict_to_load(model, optimizer, named, load_directly=True)

    state = optim_state_dict(model, optimizer)
    assert _same(rekey_optim_state_dict(state, ID, model, optim=optimizer), numbered)


def test_a_wrapped_and_a_composable_model_have_one_set_of_names(
    one_rank: World,
) -> None:
    """So a state that was rekeyed with one fits the other."""
    composable, wrapped = fully_shard(tiny_mlp()), FSDP(tiny_mlp())

    keys = [
        rekey_optim_state_dict(stepped(m).state_dict(), NAME, m, two_groups(m))
        for m in (composable, wrapped)
    ]

    assert keys[0]["param_groups"] == keys[1]["param_groups"]
