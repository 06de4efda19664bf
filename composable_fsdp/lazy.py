"""Names of a package that are resolved when they are first used (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def resolver(homes: Mapping[str, str]) -> tuple[Callable[[str], object], list[str]]:
    """Return what finds a name, and the sorted names, of modules with their names."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def resolve(name: str) -> object:
        """Return a public name of a package; for its ``__getattr__``."""
        if name not in home_of:
            raise AttributeError(f"no public name {name!r}; there are {[*home_of]}")
        return getattr(import_module(f"composable_fsdp.{home_of[name]}"), name)

    return resolve, sorted(home_of)
