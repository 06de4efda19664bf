"""Turns ``plan(units=[...])`` into modules: units as a script makes them by hand."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import quoted
from composable_fsdp.planning import walk
from composable_fsdp.planning.assign import Chosen
from composable_fsdp.planning.checks import refuse_container


def chosen_units(root: nn.Module, units: Iterable[object]) -> Chosen:
    """Return the units that a user listed, without ``root``, which is a unit anyway.

    An entry is a module, a name, a pattern of names such as "blocks.*" (a star matches
    no dot; each match is a unit), or a list of modules and names that form one unit.

    Raises: PlanError, if a name or a module is not below ``root``, or in two units;
    TypeError, for an entry of another type.
    """
    # An nn.ModuleList is a list of modules; any other module is a single one.
    is_module = isinstance(units, nn.Module) and not isinstance(units, nn.ModuleList)
    if is_module or isinstance(units, str):
        raise TypeError(
            f"units expects a list of modules or names, got {units!r:.80}. Pass [it]."
        )
    # A module under two names has the first name.
    names = dict(walk.named(root))
    order = {module: position for position, module in enumerate(names.values())}
    found: dict[nn.Module, tuple[nn.Module, ...]] = {}
    taken: set[nn.Module] = set()
    for entry in units:
        if isinstance(entry, (list, tuple, nn.ModuleList)):
            groups = [[m for each in entry for m in _modules_of(each, names, order)]]
        else:
            groups = [[module] for module in _modules_of(entry, names, order)]
        for group in groups:
            # The first module in walking order gives the unit its name.
            modules = tuple(sorted(dict.fromkeys(group), key=order.__getitem__))
            for module in modules:
                refuse_container(module)
                if module in taken:
                    raise PlanError(
                        f"units names the {type(module).__name__} "
                        f"{quoted(walk.name_of(root, module))} twice. Name each "
                        "module once."
                    )
                taken.add(module)
            # A script applies ``fully_shard`` to the root last, so lists may end in it.
            if modules and modules != (root,):
                found[modules[0]] = modules
    return found


def unit_names(root: nn.Module, units: Iterable[object] | None) -> list[list[str]]:
    """Return the names of the modules of each unit that ``chosen_units`` returns."""
    chosen = chosen_units(root, units or ())
    return [[walk.name_of(root, each) for each in group] for group in chosen.values()]


def _modules_of(
    entry: object, names: Mapping[str, nn.Module], order: Mapping[nn.Module, int]
) -> list[nn.Module]:
    """Return the modules that an entry of ``units`` names."""
    if isinstance(entry, nn.Module):
        if entry not in order:
            raise PlanError(
                f"units expects modules below the planned module; a "
                f"{type(entry).__name__} in the list is not below it. Pass modules of "
                "the same model."
            )
        return [entry]
    if not isinstance(entry, str):
        raise TypeError(
            f"units expects modules, names, or lists of them, got {entry!r:.80}."
        )
    # A name without wildcards matches itself.
    matching = [names[name] for name in names if _matches(name, entry)]
    # A typing error must not plan a model without units.
    if not matching:
        near = difflib.get_close_matches(entry, list(names), n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise PlanError(
            f"units names {entry!r}, which matches no module.{hint} Names are those of "
            "named_modules(); 'blocks.*' matches every block."
        )
    return matching


def _matches(name: str, pattern: str) -> bool:
    """Return whether ``name`` matches ``pattern``, component by component."""
    # A star that matched dots would take the modules inside of a block, too.
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
