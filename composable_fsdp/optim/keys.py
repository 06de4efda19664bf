"""Convert the keys of an optimizer state dict to the plain model's names.

Keys may be numbers (as in ``optim.state_dict()``) or names. An ambiguous key raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composable_fsdp.comm.placements import placement_of
from composable_fsdp.config import OptimStateKeyType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import strip_wrapper, takes_optimizer
from composable_fsdp.optim.names import (
    Group,
    Named,
    Table,
    made_over,
    name_parameters,
    require_pair,
    require_same_options,
)
from composable_fsdp.planning.options import by_name

Keys = dict[Any, Any]
"""Maps a key of the given state dict to the key in the result."""


def state_by_name(saved: Any, table: Table, what: str) -> dict[str, Any]:
    """Return ``saved`` with the plain model's names as keys; new dicts, same values."""
    wanted = ("state", "param_groups")
    if not isinstance(saved, dict) or any(key not in saved for key in wanted):
        got = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved)
        raise CheckpointError(
            f"{what} expects a dict with the keys 'state' and 'param_groups', got "
            f"{got if isinstance(got, list) else got.__name__}. Pass what "
            "optim_state_dict(model, optim) returned."
        )
    listed = [key for group in saved["param_groups"] for key in group["params"]]
    keys = [*saved["state"], *listed]
    if all(isinstance(key, int) for key in keys):
        known = _of_numbers(saved, listed, table, what)
    elif all(isinstance(key, str) for key in keys):
        known = _of_names(keys, table)
    else:
        raise CheckpointError(
            f"{what} expects a state keyed by names or by numbers; got both: "
            f"{[k for k in keys if isinstance(k, str)][:3]} and "
            f"{[k for k in keys if not isinstance(k, str)][:3]}. Pass what "
            "optim_state_dict(model, optim) or optim.state_dict() returned."
        )
    _require_once(known, saved["state"], what)
    _require_once(known, listed, what)
    # Unknown keys stay as they are, and are refused below.
    named = _rekeyed(saved, known)
    _require_same_names(table.members, named)
    return named


def _require_once(known: Keys, keys: Iterable[Any], what: str) -> None:
    """Refuse two keys for the same parameter, because either may be the right key."""
    first: dict[str, Any] = {}
    for key in keys:
        name = known.get(key, key)
        if name in first:
            raise CheckpointError(
                f"{what} got two keys for parameter {name!r}: {first[name]!r} and "
                f"{key!r}. Leave one of them out."
            )
        first[name] = key


def _rekeyed(saved: dict[str, Any], known: Keys) -> dict[str, Any]:
    """Return ``saved`` with the keys that ``known`` has replaced."""
    return {
        **saved,
        "state": {known.get(key, key): v for key, v in saved["state"].items()},
        "param_groups": [
            {**group, "params": [known.get(key, key) for key in group["params"]]}
            for group in saved["param_groups"]
        ],
    }


def _of_numbers(
    saved: dict[str, Any], numbers: list[int], table: Table, what: str
) -> Keys:
    """Map numbers to names by ``param_names``, else by position in the groups."""
    theirs = saved["param_groups"]
    names = [name for group in theirs for name in group.get("param_names", ())]
    # Better than positions, because the order of parameters may have changed.
    if len(names) == len(numbers) > 0:
        known = _of_names(names, table)
        if len({known.get(name) for name in names} - {None}) == len(names):
            return {i: known[name] for i, name in zip(numbers, names, strict=True)}
    fqns = [named.fqn for named in table.members]
    given, sizes = [len(g["params"]) for g in theirs], list(map(len, table.groups))
    if given != sizes:
        raise CheckpointError(
            f"{what} got a state keyed by numbers, which count the parameters of "
            f"groups of {given}; the optimizer's groups have {sizes}, so the numbers "
            "mean other parameters. Save with optim_state_dict(model, optim), which "
            "gives names."
        )
    return dict(zip(numbers, fqns, strict=True))


