"""Names of a package (PEP 562), and functions, whose modules are imported when used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def is_command_line() -> bool:
    """Return whether this process is the command line of the package."""
    # Processes that the command line starts have its ``argv``, and no ``orig_argv``.
    given, module = sys.orig_argv, " ".join(sys.orig_argv).partition(" -m ")[2]
    # While ``python -m`` imports a package, "-m" stands for the name of the program.
    is_module = sys.argv[:1] == ["-m"] and module.split(" ")[0] == "composable_fsdp"
    return is_module or Path(*given[1:2]).name == "composable-fsdp"


def resolver(homes: Mapping[str, str]) -> tuple[Callable[[str], object], list[str]]:
    """Return what finds a name, and the sorted names, of modules with their names."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def resolve(name: str) -> object:
        """Return a public name of a package; for its ``__getattr__``."""
        if name not in home_of:
            raise AttributeError(f"no public name {name!r}; there are {[*home_of]}")
        return getattr(import_module(f"composable_fsdp.{home_of[name]}"), name)

    return resolve, sorted(home_of)


def later(home: str, name: str) -> Callable[..., Any]:
    """Return a function that calls ``name`` of the module ``home``, imported then."""
    # Once: some of these run in every step.
    found = cache(lambda: getattr(import_module(home), name))

    def call(*args: Any, **kwargs: Any) -> Any:
        return found()(*args, **kwargs)

    return call
