"""Names in states of models and optimizers: of wrappers, of pairs, and as keys.

The names are those of the plain model in the same wrapper.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    replicate,
    save,
    state_dict_type,
)
from composable_fsdp.optim.save import local_state_dict
from tests.optim.models import (
    Mixed,
    by_name,
    mixed,
    train_plain,
    train_sharded,
    two_groups,
)
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import apply_units, wide_input
from tests.support.sharded import both_paths, gpt, message_of, step
from tests.support.world import World


def put(module: nn.Module, path: str) -> Any:
    return (
        fully_shard(module)
        if path == "composable"
        else FullyShardedDataParallel(module)
    )


def sharded_children(model: Any, path: str) -> Any:
    model.first, model.second = put(model.first, path), put(model.second, path)
    return model


def require_states(model: Any, plain: Any, ours: Any, reference: Any) -> None:
    """Both state dicts are those of the plain model, and load."""
    state, weights = optim_state_dict(model, ours), model.state_dict()
    part = optim_state_dict_to_load(model, ours, state)
    model.load_state_dict(weights)
    assert _same(state, by_name(plain, reference))
    assert _same(dict(weights), dict(plain.state_dict()))
    assert _same(part, local_state_dict(ours))


@pytest.mark.req("S1-02")
@both_paths
@on_ranks(2)
def test_units_inside_replicate_have_the_plain_models_names(
    world: World, path: str
) -> None:
    """As without sharding; settings reach inside."""
    plain: Any = Mixed()
    model: Any = Mixed()
    for each in (model, plain):
        each.unused.requires_grad_(False)
    model = replicate(sharded_children(model, path))
    ours = optim.AdamW(model.parameters(), lr=0.05)
    reference = optim.AdamW(plain.parameters(), lr=0.05)
    train_sharded(model, ours, world, range(2))
    train_plain(plain, reference, world.world_size, range(2))

    require_states(model, plain, ours, reference)
    first = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(True, True)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT, *first):
        once = optim_state_dict(model, ours)
        assert _same(once, by_name(plain, reference) if world.rank == 0 else {})
        part = optim_state_dict_to_load(model, ours, once)
    assert _same(part, local_state_dict(ours))


class Parallel(nn.Module):
    """Shows the parameters and modules of what it wraps as its own, as DMP does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._wrapped = inner

    def forward(self, x: Tensor) -> Any:
        return self._wrapped(x)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield from self._wrapped.named_parameters(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from self._wrapped.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped.load_state_dict(*args, **kwargs)


class Exposing(Parallel):
    """Lists what it wraps a second time, as a child of its own."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield from self._wrapped.named_parameters(*args, **kwargs)
        yield from nn.Module.named_parameters(self, "again")


@pytest.mark.req("S1-07", "S1-08")
@pytest.mark.parametrize("kind", [Parallel, Exposing])
@both_paths
@on_ranks(2)
def test_a_module_that_shows_its_child_as_itself_gives_names_once(
    world: World, path: str, kind: type[Parallel]
) -> None:
    """The names it gives, each parameter once; the warning has both names of one."""
    model, plain = kind(put(sharded_children(Mixed(), path), path)), Mixed()
    ours = optim.AdamW({id(p): p for p in model.parameters()}.values(), lr=0.05)
    reference = optim.AdamW(plain.parameters(), lr=0.05)
    train_sharded(model, ours, world, range(2))
    train_plain(plain, reference, world.world_size, range(2))

    told = (
        rf"{kind.__name__}.named_parameters\(\) gives 'scale' for the parameter at "
        r"'_wrapped.scale' \(and so on, 7 in all\): some module overrides"
    )
    with pytest.warns(UserWarning, match=told) as said:
        require_states(model, plain, ours, reference)
    assert len(said) == 2


@on_ranks(2)
def test_a_state_may_lack_what_no_unit_cuts(world: World) -> None:
    """The rest is loaded, as with FSDP1; what a unit holds may not be missing."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.register_parameter("extra", nn.Parameter(torch.ones(3)))
    x = torch.ones(2, 4)
    extra = plain.get_parameter("extra")
    model = FullyShardedDataParallel(plain, ignored_states=[extra])
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    (model(x).sum() + extra.sum()).backward()
    optimizer.step()
    whole = optim_state_dict(model, optimizer)
    lacking: dict[str, Any] = {
        "state": {k: v for k, v in whole["state"].items() if k != "extra"},
        "param_groups": [
            {**group, "params": [n for n in group["params"] if n != "extra"], "lr": 0.3}
            for group in whole["param_groups"]
        ],
    }
    fresh = optim.AdamW(model.parameters(), lr=0.1)
    fresh.load_state_dict(optim_state_dict_to_load(model, fresh, lacking))

    assert fresh.param_groups[0]["lr"] == 0.3
    assert fresh.state.get(extra, {}) == {}
    assert _same(optim_state_dict(model, fresh)["state"], lacking["state"])
    del lacking["param_groups"][0]["params"][0]
    text = message_of(lambda: optim_state_dict_to_load(model, fresh, lacking))
    assert "missing ['0.weight']" in text or "left over ['0.weight']" in text, text


with warnings.catch_warnings():
    # It compiles by torch.jit what it exports.
    warnings.simplefilter("ignore")
    from torch.distributed.optim.named_optimizer import _NamedOptimizer

State = dict[str, Any]
x_of = wide_input(8)


def groups_of(model: nn.Module, rank: int) -> list[State]:
    """Weights and biases, in another order of groups and parameters on each rank."""
    named = list(model.named_parameters())[:: -1 if rank % 2 else 1]
    groups: list[State] = [
        {"params": [p for name, p in named if name.endswith(kind)], "lr": lr}
        for kind, lr in (("weight", 0.1), ("bias", 0.2))
    ]
    return groups[:: -1 if rank % 2 else 1]


def stepped(world: World, steps: int) -> tuple[nn.Module, optim.Optimizer]:
    model = apply_units(tiny_mlp(), ["0", "2"], path="wrapper")
    optimizer = optim.AdamW(groups_of(model, world.rank))
    for at in range(steps):
        optimizer.zero_grad()
        model(x_of(at, world.rank)).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.req("P-20", "R-07")
@on_ranks(3)
def test_each_rank_may_have_its_own_order(world: World, tmp_path: Path) -> None:
    """Of groups and of parameters; out and in again, in every form."""
    model, optimizer = stepped(world, 2)
    own = copy.deepcopy(local_state_dict(optimizer))
    whole = optim_state_dict(model, optimizer)
    # The same on all ranks, and options go with the parameters.
    by_name = {n: g["lr"] for g in whole["param_groups"] for n in g["params"]}
    assert by_name == {n: 0.1 if "weight" in n else 0.2 for n in by_name}
    seen = world.gather(
        {n: s["exp_avg"].sum().item() for n, s in whole["state"].items()}
    )
    assert all(each == seen[0] for each in seen)
    first = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)
    kinds: dict[str, tuple[Any, ...]] = {
        "full": (StateDictType.FULL_STATE_DICT,),
        "first": (StateDictType.FULL_STATE_DICT, *first),
        "sharded": (StateDictType.SHARDED_STATE_DICT,),
        "local": (StateDictType.LOCAL_STATE_DICT,),
    }
    for kind in (*kinds, "native"):
        other, fresh = stepped(world, 1)
        if kind == "native":
            save(tmp_path / "saved", model, optimizer)
            load(tmp_path / "saved", other, fresh)
        else:
            asked: Any = kinds[kind]
            with state_dict_type(model, *asked), state_dict_type(other, *asked):
                state = optim_state_dict(model, optimizer)
                if kind in ("full", "sharded"):
                    # One order on all ranks, or a loop that gathers would wait.
                    names = [name for name, _ in model.named_parameters()]
                    assert list(state["state"]) == names
                fresh.load_state_dict(optim_state_dict_to_load(other, fresh, state))
        assert _same(local_state_dict(fresh)["state"], own["state"]), kind
        assert [g["lr"] for g in fresh.param_groups] == [
            g["lr"] for g in own["param_groups"]
        ]