def _of_names(keys: list[str], table: Table) -> Keys:
    """Map given names to the model's names."""
    members = table.members
    # First the names in use; a tied parameter has several, and all are accepted.
    known: Keys = {named.fqn: named.fqn for named in members}
    mine = {id(named.parameter): named.fqn for named in members}
    for name, parameter in table.model.named_parameters(remove_duplicate=False):
        if id(parameter) in mine:
            known.setdefault(strip_wrapper(name), mine[id(parameter)])
    found = {key: known.get(strip_wrapper(key)) for key in keys}
    return {key: name for key, name in found.items() if name is not None}


def _require_same_names(members: list[Named], saved: dict[str, Any]) -> None:
    """Refuse names that are missing in ``saved`` and names that are left over."""
    theirs = {name for group in saved["param_groups"] for name in group["params"]}
    # A parameter that no unit shards (an ignored one, an adapter) may be new, and
    # starts without state, as with FSDP1. Not by ``is_cut``: the same state is accepted
    # or refused at every world size.
    missing = sorted(
        named.fqn
        for named in members
        if named.fqn not in theirs
        and named.handle is not None
        and placement_of(named.handle.layout.plan.options.chosen).states
    )
    known = {named.fqn for named in members}
    extra = sorted((theirs | set(saved["state"])) - known)
    if missing or extra:
        raise CheckpointError(
            f"The optimizer state is of another model: missing {missing or 'nothing'}, "
            f"left over {extra or 'nothing'}. Load it into an optimizer over the same "
            "parameters."
        )


def aligned_groups(table: Table, saved: dict[str, Any]) -> list[Group]:
    """Return the optimizer's groups with the saved options, found by names."""
    theirs = saved["param_groups"]
    home = {name: i for i, group in enumerate(theirs) for name in group["params"]}
    result = []
    for g, (members, own) in enumerate(zip(table.groups, table.own, strict=True)):
        origins = {home[named.fqn] for named in members if named.fqn in home}
        require_same_options(g, origins, theirs)
        options = dict(theirs[origins.pop()] if origins else own)
        # In the order of the parameters, which is the optimizer's.
        options.pop("param_names", None)
        if "param_names" in own:
            options["param_names"] = own["param_names"]
        result.append({**options, "params": [named.fqn for named in members]})
    return result


@takes_optimizer
def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Iterable[Any] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return the state dict keyed by parameter names or by the optimizer's numbers.

    The result has new dicts around the same values.

    Args:
        optim_state_dict: the state dict, ``{"state": ..., "param_groups": ...}``.
        optim_state_key_type: ``PARAM_NAME`` for names of ``model``, or ``PARAM_ID`` for
            numbers, which count the parameters in the order of ``optim.state_dict()``.
        model: the model that gives the names; need not be sharded.
        optim_input: parameters or groups from which the optimizer was or will be made;
            used only without ``optim``. Default: a single group of all parameters.
        optim: the optimizer; default: use ``optim_input``.

    Raises: CheckpointError, for a key that ``model`` or ``optim`` does not know, or if
        names and numbers are mixed; TypeError, for another ``optim_state_key_type``.
    """
    kind = by_name(
        OptimStateKeyType, optim_state_key_type, argument="optim_state_key_type"
    )
    what = "rekey_optim_state_dict"
    optim = made_over(model, optim, optim_input)
    require_pair(model, optim, what)
    table = name_parameters(model, optim.param_groups)
    found = state_by_name(optim_state_dict, table, what)
    if kind is OptimStateKeyType.PARAM_NAME:
        return found
    # ``optim.state_dict()`` numbers the parameters through all groups.
    result = _rekeyed(found, {named.fqn: n for n, named in enumerate(table.members)})
    for group in result["param_groups"]:
        # An optimizer assigns numbers by position.
        group["params"].sort()
    return result
