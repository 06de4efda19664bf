"""Convert the keys of an optimizer state dict to the plain model's names.

Keys may be numbers (as in ``optim.state_dict()``), the plain model's names, or the
names that the optimizer was made with (``param_names``). An ambiguous key raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from composable_fsdp.config import OptimStateKeyType, ShardingStrategy
from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.optim.names import Group, Named, groups_of, name_parameters
from composable_fsdp.planning.options import by_name

Table = dict[Any, Any]
"""Maps a key of the given state dict to the key in the result."""


def state_by_name(
    saved: Any,
    model: nn.Module,
    groups: list[list[Named]],
    own: list[Group],
    what: str,
    *,
    partial: bool = False,
) -> dict[str, Any]:
    """Return ``saved`` with the plain model's names as keys; new dicts, same values.

    ``partial``: parameters may be missing, and numbers count those of ``groups``.

    Raises: CheckpointError, listing names that are missing, left over or given twice,
    or if numbers and names are mixed.
    """
    wanted = ("state", "param_groups")
    if not isinstance(saved, dict) or any(key not in saved for key in wanted):
        got = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved)
        raise CheckpointError(
            f"{what} expects a dict with the keys 'state' and 'param_groups', got "
            f"{got if isinstance(got, list) else got.__name__}. Pass what "
            "optim_state_dict(model, optim) returned."
        )
    keys = [*saved["state"], *(k for g in saved["param_groups"] for k in g["params"])]
    if all(isinstance(key, int) for key in keys):
        table = _of_numbers(saved, model, groups, own, what, partial=partial)
    elif all(isinstance(key, str) for key in keys):
        table = _of_names(keys, model, groups, own)
    else:
        raise CheckpointError(
            f"{what} expects a state keyed by names or by numbers; got both: "
            f"{[k for k in keys if isinstance(k, str)][:3]} and "
            f"{[k for k in keys if not isinstance(k, str)][:3]}. Pass what "
            "optim_state_dict(model, optim) or optim.state_dict() returned."
        )
    _require_once(table, saved, what)
    # Unknown keys stay as they are, and are refused below.
    named = _rekeyed(saved, table)
    _require_same_names(groups, named, partial=partial)
    return named


def _rekeyed(saved: dict[str, Any], table: Table) -> dict[str, Any]:
    """Return ``saved`` with the keys that ``table`` knows replaced."""
    return {
        **saved,
        "state": {table.get(key, key): v for key, v in saved["state"].items()},
        "param_groups": [
            {**group, "params": [table.get(key, key) for key in group["params"]]}
            for group in saved["param_groups"]
        ],
    }


def _of_numbers(
    saved: dict[str, Any],
    model: nn.Module,
    groups: list[list[Named]],
    own: list[Group],
    what: str,
    *,
    partial: bool,
) -> Table:
    """Map numbers to names by ``param_names``, else by position in the groups."""
    theirs = saved["param_groups"]
    names = [name for group in theirs for name in group.get("param_names", ())]
    numbers = [number for group in theirs for number in group["params"]]
    # Better than positions, because the order of parameters may have changed.
    if len(names) == len(numbers) > 0:
        known = _of_names(names, model, groups, own)
        if len({known.get(name) for name in names} - {None}) == len(names):
            return {i: known[name] for i, name in zip(numbers, names, strict=True)}
    fqns = [named.fqn for members in groups for named in members]
    if partial:
        return dict(enumerate(fqns))
    sizes = [len(members) for members in groups]
    if [len(group["params"]) for group in theirs] != sizes:
        raise CheckpointError(
            f"{what} got a state keyed by numbers, which count the parameters of "
            f"groups of {[len(group['params']) for group in theirs]}; the optimizer's "
            f"groups have {sizes}, so the numbers mean other parameters. Save with "
            "optim_state_dict(model, optim), which gives names."
        )
    return dict(zip(numbers, fqns, strict=True))


def _of_names(
    keys: list[str], model: nn.Module, groups: list[list[Named]], own: list[Group]
) -> Table:
    """Map given names to the model's names."""
    members = [named for group_members in groups for named in group_members]
    # First the names in use; a tied parameter has several, and all are accepted.
    known: Table = {named.fqn: named.fqn for named in members}
    mine = {id(named.parameter): named.fqn for named in members}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in mine:
            known.setdefault(strip_wrapper(name), mine[id(parameter)])
    by_model = {key: known.get(strip_wrapper(key)) for key in keys}
    given = [name for group in own for name in group.get("param_names", ())]
    made_with: Table = {}
    if len(given) == len(members):
        made_with = dict(zip(given, (m.fqn for m in members), strict=True))
    by_optim = {key: made_with.get(key) for key in keys}
    # All keys must come from the same table: a mixture of both would be a guess.
    whole = (each for each in (by_model, by_optim) if None not in each.values())
    found = next(whole, by_model)
    return {key: name for key, name in found.items() if name is not None}


