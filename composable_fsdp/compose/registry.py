"""Which APIs a module carries, and which state is nearest to it.

Two stores, because they live and die differently::

    module.__dict__["_composable_api_states"]    {api name: state}, where an API was
                                                 applied; copied and pickled with the
                                                 module
    OwnerMap                                     module ~> state, on every submodule;
                                                 weak on both sides: keeps nothing alive

The registry's key is a constant, so it means the same in every process. Reads never
write. The last part recognizes torch's own data-parallel APIs without importing them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from torch import nn

REGISTRY_KEY: Final = "_composable_api_states"
"""Where a module's ``__dict__`` holds its registry."""

S = TypeVar("S")

_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


# ---- the registry of one module ---------------------------------------------


def get_registry(module: nn.Module) -> Mapping[str, object]:
    """Return the states of the APIs applied to ``module`` itself, by API name.

    The mapping is read-only and a snapshot: a later application does not show in it.
    """
    registry: dict[str, object] | None = module.__dict__.get(REGISTRY_KEY)
    return _NOTHING if registry is None else MappingProxyType(registry)


def get_state(module: nn.Module, api: str) -> object | None:
    """Return the state that ``api`` left on ``module``, None if it was not applied."""
    registry: dict[str, object] | None = module.__dict__.get(REGISTRY_KEY)
    return None if registry is None else registry.get(api)


def has_api(module: nn.Module, *apis: str) -> bool:
    """Whether any of ``apis`` was applied to ``module`` itself."""
    registry: dict[str, object] | None = module.__dict__.get(REGISTRY_KEY)
    return registry is not None and any(api in registry for api in apis)


def set_state(module: nn.Module, api: str, state: object) -> None:
    """Make ``state`` what ``api`` keeps on ``module``, in place of any before."""
    # A new dict each time: copy.copy(module) shares the old one and must not see this.
    module.__dict__[REGISTRY_KEY] = {**get_registry(module), api: state}


def remove_state(module: nn.Module, api: str) -> None:
    """Forget what ``api`` keeps on ``module``; nothing happens if there is nothing.

    The last entry takes the registry with it, so the module is as if never touched.
    """
    registry = dict(get_registry(module))
    registry.pop(api, None)
    if registry:
        module.__dict__[REGISTRY_KEY] = registry
    else:
        module.__dict__.pop(REGISTRY_KEY, None)


# ---- the nearest owner of every submodule -----------------------------------


class _StateLink(weakref.ref[Any]):
    """A weak reference to a state that knows the entries it was set for."""

    __slots__ = ("keys",)
    keys: tuple[int, ...]


class _ModuleLink(weakref.ref[Any]):
    """A weak reference to a module: the entry of ``key``, and the owner it names."""

    __slots__ = ("key", "owner")
    key: int
    owner: _StateLink


class OwnerMap(Generic[S]):
    """A map from modules to the state of their nearest owner, weak on both sides.

    An entry vanishes when its module or its state does. Modules are told apart by
    identity, because a module class may define ``__eq__`` or be unhashable. States need
    a ``__weakref__`` slot.
    """

    __slots__ = ("_drop_module", "_drop_state", "_entries")

    def __init__(self) -> None:
        entries: dict[int, _ModuleLink] = {}

        # Another callback of the same death may have set a new owner: each drops only
        # its own entries. None outlives its module, so an id that comes again is free.
        def drop_module(link: weakref.ref[Any]) -> None:
            key = getattr(link, "key", -1)
            if entries.get(key) is link:
                del entries[key]

        def drop_state(link: weakref.ref[Any]) -> None:
            for key in getattr(link, "keys", ()):
                if key in entries and entries[key].owner is link:
                    del entries[key]

        self._entries = entries
        self._drop_module = drop_module
        self._drop_state = drop_state

    def set(self, state: S, *modules: nn.Module) -> None:
        """Make ``state`` the owner of ``modules``, in place of any before."""
        owner = _StateLink(state, self._drop_state)
        owner.keys = tuple(map(id, modules))
        for key, module in zip(owner.keys, modules, strict=True):
            self._entries[key] = entry = _ModuleLink(module, self._drop_module)
            entry.key, entry.owner = key, owner

    def get(self, module: nn.Module) -> S | None:
        """Return the state that owns ``module``, or None if nothing does."""
        entry = self._entries.get(id(module))
        if entry is None:
            return None
        state: S | None = entry.owner()
        return state

    def clear(self, module: nn.Module) -> None:
        """Forget the owner of ``module``; nothing happens if there is none."""
        self._entries.pop(id(module), None)

    def __len__(self) -> int:
        """Return the number of modules that have an owner."""
        return len(self._entries)


# ---- torch's own APIs, recognized without importing them --------------------

# The only place that knows torch's private names; checked on torch 2.13. Classes are
# found along the MRO by name, and torch's registry under the key that torch draws anew
# in each process: while its contract is not loaded, it cannot have marked anything.
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
    """Name the API on ``module`` whose whole subtree sharding must leave alone.

    That is ``replicate``, ours or torch's, or torch's DDP; None if there is none.
    """
    return other_apis(module)[0]


def foreign_fsdp(module: nn.Module) -> str | None:
    """Name torch's FSDP1 or FSDP2 if it was applied to ``module`` itself, else None."""
    return other_apis(module)[1]


def other_apis(module: nn.Module) -> tuple[str | None, str | None]:
    """Return what ``incompatible_api`` and ``foreign_fsdp`` say, in one look."""
    name, held = _torch_class(type(module)), module.__dict__
    # Every module of a tree is asked, and next to none holds a registry.
    torch_key = getattr(sys.modules.get(_TORCH_CONTRACT), "REGISTRY_KEY", REGISTRY_KEY)
    if not name and REGISTRY_KEY not in held and torch_key not in held:
        return _NO_OTHERS
    registry = _torch_registry(module)
    ours = has_api(module, "replicate")
    incompatible = _TORCH_REPLICATES.get(name)
    if incompatible is None and "replicate" in registry:
        incompatible = "torch's replicate"
    foreign = _TORCH_SHARDS.get(name)
    if not name and "fully_shard" in registry:
        foreign = _TORCH_SHARDS["FSDPModule"]
    return incompatible or ("replicate" if ours else None), foreign


_NO_OTHERS: Final = (None, None)


# By identity, with a weak reference that takes the entry out: torch makes a class for
# each class it meets, and a WeakKeyDictionary takes microseconds to look one up.
_classes: dict[int, tuple[str, weakref.ref[type]]] = {}


def _torch_class(kind: type[nn.Module]) -> str:
    """Return the first of the class names above along the MRO, or an empty string."""
    key = id(kind)
    known = _classes.get(key)
    if known is None:
        gone = weakref.ref(kind, lambda _: _classes.pop(key, None))
        known = _classes[key] = (_find_torch_class(kind), gone)
    return known[0]


def _find_torch_class(kind: type[nn.Module]) -> str:
    # The first one counts: ReplicateModule derives from FSDPModule.
    for base in kind.__mro__:
        name = base.__name__
        known = name in _TORCH_REPLICATES or name in _TORCH_SHARDS
        # Ours has the name of torch's FSDP1.
        if known and base.__module__.partition(".")[0] == "torch":
            return name
    return ""


def _torch_registry(module: nn.Module) -> Mapping[str, object]:
    """Return torch's own registry of ``module``, empty if there is none."""
    contract = sys.modules.get(_TORCH_CONTRACT)
    if contract is None:
        return _NOTHING
    registry = module.__dict__.get(getattr(contract, "REGISTRY_KEY", ""))
    return registry if isinstance(registry, dict) else _NOTHING
