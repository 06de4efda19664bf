"""Tests whose own body runs on ranks::

    @on_ranks(1, 2, 3)
    @pytest.mark.parametrize("path", PATHS)
    def test_a_model_trains(world: World, path: str) -> None:
        ...                                    # runs on each rank of each world

Arguments are pickled. A test that reads the results of ranks, or whose arguments
Hypothesis draws, calls ``ranks(2).run(check, ...)``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import pytest

from tests.support.place import BODY, World
from tests.support.pool import RankPool

P = ParamSpec("P")


def on_ranks(
    *world_sizes: int,
) -> Callable[[Callable[Concatenate[World, P], None]], Callable[..., None]]:
    """Run the decorated test on ranks, once for each of ``world_sizes``.

    Several sizes are values of the parameter ``world_size``. Without sizes, the test
    runs on the pool that the fixture ``pool`` gives, as tests of GPUs do.
    """

    def decorate(
        body: Callable[Concatenate[World, P], None],
    ) -> Callable[..., None]:
        names = list(inspect.signature(body).parameters)[1:]
        asked = ["ranks"] if world_sizes else ["pool"]
        if len(world_sizes) > 1:
            asked.append("world_size")

        @functools.wraps(body)
        def test(**given: Any) -> None:
            _pool(given, world_sizes).run(test, *(given[name] for name in names))

        kind = inspect.Parameter.KEYWORD_ONLY
        seen = [inspect.Parameter(name, kind) for name in dict.fromkeys(asked + names)]
        setattr(test, BODY, body)
        # pytest takes the names of parameters and fixtures from here.
        test.__signature__ = inspect.Signature(seen)  # type: ignore[attr-defined]  # of functions, too
        if len(world_sizes) > 1:
            test = pytest.mark.parametrize("world_size", world_sizes)(test)
        return test

    return decorate


def _pool(given: dict[str, Any], world_sizes: tuple[int, ...]) -> RankPool:
    if not world_sizes:
        pool: RankPool = given["pool"]
        return pool
    pool = given["ranks"](given.get("world_size", world_sizes[0]))
    return pool
