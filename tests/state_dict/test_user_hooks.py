"""Hooks and overridden methods of users see whole values: a table against plain torch.

Each hook of the table (on save, and its inverse on load) is on the root, on a unit or
on a module inside a unit. The state dict is that of the plain model with the same hook,
and so is the model that loads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fsdp2,
    fully_shard,
    state_dict_type,
    unshard_params,
)
from tests.support.on_ranks import on_ranks
from tests.support.world import World

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
Entries = dict[str, Any]


class Plain(nn.Module):
    """A module with parameters and a buffer of its own, and perhaps a child."""

    seen: Tensor

    def __init__(self, below: nn.Module | None = None, rows: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 4))
        self.bias = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.randn(2))
        self.below: Any = below

    def forward(self, x: Tensor) -> Tensor:
        below: Any = self.below
        x = x if below is None else below(x)
        made: Tensor = (
            x @ self.weight.t() @ self.weight + self.bias.sum() + self.seen.sum()
        )
        return made


class Coded(Plain):
    """Overrides what torch calls, and reads its own parameters there."""

    total: Any = None

    def _save_to_state_dict(
        self, destination: Any, prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "tripled"] = 3 * self.weight.detach()
        destination[prefix + "rows"] = torch.tensor(self.weight.shape[0])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        rows = int(state_dict.pop(prefix + "rows"))
        assert rows == self.weight.shape[0]
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "tripled") / 3
        # What is missing stays what it is, and is written to by hand.
        del state_dict[prefix + "bias"]
        with torch.no_grad():
            self.bias.add_(1)
        state_dict.setdefault(prefix + "bias", self.bias.detach().clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def get_extra_state(self) -> Any:
        return {"norm": self.weight.detach().norm()}

    def set_extra_state(self, state: Any) -> None:
        self.total = state["norm"], self.weight.detach().norm()


def cast(module: Any, state: Entries, at: str) -> None:
    state[at + "weight"] = state[at + "weight"].to(torch.float64)
    state[at + "seen"] = state[at + "seen"].double()


def merge(module: Any, state: Entries, at: str) -> None:
    parts = state.pop(at + "weight"), state.pop(at + "bias")
    state[at + "both"] = torch.cat([part.reshape(-1) for part in parts])


def unmerge(module: Any, state: Entries, at: str) -> None:
    both, numel = state.pop(at + "both"), module.weight.numel()
    state[at + "weight"] = both[:numel].view(module.weight.shape)
    state[at + "bias"] = both[numel:]


def rename(module: Any, state: Entries, at: str) -> None:
    state[at + "kernel"] = state.pop(at + "weight")


def unrename(module: Any, state: Entries, at: str) -> None:
    state[at + "weight"] = state.pop(at + "kernel")


def drop(module: Any, state: Entries, at: str) -> None:
    del state[at + "bias"]


def keep(module: Any, state: Entries, at: str) -> None:
    state[at + "bias"] = module.bias.detach().clone()


def derive(module: Any, state: Entries, at: str) -> None:
    state[at + "norm"] = state[at + "weight"].norm()
    state[at + "own"] = module.weight.detach().abs().max() + module.bias.numel()


def underive(module: Any, state: Entries, at: str) -> None:
    assert state.pop(at + "norm") > 0
    assert state.pop(at + "own") > 0


HOOKS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "cast": (cast, lambda *_: None),
    "merge": (merge, unmerge),
    "rename": (rename, unrename),
    "drop": (drop, keep),
    "derive": (derive, underive),
}
PLACES = "", "below", "below.below"


def made(what: str, place: str, seed: int, rows: int = 6) -> Any:
    """A model of three levels, with the hook of ``what`` at ``place``."""
    torch.manual_seed(seed)
    kinds = [Coded if what == "code" and p == place else Plain for p in PLACES]
    model = kinds[0](kinds[1](kinds[2](rows=rows), rows), rows)
    module: Any = model.get_submodule(place)
    if what in HOOKS:
        save, load = HOOKS[what]
        module.register_state_dict_post_hook(
            lambda module, state, prefix, _: save(module, state, prefix)
        )
        module.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: load(module, state, prefix)
        )
    if what == "after":
        module.register_load_state_dict_post_hook(normalise)
    return model


@torch.no_grad()
def normalise(module: Any, _: object) -> None:
    module.weight.div_(module.weight.norm())


def applied(door: str, model: Any) -> Any:
    """The root and ``below`` are units; ``below.below`` is a part of a unit."""
    if door == "wrapper":
        model.below = FullyShardedDataParallel(model.below)
        return FullyShardedDataParallel(model)
    apply: Any = fsdp2.fully_shard if door == "door" else fully_shard
    apply(model.below)
    return apply(model)


def whole(state: Entries) -> Entries:
    """Full tensors, in the order of the dict."""
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in state.items()
    }


def require_equal(found: Entries, expected: Entries, where: object) -> None:
    found = whole(found)
    assert list(found) == list(expected), where
    for key, value in expected.items():
        got = found[key]
        if isinstance(value, dict):
            require_equal(got, value, where)
            continue
        assert (got.shape, got.dtype) == (value.shape, value.dtype), (where, key)
        assert torch.equal(got, value) or torch.allclose(got, value, rtol=1e-6), (
            where,
            key,
        )


def values_of(model: nn.Module) -> Entries:
    """The full parameters and buffers, without a state dict."""
    with unshard_params(model, writeback=False):
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: value.detach().clone() for name, value in named}


def check_round_trip(
    what: str, place: str, door: str, kind: StateDictType, rows: int = 6
) -> None:
    where = what, place, door, kind.name
    plain, other = (made(what, place, seed, rows) for seed in (0, 1))
    expected = plain.state_dict()
    model, target = (applied(door, made(what, place, seed, rows)) for seed in (0, 1))
    leaves = [id(p) for p in model.parameters()]

    with state_dict_type(model, kind), state_dict_type(target, kind):
        saved = model.state_dict()
        require_equal(saved, expected, where)
        report = target.load_state_dict(saved)

    plain_report = other.load_state_dict(expected)
    assert report == plain_report, where
    other_values = dict([*other.named_parameters(), *other.named_buffers()])
    require_equal(values_of(target), other_values, where)
    assert leaves == [id(p) for p in model.parameters()], where
    target(torch.ones(2, 4)).sum().backward()


@pytest.mark.req("S1-31", "S1-32", "R-04")
@pytest.mark.parametrize(
    ("door", "kind"), [("functional", SHARDED), ("wrapper", FULL), ("door", SHARDED)]
)
@on_ranks(2)
def test_hooks_save_and_load_as_on_the_plain_model(
    world: World, door: str, kind: StateDictType
) -> None:
    """On the root, a unit and a part; on every door."""
    everything = (*HOOKS, "code", "after")
    for what in everything if door == "functional" else ("merge", "code"):
        for place in PLACES:
            check_round_trip(what, place, door, kind)


class Interrupted(Exception):
    """Raised by a hook."""


@pytest.mark.parametrize("door", ["functional", "wrapper", "door"])
@on_ranks(2)
def test_a_hook_that_raises_leaves_the_model_as_it_was(world: World, door: str) -> None:
    """On save and on load, at each place; the next call is right."""
    plain = made("", "", 0)
    for place in PLACES:
        model = made("", "", 0)
        module: Any = model.get_submodule(place)

        def fail(*_: Any) -> None:
            raise Interrupted

        save = module.register_state_dict_post_hook(fail)
        load = module.register_load_state_dict_pre_hook(fail)
        model = applied(door, model)
        leaves = [
            (id(p), p.shape, p._version) for p in module.parameters(recurse=False)
        ]
        for call in (
            model.state_dict,
            lambda m=model: m.load_state_dict(plain.state_dict()),
        ):
            with pytest.raises(Interrupted):
                call()
            now = module.parameters(recurse=False)
            assert leaves == [(id(p), p.shape, p._version) for p in now]
        save.remove()
        load.remove()

        require_equal(model.state_dict(), plain.state_dict(), (place, door))
        # As a class's own method calls it, past what is on the instance.
        require_equal(nn.Module.state_dict(model), plain.state_dict(), (place, door))


@on_ranks(2)
def test_hooks_run_alike_on_ranks_that_return_nothing(world: World) -> None:
    """``rank0_only`` and ``offload_to_cpu``; at a size above every sample."""
    for what in ("merge", "derive", "code"):
        for place in PLACES:
            rows = 30_000 if (what, place) == ("merge", "below") else 6
            expected = made(what, place, 0, rows).state_dict()
            model = applied("functional", made(what, place, 0, rows))
            config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
            with state_dict_type(model, FULL, config):
                found = model.state_dict()
            require_equal(found, expected if world.rank == 0 else {}, (what, place))
            require_equal(model.state_dict(), expected, (what, place))
    check_round_trip("merge", "below", "functional", SHARDED, rows=30_000)


@on_ranks(2)
def test_writes_into_values_that_are_dropped_are_told_once(world: World) -> None:
    """As timm's averages do; values that are kept or loaded belong to the caller."""
    for kind in (FULL, SHARDED):
        model, average = (applied("functional", made("", "", seed)) for seed in (0, 1))
        with (
            state_dict_type(model, kind),
            state_dict_type(average, kind),
            logs() as told,
        ):
            for _ in range(3):
                average_as_timm(average, model)
            assert len(told) == 2, told  # one a unit
            assert "were written to in place and dropped ('weight', 'bias')" in told[0]
            told.clear()
            for _ in range(3):
                kept = model.state_dict()
                for value in kept.values():
                    value.mul_(0.5)
                model.load_state_dict(kept)
            mean = model.state_dict()
            for name, value in model.state_dict().items():
                mean[name].lerp_(value, 0.1)
            model.state_dict()
            assert told == []


def average_as_timm(average: nn.Module, model: nn.Module) -> None:
    values = average.state_dict().values(), model.state_dict().values()
    for mean, value in zip(*values, strict=True):
        mean.lerp_(value, 0.1)


@contextmanager
def logs() -> Iterator[list[str]]:
    """The messages of the package's log of state dicts."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("composable_fsdp.state_dict")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
