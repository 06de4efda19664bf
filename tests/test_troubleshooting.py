"""The messages in the troubleshooting page are those that this package prints.

``tests/faults`` provokes the messages about hangs, which take the timeouts of groups.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from composable_fsdp import (
    CustomPolicy,
    MixedPrecision,
    clip_grad_norm_,
    fully_shard,
    load,
    save,
    unshard_params,
)
from tests.support.page_names import VOCABULARY, WIDTH, Block, Net, loss_of, sharded
from tests.support.sharded import RankCount
from tests.support.world import World, single_rank_group

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting" / "index.md"
BATCH = torch.arange(8).view(1, 8)
SECTION = re.compile(r"^#+ ([^\n]*)\n\n```output\n(.*?)\n```", re.MULTILINE | re.DOTALL)
MESSAGES: dict[str, str] = dict(SECTION.findall(PAGE.read_text()))
ELSEWHERE = {
    "A call on rank 0 alone",
    "Ranks have different numbers of batches",
    "A rank skips a layer",
}


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer, after a backward."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(loss_of(model, BATCH))
    return optimizer


def different_models(rank: int) -> None:
    torch.manual_seed(0)
    model = Net()
    if rank:
        model.blocks.append(Block())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)(BATCH)


def different_weights(rank: int) -> None:
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(Net())(BATCH)


def part_called(rank: int) -> None:
    model = sharded()
    model(BATCH)
    cast(Block, model.blocks[0]).mlp(torch.ones(1, WIDTH))


def torch_clips(rank: int) -> None:
    model = sharded()
    trained(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def muon(rank: int) -> None:
    model = sharded()
    trained(model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer: torch.optim.Optimizer = torch.optim.Muon(matrices)
    optimizer.step()


def optimizer_inside(rank: int) -> None:
    model = sharded()
    with unshard_params(model):
        optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(loss_of(model, BATCH))
    optimizer.step()


def step_inside(rank: int) -> None:
    model = sharded()
    optimizer = trained(model)
    with unshard_params(model):
        optimizer.step()


def not_a_number(rank: int) -> None:
    model = sharded()
    torch.autograd.backward(loss_of(model, BATCH) * float("nan"))
    clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


def two_dtypes(rank: int) -> None:
    model = Net()
    for block in model.blocks:
        block.norm = nn.Identity()
    options = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    policy = CustomPolicy(lambda m: options if m in list(model.blocks) else False)
    fully_shard(model, policy=policy)(BATCH)


def parent_first(rank: int) -> None:
    model = fully_shard(Net())
    fully_shard(model.blocks[0])


def list_of_modules(rank: int) -> None:
    fully_shard(Net().blocks)


def tied(rank: int) -> None:
    model = Net()
    model.head.weight = model.embed.weight
    fully_shard(model.head)
    fully_shard(model)


def on_meta(rank: int) -> None:
    with torch.device("meta"):
        model = Net()
    fully_shard(model)(BATCH)


def saved_twice(rank: int) -> None:
    model = sharded()
    save("runs/step-1", model)
    save("runs/step-1", model)


def wrong_path(rank: int) -> None:
    load("nowhere", sharded())


def other_model(rank: int) -> None:
    save("runs/step-1", sharded())
    model = Net()
    model.head = nn.Linear(WIDTH, VOCABULARY + 1)
    load("runs/step-1", fully_shard(model))


def no_optimizer(rank: int) -> None:
    model = sharded()
    save("runs/step-1", model)
    load("runs/step-1", model, torch.optim.AdamW(model.parameters()))


def printed(title: str, rank: int) -> str:
    """Return the error or warning as Python prints it."""
    with pytest.raises((Exception, Warning)) as error:
        CASES[title](rank)
    return f"{error.type.__name__}: {error.value}"


def printed_on_a_rank(world: World, title: str) -> str:
    """Return the error of this rank."""
    return printed(title, world.rank)


CASES: dict[str, Callable[[int], Any]] = {
    "DesyncError: Ranks have sharded different models": different_models,
    "Warning: Ranks have sharded different weights": different_weights,
    "A part of the model cannot be called": part_called,
    "An optimizer that holds the wrong parameters": optimizer_inside,
    "A step inside unshard_params": step_inside,
    "Gradients clipped by torch": torch_clips,
    "Gradients that are not finite": not_a_number,
    "mat1 and mat2 must have the same dtype": two_dtypes,
    "No process group": parent_first,
    "Children first": parent_first,
    "A list of modules": list_of_modules,
    "A tied weight": tied,
    "Parameters on meta": on_meta,
    "The optimizer is refused": muon,
    "The directory exists": saved_twice,
    "The path is wrong": wrong_path,
    "Another model": other_model,
    "No optimizer in the checkpoint": no_optimizer,
}
ON_TWO_RANKS = {
    "DesyncError: Ranks have sharded different models",
    "Warning: Ranks have sharded different weights",
    "A part of the model cannot be called",
    "Gradients clipped by torch",
    "The optimizer is refused",
}


@pytest.mark.parametrize("title", CASES)
def test_a_message_is_the_one_that_the_page_shows(
    ranks: RankCount, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word by word, where the page does not say ``...``; numbers may differ."""
    monkeypatch.chdir(tmp_path)

    if title in ON_TWO_RANKS:
        found = ranks(2).run(printed_on_a_rank, title)[0]
    elif title == "No process group":
        found = printed(title, 0)
    else:
        with single_rank_group():
            found = printed(title, 0)

    shown = re.escape(MESSAGES[title]).replace(re.escape("..."), ".*?")
    shown = re.sub(r"\d+(?:\\\.\d+)?", r"[\\d.e-]+", shown)
    assert re.match(shown, found), f"{found}\n\n{MESSAGES[title]}"


def test_every_message_of_the_page_is_provoked() -> None:
    """Here, or by the tests of faults."""
    assert set(MESSAGES) == set(CASES) | ELSEWHERE
