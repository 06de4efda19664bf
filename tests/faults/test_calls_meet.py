"""A call that needs all ranks, made by one rank or made differently, ends in a message.

Raw torch ends these by SIGABRT, by mixed values, or by a time-out without a name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from composable_fsdp import (
    clip_grad_norm_,
    get_full_grad,
    get_full_param,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    set_full_grad,
    set_full_param,
    unshard,
    unshard_params,
)
from composable_fsdp.comm import agreement
from composable_fsdp.features.guard.meetings import order_over
from composable_fsdp.optim import get_full_optim_state, set_full_optim_state
from composable_fsdp.storage import export_safetensors
from tests.support.reference import gpt_input, loss_of
from tests.support.sharded import RankCount, gpt, message_of, step
from tests.support.world import World

NAME = "head.weight"


class Trained:
    """A model after a step, with gradients, and what calls need."""

    def __init__(self, world: World, folder: Path) -> None:
        self.model = gpt("composable")
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.01)
        step(self.model, self.optim, world.rank, 0)
        self.state = self.model.state_dict()
        self.optim_state = optim_state_dict(self.model, self.optim)
        self.full = get_full_param(self.model, NAME)
        self.kept = get_full_optim_state(self.model, self.optim, NAME)
        self.folder = folder
        save(folder / "saved", self.model, self.optim)


def shown(trained: Trained, **options: bool) -> None:
    with unshard_params(trained.model, **options):
        pass


CALLS: dict[str, Callable[[Trained], Any]] = {
    "save": lambda t: save(t.folder / "alone", t.model, t.optim),
    "load": lambda t: load(t.folder / "saved", t.model, t.optim),
    "export_safetensors": lambda t: export_safetensors(t.folder / "out", t.model),
    "state_dict": lambda t: t.model.state_dict(),
    "load_state_dict": lambda t: t.model.load_state_dict(t.state),
    "optim_state_dict": lambda t: optim_state_dict(t.model, t.optim),
    "optim_state_dict_to_load": lambda t: optim_state_dict_to_load(
        t.model, t.optim, t.optim_state
    ),
    "clip_grad_norm_": lambda t: clip_grad_norm_(t.model, 1.0),
    "unshard_params": shown,
    "unshard": lambda t: unshard(t.model.get_submodule("blocks.0")),
    "get_full_param": lambda t: get_full_param(t.model, NAME),
    "set_full_param": lambda t: set_full_param(t.model, NAME, t.full),
    "get_full_grad": lambda t: get_full_grad(t.model, NAME),
    "set_full_grad": lambda t: set_full_grad(t.model, NAME, t.full),
    "get_full_optim_state": lambda t: get_full_optim_state(t.model, t.optim, NAME),
    "set_full_optim_state": lambda t: set_full_optim_state(
        t.model, t.optim, NAME, t.kept
    ),
}
NAMES = list(CALLS)


def soon(seconds: float) -> Any:
    return mock.patch.dict(os.environ, {agreement.TIMEOUT_VARIABLE: str(seconds)})


def alone(world: World, folder: Path) -> dict[str, str]:
    # What earlier tests did on these ranks is not expected here.
    order_over([world.group]).forget()
    trained = Trained(world, folder)
    texts = {}
    for name, call in CALLS.items():
        if world.rank == 0:
            began = time.monotonic()
            with soon(0.1):
                texts[name] = message_of(partial(call, trained))
            assert time.monotonic() - began < 5, name
    # No rank has sent anything: training goes on, and so does each call on all ranks.
    step(trained.model, trained.optim, world.rank, 1)
    after = get_full_param(trained.model, NAME)
    assert torch.isfinite(after).all()
    return texts


@pytest.mark.req("X-12")
def test_a_call_of_one_rank_alone_is_told_and_sends_nothing(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Within the time limit, with the call and the rank that did not make it."""
    texts, _ = ranks(2).run(alone, tmp_path)

    assert list(texts) == NAMES
    for name, text in texts.items():
        assert text.startswith(f"DesyncError: This rank is in {name}("), text
        assert ". Rank 1 did not come within 0.1 s" in text


def different(world: World, folder: Path) -> list[str]:
    order_over([world.group]).forget()
    trained, texts = Trained(world, folder), []
    with soon(20):
        for index in range(len(NAMES)):
            name = NAMES[(index + world.rank) % len(NAMES)]
            texts.append(message_of(partial(CALLS[name], trained)))
    step(trained.model, trained.optim, world.rank, 1)
    return texts


@pytest.mark.req("X-12")
def test_different_calls_are_told_on_both_ranks(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Each with what each rank called."""
    first, second = ranks(2).run(different, tmp_path)

    assert first == second
    for index, text in enumerate(first):
        names = NAMES[index], NAMES[(index + 1) % len(NAMES)]
        assert text.startswith("DesyncError: Ranks disagree: "), text
        assert f"rank 0 is in {names[0]}(" in text
        assert f"rank 1 is in {names[1]}(" in text


def other(trained: Trained, rank: int, name: str) -> Any:
    """A call with arguments that differ on rank 1."""
    t, is_second = trained, rank == 1
    if name == "which":
        return get_full_param(t.model, [NAME, "norm.weight"][rank])
    if name == "norm":
        return clip_grad_norm_(t.model, 1.0, norm_type=[2.0, torch.inf][rank])
    if name == "fewer":
        return clip_grad_norm_(list(t.model.parameters())[rank:], 1.0)
    if name == "writeback":
        return shown(t, writeback=is_second)
    if name == "first":
        return shown(t, rank0_only=is_second, writeback=False)
    raise AssertionError(name)


ARGUMENTS = ["which", "norm", "fewer", "writeback", "first"]


def with_other_arguments(world: World, folder: Path) -> list[tuple[str, bool]]:
    trained, found = Trained(world, folder), []
    with soon(20):
        for name in ARGUMENTS:
            text = message_of(partial(other, trained, world.rank, name))
            now = {
                k: torch.equal(v, trained.state[k]) for k, v in full(trained).items()
            }
            found.append((text, all(now.values())))
    step(trained.model, trained.optim, world.rank, 1)
    return found


def full(trained: Trained) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = trained.model.state_dict()
    return state


@pytest.mark.req("X-12", "X-08")
def test_other_arguments_are_told_and_change_no_value(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Other norms, parameters or options on one rank."""
    first, second = ranks(2).run(with_other_arguments, tmp_path)

    assert first == second
    for name, (text, unchanged) in zip(ARGUMENTS, first, strict=True):
        assert text.startswith("DesyncError: Ranks disagree: "), (name, text)
        assert unchanged, name


def clip_left_out(world: World) -> str:
    model = gpt("composable")

    def forward() -> None:
        loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]

    for _ in range(3):
        forward()
        clip_grad_norm_(model, 1.0)
    forward()
    text = ""
    if world.rank == 1:
        with soon(0.2):
            text = message_of(forward)
    # Rank 0 is in here, and rank 1 comes late.
    clip_grad_norm_(model, 1.0)
    forward()
    return text


@pytest.mark.req("X-12")
def test_a_clip_that_one_rank_leaves_out_is_told_at_its_next_forward(
    ranks: RankCount,
) -> None:
    """Before it sends, so that the sum of the others is not mixed with its gather."""
    _, text = ranks(2).run(clip_left_out)

    assert "this rank begins a forward of (root) in training mode" in text
    assert "where the recorded order has: clip_grad_norm_(norm_type=2" in text
    assert "Rank 0 did not come within 0.2 s" in text
    assert "Make the same calls in the same order" in text
