"""A view of an optimizer over flat parameters as an optimizer over the originals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import FlatParamRecord, find_flat
from composable_fsdp.naming import quoted
from composable_fsdp.optim.flat_state import (
    Part,
    Values,
    flatten_state,
    has_flats,
    originals,
    parts_of,
    require_flattenable,
    same_scalar,
    values_of,
)
from composable_fsdp.optim.own_state_dict import plain_values
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks


def over_originals(optim: Any) -> Any:
    """Return ``optim``, or a view over the originals of its flat parameters."""
    groups = getattr(optim, "param_groups", None)
    return OverOriginals(optim) if groups and has_flats(groups) else optim


def for_checkpoint(optim: Any) -> Any:
    """Return the view after the optimizer has taken up state that was loaded before."""
    install_optimizer_hooks(optim)
    return over_originals(optim)


def plain_state(optim: Any, parameter: Tensor) -> Values:
    """Return the state of a parameter, with quantized tensors dequantized."""
    # ``optim.state`` is a defaultdict, and a read must not add a key.
    return plain_values(optim, optim.state.get(parameter, {}))


class OverOriginals:
    """An optimizer over flat parameters as one over the originals."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim
        self.defaults = getattr(optim, "defaults", {})
        self.param_groups = originals(optim.param_groups)
        found = (find_flat(p) for g in optim.param_groups for p in g["params"])
        self.flats = [(each[1], parts_of(*each)) for each in found if each is not None]
        self.state = _States(optim, self.flats)
        self._made: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._given: dict[Tensor, Values] = {}
        """The state of the last ``load_state_dict``, of flat parameters."""

    def new_state(self, leaf: nn.Parameter, name: str, dtype: torch.dtype) -> Tensor:
        """Return memory for a new state of ``leaf``, in the shape of ``leaf``."""
        place = self.state.places.get(id(leaf))
        if place is None:
            return torch.empty(leaf.shape, dtype=dtype, device=leaf.device)
        # Views of one tensor, which ``load_state_dict`` then takes without a copy.
        flat, part = place
        made = self._made.setdefault(flat.parameter, {})
        if name not in made:
            made[name] = leaf.new_zeros(flat.layout.shard_numel, dtype=dtype)
        return part.view(made[name]).detach()

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Load a state dict that counts the originals. Raises: as ``flatten_state``."""
        groups, present = self.optim.param_groups, dict(self.optim.state)
        for parameter, made in self._made.items():
            # The optimizer does not have the tensors of ``new_state`` yet.
            present[parameter] = {**present.get(parameter, {}), **made}
        flat = flatten_state(groups, given, present)
        self.optim.load_state_dict(flat)
        parameters = [p for group in groups for p in group["params"]]
        self._given = {p: flat["state"].get(i, {}) for i, p in enumerate(parameters)}

    def keep_given(self, leaf: Tensor) -> None:
        """Restore what torch has changed of the state given for ``leaf``."""
        place = self.state.places.get(id(leaf))
        parameter: Any = leaf if place is None else place[0].parameter
        keep_given(self._given.get(parameter, {}), self.optim.state[parameter])

    def write(self, leaf: Tensor, values: Values) -> None:
        """Write states of ``leaf``, if need be into those of its flat parameter."""
        place = self.state.places.get(id(leaf))
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
                part.view(whole[name]).copy_(value.view(leaf.shape))
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
        for _, parts in self.flats:
            require_flattenable(parts, [given(part.ref.leaf) for part in parts])


class _States:
    """``optim.state`` by originals: ``[leaf]`` and ``.get(leaf, default)``."""

    def __init__(
        self, optim: Optimizer, flats: list[tuple[FlatParamRecord, list[Part]]]
    ) -> None:
        self._optim = optim
        self.places = {
            id(part.ref.leaf): (flat, part) for flat, parts in flats for part in parts
        }

    def __getitem__(self, leaf: nn.Parameter) -> Values:
        place = self.places.get(id(leaf))
        if place is None:
            values: Values = self._optim.state[leaf]
            return values
        flat, part = place
        return values_of(part, flat, self._optim.state[flat.parameter])

    def get(self, leaf: nn.Parameter, default: Any = None) -> Any:
        """Return the state of a leaf, or ``default`` if there is none."""
        place = self.places.get(id(leaf))
        key = leaf if place is None else place[0].parameter
        # ``load_state_dict`` gives the optimizer another dict.
        return self[leaf] if self._optim.state.get(key) else default


_STEP = "step"
"""The state whose dtype and device an optimizer chooses by its options."""


def keep_given(given: Mapping[str, Any], present: dict[str, Any]) -> None:
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
