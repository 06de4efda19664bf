"""``OwnerState``: state of other shapes, which the owner of a matrix alone holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    Block,
    OwnerState,
    full_shape,
    get_full_grad,
    get_full_param,
    load,
    map_on_owners,
    optim_state_dict,
    save,
)
from tests.optim.test_owners import OPTIONS, Matrices, sharded
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


def precondition(state: Any, whole: Tensor, p: Tensor) -> Tensor:
    """A step of Shampoo: inverse fourth roots of both sums of squares."""
    own = state[p]
    own["step"] = own.get("step", 0) + 1
    sides = {"left": whole @ whole.T, "right": whole.T @ whole}
    for name, square in sides.items():
        own[name] = own.get(name, torch.eye(len(square))) + square
    return _root(own["left"]) @ whole @ _root(own["right"])


def _root(square: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(square)
    root: Tensor = vectors @ torch.diag(values.pow(-0.25)) @ vectors.T
    return root


class Shampoo(torch.optim.Optimizer):
    """Preconditioners m x m and n x n, on the owner of a matrix alone."""

    works_on_shards = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.owned = OwnerState(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        grads = [p.grad for p in group["params"]]
        found = map_on_owners(group["params"], grads, partial(precondition, self.owned))
        for p, update in zip(group["params"], found, strict=True):
            if update is not None:
                p.add_(update, alpha=-group["lr"])


def train(
    world: World, model: nn.Module, plain: nn.Module, both: Any, steps: range
) -> None:
    """Step both models with the gradients of the sharded model; compare."""
    for step in steps:
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(step))
        backward(model(x + world.rank).square().mean())
        for name, p in plain.named_parameters():
            p.grad = get_full_grad(model, name) if name != "unused" else None
        for each in both:
            each.step()
        model.zero_grad()
    for name, p in plain.named_parameters():
        assert torch.equal(get_full_param(model, name), p), name


def pair_of(**options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Return the sharded and the plain model with their optimizers."""
    model, plain = sharded("composable", **options), Matrices()
    return model, plain, (Shampoo(model.parameters()), Shampoo(plain.parameters()))


def require_equal(found: Any, expected: Any) -> None:
    """Equal state of all matrices."""
    assert found["shapes"] == expected["shapes"]
    assert list(found["state"]) == list(expected["state"])
    for number, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(
                torch.as_tensor(found["state"][number][name]), torch.as_tensor(value)
            )


def begin(world: World, folder: Path, name: str) -> None:
    model, plain, both = pair_of(**OPTIONS[name](world))
    train(world, model, plain, both, range(2))
    require_equal(both[0].owned.state_dict(), both[1].owned.state_dict())
    save(folder / "saved", model, extra={"owned": both[0].owned})
    if world.rank == 0:
        saved = plain.state_dict(), both[1].owned.state_dict()
        torch.save(saved, folder / "plain.pt")


def go_on(world: World, folder: Path, options: dict[str, Any]) -> list[int]:
    model, plain, both = pair_of(**options)
    load(folder / "saved", model, extra={"owned": both[0].owned})
    weights, state = torch.load(folder / "plain.pt")
    plain.load_state_dict(weights)
    both[1].owned.load_state_dict(state)
    held = list(both[0].owned._values)
    train(world, model, plain, both, range(2, 4))
    require_equal(both[0].owned.state_dict(), both[1].owned.state_dict())
    return held


@pytest.mark.few(2)
@pytest.mark.req("M-05")
@pytest.mark.parametrize(
    ("first", "name", "then", "options"),
    [
        (2, "full_shard", 3, {}),
        (3, "full_shard", 2, {"block": Block.TENSOR}),
        (4, "hybrid", 1, {}),
        (2, "no_shard", 2, {}),
    ],
)
def test_shampoo_goes_on_at_another_world_size(
    ranks: RankCount,
    tmp_path: Path,
    first: int,
    name: str,
    then: int,
    options: dict[str, Any],
) -> None:
    """Bit by bit as the whole model goes on; each state is on a single rank."""
    ranks(first).run(begin, tmp_path, name)
    held = ranks(then).run(go_on, tmp_path, options)
    assert sorted(n for each in held for n in each) == list(range(1, 9))


@on_ranks(2)
def test_state_in_the_optimizer_is_refused_by_name(world: World) -> None:
    """State of other shapes in ``optim.state`` stops the next step and the save."""
    model, _, (optimizer, _) = pair_of()
    for p in model.parameters():
        optimizer.state[p]["left"] = torch.eye(full_shape(p)[0] + 3)

    text = message_of(lambda: optim_state_dict(model, optimizer))
    assert text.split(":")[0] in ("CheckpointError", "CompositionError"), text
    backward(model(torch.ones(6, 12)).sum())
    text = message_of(optimizer.step)
    assert "Shampoo's state 'left' of '" in text


@on_ranks(2)
def test_freezing_asks_to_move_the_state(world: World) -> None:
    """Other ranks may own the matrices; the state goes on after the move."""
    model, plain, both = pair_of()
    train(world, model, plain, both, range(1))
    expected = both[0].owned.state_dict()
    model.get_parameter("layers.2.0.weight").requires_grad_(False)
    backward(model(torch.ones(6, 12)).sum())

    text = message_of(both[0].step)
    assert "state.load_state_dict(state.state_dict())" in text
    both[0].owned.load_state_dict(both[0].owned.state_dict())
    require_equal(both[0].owned.state_dict(), expected)


def nested(state: Any, whole: Tensor, p: Tensor) -> Tensor:
    """State in containers, as SOAP keeps bases per dimension in a list."""
    state[p]["bases"] = [whole @ whole.T, whole.T]
    state[p]["more"] = {"scale": whole + 1, "pair": (3, [whole + 2])}
    return whole


@on_ranks(2, 3)
def test_state_in_lists_and_dicts_comes_from_its_owner(world: World) -> None:
    """Tensors at any depth are on all ranks, and go back to the owner."""
    model, plain, _ = pair_of()
    whole = [p.detach().clone() for p in plain.parameters()]
    parameters = list(model.parameters())
    owned = OwnerState(parameters)
    map_on_owners(parameters, [p.detach() for p in parameters], partial(nested, owned))
    saved = owned.state_dict()
    again = OwnerState(parameters)
    again.load_state_dict(saved)

    assert list(saved["state"]) == list(range(len(whole)))
    for held in (saved["state"], again._values):
        for number, value in held.items():
            square, turned = value["bases"]
            torch.testing.assert_close(square, whole[number] @ whole[number].T)
            assert torch.equal(turned, whole[number].T)
            assert torch.equal(value["more"]["scale"], whole[number] + 1)
            rank, (last,) = value["more"]["pair"]
            assert rank == 3
            assert torch.equal(last, whole[number] + 2)


@on_ranks(2)
def test_other_parameters_are_refused(world: World) -> None:
    """Parameters of another rank, and state of other matrices."""
    model, _, (optimizer, _) = pair_of()
    owned = optimizer.owned
    texts = [message_of(partial(owned.__getitem__, p)) for p in model.parameters()]
    refused = [text for text in texts if text.startswith("CompositionError")]
    assert 0 < len(refused) < len(texts)
    assert "OwnerState expects parameters that this rank owns" in refused[0]
    saved = owned.state_dict()
    saved["shapes"] = saved["shapes"][::-1]
    text = message_of(lambda: owned.load_state_dict(saved))
    assert text.startswith("CheckpointError: OwnerState expects the state of")
