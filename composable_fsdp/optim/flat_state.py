"""Convert optimizer state between flat parameters and original parameters.

::

    flat form       params [0, 1]              state 0: exp_avg (shard_numel,), step
    per original    params [0, 1, 2, 3, 4]     state 0: exp_avg (k, *trailing), step ..

``unflatten_state`` converts the upper form into the lower, ``flatten_state`` the lower
into the upper. All other files of this folder work on original parameters, so state
saved from flat parameters can be loaded into an optimizer over original parameters, and
the other way round. A scalar (``step``) belongs to the whole region:
``unflatten_state`` copies it for each original, and ``flatten_state`` requires that all
copies are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import FLAT_PARAMS, FlatParamRecord, find_flat
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef, param_refs
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.scalars import is_scalar
from composable_fsdp.state_dict.sharded import ShardedValue

Group = dict[str, Any]

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
"""Element-wise state that optimizers initialize with zeros. If a parameter has no such
state yet, zeros are used for it: a step with a zero gradient gives the same."""


_WAY_OUT = "Load it into an optimizer over model.parameters()."
BY_NAME = (
    "Save what optim_state_dict(model, optim) returns, which is by parameter names, "
    "and load it with optim_state_dict_to_load(model, optim, state); or save and load "
    "the native checkpoint."
)
"""The remedy for state of flat parameters that are laid out otherwise."""


class Part(NamedTuple):
    """An original parameter, whose elements start at ``at`` of a flat one's shard."""

    ref: ParamRef
    at: int

    @property
    def leaf(self) -> nn.Parameter:
        """The original parameter."""
        return self.ref.leaf

    @property
    def name(self) -> str:
        """The name of the original parameter."""
        return self.ref.name

    def view(self, flat: Tensor) -> Tensor:
        """Return the leaf-shaped view of this part of ``flat`` ``(shard_numel,)``."""
        return flat[self.at : self.at + self.leaf.numel()].view(self.leaf.shape)


def parts_of(handle: FlatParamHandle, flat: FlatParamRecord) -> list[Part]:
    """Return the originals of a flat parameter in slot order, also of a retired one."""
    # Find leaves by slot index, because a retired flat parameter keeps an old layout,
    # and the leaves may be in other regions now.
    refs = {ref.slot.index: ref for ref in param_refs(handle)}
    return [
        Part(refs[slot.index], flat.layout.shard_offset(slot, flat.rank))
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
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [leaf for p in group["params"] for leaf in _leaves(p)],
        }
        for group in param_groups
    ]


def _leaves(parameter: nn.Parameter) -> list[nn.Parameter]:
    """Return the originals of a parameter in an optimizer."""
    found = find_flat(parameter)
    # A parameter that is not flat is its own and only original.
    return [parameter] if found is None else [p.leaf for p in parts_of(*found)]


def unflatten_state(param_groups: list[Group], given: dict[str, Any]) -> dict[str, Any]:
    """Convert a state dict over flat parameters into a state dict over originals.

    Tensors of the result are views of those in ``given``; numbers count the originals.
    A state that is per original already, or of other groups, is returned unchanged.

    Raises: CheckpointError, for state that is not element-wise.
    """
    if not has_flats(param_groups) or not _is_flat_form(param_groups, given):
        return given
    state: dict[int, dict[str, Any]] = {}
    groups: list[Group] = []
    number = 0
    for own, saved in zip(param_groups, given["param_groups"], strict=True):
        first = number
        for parameter, key in zip(own["params"], saved["params"], strict=True):
            values = given["state"].get(key)
            found = find_flat(parameter)
            if found is None:
                each: list[Any] = [values]
            elif values is None:
                # The flat parameter has no state yet, but the originals still need
                # their numbers.
                each = [None] * len(found[1].layout.parameters)
            else:
                handle, flat = found
                each = [
                    {k: part_of_state(part, flat, k, v) for k, v in values.items()}
                    for part in parts_of(handle, flat)
                ]
            for own_values in each:
                if own_values is not None:
                    state[number] = own_values
                number += 1
        kept = {key: value for key, value in saved.items() if key != "param_names"}
        groups.append({**kept, "params": list(range(first, number))})
    return {**given, "state": state, "param_groups": groups}


