"""``help`` shows the arguments and the result of a composable API.

``typed_calls.py`` holds what type checkers see of them.
"""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import pytest

from composable_fsdp import fully_shard, replicate

APIS: list[Callable[..., Any]] = [fully_shard, replicate]


@pytest.mark.req("N-04")
@pytest.mark.parametrize("api", APIS, ids=["fully_shard", "replicate"])
def test_help_shows_every_argument_and_the_result(api: Callable[..., Any]) -> None:
    """As for a plain function: one signature, then the docstring."""
    signature = inspect.signature(api)
    names = list(signature.parameters)

    assert names[0] == "module"
    assert signature.return_annotation == signature.parameters["module"].annotation
    assert not any(
        each.kind is each.VAR_KEYWORD for each in signature.parameters.values()
    )
    shown = pydoc.plain(pydoc.render_doc(api))
    assert f"{api.__name__}(" in shown
    head, body = shown.split("->", 1)
    for name in names:
        assert f"{name}:" in head
        assert name in body
    assert "composable API" not in shown
