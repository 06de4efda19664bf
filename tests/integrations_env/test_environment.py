"""The environment of these tests is the one that ``constraints.txt`` describes."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.parametrize(
    "name",
    [
        "accelerate",
        "diffusers",
        "lightning",
        "peft",
        "torch",
        "torchao",
        "timm",
        "torchmetrics",
        "torchtitan",
        "transformers",
        "trl",
    ],
)
def test_a_framework_is_installed_in_the_pinned_version(name: str) -> None:
    """The claims of this folder are about these versions."""
    pins = [each.split(";")[0] for each in CONSTRAINTS.read_text().splitlines()]

    # A build of torch adds its own part behind "+".
    assert f"{name}=={version(name).partition('+')[0]}" in pins