def _is_flat_form(param_groups: list[Group], given: Any) -> bool:
    """Return whether the groups of ``given`` count flat parameters.

    They do if they have the sizes of ``param_groups`` and numbers as keys.
    """
    if not isinstance(given, dict) or "param_groups" not in given:
        return False
    theirs = given["param_groups"]
    return [len(g["params"]) for g in theirs] == [
        len(g["params"]) for g in param_groups
    ] and all(isinstance(key, int) for g in theirs for key in g["params"])


def sharded_state(flat: FlatParamRecord, value: Any) -> Any:
    """Return ``(shard_numel,)`` state as a ``ShardedValue``, other values unchanged."""
    layout = flat.layout
    if not isinstance(value, Tensor) or value.shape != (layout.shard_numel,):
        return value
    if not layout.padded_numel:
        # A value without elements has no boxes, so a checkpoint could not describe it.
        return value
    # A plain tensor would be taken by torch.distributed.checkpoint for a value that is
    # equal on all ranks, and only the part of a single rank would be saved.
    return ShardedValue(
        value,
        (layout.padded_numel,),
        0,
        layout.shard_numel,
        flat.rank,
        layout.world_size,
    )


def flat_part(flat: FlatParamRecord, name: str, value: Any) -> Any:
    """Return this rank's ``(shard_numel,)`` of a flat parameter's state, or a scalar.

    Raises: CheckpointError, for another shape or a sharded value of another layout.
    """
    numel = flat.layout.shard_numel
    if isinstance(value, ShardedValue):
        expected = sharded_state(flat, value.local)
        if isinstance(expected, ShardedValue) and expected.is_part_like(value):
            return value.local
    elif not isinstance(value, Tensor) or tuple(value.shape) in ((), (numel,)):
        return value
    raise CheckpointError(
        f"Optimizer state {name!r} of a flat parameter has shape {tuple(value.shape)}; "
        f"expected a scalar or this rank's shard, {(numel,)}. {BY_NAME}"
    )


def part_of_state(part: Part, flat: FlatParamRecord, name: str, value: Any) -> Any:
    """Return the original's part of a flat parameter's state; scalars are copied.

    Raises: CheckpointError, for state that is not element-wise, or of another layout.
    """
    if isinstance(value, ShardedValue):
        value = flat_part(flat, name, value)
    if not isinstance(value, Tensor):
        return value
    if value.shape == (flat.layout.shard_numel,):
        return part.view(value)
    if value.ndim == 0:
        return value.clone()
    if value.shape == part.leaf.shape and len(flat.layout.parameters) == 1:
        # A flat parameter of a single original may keep state in the original's shape.
        return value
    raise CheckpointError(
        f"Optimizer state {name!r} of the flat parameter with {quoted(part.name)} has "
        f"shape {tuple(value.shape)}; expected a scalar or this rank's shard, "
        f"{(flat.layout.shard_numel,)}. State that is not element-wise cannot be told "
        "apart by parameters. Use an element-wise optimizer."
    )


