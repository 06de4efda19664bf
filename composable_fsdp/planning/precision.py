"""Selects the modules that keep full precision under mixed precision.

The dtypes of a unit are in ``flat.precision``, the casts in ``runtime.precision``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import nn

from composable_fsdp.config import MixedPrecision
from composable_fsdp.planning import walk


def with_full_precision(
    targets: Mapping[nn.Module, Mapping[str, Any]],
    root: nn.Module,
    *,
    mixed_precision: MixedPrecision | None,
    left_out: Set[nn.Module],
    root_kwargs: Mapping[str, Any],
) -> Mapping[nn.Module, Mapping[str, Any]]:
    """Return ``targets`` with modules of ignored classes as units in full precision.

    Such a module becomes a unit without mixed precision even if the policy did not
    select the module; its other options are the policy's, else the root's. The
    arguments stay unchanged.

    Returns: ``{module: options}``.
    """
    classes = ignored_classes(mixed_precision)
    if not classes:
        return targets
    chosen = {
        module: {**root_kwargs, **targets.get(module, {}), "mixed_precision": None}
        for module in walk.modules(root)
        if isinstance(module, classes) and module is not root and module not in left_out
    }
    # ``chosen`` comes last: full precision wins over the policy's options.
    return {**targets, **chosen}


def ignored_classes(mixed_precision: MixedPrecision | None) -> tuple[type, ...]:
    """Return the classes that keep full precision; none without mixed precision."""
    if mixed_precision is None:
        return ()
    return tuple(mixed_precision._module_classes_to_ignore)


def overridden_classes(
    modules: Iterable[nn.Module], mixed_precision: MixedPrecision | None
) -> set[type[nn.Module]]:
    """Return the ignored classes that have an instance in ``modules``."""
    classes = ignored_classes(mixed_precision)
    return {c for module in modules for c in classes if isinstance(module, c)}
