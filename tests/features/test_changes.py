"""Changes that one rank refuses, optimizers in backward, transforms, versions."""

from __future__ import annotations

import copy
import logging
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import fully_shard, no_sync
from composable_fsdp.features import versions
from tests.faults.blocks import SOON, sharded, steps_of
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, apply_units, backward, differences
from tests.support.sharded import RankCount, message_of
from tests.support.short_waits import shorten_waits
from tests.support.tiny import tiny_mlp
from tests.support.world import World, single_rank_group


def change_alone(world: World, strategy: str, kind: str) -> tuple[str, float]:
    """Rank 1 alone changes a parameter; the error of this rank, and its time."""
    shorten_waits()
    model = sharded(strategy)
    steps_of(model, 4)
    if kind == "frozen":
        with no_sync(model):
            model(torch.ones(2, 4)).sum().backward()
    if world.rank == 1:
        if kind == "frozen":
            model.get_parameter("blocks.1.weight").requires_grad_(False)
        else:
            model.blocks[1].weight = nn.Parameter(torch.ones(3, 5))
    start = time.monotonic()
    text = message_of(lambda: steps_of(model, 2))
    return text, time.monotonic() - start


@pytest.mark.req("X-09")
@pytest.mark.parametrize(
    ("strategy", "size", "kind", "words"),
    [
        ("HYBRID_SHARD", 4, "shape", "'blocks.1.weight' was changed after fully_shard"),
        ("FULL_SHARD", 2, "frozen", "while its gradients wait to be reduced"),
    ],
)
def test_what_one_rank_refuses_is_heard_by_all(
    ranks: RankCount, strategy: str, size: int, kind: str, words: str
) -> None:
    """With its words, long before the time-out of the group."""
    run = ranks(size).run(change_alone, strategy, kind, timeout=60, retire=True)

    for rank, (text, took) in enumerate(run):
        assert took < SOON
        assert words in text, (rank, text)
        assert text.startswith("DesyncError") == (rank != 1), (rank, text)


def give(model: nn.Module) -> None:
    """Mark parameters as torch's ``_apply_optimizer_in_backward`` does."""
    # Its import compiles for seconds.
    for each in model.parameters():
        vars(each)["_in_backward_optimizers"] = [torch.optim.Adam([each], lr=0.1)]


@pytest.mark.req("B-16")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("before", [True, False])
@on_ranks(2)
def test_optimizers_that_parameters_carry_step_in_backward(
    world: World, path: str, before: bool
) -> None:
    """Given before or after sharding, the gradients of a step are cleared."""
    torch.manual_seed(0)
    plain = tiny_mlp()
    model: Any = copy.deepcopy(plain)
    if before:
        give(model)
    model = apply_units(model, ("0",), path=path)
    if not before:
        give(model)
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    width = next(p for p in plain.parameters()).shape[1]
    for _ in range(3):
        x = torch.randn(2, width)
        for each in (model, plain):
            backward(each(x).square().mean())
        adam.step()
        adam.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    assert differences(model.state_dict(), plain.state_dict()) == {}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@on_ranks(2)
def test_a_transform_may_take_an_activation_from_outside(world: World) -> None:
    """The tangent of ``torch.func.jvp``, and the gradients through its output."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 6), nn.Linear(6, 10)
    first, last = (fully_shard(copy.deepcopy(each)) for each in plain)
    x, point = torch.randn(8), torch.randn(10)

    def value(one: nn.Module, two: nn.Module) -> tuple[Tensor, Tensor]:
        hidden = one(x)
        out, tangent, *_ = torch.func.jvp(lambda u: two(hidden) + u, (point,), (point,))
        return out, tangent

    for _ in range(3):
        ours, expected = value(first, last), value(*plain)
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        backward(ours[0].sum())
        backward(expected[0].sum())
    for own, other in zip((first, last), plain, strict=True):
        assert other.weight.grad is not None
        rows = torch.zeros_like(other.weight)
        if own.weight.grad is not None:
            rows[: len(own.weight)] = own.weight.grad
        total = rows.square().sum()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total, other.weight.grad.square().sum())


def test_other_versions_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line at the first ``fully_shard``, and none on versions that were tested."""
    versions.tell_untested.cache_clear()
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    with caplog.at_level(logging.WARNING), single_rank_group():
        monkeypatch.setattr(torch, "__version__", "2.13.1+cpu")
        fully_shard(nn.Linear(2, 2))
        assert not caplog.messages

        versions.tell_untested.cache_clear()
        monkeypatch.setattr(torch, "__version__", "2.15.0a0+git")
        for _ in range(2):
            fully_shard(nn.Linear(2, 2))

    assert caplog.messages == [
        "composable_fsdp was not tested on torch 2.15.0a0+git (tested: 2.11 to 2.13)."
    ]
