"""Each element-wise optimizer of ``torch.optim``: sharded as plain, out and in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn, optim

from composable_fsdp import optim_state_dict, optim_state_dict_to_load
from tests.optim.models import (
    Mixed,
    by_name,
    mixed,
    train_plain,
    train_sharded,
    two_groups,
)
from tests.support.place import _same
from tests.support.reference import PATHS, differences
from tests.support.sharded import RankCount
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