def step_with(
    optimizer: Any, model: nn.Module, extra: nn.Parameter | None, world: World
) -> None:
    model(x_of(0, world.rank)).pow(2).mean().backward()
    if extra is not None:
        extra.grad = torch.ones_like(extra)
    optimizer.step()


@pytest.mark.req("P-20")
@both_paths
@on_ranks(2)
def test_what_the_model_does_not_hold_goes_by_the_name_it_was_given(
    world: World, path: str
) -> None:
    """Every rank holds it whole; without a name of its own it is refused."""
    model, extra, pairs = with_extra(path)
    optimizer = torch.optim.AdamW(pairs, lr=0.1)
    step_with(optimizer, model, extra, world)
    before = copy.deepcopy(local_state_dict(optimizer))

    state = optim_state_dict(model, optimizer)
    step_with(optimizer, model, extra, world)
    optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state))

    assert torch.equal(state["state"]["my.extra"]["exp_avg"], torch.full((3,), 0.1))
    assert state["param_groups"][0]["params"][-1] == "my.extra"
    assert _same(local_state_dict(optimizer)["state"], before["state"])
    wrong: list[Any] = [[*model.parameters(), extra], [("0.weight", extra)]]
    for parameters in wrong:
        unnamed = torch.optim.AdamW(parameters)
        text = message_of(partial(optim_state_dict, model, unnamed))
        assert "make the optimizer of (name, parameter) pairs, with names" in text


