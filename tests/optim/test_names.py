"""Names of parameters under wrappers and overrides of others, in states of both kinds.

The names are always those of the plain model in the same wrapper.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    replicate,
    state_dict_type,
)
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.optim.own_state_dict import local_state_dict
from tests.optim.models import Mixed, by_name, train_plain, train_sharded
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.sharded import RankCount, both_paths, message_of
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


def ddp_around(path: str) -> nn.Module:
    """DDP averages what no unit holds."""
    model = sharded_children(Mixed(), path)
    model.unused.requires_grad_(False)
    return DistributedDataParallel(model)


def in_replicate(path: str) -> nn.Module:
    model = Mixed()
    sharded_children(model, path)
    replicate(model)
    return model


def plain_ddp() -> nn.Module:
    model = Mixed()
    model.unused.requires_grad_(False)
    return DistributedDataParallel(model)


@pytest.mark.req("S1-02")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [ddp_around, in_replicate])
@both_paths
@on_ranks(2)
def test_units_inside_ddp_or_replicate_have_the_plain_models_names(
    world: World, make: Callable[[str], Any], path: str
) -> None:
    """``module.`` in front with DDP, as without sharding; settings reach inside."""
    model = make(path)
    plain = plain_ddp() if make is ddp_around else Mixed()
    ours = optim.AdamW(model.parameters(), lr=0.05)
    reference = optim.AdamW(plain.parameters(), lr=0.05)
    train_sharded(model, ours, world, range(2))
    if make is ddp_around:
        train_sharded(plain, reference, world, range(2))
    else:
        train_plain(plain, reference, world.world_size, range(2))

    state, weights = optim_state_dict(model, ours), model.state_dict()
    first = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(True, True)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT, *first):
        once = optim_state_dict(model, ours)
        assert _same(once, state if world.rank == 0 else {})
        part = optim_state_dict_to_load(model, ours, once)
    model.load_state_dict(weights)

    assert _same(state, by_name(plain, reference))
    assert _same(dict(weights), dict(plain.state_dict()))
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


def check_override(world: World, kind: type[Parallel], path: str) -> str:
    model, plain = kind(put(sharded_children(Mixed(), path), path)), Mixed()
    ours = optim.AdamW({id(p): p for p in model.parameters()}.values(), lr=0.05)
    reference = optim.AdamW(plain.parameters(), lr=0.05)
    train_sharded(model, ours, world, range(2))
    train_plain(plain, reference, world.world_size, range(2))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = optim_state_dict(model, ours)
        part = optim_state_dict_to_load(model, ours, state)
    weights = model.state_dict()
    model.load_state_dict(weights)

    assert _same(state, by_name(plain, reference))
    assert _same(dict(weights), dict(plain.state_dict()))
    assert _same(part, local_state_dict(ours))
    return str(caught[0].message)


@pytest.mark.req("S1-07", "S1-08")
@pytest.mark.parametrize("kind", [Parallel, Exposing])
@both_paths
def test_a_module_that_shows_its_child_as_itself_gives_names_once(
    ranks: RankCount, path: str, kind: type[Parallel]
) -> None:
    """The names it gives, each parameter once; the warning has both names of one."""
    for text in ranks(2).run(check_override, kind, path):
        assert text.startswith(
            f"{kind.__name__}.named_parameters() gives 'scale' for the parameter at "
            "'_wrapped.scale' (and so on, 7 in all): some module overrides"
        )


@pytest.mark.req("S1-08")
@both_paths
@on_ranks(2)
def test_ordinary_models_are_not_warned_of(world: World, path: str) -> None:
    """Wrappers of ours and a model inside others are ordinary."""
    model = put(sharded_children(Mixed(), path), path)
    optimizer = optim.AdamW(model.parameters())
    train_sharded(model, optimizer, world, range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = optim_state_dict(model, optimizer)
        optim_state_dict_to_load(model, optimizer, state)
        optim_state_dict(nn.Sequential(nn.Sequential(model)), optimizer)


class Tricky(nn.Module):
    """Children of names that look like wrappers and are none."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 4)
        self.my_fsdp_wrapped_module = nn.Linear(4, 4)
        self._fsdp_wrapped_module_2 = nn.Linear(4, 4)
        self.weights = nn.ModuleDict({"module": nn.Linear(4, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.my_fsdp_wrapped_module(self.module(x))
        out: Tensor = self.weights["module"](self._fsdp_wrapped_module_2(x))
        return out


@pytest.mark.req("S1-09")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around", ["nothing", "DDP"])
@both_paths
@on_ranks(2)
def test_children_named_like_wrappers_keep_their_names(
    world: World, path: str, around: str
) -> None:
    """A child called ``module`` and names with a wrapper's inside, in every state."""

    def build() -> Any:
        torch.manual_seed(0)
        return Tricky()

    def dressed(model: nn.Module) -> nn.Module:
        if around == "DDP":
            return DistributedDataParallel(model)
        return nn.ModuleDict({"module": model})["module"]

    inner, plain = build(), dressed(build())
    for name in ("module", "my_fsdp_wrapped_module", "_fsdp_wrapped_module_2"):
        setattr(inner, name, put(getattr(inner, name), path))
    if around != "DDP":
        inner = put(inner, path)
    model = dressed(inner)
    ours, reference = (optim.AdamW(m.parameters()) for m in (model, plain))
    train_sharded(model, ours, world, range(1))
    for at in range(1):
        if around == "DDP":
            train_sharded(plain, reference, world, range(at, at + 1))
        else:
            train_plain(plain, reference, world.world_size, range(at, at + 1))
    state, weights = optim_state_dict(model, ours), model.state_dict()
    model.load_state_dict(weights)

    assert _same(state, by_name(plain, reference))
    assert _same(dict(weights), dict(plain.state_dict()))
    part = optim_state_dict_to_load(model, ours, state)
    assert _same(part, local_state_dict(ours))


@pytest.mark.req("S1-09")
@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.weight", "module.weight"),
        ("_fsdp_wrapped_module.module._fsdp_wrapped_module.weight", "module.weight"),
        ("a._fsdp_wrapped_module_2.b", "a._fsdp_wrapped_module_2.b"),
        ("x_fsdp_wrapped_module.b", "x_fsdp_wrapped_module.b"),
        ("_checkpoint_wrapped_module._fsdp_wrapped_module.b", "b"),
        ("_fsdp_wrapped_module", ""),
    ],
)
def test_only_whole_components_are_taken_out(name: str, plain: str) -> None:
    """By path component, wherever it stands."""
    assert strip_wrapper(name) == plain


def check_foreign(world: World) -> str:
    model = Parallel(fully_shard(Mixed()))
    other = optim.SGD([nn.Parameter(torch.ones(2))])
    return message_of(lambda: optim_state_dict(model, other))


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_that_is_nowhere_is_still_refused(ranks: RankCount) -> None:
    """Overrides open no hole."""
    for text in ranks(2).run(check_foreign):
        assert "is not a parameter of the Parallel it was asked about" in text


@both_paths
@on_ranks(2)
def test_a_state_may_lack_what_no_unit_cuts(world: World, path: str) -> None:
    """The rest is loaded, as with FSDP1; what a unit holds may not be missing."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.register_parameter("extra", nn.Parameter(torch.ones(3)))
    x = torch.ones(2, 4)
    ignored: Any = [plain.get_parameter("extra")]
    if path == "composable":
        model: nn.Module = fully_shard(plain, ignored_states=ignored)
    else:
        model = FullyShardedDataParallel(plain, ignored_states=ignored)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    (model(x).sum() + plain.get_parameter("extra").sum()).backward()
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
    assert fresh.state.get(plain.get_parameter("extra"), {}) == {}
    assert _same(optim_state_dict(model, fresh)["state"], lacking["state"])
    del lacking["param_groups"][0]["params"][0]
    text = message_of(lambda: optim_state_dict_to_load(model, fresh, lacking))
    assert "missing ['0.weight']" in text or "left over ['0.weight']" in text, text