def _require_once(table: Table, saved: dict[str, Any], what: str) -> None:
    """Refuse two keys for the same parameter, because either may be the right key."""
    for keys in (
        list(saved["state"]),
        [key for group in saved["param_groups"] for key in group["params"]],
    ):
        first: dict[str, Any] = {}
        for key in keys:
            name = table.get(key, key)
            if name in first:
                raise CheckpointError(
                    f"{what} got two keys for parameter {name!r}: {first[name]!r} and "
                    f"{key!r}. Leave one of them out."
                )
            first[name] = key


def _require_same_names(
    groups: list[list[Named]], saved: dict[str, Any], *, partial: bool
) -> None:
    """Refuse names that are missing in ``saved`` and names that are left over."""
    ours = {named.fqn: named for members in groups for named in members}
    theirs = {name for group in saved["param_groups"] for name in group["params"]}
    # A parameter that no unit shards (an ignored one, an adapter) may be new, and
    # starts without state, as with FSDP1.
    missing = sorted(
        name
        for name, named in ours.items()
        if name not in theirs and _may_be_cut(named) and not partial
    )
    extra = sorted((theirs | set(saved["state"])) - ours.keys())
    if missing or extra:
        raise CheckpointError(
            f"The optimizer state is of another model: missing {missing or 'nothing'}, "
            f"left over {extra or 'nothing'}. Load it into an optimizer over the same "
            "parameters."
        )


def _may_be_cut(named: Named) -> bool:
    """Return whether a unit shards the parameter at some world size."""
    # Not ``is_cut``: the same state is accepted or refused at every world size.
    if named.handle is None:
        return False
    return named.handle.layout.plan.options.strategy is not ShardingStrategy.NO_SHARD


def require_same_options(
    g: int, origins: set[int], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a group whose parameters come from saved groups with different options."""
    # Representations, because options may be unhashable (lists, dicts).
    left_out = ("params", "param_names")
    options = {
        repr(sorted((k, v) for k, v in saved[n].items() if k not in left_out))
        for n in origins
    }
    if len(options) > 1:
        raise CheckpointError(
            f"The optimizer's group {g} holds parameters of several saved groups "
            f"({sorted(origins)}), whose options differ. Build the groups as they "
            "were saved; a flat parameter is in one group, so over "
            "model.parameters() if that cuts it."
        )


def aligned_groups(
    groups: list[list[Named]], saved: dict[str, Any], own: list[Group]
) -> list[Group]:
    """Return the optimizer's groups with the saved options, found by parameter names.

    Raises: CheckpointError, as ``require_same_options``.
    """
    home = {
        name: i
        for i, group in enumerate(saved["param_groups"])
        for name in group["params"]
    }
    result = []
    for g, members in enumerate(groups):
        origins = {home[named.fqn] for named in members if named.fqn in home}
        require_same_options(g, origins, saved["param_groups"])
        options = dict(saved["param_groups"][origins.pop()] if origins else own[g])
        # In the order of the parameters, which is the optimizer's.
        options.pop("param_names", None)
        if "param_names" in own[g]:
            options["param_names"] = own[g]["param_names"]
        result.append({**options, "params": [named.fqn for named in members]})
    return result


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return the state dict keyed by parameter names or by the optimizer's numbers.

    The result has new dicts around the same values.

    Args:
        optim_state_dict: the state dict, ``{"state": ..., "param_groups": ...}``, of
            all parameters or of some.
        optim_state_key_type: ``PARAM_NAME`` for names of ``model``, or ``PARAM_ID`` for
            numbers, which count the parameters in the order of ``optim.state_dict()``.
        model: the model that gives the names; need not be sharded.
        optim_input: parameters or groups from which the optimizer was or will be made;
            used only without ``optim``. Default: a single group of all parameters.
        optim: the optimizer; default: use ``optim_input``.

    Returns: the state dict with the requested keys.

    Raises: CheckpointError, for a key that ``model`` or ``optim`` does not know, or if
    names and numbers are mixed; TypeError, if ``optim_state_key_type`` is no key type.
    """
    kind = by_name(
        OptimStateKeyType, optim_state_key_type, argument="optim_state_key_type"
    )
    what = "rekey_optim_state_dict"
    own = groups_of(model, optim, optim_input, what)
    groups = name_parameters(model, own)
    found = state_by_name(optim_state_dict, model, groups, own, what, partial=True)
    if kind is OptimStateKeyType.PARAM_NAME:
        return found
    # ``optim.state_dict()`` numbers the parameters through all groups.
    numbers = {named.fqn: n for n, named in enumerate(chain.from_iterable(groups))}
    result = _rekeyed(found, numbers)
    for group in result["param_groups"]:
        # An optimizer assigns numbers by position.
        group["params"].sort()
    return result