def flatten_state(
    param_groups: list[Group],
    given: dict[str, Any],
    present: dict[Any, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Convert a state dict over originals, keyed by numbers, into the flat form.

    Raises: CheckpointError, naming parameters of a region whose scalars differ, or
    parameters that lack state which others have and which does not start from zero.
    """
    if not has_flats(param_groups):
        return given
    state: dict[int, dict[str, Any]] = {}
    groups: list[Group] = []
    number = 0
    for own, saved in zip(param_groups, given["param_groups"], strict=True):
        first, keys = number, iter(saved["params"])
        for parameter in own["params"]:
            found = find_flat(parameter)
            if found is None:
                values = given["state"].get(next(keys))
            else:
                parts = parts_of(*found)
                each = [given["state"].get(next(keys)) or {} for _ in parts]
                there = (present or {}).get(parameter, {})
                values = dict(_joined(found[1], parts, each, there)) or None
            if values is not None:
                state[number] = values
            number += 1
        kept = {key: value for key, value in saved.items() if key != "param_names"}
        # The saved names count originals; the optimizer's own names count parameters.
        if "param_names" in own:
            kept["param_names"] = own["param_names"]
        groups.append({**kept, "params": list(range(first, number))})
    return {**given, "state": state, "param_groups": groups}


def _joined(
    flat: FlatParamRecord,
    parts: list[Part],
    each: list[dict[str, Any]],
    there: dict[str, Any],
) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every state of a flat parameter."""
    require_flattenable(parts, each)
    for name in dict.fromkeys(name for values in each for name in values):
        found = [
            (part, values[name])
            for part, values in zip(parts, each, strict=True)
            if name in values
        ]
        # A 0-d state of a 0-d original alone may be either; any other original tells.
        scalar = [v for part, v in found if not is_elementwise(part, name, v)]
        whole = there.get(name)
        if scalar:
            # Equal in all parts, as ``require_flattenable`` has checked.
            yield name, scalar[0]
        # The parts are views of the optimizer's own tensor already: take that tensor
        # without a copy.
        elif isinstance(whole, Tensor) and all(_is_in(p, v, whole) for p, v in found):
            yield name, whole
        else:
            # Zeros fill the padding, and parts without this state (see
            # ``_ZERO_AT_FIRST``).
            made = found[0][1].new_zeros(flat.layout.shard_numel)
            for part, value in found:
                part.view(made).copy_(value.view(part.leaf.shape))
            yield name, made


def require_flattenable(parts: list[Part], each: list[dict[str, Any]]) -> None:
    """Refuse states of the originals that a flat parameter cannot represent.

    In ``each`` an ``Ellipsis`` stands for an element-wise tensor that is not read yet.

    Raises: CheckpointError, as ``flatten_state``.
    """
    for name in dict.fromkeys(name for values in each for name in values):
        found: list[tuple[Part, Any]] = []
        lacking: list[str] = []
        for part, values in zip(parts, each, strict=True):
            if name not in values:
                # A parameter without elements on this rank cannot lack state.
                lacking += [part.name] if part.leaf.numel() else []
            elif values[name] is not ... and not is_elementwise(
                part, name, values[name]
            ):
                found.append((part, values[name]))
        _require_same(name, found)
        if lacking and not found and name not in _ZERO_AT_FIRST:
            has = next(p for p, v in zip(parts, each, strict=True) if name in v)
            raise CheckpointError(
                f"Optimizer state {name!r} is there for {quoted(has.name)} and not for "
                f"{listed(map(quoted, lacking))}, which are in one flat parameter. "
                f"{_WAY_OUT}"
            )


def is_elementwise(part: Part, name: str, value: Any) -> bool:
    """Return whether a state has an element per element that this rank holds."""
    if is_scalar(name, value, part.leaf.shape):
        return False
    return bool(value.numel() == part.leaf.numel())


def _is_in(part: Part, value: Tensor, whole: Tensor) -> bool:
    """Return whether ``value`` is already the part's view of ``whole``."""
    # The same address is enough: parts of one flat parameter do not overlap, and both
    # tensors have the part's number of elements.
    home = part.view(whole)
    return value.data_ptr() == home.data_ptr() and value.dtype == home.dtype


def _require_same(name: str, found: list[tuple[Part, Any]]) -> None:
    """Refuse scalars of a region that differ. Raises: CheckpointError."""
    for part, other in found[1:]:
        first, value = found[0]
        if not same_scalar(value, other):
            raise CheckpointError(
                f"Optimizer state {name!r} is {_brief(value)} for {quoted(first.name)} "
                f"and {_brief(other)} for {quoted(part.name)}, which are in one flat "
                f"parameter and so have one value. {_WAY_OUT}"
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
