"""Tell of values of a state dict that were written to in place and then dropped.

The values are copies: an average that is kept by writes into ``state_dict()`` of the
averaged model would never move.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from composable_fsdp.naming import listed, quoted
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.state import _FSDPState

_log = logging.getLogger("composable_fsdp.state_dict")

_Given = tuple[str, "weakref.ref[Tensor]", Tensor, int]
"""Name, value, a tensor without elements that has its version counter, the version."""

_given: weakref.WeakKeyDictionary[_FSDPState, list[_Given]] = (
    weakref.WeakKeyDictionary()
)
_told: weakref.WeakSet[_FSDPState] = weakref.WeakSet()


def watch(state: _FSDPState, values: Mapping[str, Any]) -> None:
    """Note the values that ``state_dict()`` returns for a unit, none kept alive."""
    found = _given[state] = []
    for name, value in values.items():
        if isinstance(value, Tensor):
            counter = value.detach()
            # Other memory, and the version counter stays the value's.
            if isinstance(counter, ShardedValue):
                counter.local = counter.local.new_empty(0)
            else:
                counter.data = value.new_empty(0)
            found.append((name, weakref.ref(value), counter, value._version))


def forget(state: _FSDPState) -> None:
    """Forget the values: the model loads, perhaps these values."""
    _given.pop(state, None)


def tell(state: _FSDPState) -> None:
    """Log, once a unit, if the values given last were written to and dropped."""
    written = [
        quoted(name)
        for name, value, counter, version in _given.pop(state, ())
        # Values that are kept belong to the caller, who may change and save them.
        if counter._version != version and value() is None
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
