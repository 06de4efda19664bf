"""Optimizer state of one parameter, which a flat parameter may have joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from composable_fsdp.access.gather import gather_slot
from composable_fsdp.access.single import find_parameter, unit_of
from composable_fsdp.errors import CheckpointError, CompositionError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.param_ref import ParamRef
from composable_fsdp.naming import did_you_mean, listed, quoted, takes_optimizer
from composable_fsdp.optim.flat_state import (
    Values,
    originals,
    parts_of,
    require_flattenable,
    same_scalar,
    values_of,
)
from composable_fsdp.optim.names import Named, meet_for_state, require_pair
from composable_fsdp.optim.save import plain_values
from composable_fsdp.optim.sharded import part_for, require_same_state
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import require_elementwise
from composable_fsdp.planning.dtensors import is_dtensor


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
        """Restore dtypes and containers that torch has changed of a loaded state."""
        # Optimizers keep ``step`` where their options say.
        kept = {name: value for name, value in given.items() if name != "step"}
        kept = tree_map_only(Tensor, lambda t: t.to(leaf.device), kept)
        place = self._places.get(id(leaf))
        if place is not None:
            flat, part = place
            cut = {k: v for k, v in kept.items() if part.is_elementwise(k, v)}
            self.write(leaf, cut)
            leaf, kept = flat.parameter, {k: kept[k] for k in kept if k not in cut}
        self.optim.state[leaf].update(kept)

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


@takes_optimizer
def get_full_optim_state(
    model: nn.Module, optim: Optimizer, fqn: str
) -> dict[str, Any]:
    """Return the state that ``optim`` keeps for a parameter, in full shapes.

    ``fqn`` is its name in the plain model. The result, ``{name: value}``, has new
    tensors on the compute device; it is ``{}`` before the first step, and for a
    parameter that never had a gradient.

    Collective: one exchange of state names, and per state one broadcast from each rank
    that holds elements, over the shard group; all its ranks must call. None, if the
    parameter is not sharded.
    Raises: CompositionError, for a name that ``model`` or ``optim`` does not have, and
    for an optimizer that needs whole parameters; CheckpointError, DesyncError,
    PhaseError and TypeError, as ``optim_state_dict``.

    >>> get_full_optim_state(model, optim, "head.weight")["exp_avg"]
    """
    named = _find(model, optim, fqn, "get_full_optim_state")
    states = [OriginalView(optim).state_of(named.parameter)]
    if named.ref is not None:
        require_same_state([named], states)
    result = dict(states[0])
    # By name, because each state needs broadcasts, in the same order on all ranks.
    for key, value in sorted(result.items()):
        if named.ref is not None and named.is_cut and not named.is_scalar(key, value):
            value = gather_slot(named.ref, value)
        result[key] = value.detach().clone() if isinstance(value, Tensor) else value
    return result


@takes_optimizer
@torch.no_grad()
def set_full_optim_state(
    model: nn.Module, optim: Optimizer, fqn: str, state: dict[str, Any]
) -> None:
    """Write optimizer state of a parameter from full values.

    Each rank passes the same ``{name: value}``, tensors in the parameter's full shape
    or scalars, and writes its part. State names that are left out keep their values.

    Raises: as ``get_full_optim_state``; CheckpointError, for another shape or for a
    name that the optimizer does not keep, before anything is written. A rank without
    any state cannot check names.
    """
    named = _find(model, optim, fqn, "set_full_optim_state")
    view = OriginalView(optim)
    own: Any = view.state_of(named.parameter)
    known = {key for values in optim.state.values() for key in values}
    parts = {}
    for key, value in state.items():
        if known and key not in known:
            raise CheckpointError(
                f"set_full_optim_state: {type(optim).__name__} keeps no {key!r} for "
                f"{quoted(fqn)}{did_you_mean(key, known)}. It keeps {listed(known)}."
            )
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if shape not in ((), named.shape):
            raise CheckpointError(
                f"set_full_optim_state expects {key!r} of {quoted(fqn)} as a scalar or "
                f"in the parameter's full shape {named.shape}, got {shape}."
            )
        parts[key] = _part(named, key, value, own.get(key))
    if not named.is_absent:
        view.write(named.parameter, parts)


def _part(named: Named, key: str, value: Any, before: Any) -> Any:
    """Return a copy of this rank's part of a full value, in place of ``before``."""
    if not isinstance(value, Tensor):
        return value
    # For a 0-d parameter the optimizer's own state tells.
    if value.ndim or before is None or not named.is_scalar(key, before):
        value = part_for(named, key, value)
    # Optimizers keep ``step`` on the CPU.
    if isinstance(before, Tensor):
        value = value.to(before.device, before.dtype)
    elif not named.is_scalar(key, value):
        value = value.to(named.parameter.device)
    return value.detach().clone()


def _find(model: nn.Module, optim: Optimizer, fqn: str, what: str) -> Named:
    """Find the parameter by name and check that ``optim`` holds the parameter."""
    require_pair(model, optim, what)
    found = find_parameter(model, fqn, what)
    ref = found if isinstance(found, ParamRef) else None
    named = Named(fqn, found.leaf if isinstance(found, ParamRef) else found, ref)
    units = [] if ref is None else [unit_of(ref)]
    # Reading sends over the shard group; writing must be the same in replicas.
    meet_for_state(units, what, repr(fqn), replicas=what.startswith("set"))
    install_optimizer_hooks(optim)
    require_elementwise(optim)
    held = [p for group in originals(optim.param_groups) for p in group["params"]]
    if all(p is not named.parameter for p in held):
        raise CompositionError(
            f"{what}: parameter {quoted(fqn)} is not in the {type(optim).__name__}. "
            "Pass the optimizer that trains it."
        )
    return named
