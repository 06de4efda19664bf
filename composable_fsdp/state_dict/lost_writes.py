"""Tell of values of a state dict that were written to in place and then dropped.

The values are copies, where those of a plain model are its parameters: an average that
is kept by writes into ``average.state_dict()`` would never move.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from composable_fsdp.naming import listed, quoted
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _FSDPState

_log = logging.getLogger("composable_fsdp.state_dict")


class _Given(NamedTuple):
    """A value that ``state_dict()`` has returned."""

    name: str
    value: weakref.ref[Tensor]
    counter: Tensor
    """Without elements; has the version counter of the value."""
    version: int


_given: weakref.WeakKeyDictionary[_FSDPState, list[_Given]] = (
    weakref.WeakKeyDictionary()
)


def watch(state: _FSDPState, values: Mapping[str, Any]) -> None:
    """Note the values that ``state_dict()`` returns for a unit."""
    # A unit of several modules has several calls.
    _given[state] = [
        _note(name, value)
        for name, value in values.items()
        if isinstance(value, Tensor)
    ]


def forget(state: _FSDPState) -> None:
    """Forget the values: the model loads, perhaps these values."""
    _given.pop(state, None)


def tell(state: _FSDPState) -> None:
    """Log, once a unit, if the values given last were written to and dropped."""
    written = [
        quoted(each.name)
        for each in _given.pop(state, ())
        # Values that are kept belong to the caller, who may change and save them.
        if each.counter._version != each.version and each.value() is None
    ]
    if written and state not in _told:
        _told.add(state)
        _log.warning(
            "Values of state_dict() of %s were written to in place and dropped (%s). "
            "They are copies, and the model has not changed. For an average of the "
            "weights update the parameters: torch.optim.swa_utils.AveragedModel, or a "
            "loop over average.parameters() and model.parameters(). To write full "
            "values use unshard_params(model), or model.load_state_dict(values).",
            state.title,
            listed(written),
        )


_told: weakref.WeakSet[_FSDPState] = weakref.WeakSet()


def _note(name: str, value: Tensor) -> _Given:
    """Return a note that keeps neither the value nor its memory alive."""
    counter = value.detach()
    # Other memory, and the version counter stays the value's.
    if isinstance(counter, ShardedValue):
        counter.local = counter.local.new_empty(0)
    else:
        counter.data = value.new_empty(0)
    return _Given(name, weakref.ref(value), counter, value._version)
