"""Converts saved optimizer state into a single form, keyed by the plain model's names.

::

    {"state": {name: ...}, "param_groups": [...]}   optim_state_dict, and torch's
                                                    get_optimizer_state_dict
    {"state.<name>.<state>": ...,                   get_optimizer_state_dict, flattened
     "param_groups.<name>.<option>": ...}
    {"state": {0: ...}, "param_groups": [...]}      optimizer.state_dict(): needs
                                                    ``param_names`` in the groups
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composable_fsdp.errors import CheckpointError

Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Optim:
    """State by parameter name and state name; groups whose ``params`` are names."""

    state: dict[str, dict[str, Any]]
    groups: Sequence[Group] | None


def named_optim(
    where: str, tree: Mapping[str, Any] | None, names: Mapping[str, str]
) -> Optim:
    """Return the saved optimizer ``tree`` with all parameters by name.

    Args:
        where: the name of the checkpoint in messages.
        tree: the saved optimizer in any of the three forms; None without optimizer.
        names: each name of a tensor in the model -> the first name of the same tensor.

    Returns: the state and the groups; ``groups`` is None without optimizer.
    Raises: CheckpointError, for state by ids without names, state of unknown
    parameters, or another form.
    """
    if tree is None:
        return Optim({}, None)
    if tree.keys() <= {"state", "param_groups"} and "param_groups" in tree:
        state, groups = tree.get("state", {}), tree["param_groups"]
    elif all(str(key).startswith(("state.", "param_groups.")) for key in tree):
        state, groups = _unflatten(where, tree, names)
    else:
        raise CheckpointError(
            f"{where}: the optimizer holds {sorted(map(str, tree))[:8]}; expected "
            "'state' and 'param_groups'. Save composable_fsdp.optim_state_dict(model, "
            "optim) with FULL_STATE_DICT set, or convert with --weights-only."
        )
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        raise CheckpointError(
            f"{where}: the optimizer's 'state' is a {type(state).__name__} and its "
            f"'param_groups' a {type(groups).__name__}; expected a dict and a list."
        )
    by_id = _names_of_ids(where, groups)
    if by_id:
        # Ids are compared as text: some formats keep the keys of dictionaries only as
        # text.
        state = {by_id.get(str(key), key): values for key, values in state.items()}
    found = _checked(where, state, names)
    return Optim(found, [_named(group, {**names, **by_id}) for group in groups])


def _checked(
    where: str, state: Mapping[Any, Any], names: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the state by first names; raise for names that are not in the model."""
    for name, values in state.items():
        # State of an unknown parameter must not be lost without an error.
        if name not in names or not isinstance(values, Mapping):
            raise CheckpointError(
                f"{where}: the optimizer has state of {name!r}, which is no parameter "
                "of the model in it. Save the two again, or convert with "
                "--weights-only."
            )
    # A parameter without values counts as a parameter without state.
    return {names[name]: dict(values) for name, values in state.items() if values}


def _names_of_ids(where: str, groups: Sequence[Any]) -> dict[str, str]:
    """Return id -> name for groups whose ``params`` are ids; empty without ids."""
    found: dict[str, str] = {}
    for group in groups:
        params = group.get("params", []) if isinstance(group, Mapping) else None
        if not isinstance(params, list | tuple):
            raise CheckpointError(
                f"{where}: a group of the optimizer is {group!r}; expected a dict with "
                "a list of parameters under 'params'."
            )
        if all(isinstance(param, str) for param in params):
            continue
        # torch saves ``param_names`` if the optimizer was built from named parameters.
        known = group.get("param_names", ())
        if len(known) != len(params):
            raise CheckpointError(
                f"{where}: the optimizer's parameters are numbers, which say nothing "
                "without the model's code. Save composable_fsdp.optim_state_dict("
                "model, optim), which keys them by name, or build the optimizer from "
                "model.named_parameters(); or convert with --weights-only."
            )
        found.update(zip(map(str, params), known, strict=True))
    return found


def _named(group: Mapping[str, Any], by_id: Mapping[str, str]) -> Group:
    """Return the group with ``params`` by first name and without ``param_names``."""
    # The names are in ``params`` already.
    options = {key: value for key, value in group.items() if key != "param_names"}
    params = [by_id.get(str(param), param) for param in group.get("params", [])]
    return {**options, "params": params}


def _unflatten(
    where: str, tree: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, dict[str, Any]], list[Group]]:
    """Return the nested state, and groups of parameters whose options are all equal."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, Group] = {}
    for key, value in tree.items():
        # A parameter name contains dots, so the state's name is the text after the last
        # dot.
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if name not in names:
            raise CheckpointError(
                f"{where}: {key!r} of the optimizer belongs to no parameter of the "
                "model in it. Convert with --weights-only, or save the two again."
            )
        (state if kind == "state" else options).setdefault(name, {})[last] = value
    # The flattened form has options per parameter: the original groups are not known.
    groups: list[Group] = []
    for name, own in options.items():
        own = {key: value for key, value in own.items() if key != "params"}
        for group in groups:
            if {k: v for k, v in group.items() if k != "params"} == own:
                group["params"].append(name)
                break
        else:
            groups.append({**own, "params": [name]})
    return state, groups
