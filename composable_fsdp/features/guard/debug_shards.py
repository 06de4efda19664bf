"""What ``COMPOSABLE_FSDP_DEBUG=1`` adds to a forward: shards are hashed.

A write through ``.data`` between a forward and its backward moves no version counter of
autograd, so that backward computes with other values in silence. Each use of a unit
hashes the unit's shards at the end of its forward, and backward compares. Every byte is
read twice in each step, so a tree is checked only if asked.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.errors import PhaseError
from composable_fsdp.features.guard.debug import DEBUG_VARIABLE, is_debugging
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.flat.value_hash import hash_values, have_values
from composable_fsdp.naming import listed, quoted
from composable_fsdp.runtime.unshard import shard_versions
from composable_fsdp.tree.moments import ORDERS, OWN_ORDERS
from composable_fsdp.tree.state import RuntimeContext, StepOrder, _FSDPState


class _Shards(NamedTuple):
    """The shards of a unit at the end of a forward."""

    versions: tuple[int, ...]
    hashes: dict[str, int]
    """By FQN of the parameter."""


class _HashedShards(StepOrder):
    """Adds hashes of shards to the class of the order that stands behind."""

    # Without slots: of two bases with slots of their own Python makes no class.
    def __init__(self, mode: Hashable = ()) -> None:
        super().__init__(mode)
        self.shards: dict[int, _Shards] = {}

    def add(self, unit: _FSDPState, begin: int = 0) -> int:
        """Append a use, and hash the shards."""
        index = super().add(unit, begin)
        self.shards[index] = _shards_of(unit.handle)
        return index

    def reach(
        self, context: RuntimeContext, handle: FlatParamHandle, index: int
    ) -> None:
        """Compare the shards, and do as the other class.

        Collective, Raises: as the other class; PhaseError, if the shards differ.
        """
        # Before the order log: a rank that raises must not have announced the use.
        _require_unchanged(self.shards, handle, index)
        super().reach(context, handle, index)


def hash_if_debugging(context: RuntimeContext) -> None:
    """Have the shards of a tree hashed if the program is debugged."""
    if is_debugging():
        OWN_ORDERS[context] = _checked_order


def _checked_order(mode: Hashable, fills: bool) -> StepOrder:
    """Return the order of a forward whose shards are hashed."""
    # An order of its own class, and no test in the steps of programs without debugging.
    base: Any = ORDERS[fills]
    checked: type[StepOrder] = type("CheckedOrder", (_HashedShards, base), {})
    return checked(mode)


# The forward may run inside a transform, where hashes would have no memory.
@outside_transforms
def _shards_of(handle: FlatParamHandle) -> _Shards:
    """Return versions and hashes of the unit's sharded parameters."""
    # Each parameter by itself, and not the flat buffer, so that the error has a name.
    refs = list(param_refs(handle))
    leaves = [ref.leaf for ref in refs]
    values = hash_values(leaves).tolist() if have_values(leaves) else []
    names = [slot_path(handle, ref.slot) for ref in refs]
    return _Shards(shard_versions(handle), dict(zip(names, values, strict=False)))


def _require_unchanged(
    known: dict[int, _Shards], handle: FlatParamHandle, index: int
) -> None:
    """Refuse a backward whose shards are not those of the forward.

    Raises: PhaseError, on the ranks that hold changed elements.
    """
    # Once: a second backward through a retained graph may follow a legal write.
    before = known.pop(index, None)
    if before is None:
        return
    now = _shards_of(handle)
    # Autograd compares versions itself, and knows which writes are harmless.
    if now.versions != before.versions:
        return
    found = [
        name
        for name, value in now.hashes.items()
        if before.hashes.get(name, value) != value
    ]
    if found:
        raise PhaseError(
            f"This rank's elements of {listed(map(quoted, found))} have changed "
            f"between the forward and the backward of unit {handle.name}, by a write "
            "that moves no version counter (through .data, or by a kernel of another "
            f"library), found by {DEBUG_VARIABLE}=1: backward would compute with other "
            "values than forward. Write before the forward or after the backward."
        )
