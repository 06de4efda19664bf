"""Tell of values of a state dict that were written to and dropped, or taken apart.

The values are copies: an average that is kept by writes into ``state_dict()`` of the
averaged model would never move.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from composable_fsdp.naming import listed, quoted, strip_wrapper
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


def tell_of_parts(
    state: _FSDPState,
    module: nn.Module,
    prefix: str,
    values: Mapping[str, Any],
    keys: Collection[str],
) -> None:
    """Log that a hook has put plain tensors in the place of sharded values."""
    slots = [s for r in state.handle.layout.regions for s in r.layout.parameters]
    lost = [slot.fqn for slot in slots if prefix + slot.fqn not in keys]
    # A part of the unit lacks the other parts.
    lost *= module is state.module
    tables = (state.module.named_parameters, state.module.named_buffers) if lost else ()
    own = {
        prefix + strip_wrapper(name)
        for table in tables
        for name, _ in table(remove_duplicate=False)
    }
    added = [
        quoted(key)
        for key, value in values.items()
        if lost and type(value) is Tensor and key.startswith(prefix) and key not in own
    ]
    if added:
        _log.warning(
            "The sharded state dict of %s lacks %s, and a hook has added the plain "
            "tensors %s, of which torch.distributed.checkpoint saves one rank's. Make "
            "them of full values, by value.full_tensor().",
            state.title,
            listed(map(quoted, lost)),
            listed(added),
        )
