"""Which modules keep full precision in a tree that computes in a lower one."""

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
    """Return a policy's ``targets`` with every module of an ignored class among them.

    Each such module below ``root`` is a unit without mixed precision, whatever the
    policy said of it; its other options are the policy's, or the root's. Modules in
    ``left_out`` stay as they are. Changes nothing that it was given.
    """
    classes = ignored_classes(mixed_precision)
    if not classes:
        return targets
    chosen = {
        module: {**root_kwargs, **targets.get(module, {}), "mixed_precision": None}
        for module in walk.modules(root)
        if isinstance(module, classes) and module is not root and module not in left_out
    }
    return {**targets, **chosen}


def ignored_classes(mixed_precision: MixedPrecision | None) -> tuple[type, ...]:
    """Classes whose modules keep full precision; none without mixed precision."""
    if mixed_precision is None:
        return ()
    return tuple(mixed_precision._module_classes_to_ignore)


def overridden_classes(
    modules: Iterable[nn.Module], mixed_precision: MixedPrecision | None
) -> set[type[nn.Module]]:
    """Those of the ignored classes that ``modules`` really are instances of."""
    classes = ignored_classes(mixed_precision)
    return {c for module in modules for c in classes if isinstance(module, c)}
