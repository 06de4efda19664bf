"""Wrappers of activations that are put in after sharding, inside units or around."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.access import (
    set_modules_to_forward_prefetch,
    set_reshard_after_forward,
)
from composable_fsdp.doors.checkpoint_wrapper import apply_activation_checkpointing
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.on_ranks import on_ranks
from tests.support.reference import apply_units
from tests.support.sharded import both_paths
from tests.support.world import World


class Layer(nn.Module):
    """A weight, a buffer and a second method."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.offset

    def twice(self, x: Tensor) -> Tensor:
        assert self.weight.shape == (2, 2), "sharded inside the method"
        return self(x) * 2  # type: ignore[no-any-return]


def sharded(path: str, **options: Any) -> nn.Module:
    """Two layers, each a unit that is wrapped after sharding."""
    layers = nn.Sequential(Layer(), Layer())
    model = apply_units(layers, ["0", "1"], path=path, **options)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Layer))
    return model


def units(model: nn.Module) -> tuple[list[nn.Module], list[_FSDPState]]:
    """What a user holds of the two layers, and their states."""
    inner = getattr(model, "module", model)
    return list(inner.children()), _get_fsdp_states(model)[1:]


@both_paths
@on_ranks(2)
def test_settings_of_a_wrapped_unit_find_it(world: World, path: str) -> None:
    """By the module that stands in the tree, whichever wrapper is outside."""
    model = sharded(path)
    held, (first, second) = units(model)

    set_reshard_after_forward(held[0], False, recurse=False)
    set_modules_to_forward_prefetch(held[0], [held[1]])

    assert (
        first.settings.reshard_after_forward,
        second.settings.reshard_after_forward,
    ) == (False, None)
    assert first.ahead_in_forward == (second,)
