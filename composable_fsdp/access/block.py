"""Context managers that say so if they were called without ``with``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any, ParamSpec, cast

from composable_fsdp.errors import warn

P = ParamSpec("P")


class _Block(_GeneratorContextManager[None]):
    """A context manager that warns if nothing has entered it."""

    def _recreate_cm(self) -> Any:
        # A decorator enters a copy for each call.
        self.gen.close()
        return super()._recreate_cm()

    def __del__(self) -> None:
        # A call with wrong arguments has made no generator.
        gen = vars(self).get("gen")
        if gen and getgeneratorstate(gen) == GEN_CREATED:
            name = self.func.__name__
            warn(
                f"{name}(...) without `with` did nothing: write `with {name}(...):`.",
                RuntimeWarning,
            )


def block(
    function: Callable[P, Iterator[None]],
) -> Callable[P, AbstractContextManager[None]]:
    """Return ``function`` as ``contextmanager`` does."""

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
        return _Block(cast(Any, function), args, kwargs)

    return made
