"""Optimizer state of flat parameters, as state of their originals, and back.

Only ``optim.state`` has the flat form; every state dict is per original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import FLAT_PARAMS, FlatParamRecord, find_flat
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef, param_refs
from composable_fsdp.naming import listed, quoted
from composable_fsdp.planning.dtensors import is_dtensor

Group = dict[str, Any]
Values = dict[str, Any]
StateDict = dict[str, Any]

_ZERO_AT_FIRST = (
    "acc_delta",
    "ax",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
)
"""State that optimizers begin with zeros, which stand for state that is not there: a
step with a zero gradient gives the same."""

_WAY_OUT = "Load it into an optimizer over model.parameters()."
BY_NAME = (
    "Save what optim_state_dict(model, optim) returns, which is by parameter names, "
    "and load it with optim_state_dict_to_load(model, optim, state); or save and load "
    "the native checkpoint."
)
"""The remedy for state of flat parameters that are laid out otherwise."""

SCALARS = ("step", "mu_product", "eta", "mu")
"""Scalar state in ``torch.optim``, which the shape of a 0-d parameter does not tell."""


def is_scalar(name: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a state is a single value per parameter, equal on all ranks."""
    return not isinstance(value, Tensor) or is_scalar_shape(name, value.shape, shape)


def is_scalar_shape(name: str, own: Sequence[int], shape: Sequence[int]) -> bool:
    """Answer ``is_scalar`` for a tensor that is not read yet."""
    return len(own) == 0 and (len(shape) > 0 or name in SCALARS)


def is_wrapper(value: Any) -> bool:
    """Return whether ``value`` is a tensor that wraps others other than a DTensor."""
    if type(value) is Tensor or not isinstance(value, Tensor) or is_dtensor(value):
        return False
    wraps: bool = is_traceable_wrapper_subclass(value)
    return wraps


class Part(NamedTuple):
    """An original parameter, whose elements start at ``at`` of a flat one's shard."""

    ref: ParamRef
    at: int

    def view(self, flat: Tensor) -> Tensor:
        """Return the leaf-shaped view of this part of ``flat`` ``(shard_numel,)``."""
        return flat[self.at : self.at + self.ref.leaf.numel()].view(self.ref.leaf.shape)

    def is_elementwise(self, name: str, value: Any) -> bool:
        """Return whether a state has an element per element that this rank holds."""
        if is_scalar(name, value, self.ref.leaf.shape):
            return False
        return bool(value.numel() == self.ref.leaf.numel())


def parts_of(handle: FlatParamHandle, flat: FlatParamRecord) -> list[Part]:
    """Return the originals of a flat parameter in slot order, also of a retired one."""
    # By slot index: a retired flat parameter keeps an old layout, and the leaves may be
    # in other regions now.
    refs = {ref.slot.index: ref for ref in param_refs(handle)}
    return [
        Part(refs[slot.index], flat.layout.shard_offset(slot, handle.groups.rank))
        for slot in flat.layout.parameters
    ]


def has_flats(param_groups: list[Group]) -> bool:
    """Return whether an optimizer has flat parameters."""
    return any(id(p) in FLAT_PARAMS for group in param_groups for p in group["params"])


def originals(param_groups: list[Group]) -> list[Group]:
    """Return the groups with flat parameters replaced by their originals."""
    if not has_flats(param_groups):
        return param_groups
    return [
        _group(group, [leaf for p in group["params"] for leaf in _leaves(p)])
        for group in param_groups
    ]


def _leaves(parameter: nn.Parameter) -> list[nn.Parameter]:
    """Return the originals of a parameter in an optimizer."""
    found = find_flat(parameter)
    return [parameter] if found is None else [p.ref.leaf for p in parts_of(*found)]


def _group(options: Group, params: list[Any]) -> Group:
    """Return a group of other parameters with the same options."""
    kept = {key: value for key, value in options.items() if key != "param_names"}
    return {**kept, "params": params}


def unflatten_state(param_groups: list[Group], given: StateDict) -> StateDict:
    """Convert what ``optim.state_dict()`` has of flat parameters into views."""
    if not has_flats(param_groups):
        return given
    state: dict[int, Values] = {}
    groups: list[Group] = []
    number = 0
    for own, saved in zip(param_groups, given["param_groups"], strict=True):
        first = number
        for parameter, key in zip(own["params"], saved["params"], strict=True):
            values, found = given["state"].get(key), find_flat(parameter)
            parts = [] if found is None else parts_of(*found)
            if values is not None and found is None:
                state[number] = values
            elif values is not None and found is not None:
                each = (values_of(part, found[1], values) for part in parts)
                state |= dict(enumerate(each, number))
            number += len(parts) or 1
        groups.append(_group(saved, list(range(first, number))))
    return {**given, "state": state, "param_groups": groups}


def values_of(part: Part, flat: FlatParamRecord, values: Values) -> Values:
    """Return an original's part of a flat parameter's state; scalars are copied."""
    return {name: _value_of(part, flat, name, each) for name, each in values.items()}


