"""Convert the keys of an optimizer state dict to the plain model's names.

Keys may be numbers (as in ``optim.state_dict()``), the plain model's names, or the
names that the optimizer was made with (``param_names``). An ambiguous key raises; keys
are never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from composable_fsdp.config import OptimStateKeyType, ShardingStrategy
from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.optim.names import Group, Named, groups_of, name_parameters
from composable_fsdp.planning.options import by_name

Table = dict[Any, str]
"""Maps a key of the given state dict to the plain model's name."""


def state_by_name(
    saved: Any, model: nn.Module, groups: list[list[Named]], own: list[Group], what: str
) -> dict[str, Any]:
    """Return ``saved`` with the plain model's names as keys; new dicts, same values.

    Raises: CheckpointError, listing names that are missing, left over or given twice,
    or if numbers and names are mixed.
    """
    _require_form(saved, what)
    keys = [*saved["state"], *(k for g in saved["param_groups"] for k in g["params"])]
    if all(isinstance(key, int) for key in keys):
        table = _of_numbers(saved, model, groups, own, what)
    elif all(isinstance(key, str) for key in keys):
        table = _of_names(keys, model, groups, own)
    else:
        raise CheckpointError(
            f"{what} expects a state keyed by names or by numbers; got both: "
            f"{[k for k in keys if isinstance(k, str)][:3]} and "
            f"{[k for k in keys if not isinstance(k, str)][:3]}. Pass what "
            "optim_state_dict(model, optim) or optim.state_dict() returned."
        )
    named = {
        **saved,
        # Unknown keys stay unchanged; ``_require_same_names`` reports them.
        "state": {table.get(key, key): v for key, v in saved["state"].items()},
        "param_groups": [
            {**group, "params": [table.get(key, key) for key in group["params"]]}
            for group in saved["param_groups"]
        ],
    }
    _require_once(table, saved, what)
    _require_same_names(groups, named)
    return named


def _require_form(saved: Any, what: str) -> None:
    """Raise CheckpointError unless ``saved`` has the keys of an optimizer state."""
    wanted = ("state", "param_groups")
    if not isinstance(saved, dict) or any(key not in saved for key in wanted):
        got = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved)
        raise CheckpointError(
            f"{what} expects a dict with the keys 'state' and 'param_groups', got "
            f"{got if isinstance(got, list) else got.__name__}. Pass what "
            "optim_state_dict(model, optim) returned."
        )


def _of_numbers(
    saved: dict[str, Any],
    model: nn.Module,
    groups: list[list[Named]],
    own: list[Group],
    what: str,
) -> Table:
    """Map numbers to names by ``param_names``, else by position in the groups."""
    theirs = saved["param_groups"]
    names = [name for group in theirs for name in group.get("param_names", ())]
    numbers = [number for group in theirs for number in group["params"]]
    # Saved names are better than positions, because the order of parameters may have
    # changed. Use them only if every name is known and different.
    if len(names) == len(numbers) > 0:
        known = _of_names(names, model, groups, own)
        if len({known.get(name) for name in names} - {None}) == len(names):
            return {i: known[name] for i, name in zip(numbers, names, strict=True)}
    sizes = [len(members) for members in groups]
    if [len(group["params"]) for group in theirs] != sizes:
        raise CheckpointError(
            f"{what} got a state keyed by numbers, which count the parameters of "
            f"groups of {[len(group['params']) for group in theirs]}; the optimizer's "
            f"groups have {sizes}, so the numbers mean other parameters. Save with "
            "optim_state_dict(model, optim), which gives names."
        )
    fqns = [named.fqn for members in groups for named in members]
    return dict(zip(numbers, fqns, strict=True))


def _of_names(
    keys: list[str], model: nn.Module, groups: list[list[Named]], own: list[Group]
) -> Table:
    """Map given names to the model's names."""
    members = [named for group_members in groups for named in group_members]
    # Start with the names in use, so that no other name of a tied parameter replaces
    # them.
    known: Table = {named.fqn: named.fqn for named in members}
    mine = {id(named.parameter): named.fqn for named in members}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in mine:
            # A tied parameter has several names; accept all of them.
            known.setdefault(strip_wrapper(name), mine[id(parameter)])
    given = [name for group in own for name in group.get("param_names", ())]
    made_with: Table = {}
    if len(given) == len(members):
        made_with = dict(zip(given, (m.fqn for m in members), strict=True))
    lookups: list[Callable[[str], str | None]] = [
        lambda key: known.get(strip_wrapper(key)),
        made_with.get,
    ]
    found = [{key: lookup(key) for key in keys} for lookup in lookups]
    # All keys must come from the same table: a mixture of both would be a guess.
    whole = next((table for table in found if None not in table.values()), found[0])
    return {key: name for key, name in whole.items() if name is not None}


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


def _require_same_names(groups: list[list[Named]], saved: dict[str, Any]) -> None:
    """Refuse names that are missing in ``saved`` and names that are left over."""
    ours = {named.fqn: named for members in groups for named in members}
    theirs = {name for group in saved["param_groups"] for name in group["params"]}
    # A parameter that no unit shards (an ignored parameter, an adapter) may be new. The
    # parameter starts without state then, as with FSDP1.
    missing = sorted(
        name
        for name, named in ours.items()
        if name not in theirs and _may_be_cut(named)
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
    # Do not ask ``is_cut``, which depends on the world size: the same state has to be
    # accepted or refused at every world size.
    if named.handle is None:
        return False
    return named.handle.layout.plan.options.strategy is not ShardingStrategy.NO_SHARD


def _options(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the options of a group, sorted by name, for a comparison."""
    return sorted(
        (k, v) for k, v in group.items() if k not in ("params", "param_names")
    )


def require_same_options(
    g: int, origins: set[int], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a group whose parameters come from saved groups with different options.

    Raises: CheckpointError.
    """
    # Compare representations, because options may be unhashable (lists, dicts).
    if len({repr(_options(saved[origin])) for origin in origins}) > 1:
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

    Raises: CheckpointError, for a group whose parameters were in saved groups with
    different options.
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
        # All groups in ``origins`` have equal options.
        options = dict(saved["param_groups"][origins.pop()] if origins else own[g])
        # ``param_names`` must be in the order of the parameters. The order is the
        # optimizer's, so the names have to be the optimizer's, too.
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
        optim_state_dict: the state dict, ``{"state": ..., "param_groups": ...}``.
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
    found = state_by_name(optim_state_dict, model, groups, own, what)
    if kind is OptimStateKeyType.PARAM_NAME:
        return found
    # ``optim.state_dict()`` numbers the parameters through all groups.
    table = {named.fqn: n for n, named in enumerate(chain.from_iterable(groups))}
    return {
        **found,
        "state": {table[k]: v for k, v in found["state"].items()},
        "param_groups": [
            # Sort the numbers, because an optimizer assigns numbers by position.
            {**group, "params": sorted(table[key] for key in group["params"])}
            for group in found["param_groups"]
        ],
    }
