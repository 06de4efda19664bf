"""A view of an optimizer by original parameters, also of one over flat parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.naming import quoted
from composable_fsdp.optim.flat_state import (
    Values,
    originals,
    parts_of,
    require_flattenable,
    same_scalar,
    values_of,
)
from composable_fsdp.optim.own_state_dict import plain_values
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.planning.dtensors import is_dtensor

_STEP = "step"
"""The state whose dtype and device an optimizer chooses by its options."""


class OriginalView:
    """An optimizer by original parameters, which a flat parameter may have joined."""

    def __init__(self, optim: Any) -> None:
        # First: the optimizer takes up state that was loaded before.
        install_optimizer_hooks(optim)
        self.optim = optim
        self.param_groups = originals(optim.param_groups)
        found = (find_flat(p) for g in optim.param_groups for p in g["params"])
        self._flats = [(each[1], parts_of(*each)) for each in found if each is not None]
        self._places = {
            id(part.ref.leaf): (flat, part)
            for flat, parts in self._flats
            for part in parts
        }
        self._made: dict[tuple[nn.Parameter, str], Tensor] = {}

    def state_of(self, leaf: Any) -> Values:
        """Return the state of an original; of a flat parameter's, new views."""
        place = self._places.get(id(leaf))
        # ``optim.state`` is a defaultdict, and a read must not add a key.
        if place is None:
            values: Values = self.optim.state.get(leaf, {})
            return values
        flat, part = place
        return values_of(part, flat, self.optim.state.get(flat.parameter, {}))

    def plain_state_of(self, leaf: Any) -> Values:
        """Return the state of an original, with quantized tensors dequantized."""
        return plain_values(self.optim, self.state_of(leaf))

    def new_state(self, leaf: Any, name: str, dtype: torch.dtype) -> Tensor:
        """Return memory for a new state of ``leaf``, in the shape of ``leaf``."""
        place = self._places.get(id(leaf))
        if place is None:
            if is_dtensor(leaf):
                return torch.empty_like(leaf, dtype=dtype, requires_grad=False)
            return torch.empty(leaf.shape, dtype=dtype, device=leaf.device)
        # Views of one tensor, which ``load_state_dict`` then takes without a copy.
        flat, part = place
        key = flat.parameter, name
        if key not in self._made:
            zeros = leaf.detach().new_zeros(flat.layout.shard_numel, dtype=dtype)
            self._made[key] = zeros
        return part.view(self._made[key])

    def keep_given(self, leaf: Any, given: Values) -> None:
        """Restore what torch has changed of the state loaded for ``leaf``."""
        place = self._places.get(id(leaf))
        if place is None:
            _keep_given(given, self.optim.state[leaf])
            return
        flat, part = place
        cut = {k: v for k, v in given.items() if part.is_elementwise(k, v)}
        self.write(leaf, cut)
        shared = {k: v for k, v in given.items() if k not in cut}
        _keep_given(shared, self.optim.state[flat.parameter])

    def write(self, leaf: Any, values: Values) -> None:
        """Write states of ``leaf``, if need be into those of its flat parameter."""
        place = self._places.get(id(leaf))
        if place is None:
            self.optim.state[leaf].update(values)
            return
        flat, part = place
        whole = self.optim.state[flat.parameter]
        for name, value in values.items():
            if part.is_elementwise(name, value):
                if name not in whole:
                    # Zeros for the other originals.
                    whole[name] = value.new_zeros(flat.layout.shard_numel)
                whole[name] = whole[name].to(value.dtype)
                part.view(whole[name]).copy_(value.view(part.ref.leaf.shape))
            elif name not in whole or same_scalar(whole[name], value):
                whole[name] = value
            else:
                # All originals of a flat parameter share this scalar.
                raise CheckpointError(
                    f"Optimizer state {name!r} of {quoted(part.ref.name)} is "
                    f"{whole[name]} and cannot be set to {value}: the parameters of "
                    "its flat parameter have one value. Load all of them: "
                    "optim_state_dict_to_load(model, optim, state)."
                )

    def require_joinable(self, given: Callable[[nn.Parameter], Values]) -> None:
        """Refuse values that ``load_state_dict`` would refuse, before they are read."""
        for _, parts in self._flats:
            require_flattenable(parts, [given(part.ref.leaf) for part in parts])


def _keep_given(given: Mapping[str, Any], present: dict[str, Any]) -> None:
    """Restore in ``present``, a loaded state, what torch has changed."""
    for name in given.keys() & present.keys() - {_STEP}:
        present[name] = _kept(given[name], present[name])


def _kept(given: Any, cast: Any) -> Any:
    """Return ``cast`` with the dtypes and containers of ``given``, on its devices."""
    if isinstance(given, Tensor) and isinstance(cast, Tensor):
        # From the given tensor: the cast one has lost its digits.
        return cast if cast.dtype == given.dtype else given.to(cast.device)
    if type(given) is dict and isinstance(cast, dict):
        others = given.keys() & cast.keys() - {_STEP}
        return {**cast, **{key: _kept(given[key], cast[key]) for key in others}}
    if type(given) in (list, tuple, deque) and isinstance(cast, type(given)):
        items = [_kept(a, b) for a, b in zip(given, cast, strict=True)]
        # torch makes a deque from its items alone.
        return (
            deque(items, given.maxlen) if type(given) is deque else type(given)(items)
        )
    # A text is iterable, too: torch makes it into the name of a generator.
    return given if isinstance(given, str) else cast