def with_extra(path: str) -> tuple[nn.Module, nn.Parameter, Any]:
    """A model, a parameter of no model, and both by name."""
    model, extra = apply_units(tiny_mlp(), ["0"], path=path), torch.ones(3)
    parameter = nn.Parameter(extra)
    return model, parameter, [*model.named_parameters(), ("my.extra", parameter)]


@pytest.mark.req("P-20")
@on_ranks(2)
def test_an_optimizer_around_one_is_taken_by_its_names(world: World) -> None:
    """torch's ``_NamedOptimizer``, which does not call ``Optimizer.__init__``."""
    model, extra, pairs = with_extra("wrapper")
    make: Any = _NamedOptimizer
    optimizer = make(pairs, torch.optim.AdamW, None, None, lr=0.1)
    step_with(optimizer, model, extra, world)
    own = {p: copy.deepcopy(v) for p, v in optimizer._optimizer.state.items()}

    state = optim_state_dict(model, optimizer)
    step_with(optimizer, model, extra, world)
    given = optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)
    optimizer.load_state_dict(given)

    names = [name for name, _ in pairs]
    held = [name for name, parameter in pairs if parameter.numel()]
    assert sorted(state["state"]) == sorted(names)
    assert sorted(given["state"]) == sorted(held)
    for name, parameter in model.named_parameters():
        whole = state["state"][name]["exp_avg"]
        assert whole.shape == dict(tiny_mlp().named_parameters())[name].shape
        assert _same(optimizer._optimizer.state.get(parameter), own.get(parameter))
    assert _same(optimizer._optimizer.state[extra], own[extra])


def trained_mixed(world: World, path: str) -> tuple[nn.Module, optim.Optimizer]:
    model = mixed(path)
    optimizer = optim.AdamW(two_groups(model))
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
@on_ranks(2)
def test_a_given_state_may_be_keyed_by_numbers_or_by_names(world: World) -> None:
    """Names in any order of groups, and those of a wrapper; full and local."""
    model, optimizer = trained_mixed(world, "wrapper")
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
@on_ranks(2)
def test_a_plain_optimizers_numbers_are_loaded_by_their_places(world: World) -> None:
    """What ``optim.state_dict()`` of a plain model gives needs no renaming."""
    plain, model = Mixed(), mixed("wrapper", seed=1)
    reference = optim.AdamW(two_groups(plain))
    train_plain(plain, reference, world.world_size, range(2))
    optimizer = optim.AdamW(two_groups(model), lr=0.5)

    for kind in (False, True):
        optim_state_dict_to_load(
            model,
            optimizer,
            by_name(plain, reference) if kind else reference.state_dict(),
            load_directly=True,
        )

        assert _same(optim_state_dict(model, optimizer), by_name(plain, reference))


@pytest.mark.req("U-05")
@on_ranks(2)
def test_names_that_an_optimizer_was_made_with_tell_its_numbers(world: World) -> None:
    """Not the order: the groups of the two may list parameters differently."""
    plain, model = TinyGPT(), gpt("wrapper")
    reference = optim.AdamW(plain.named_parameters())
    plain(torch.zeros(1, 5, dtype=torch.long)).square().mean().backward()
    reference.step()
    ours = optim.AdamW(list(model.named_parameters())[::-1])

    part = optim_state_dict_to_load(model, ours, reference.state_dict())
    ours.load_state_dict(part)
    state = optim_state_dict(model, ours)

    names = [name for name, _ in plain.named_parameters()][::-1]
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
    """Every name of a tied parameter."""
    model = gpt("composable", tied_head=True)
    optimizer = optim.AdamW(model.parameters())
    step(model, optimizer, world.rank, 0)
    expected = optim_state_dict(model, optimizer)
    fqns = expected["param_groups"][0]["params"]
    raw = optimizer.state_dict()

    with_tied = renamed(raw, lambda i: fqns[i].replace("tokens.weight", "head.weight"))

    assert _same(optim_state_dict(model, optimizer, with_tied), expected)
