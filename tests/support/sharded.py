"""What the tests outside the step share: a small GPT on either path, and its parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp.flat.region import part_of
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyGPT
from tests.support.reference import PATHS, apply_units, gpt_input, loss_of
from tests.support.world import RankPool

RankCount = Callable[[int], RankPool]

both_paths = pytest.mark.parametrize("path", PATHS)
one_to_three_ranks = pytest.mark.parametrize("world_size", [1, 2, 3])

UNITS = ("blocks.0", "blocks.1")


def gpt(
    path: str, *, tied_head: bool = False, seed: int = 0, **options: Any
) -> nn.Module:
    """A ``TinyGPT`` of three units: both blocks, and the root with what is left."""
    model = TinyGPT(tied_head=tied_head, seed=seed)
    return apply_units(model, UNITS, path=path, **options)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, at: int
) -> None:
    """One training step on the tokens of (``at``, ``rank``)."""
    loss_of(model, gpt_input(at, rank)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def is_full(model: nn.Module) -> list[bool]:
    """Per unit in ``.modules()`` order, whether its full parameters are shown."""
    return [state.handle.is_full for state in _get_fsdp_states(model)]


def own_parts(
    model: nn.Module, full: dict[str, Tensor]
) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Per name, the sharded leaf and this rank's part of ``full[name]``."""
    names = {id(p): strip_wrapper(name) for name, p in model.named_parameters()}
    found = {}
    for state in _get_fsdp_states(model):
        handle = state.handle
        # Of a unit that is full by hand the modules show the full leaves.
        shown = {id(leaf): id(other) for _, _, leaf, other in handle.swaps}
        for region in handle.layout.regions:
            for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True):
                name = names.get(id(leaf)) or names[shown[id(leaf)]]
                found[name] = leaf, part_of(region, slot, full[name], like=leaf)
    return found


def own_gradient(leaf: Tensor) -> Tensor:
    """``.grad``; where the rank holds no element, and so has none, an empty tensor."""
    if leaf.grad is None and not leaf.numel():
        return torch.empty_like(leaf)
    assert leaf.grad is not None
    return leaf.grad


def message_of(act: Callable[[], object]) -> str:
    """Kind and text of what ``act`` raises, without the rank at its end."""
    try:
        act()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return re.sub(r" \[rank \d+\]$", "", text)
    return "nothing was raised"
