"""Keys of a given state: numbers, names, other names, and what fits in no way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from composable_fsdp import (
    FullyShardedDataParallel,
    StateDictType,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
)
from tests.optim.models import Mixed, by_name, mixed, train_plain, train_sharded
from tests.optim.models import two_groups as groups_of
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.sharded import RankCount, both_paths, gpt, message_of, step
from tests.support.world import World


def trained(world: World, path: str) -> tuple[nn.Module, optim.Optimizer]:
    model = mixed(path)
    optimizer = optim.AdamW(groups_of(model))
    train_sharded(model, optimizer, world, range(2))
    return model, optimizer


def renamed(state: dict[str, Any], rename: Any) -> dict[str, Any]:
    return {
        "state": {rename(k): v for k, v in state["state"].items()},
        "param_groups": [
            {**g, "params": [rename(k) for k in g["params"]]}
            for g in state["param_groups"]
        ],
    }


@pytest.mark.req("U-05")
@both_paths
@on_ranks(2)
def test_a_given_state_may_be_keyed_by_numbers_or_by_names(
    world: World, path: str
) -> None:
    """Names in any order of groups, and those of a wrapper; full and local."""
    model, optimizer = trained(world, path)
    expected = optim_state_dict(model, optimizer)
    numbered = optimizer.state_dict()
    order = [name for g in expected["param_groups"] for name in g["params"]]
    by_names = renamed(numbered, order.__getitem__)
    wrapped = renamed(by_names, lambda name: f"_fsdp_wrapped_module.{name}")
    backwards = {
        "state": dict(reversed(by_names["state"].items())),
        "param_groups": by_names["param_groups"][::-1],
    }

    for given in (numbered, by_names, wrapped, backwards):
        assert _same(optim_state_dict(model, optimizer, given), expected)
    with state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        mine = optim_state_dict(model, optimizer)
        held = {name for name, p in model.named_parameters() if p.numel()}
        assert mine["state"].keys() == expected["state"].keys() & held
        assert _same(optim_state_dict(model, optimizer, by_names), mine)


@pytest.mark.req("U-05")
@both_paths
@on_ranks(2)
def test_a_plain_optimizers_numbers_are_loaded_by_their_places(
    world: World, path: str
) -> None:
    """What ``optim.state_dict()`` of a plain model gives needs no renaming."""
    plain, model = Mixed(), mixed(path, seed=1)
    reference = optim.AdamW(groups_of(plain))
    train_plain(plain, reference, world.world_size, range(2))
    optimizer = optim.AdamW(groups_of(model), lr=0.5)

    for kind in (False, True):
        optim_state_dict_to_load(
            model,
            optimizer,
            by_name(plain, reference) if kind else reference.state_dict(),
            load_directly=True,
        )

        assert _same(optim_state_dict(model, optimizer), by_name(plain, reference))


def backwards(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())[::-1]


@pytest.mark.req("U-05")
@both_paths
@on_ranks(2)
def test_names_that_an_optimizer_was_made_with_tell_its_numbers(
    world: World, path: str
) -> None:
    """Not the order: the groups of the two may list parameters differently.

    One made from names, in another order than the one whose state is loaded.
    """
    plain, model = TinyGPT(), gpt(path)
    reference = optim.AdamW(plain.named_parameters())
    plain(torch.zeros(1, 5, dtype=torch.long)).square().mean().backward()
    reference.step()
    ours = optim.AdamW(backwards(model))

    part = optim_state_dict_to_load(model, ours, reference.state_dict())
    ours.load_state_dict(part)
    state = optim_state_dict(model, ours)

    names = [name for name, _ in backwards(plain)]
    assert state["param_groups"][0]["param_names"] == names
    assert state["param_groups"][0]["params"] == names
    assert _same(
        {name: state["state"][name] for name in names[::-1]},
        by_name(plain, reference)["state"],
    )
    step(model, ours, world.rank, 0)
    unnamed = optim.AdamW(model.parameters())
    unnamed.load_state_dict(optim_state_dict_to_load(model, unnamed, state))
    assert "param_names" not in unnamed.param_groups[0]


@pytest.mark.req("U-05")
@on_ranks(2)
def test_a_parameters_other_names_are_known(world: World) -> None:
    """Those of the optimizer, and every name of a tied parameter.

    Names of the user's own, and another name of a tied parameter.
    """
    model = gpt("composable", tied_head=True)
    own = [(f"p{i}", p) for i, (_, p) in enumerate(model.named_parameters())]
    optimizer = optim.AdamW(own)
    step(model, optimizer, world.rank, 0)
    expected = optim_state_dict(model, optimizer)
    fqns = expected["param_groups"][0]["params"]
    raw = optimizer.state_dict()

    with_own = renamed(raw, lambda i: f"p{i}")
    with_tied = renamed(raw, lambda i: fqns[i].replace("tokens.weight", "head.weight"))

    assert _same(optim_state_dict(model, optimizer, with_own), expected)
    assert _same(optim_state_dict(model, optimizer, with_tied), expected)


def check_ambiguous(world: World, path: str) -> dict[str, str]:
    model, optimizer = trained(world, path)
    good = optim_state_dict(model, optimizer)
    twice = {
        "state": {**good["state"], "_fsdp_wrapped_module.scale": {}},
        "param_groups": good["param_groups"],
    }
    other = renamed(good, lambda name: name.replace("first", "third"))
    numbered = optimizer.state_dict()
    uneven = {"state": {}, "param_groups": numbered["param_groups"][:1]}
    wrong = {"twice": twice, "other": other, "uneven": uneven}
    return {
        f"{way} {key}": message_of(partial(act, model, optimizer, state))
        for key, state in wrong.items()
        for way, act in (("to", optim_state_dict_to_load), ("of", optim_state_dict))
    }


@pytest.mark.req("U-05")
@both_paths
def test_keys_that_can_be_read_in_two_ways_or_none_are_refused(
    ranks: RankCount, path: str
) -> None:
    """With what differs; nothing is guessed and nothing is left out."""
    for texts in ranks(2).run(check_ambiguous, path):
        for way in ("to", "of"):
            assert (
                "got two keys for parameter 'scale': 'scale' and "
                "'_fsdp_wrapped_module.scale'. Leave one of them out."
                in texts[f"{way} twice"]
            )
            assert (
                "missing ['first.bias', 'first.weight'], left over ['third.bias', "
                "'third.weight']" in texts[f"{way} other"]
            )
            assert (
                "groups of [5]; the optimizer's groups have [5, 2]"
                in (texts[f"{way} uneven"])
            )


def test_the_wrappers_static_method_takes_names_as_well(one_rank: World) -> None:
    """FSDP1's third argument, as torchrec's keyed optimizers give it."""
    model = FullyShardedDataParallel(Mixed())
    optimizer = optim.AdamW(model.parameters())
    train_sharded(model, optimizer, one_rank, range(1))
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)

    again = FullyShardedDataParallel.optim_state_dict(model, optimizer, state)

    assert _same(again, state)
