"""Names of a package (PEP 562), and functions, whose modules are imported when used."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_PUBLIC = re.compile(r"from (composable_fsdp\.\S+) import \(?\s*(\w+) as \2\b")


def is_command_line() -> bool:
    """Return whether this process is the command line of the package."""
    # Processes that the command line starts have its ``argv``, and no ``orig_argv``.
    given, module = sys.orig_argv, " ".join(sys.orig_argv).partition(" -m ")[2]
    # While ``python -m`` imports a package, "-m" stands for the name of the program.
    is_module = sys.argv[:1] == ["-m"] and module.split(" ")[0] == "composable_fsdp"
    return is_module or Path(*given[1:2]).name == "composable-fsdp"


def public_names(package: str) -> list[str]:
    """Let a package import the names below its ``TYPE_CHECKING`` when they are used."""
    module: Any = sys.modules[package]
    # Type checkers need these imports, and so the names stand once.
    found = _PUBLIC.findall(module.__spec__.loader.get_source(package))
    homes = {name: home for home, name in found}

    def resolve(name: str) -> object:
        if name in homes:
            value: object = getattr(import_module(homes[name]), name)
        elif "." not in package:
            value = import_module(f"{package}.doors.elsewhere").submodule(name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(module, name, value)
        return value

    # Set here: type checkers would take any name for one of a package with a
    # ``__getattr__``.
    module.__getattr__ = resolve
    module.__dir__ = lambda: sorted({*vars(module), *homes})
    return sorted(homes)


def later(home: str, name: str) -> Callable[..., Any]:
    """Return a function that calls ``name`` of the module ``home``, imported then."""
    # Once: some of these run in every step.
    found = cache(lambda: getattr(import_module(home), name))

    def call(*args: Any, **kwargs: Any) -> Any:
        return found()(*args, **kwargs)

    return call
