"""The states of the APIs on a module, and the nearest enclosing state of a module.

The registry is in the module's ``__dict__``, so it is copied and pickled with it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from torch import nn

API: Final = "fully_shard"
REPLICATE: Final = "replicate"
"""The names of this package's states in the registry."""

REGISTRY_KEY: Final = "_composable_api_states"
"""The key in ``module.__dict__``: constant, so that pickled modules keep states."""

S = TypeVar("S")

# A single read-only empty mapping, so that reads allocate nothing.
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


# ---- the registry of one module ---------------------------------------------


def get_registry(module: nn.Module) -> Mapping[str, object]:
    """Return the states of the APIs applied to ``module`` itself, by API name."""
    registry: dict[str, object] | None = module.__dict__.get(REGISTRY_KEY)
    return _NOTHING if registry is None else MappingProxyType(registry)


def get_state(module: nn.Module, api: str) -> object | None:
    """Return the state of ``api`` on ``module``; None if ``api`` was not applied."""
    registry: dict[str, object] | None = module.__dict__.get(REGISTRY_KEY)
    return None if registry is None else registry.get(api)


def has_api(module: nn.Module, *apis: str) -> bool:
    """Return whether any of ``apis`` was applied to ``module`` itself."""
    registry: dict[str, object] | None = module.__dict__.get(REGISTRY_KEY)
    return registry is not None and not registry.keys().isdisjoint(apis)


def set_state(module: nn.Module, api: str, state: object) -> None:
    """Register ``state`` for ``api`` on ``module``; replace an earlier state."""
    # Always make a new dict: ``copy.copy(module)`` shares the old dict with the
    # original, and the copy must not see this state.
    module.__dict__[REGISTRY_KEY] = {**get_registry(module), api: state}


def remove_state(module: nn.Module, api: str) -> None:
    """Remove the state of ``api`` from ``module``; do nothing if not applied."""
    registry = dict(get_registry(module))
    registry.pop(api, None)
    if registry:
        module.__dict__[REGISTRY_KEY] = registry
    else:
        module.__dict__.pop(REGISTRY_KEY, None)


# ---- the nearest owner of every submodule -----------------------------------


class OwnerMap(Generic[S]):
    """A map from modules to the nearest enclosing unit's state, weak on both sides."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        # Keys are ids: a module class may define ``__eq__`` or be unhashable. No entry
        # outlives the module of the entry, so a reused id finds no old entry.
        self._entries: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[Any]]] = {}

    def set(self, state: S, *modules: nn.Module) -> None:
        """Make ``state`` the owner of ``modules``; replace earlier owners."""
        entries, owner = self._entries, weakref.ref(state)
        for key, module in zip(map(id, modules), modules, strict=True):

            def drop(link: weakref.ref[nn.Module], key: int = key) -> None:
                # Another module may have the id already.
                if key in entries and entries[key][0] is link:
                    del entries[key]

            entries[key] = weakref.ref(module, drop), owner

    def get(self, module: nn.Module) -> S | None:
        """Return the state that owns ``module``; None if no state does."""
        entry = self._entries.get(id(module))
        # Also None if the state is dead.
        state: S | None = None if entry is None else entry[1]()
        return state

    def without_owner(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the ``modules`` that no state owns."""
        entries = self._entries
        return [
            module
            for module in modules
            if (entry := entries.get(id(module))) is None or entry[1]() is None
        ]

    def __len__(self) -> int:
        """Return the number of modules that have an owner."""
        return sum(owner() is not None for _, owner in self._entries.values())


# ---- torch's own APIs, recognized without importing them --------------------

# This is the only place that knows torch's private names; checked on torch 2.13.
# ``_torch_class`` finds torch's classes along the MRO by name. Torch draws the key of
# torch's registry anew in each process; while torch's contract module is not imported,
# no module can carry that key.
TORCH_DDP: Final = "torch's DistributedDataParallel"
_TORCH_REPLICATES: Final = {
    "DistributedDataParallel": TORCH_DDP,
    "DDP": "torch's replicate",
    "ReplicateModule": "torch's replicate",
}
_TORCH_SHARDS: Final = {
    "FullyShardedDataParallel": "torch's FullyShardedDataParallel (FSDP1)",
    "FSDPModule": "torch's fully_shard (FSDP2)",
}
_TORCH_CONTRACT: Final = "torch.distributed._composable.contract"


def incompatible_api(module: nn.Module) -> str | None:
    """Return the API on ``module`` that excludes the subtree from sharding, or None."""
    return other_apis(module)[0]


def foreign_fsdp(module: nn.Module) -> str | None:
    """Return torch's FSDP1 or FSDP2, by name, if applied to ``module`` itself."""
    return other_apis(module)[1]


def other_apis(module: nn.Module) -> tuple[str | None, str | None]:
    """Return ``(incompatible_api(module), foreign_fsdp(module))`` in one pass."""
    known, held = _classes.get(id(type(module))), module.__dict__
    name = _torch_class(type(module)) if known is None else known[0]
    # Planning calls this function for every module of a tree, and nearly no module has
    # a registry: leave early. Without torch's contract module no module has torch's.
    registry = _NOTHING
    if _TORCH_CONTRACT in sys.modules:
        torch_key: str = sys.modules[_TORCH_CONTRACT].REGISTRY_KEY
        registry = held.get(torch_key, _NOTHING)
    if not name and REGISTRY_KEY not in held and not registry:
        return _NO_OTHERS
    ours = has_api(module, REPLICATE)
    incompatible = _TORCH_REPLICATES.get(name)
    if incompatible is None and "replicate" in registry:
        incompatible = "torch's replicate"
    foreign = _TORCH_SHARDS.get(name)
    if not name and "fully_shard" in registry:
        foreign = _TORCH_SHARDS["FSDPModule"]
    return incompatible or (REPLICATE if ours else None), foreign


_NO_OTHERS: Final = (None, None)


# Keyed by id, with a weak reference whose callback removes the entry. Torch makes a new
# class for each class that it wraps, so strong keys would leak; a lookup in a
# WeakKeyDictionary takes microseconds.
_classes: dict[int, tuple[str, weakref.ref[type]]] = {}


def _torch_class(kind: type[nn.Module]) -> str:
    """Return the first class name along the MRO that is in the tables above, or ""."""
    found, key = "", id(kind)
    # The first match counts: ReplicateModule derives from FSDPModule.
    for base in kind.__mro__:
        name = base.__name__
        is_known = name in _TORCH_REPLICATES or name in _TORCH_SHARDS
        # This package's FullyShardedDataParallel has the name of torch's FSDP1, so the
        # class must also come from torch.
        if is_known and base.__module__.partition(".")[0] == "torch":
            found = name
            break
    _classes[key] = found, weakref.ref(kind, lambda _: _classes.pop(key, None))
    return found
