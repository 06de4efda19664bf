"""The state of an optimizer over flat parameters, as one over the originals has it.

::

    flat form       params [0, 1]              state 0: exp_avg (shard_numel,), step
    per original    params [0, 1, 2, 3, 4]     state 0: exp_avg (k, *trailing), step ..

``unflatten_state`` goes down, ``join`` up. All else in this folder sees originals, so a
state from flat parameters and one from the originals are the same, and go into each
other's optimizers. A scalar (``step``) is one of the region: each original is given a
copy, and they come back only if they are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.flat_parameter import FLAT_PARAMS, FlatParamRecord, find_flat
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import join_name as join_names
from composable_fsdp.naming import quoted
from composable_fsdp.optim.scalars import SCALARS
from composable_fsdp.planning.layout import ParameterSlot
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
"""Element-wise state that starts from zero, so zeros stand for a parameter that has
none yet: that is what a gradient of zeros makes of them."""


_WAY_OUT = "Load it into an optimizer over model.parameters()."


class Part(NamedTuple):
    """One original in a flat parameter: ``[at, at + numel)`` of it."""

    leaf: nn.Parameter
    slot: ParameterSlot
    at: int
    name: str

    def view(self, flat: Tensor) -> Tensor:
        """Its elements of ``flat`` ``(shard_numel,)``, in the leaf's shape."""
        return flat[self.at : self.at + self.leaf.numel()].view(self.leaf.shape)


def parts_of(handle: FlatParamHandle, flat: FlatParamRecord) -> list[Part]:
    """The originals of a flat parameter, in slot order, also of a retired one."""
    leaves = {
        slot.index: leaf
        for region in handle.regions
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
    }
    return [
        Part(
            leaves[slot.index],
            slot,
            flat.layout.shard_offset(slot, flat.rank),
            join_names(handle.full_fqn, slot.fqn),
        )
        for slot in flat.layout.parameters
    ]


def has_flats(param_groups: list[Group]) -> bool:
    """Whether an optimizer has flat parameters."""
    return any(id(p) in FLAT_PARAMS for group in param_groups for p in group["params"])


def originals(param_groups: list[Group]) -> list[Group]:
    """The groups with originals in the place of flat parameters; as they are if none.

    Names that were given to flat parameters are nobody's then.
    """
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
    found = find_flat(parameter)
    return [parameter] if found is None else [p.leaf for p in parts_of(*found)]


def unflatten_state(param_groups: list[Group], given: dict[str, Any]) -> dict[str, Any]:
    """``given``, a state dict in the form of ``param_groups``, per original.

    Tensors are views of those in ``given``; numbers count the originals. What is per
    original already, or not of these groups, is returned as it is.

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
    """Whether the groups of ``given`` count flat parameters, as optimizers do."""
    if not isinstance(given, dict) or "param_groups" not in given:
        return False
    theirs = given["param_groups"]
    return [len(g["params"]) for g in theirs] == [
        len(g["params"]) for g in param_groups
    ] and all(isinstance(key, int) for g in theirs for key in g["params"])


def part_of_state(part: Part, flat: FlatParamRecord, name: str, value: Any) -> Any:
    """The original's part of a flat parameter's state; scalars are copied.

    Raises: CheckpointError, for state that is not element-wise.
    """
    value = value.local if isinstance(value, ShardedValue) else value
    if not isinstance(value, Tensor):
        return value
    if value.shape == (flat.layout.shard_numel,):
        return part.view(value)
    if value.ndim == 0:
        return value.clone()
    if value.shape == part.leaf.shape and len(flat.layout.parameters) == 1:
        return value  # of one original, and so per original already
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
    """The inverse of ``unflatten_state``: ``given`` per original, by numbers, in flat
    form.

    ``present`` is the optimizer's own state: what the parts already lie in is taken as
    it is, and nothing is copied. Padding is zero.

    Raises: CheckpointError, naming parameters of one region whose scalars differ, or
    that lack state which others have and which does not start from zero.
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
    """Name and value of every state of one flat parameter."""
    require_flattenable(parts, each)
    for name in dict.fromkeys(name for values in each for name in values):
        found = [
            (part, values[name])
            for part, values in zip(parts, each, strict=True)
            if name in values
        ]
        whole, first = there.get(name), found[0][1]
        if not is_elementwise(found[0][0], name, first):
            yield name, first
        elif isinstance(whole, Tensor) and all(_is_in(p, v, whole) for p, v in found):
            yield name, whole
        else:
            made = first.new_zeros(flat.layout.shard_numel)
            for part, value in found:
                part.view(made).copy_(value.view(part.leaf.shape))
            yield name, made


def require_flattenable(parts: list[Part], each: list[dict[str, Any]]) -> None:
    """Refuse states of the originals that one flat parameter cannot have together.

    In ``each`` an ``Ellipsis`` stands for an element-wise tensor. Sends nothing.

    Raises: CheckpointError, as ``join``.
    """
    for name in dict.fromkeys(name for values in each for name in values):
        found: list[tuple[Part, Any]] = []
        lacking: list[str] = []
        for part, values in zip(parts, each, strict=True):
            if name not in values:
                # Of no element here, the state has none to lack.
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
                f"{', '.join(map(quoted, lacking[:3]))}"
                f"{f' and {len(lacking) - 3} more' if lacking[3:] else ''}, which are "
                f"in one flat parameter. {_WAY_OUT}"
            )


def is_elementwise(part: Part, name: str, value: Any) -> bool:
    """Whether a state has an element for each of the original's on this rank."""
    if not isinstance(value, Tensor):
        return False
    if value.ndim == 0 and (part.slot.shape != () or name in SCALARS):
        return False
    return value.numel() == part.leaf.numel()


def _is_in(part: Part, value: Tensor, whole: Tensor) -> bool:
    home = part.view(whole)
    return value.data_ptr() == home.data_ptr() and value.dtype == home.dtype


def _require_same(name: str, found: list[tuple[Part, Any]]) -> None:
    """Refuse scalars of one region that differ. Raises: CheckpointError."""
    for part, other in found[1:]:
        first, value = found[0]
        if not same_scalar(value, other):
            raise CheckpointError(
                f"Optimizer state {name!r} is {_brief(value)} for {quoted(first.name)} "
                f"and {_brief(other)} for {quoted(part.name)}, which are in one flat "
                f"parameter and so have one value. {_WAY_OUT}"
            )


def same_scalar(one: Any, other: Any) -> bool:
    """Whether two states that are no element-wise tensors are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other.to(one.device)).all())
    return type(one) is type(other) and bool(one == other)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"of {tuple(value.shape)}"
    return repr(value)