def _value_of(part: Part, flat: FlatParamRecord, name: str, value: Any) -> Any:
    """Return an original's part of one state. Raises: CheckpointError."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == (flat.layout.shard_numel,):
        return part.view(value)
    if value.ndim == 0:
        return value.clone()
    if value.shape == part.ref.leaf.shape and len(flat.layout.parameters) == 1:
        # A flat parameter of a single original may keep state in the original's shape.
        return value
    raise CheckpointError(
        f"Optimizer state {name!r} of the flat parameter with {quoted(part.ref.name)} "
        f"has shape {tuple(value.shape)}; expected a scalar or this rank's shard, "
        f"{(flat.layout.shard_numel,)}. State that is not element-wise cannot be told "
        "apart by parameters. Use an element-wise optimizer."
    )


def flatten_state(param_groups: list[Group], given: StateDict) -> StateDict:
    """Convert a state dict over originals, keyed by numbers, into the flat form."""
    if not has_flats(param_groups):
        return given
    theirs = [len(group["params"]) for group in given["param_groups"]]
    ours = [len(group["params"]) for group in originals(param_groups)]
    if theirs != ours:
        raise CheckpointError(
            f"The optimizer has flat parameters of groups of {ours} parameters, and "
            f"got a state of {theirs}. {BY_NAME}"
        )
    state: dict[int, Values] = {}
    groups: list[Group] = []
    number = 0
    for own, saved in zip(param_groups, given["param_groups"], strict=True):
        first, keys = number, iter(saved["params"])
        for number, parameter in enumerate(own["params"], first):
            found = find_flat(parameter)
            if found is None:
                values = given["state"].get(next(keys))
            else:
                parts = parts_of(*found)
                each = [given["state"].get(next(keys)) or {} for _ in parts]
                values = dict(_joined(found[1], parts, each)) or None
            if values is not None:
                state[number] = values
        number = first + len(own["params"])
        groups.append(_group(saved, list(range(first, number))))
        # The saved names count originals; the optimizer's own names count parameters.
        if "param_names" in own:
            groups[-1]["param_names"] = own["param_names"]
    return {**given, "state": state, "param_groups": groups}


def _joined(
    flat: FlatParamRecord, parts: list[Part], each: list[Values]
) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every state of a flat parameter."""
    require_flattenable(parts, each)
    for name in dict.fromkeys(name for values in each for name in values):
        pairs = zip(parts, each, strict=True)
        found = [(part, values[name]) for part, values in pairs if name in values]
        # A 0-d state of a 0-d original alone may be either; any other original tells.
        scalar = [v for part, v in found if not part.is_elementwise(name, v)]
        if scalar:
            yield name, scalar[0]
            continue
        # Views of one tensor, as ``unflatten_state`` gives, need no other memory. The
        # same address is enough: parts of a flat parameter do not overlap.
        whole = found[0][1]._base
        if (
            whole is not None
            and whole.shape == (flat.layout.shard_numel,)
            and all(
                v._base is whole and v.data_ptr() == p.view(whole).data_ptr()
                for p, v in found
            )
        ):
            yield name, whole
        else:
            # Zeros fill the padding, and parts without this state.
            made = found[0][1].new_zeros(flat.layout.shard_numel)
            for part, value in found:
                part.view(made).copy_(value.view(part.ref.leaf.shape))
            yield name, made


def require_flattenable(parts: list[Part], each: list[Values]) -> None:
    """Refuse states of the originals that a flat parameter cannot represent."""
    for name in dict.fromkeys(name for values in each for name in values):
        held = [(p, v[name]) for p, v in zip(parts, each, strict=True) if name in v]
        found = [
            (part, value)
            for part, value in held
            if value is not ... and not part.is_elementwise(name, value)
        ]
        for part, other in found[1:]:
            first, value = found[0]
            if not same_scalar(value, other):
                raise CheckpointError(
                    f"Optimizer state {name!r} is {_brief(value)} for "
                    f"{quoted(first.ref.name)} and {_brief(other)} for "
                    f"{quoted(part.ref.name)}, which are in one flat parameter and so "
                    f"have one value. {_WAY_OUT}"
                )
        # A parameter without elements on this rank cannot lack state.
        lacking = [
            part.ref.name
            for part, values in zip(parts, each, strict=True)
            if name not in values and part.ref.leaf.numel()
        ]
        if lacking and not found and name not in _ZERO_AT_FIRST:
            raise CheckpointError(
                f"Optimizer state {name!r} is there for {quoted(held[0][0].ref.name)} "
                f"and not for {listed(map(quoted, lacking))}, which are in one flat "
                f"parameter. {_WAY_OUT}"
            )


def same_scalar(one: Any, other: Any) -> bool:
    """Return whether two states that are not element-wise tensors are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other.to(one.device)).all())
    return type(one) is type(other) and bool(one == other)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"of {tuple(value.shape)}"
    return repr(value)


class OriginalView:
    """An optimizer by original parameters, which a flat parameter may have joined."""

    def __init__(self, optim: Any) -> None:
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


def plain_values(optim: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the state ``values`` of a parameter with quantized tensors dequantized."""
    if not any(map(is_wrapper, values.values())):
        return values
    return {
        name: _dequantised(optim, name, value) if is_wrapper(value) else value
        for name, value in values.items()
    }


def _dequantised(optim: Any, name: str, value: Any) -> Tensor:
    """Return ``value.dequantize()``, or raise CheckpointError without that method."""
    # ``Tensor.dequantize`` reads memory, which wrappers do not have.
    if type(value).dequantize is not Tensor.dequantize:
        plain: Tensor = value.dequantize()
        if type(plain) is Tensor and plain.shape == value.shape:
            return plain
    raise CheckpointError(
        f"{type(optim).__name__}'s state {name!r} is a {type(value).__name__}, which "
        "wraps other tensors; expected plain tensors, or a subclass whose dequantize() "
        "gives one of the same shape. Save it by torch.save(optim.state_dict()) on "
        "each rank, under StateDictType.SHARDED_STATE_DICT, or use an optimizer with "
        "plain state."
    )
