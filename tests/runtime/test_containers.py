"""Tensors in containers: found in outputs, replaced in inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp.runtime.nested_tensors import map_tensors, tensors_in
from tests.runtime.corners import OPEN, WRAPS, Record

OPAQUE = ("object", "object with slots", "distribution")
"""Objects of which no changed copy can be made."""


@pytest.mark.req("B-18")
@pytest.mark.parametrize("kind", WRAPS)
def test_every_tensor_of_an_output_is_found(kind: str) -> None:
    """Or the tensors it was made from, which have its graph."""
    y = torch.ones(2)

    found = tensors_in(WRAPS[kind](y))

    assert any(t is y or torch.equal(t, y) for t in found)


@pytest.mark.parametrize("kind", [kind for kind in WRAPS if kind not in OPAQUE])
def test_a_changed_container_is_a_copy_of_its_kind(kind: str) -> None:
    """The caller's own container keeps its tensors."""
    y = torch.ones(2)
    value = WRAPS[kind](y)

    changed = map_tensors(value, lambda t: t + 1)

    assert type(changed) is type(value)
    assert torch.equal(OPEN[kind](changed), OPEN[kind](value) + 1)
    assert torch.equal(y, torch.ones(2))


@pytest.mark.parametrize("kind", WRAPS)
def test_a_container_in_which_nothing_changes_is_returned_itself(kind: str) -> None:
    """Identity is kept where there is nothing to do."""
    value = WRAPS[kind](torch.ones(2))

    assert map_tensors(value, lambda t: t) is value


def test_modules_and_functions_in_an_output_are_not_searched() -> None:
    """A module that comes back is no container of its parameters."""
    layer = nn.Linear(2, 2)

    def scale(x: Tensor) -> Any:
        return x

    record = Record(torch.ones(1))
    record.inner = {"layer": layer, "function": scale}  # type: ignore[dict-item]

    assert tensors_in([layer, scale, nn.Linear, record]) == []
