"""Values that the modules of a unit show in place of its sharded parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from composable_fsdp.flat.handle import FlatParamHandle, Table
from composable_fsdp.tree.state import _FSDPState

_shown: weakref.WeakSet[Shown] = weakref.WeakSet()


def hooks_may_run() -> bool:
    """Return whether a unit shows values, so that hooks of users may run."""
    return bool(_shown)


class Shown:
    """Parameters over given values, in the places of the unit's own parameters."""

    __slots__ = ("__weakref__", "_buffers", "_kept", "parameters", "state")

    def __init__(self, state: _FSDPState) -> None:
        self.state = state
        self.parameters: dict[int, nn.Parameter] = {}
        """The parameters that the modules show, by slot index."""
        self._kept: list[tuple[Table, str, nn.Parameter]] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def show(self, values: Mapping[int, Tensor]) -> None:
        """Register a parameter over each value, by slot index, at all its places."""
        _shown.add(self)
        for index, table, key, leaf in placed(self.state.handle):
            if index in values and (shown := table.get(key)) is not None:
                # A tied parameter is one object at all its places.
                if index not in self.parameters:
                    self.parameters[index] = _parameter(values[index], leaf)
                self._kept.append((table, key, shown))
                table[key] = self.parameters[index]

    def show_buffer(self, buffer: Tensor, value: Tensor) -> None:
        """Give a buffer the data of ``value``."""
        self._buffers.append((buffer, buffer.data))
        buffer.data = value

    def hide(self) -> None:
        """Register the earlier parameters again."""
        _shown.discard(self)
        for table, key, before in self._kept:
            table[key] = before
        # In reverse, because a buffer that modules share was changed several times.
        for buffer, data in reversed(self._buffers):
            buffer.data = data

    def changed(self) -> Iterator[tuple[int, Tensor | None]]:
        """Yield slot index and present value of parameters written to or replaced."""
        for index, table, key, _ in placed(self.state.handle):
            made, now = self.parameters.get(index), table.get(key)
            if made is not None and (now is not made or now._version):
                yield index, now


def placed(
    handle: FlatParamHandle,
) -> Iterator[tuple[int, Table, str, nn.Parameter]]:
    """Yield slot index, table, key and sharded leaf of each place in the modules."""
    for place, swap in zip(handle.layout.places, handle.swaps, strict=True):
        yield place.slot_index, *swap[:3]


def _parameter(value: Tensor, leaf: nn.Parameter) -> nn.Parameter:
    """Return a parameter over ``value`` with the attributes of ``leaf``; version 0."""
    made = nn.Parameter(value.detach(), requires_grad=leaf.requires_grad)
    # Attributes of the user. The parts of a sharded value are attributes, too.
    for name, attribute in vars(leaf).items():
        vars(made).setdefault(name, attribute)
    return made


def owns_below(state: _FSDPState, module: nn.Module) -> bool:
    """Return whether ``module``, of the unit, holds parameters of the unit."""
    if module is state.module and len(state.modules) == 1:
        return True
    inside = set(map(id, module.modules()))
    return any(id(owner) in inside for owner in state.handle.layout.owners)
