"""Keeps state that ``Optimizer.load_state_dict`` of torch would change.

torch casts all floating-point state to the dtype of the parameter, also in containers,
but for ``step``, and makes each container anew from its items::

    given      mu_product float32    ["a", tensor float64]    deque(.., maxlen=4)
    by torch   mu_product bfloat16   ["<generator ..", ..]    deque(..)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_STEP = "step"
"""The state whose dtype and device an optimizer chooses by its options."""


def keep_given(given: Mapping[str, Any], present: dict[str, Any]) -> None:
    """Restore in ``present``, the loaded state of a parameter, what torch has changed.

    Values stay on the device that torch has chosen.
    """
    for name in given.keys() & present.keys() - {_STEP}:
        cast = present[name]
        kept = _kept(given[name], cast)
        # Most state is as given, and then torch's own objects stay.
        if kept is not cast:
            present[name] = kept


def _kept(given: Any, cast: Any) -> Any:
    """Return ``cast`` if it is what was given; else the given, on the same devices."""
    if isinstance(given, Tensor):
        if not isinstance(cast, Tensor) or cast.dtype == given.dtype:
            return cast
        # From the given tensor: the cast one has lost its digits.
        return given.to(cast.device)
    if type(given) is dict and isinstance(cast, dict):
        others = {k: v for k, v in given.items() if k != _STEP and k in cast}
        found = {k: _kept(v, cast[k]) for k, v in others.items()}
        is_kept = all(each is cast[k] for k, each in found.items())
        return cast if is_kept else {**cast, **found}
    if type(given) in (list, tuple) and type(cast) is type(given):
        items = [_kept(a, b) for a, b in zip(given, cast, strict=True)]
        is_kept = all(a is b for a, b in zip(items, cast, strict=True))
        return cast if is_kept else type(given)(items)
    # torch makes a deque from its items alone, so the length is lost in any case.
    if isinstance(given, deque):
        pairs = zip(given, cast, strict=True)
        return deque((_kept(a, b) for a, b in pairs), given.maxlen)
    # A text is iterable, too: torch makes it into the name of a generator.
    return given if isinstance(given, str) else cast
