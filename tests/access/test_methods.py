"""``register_forward_method``: methods other than ``forward`` find full parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import composable_fsdp
from composable_fsdp import CompositionError, fully_shard, register_forward_method
from composable_fsdp.phases import Residency
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    apply_units,
    assert_same_training,
    backward,
    gpt_input,
    gpt_units,
    sgd,
)
from tests.support.world import World


class Speaker(TinyGPT):
    """A GPT that also generates, scores and fails."""

    def generate(self, tokens: Tensor, *, count: int) -> Tensor:
        """Append ``count`` greedy tokens, a forward each."""
        assert self.head.weight.shape == (17, 8), "sharded inside the method"
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens

    def score(self, tokens: Tensor) -> dict[str, Tensor]:
        """A loss, without a call of ``forward``."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return {"loss": self.head(self.norm(x)).square().mean()}

    def fail(self, tokens: Tensor) -> Tensor:
        """Raise in the middle."""
        raise KeyboardInterrupt(self.tokens(tokens).shape)

    def stream(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield."""
        yield self(tokens)


def speaker(path: str) -> tuple[nn.Module, Speaker]:
    """A sharded speaker, and a plain one."""
    model = Speaker()
    plain = copy.deepcopy(model)
    return apply_units(model, gpt_units(model), path=path), plain


@pytest.mark.req("B-13")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_method_that_calls_forward_gathers_the_root_once(
    world: World, path: str
) -> None:
    """Two blocks per token, and one gather of the root around all of them."""
    model, plain = speaker(path)
    register_forward_method(model, "generate")
    prompt = gpt_input(0, world.rank)[:, :2]
    with torch.no_grad(), record_steps() as calls:
        tokens = model.generate(prompt, count=3)  # type: ignore[operator]
        expected = plain.generate(prompt, count=3)

    assert torch.equal(tokens, expected)
    require_sharded(model)
    assert_same_training(model, plain, [], [])
    assert [call.op for call in calls] == ["all_gather"] * (1 + 3 * 2)


def require_sharded(model: nn.Module) -> None:
    handles = _get_fsdp_handles(model)
    assert all(handle.residency is Residency.SHARDED for handle in handles)
    assert not any(handle.running.calls for handle in handles)


@pytest.mark.req("B-13")
@on_ranks(2)
def test_a_loss_that_a_method_returns_trains(world: World) -> None:
    """Its outputs are hooked as those of a forward; registering twice is once."""
    model, plain = speaker("wrapper")
    register_forward_method(model, "score")
    register_forward_method(model, "score")
    optimizers = sgd(model.parameters()), sgd(plain.parameters())
    for step in range(2):
        x = gpt_input(step, 0)
        backward(model.score(x)["loss"])  # type: ignore[operator]
        backward(model(x).square().mean())
        backward(plain.score(x)["loss"])
        backward(plain(x).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    assert_same_training(model, plain, [], [], tolerance=1e-6)


@on_ranks(2)
def test_a_method_that_raises_leaves_the_model_sharded(world: World) -> None:
    """Any exception, also one that passes no hook of a module."""
    model, plain = speaker("wrapper")
    register_forward_method(model, "fail")
    x = gpt_input(0, world.rank)
    with pytest.raises(KeyboardInterrupt, match=r"2, 5, 8"):
        model.fail(x)  # type: ignore[operator]

    require_sharded(model)
    assert torch.equal(model(x), plain(x))


@pytest.mark.req("D-14")
@on_ranks(2)
def test_the_method_of_a_copy_is_that_of_the_copy(world: World) -> None:
    """The method of a deep copy computes with the copy's parameters."""
    model, plain = speaker("wrapper")
    register_forward_method(model, "score")
    made = copy.deepcopy(model)
    with torch.no_grad():
        for p in [*made.parameters(), *plain.parameters()]:
            p.mul_(1.5)
    x = gpt_input(0, world.rank)

    ours, theirs = made.score(x)["loss"], plain.score(x)["loss"]  # type: ignore[operator]
    assert torch.equal(ours, theirs)
    assert not torch.equal(model.score(x)["loss"], theirs)  # type: ignore[operator]


@pytest.mark.req("B-13")
@pytest.mark.parametrize(
    ("at", "name", "text"),
    [
        ("", "generale", r"Speaker has no method 'generale'"),
        ("", "training", r"Speaker has no method 'training'"),
        ("", "stream", r"Speaker\.stream is a generator"),
        ("blocks.0.qkv", "reset_parameters", "fully sharded Speaker above it. Pass"),
    ],
)
def test_what_is_no_method_is_refused(
    one_rank: World, at: str, name: str, text: str
) -> None:
    """The class and the name are told, and the module stays as it was."""
    module = fully_shard(Speaker()).get_submodule(at)
    before = [*vars(module)]

    with pytest.raises(CompositionError, match=text):
        register_forward_method(module, name)

    assert [*vars(module)] == before


def test_an_unsharded_model_keeps_its_method() -> None:
    """The same script runs without sharding, and torch's name does the same."""
    model = Speaker()

    composable_fsdp.register_fsdp_forward_method(model, "generate")

    assert "generate" not in vars(model)


def test_the_registered_method_looks_like_the_method(one_rank: World) -> None:
    """Name, text and signature are the original's."""
    model = fully_shard(Speaker())
    signature = inspect.signature(model.generate)

    register_forward_method(model, "generate")
    register_forward_method(model, "forward")

    assert "forward" not in vars(model)
    assert inspect.signature(model.generate) == signature
    assert model.generate.__doc__ == Speaker.generate.__doc__
