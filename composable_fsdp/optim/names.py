"""The plain model's name of each parameter in an optimizer, and state by names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.placements import placement_of
from composable_fsdp.config import OptimStateKeyType
from composable_fsdp.errors import CheckpointError, warn
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.param_ref import ParamRef, find_param
from composable_fsdp.naming import join_name, strip_wrapper, takes_optimizer
from composable_fsdp.optim.flat_state import is_scalar, originals
from composable_fsdp.planning import walk
from composable_fsdp.planning.options import by_name
from composable_fsdp.tree.root import meet_over
from composable_fsdp.tree.state import _FSDPState

Group = dict[str, Any]

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter of an optimizer: name, and place if a unit holds the parameter."""

    fqn: str
    parameter: torch.Tensor
    ref: ParamRef | None

    @property
    def handle(self) -> FlatParamHandle | None:
        """The unit; None if no unit holds the parameter."""
        return self.ref.handle if self.ref else None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The shard group of the unit; None if every rank holds the parameter whole."""
        return self.ref.handle.groups.shard if self.ref else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter in the plain model."""
        return self.ref.shape if self.ref else tuple(self.parameter.shape)

    @property
    def is_cut(self) -> bool:
        """Whether the parameter is sharded over more than one rank."""
        return self.ref is not None and self.ref.is_cut

    @property
    def holders(self) -> range:
        """The ranks of the shard group that hold elements; all if there are none."""
        assert self.ref is not None
        return self.ref.region.layout.holders(self.ref.slot)

    @property
    def is_absent(self) -> bool:
        """Whether other ranks hold elements and this rank has none to step on."""
        return is_absent(self.parameter)

    @property
    def has_absent(self) -> bool:
        """Whether some rank of the shard group holds no element; equal on all ranks."""
        assert self.ref is not None
        return len(self.holders) < self.ref.region.layout.world_size

    def is_scalar(self, name: str, value: Any) -> bool:
        """Return whether this rank's state ``value`` is a scalar, not element-wise."""
        return is_scalar(name, value, self.parameter.shape)


@dataclass(frozen=True, slots=True)
class Table:
    """The parameters of an optimizer by group, and the options of the groups."""

    model: nn.Module
    groups: list[list[Named]] = field(default_factory=list)
    own: list[Group] = field(default_factory=list)

    @property
    def members(self) -> list[Named]:
        """The parameters of all groups."""
        return list(chain.from_iterable(self.groups))


def is_absent(parameter: object) -> bool:
    """Return whether only other ranks hold elements of a unit's parameter."""
    if not isinstance(parameter, torch.Tensor) or parameter.numel():
        return False
    found = find_param(parameter)
    # A flat parameter is stepped even if this rank's shard is only padding.
    return found is not None and found.slot.numel > 0 and found.region.flat is None


def require_pair(model: object, optim: object, what: str) -> None:
    """Raise TypeError unless they are a module and have ``param_groups``."""
    # Not ``Optimizer``, of which wrappers need not be subclasses.
    if not isinstance(model, nn.Module) or not hasattr(optim, "param_groups"):
        raise TypeError(
            f"{what} expects a model and its optimizer, got a {type(model).__name__} "
            f"and a {type(optim).__name__}. Of several optimizers, ask for the state "
            "of each."
        )


def optimizers_of(optim: object) -> list[Any]:
    """Return ``optim`` as a list, whether a single optimizer or a list or tuple."""
    found = list(optim) if isinstance(optim, (list, tuple)) else [optim]
    homes: dict[int, int] = {}
    for n, each in enumerate(found):
        for g, group in enumerate(originals(getattr(each, "param_groups", []))):
            for i, parameter in enumerate(group["params"]):
                if homes.setdefault(id(parameter), n) != n:
                    raise CheckpointError(
                        f"Parameter {i} of group {g} of optimizer {n}, of shape "
                        f"{tuple(parameter.shape)}, is in optimizer "
                        f"{homes[id(parameter)]} as well, and a state is kept by the "
                        "names of parameters. Give each optimizer its own."
                    )
    return found


def made_over(
    model: nn.Module, optim: Optimizer | None, optim_input: Iterable[Any] | None
) -> Any:
    """Return ``optim``, or an optimizer over ``optim_input`` or over all parameters."""
    if optim is not None:
        return optim
    given: Iterable[Any] = model.parameters() if optim_input is None else optim_input
    # Copies, because the constructor writes its own options into the groups.
    copies: list[Any] = [{**g} if isinstance(g, dict) else g for g in given]
    return torch.optim.SGD(copies)


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


def given_names(optim: object) -> dict[int, str]:
    """Return the names that ``optim`` itself keeps for parameters, by ``id``."""
    names: dict[int, str] = {}
    # torch's ``_NamedOptimizer`` and TorchRec's optimizers keep a mapping.
    for attribute in ("named_parameters", "params"):
        table = getattr(optim, attribute, None)
        if isinstance(table, Mapping):
            names.update((id(parameter), str(key)) for key, parameter in table.items())
    # Of an optimizer that was made of ``named_parameters()``.
    for group in getattr(optim, "param_groups", ()):
        pairs = zip(group["params"], group.get("param_names", ()), strict=False)
        names.update((id(parameter), name) for parameter, name in pairs)
    return names


def name_parameters(
    model: nn.Module,
    param_groups: Iterable[Group],
    given: Mapping[int, str] | None = None,
) -> Table:
    """Name the parameters of each group as ``model`` does, flat ones by originals."""
    table = Table(model, own=originals(list(param_groups)))
    names = names_of(model)
    names |= _names_behind(names, table.own)
    # Two parameters of one name would share a key.
    taken = set(names.values())
    for g, group in enumerate(table.own):
        members = []
        for i, parameter in enumerate(group["params"]):
            fqn = names.get(id(parameter)) or (given or {}).get(id(parameter))
            if fqn is None or (id(parameter) not in names and fqn in taken):
                raise CheckpointError(
                    f"Parameter {i} of the optimizer's group {g}, of shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the "
                    f"{type(model).__name__} it was asked about. Pass the model that "
                    "the optimizer trains. For a parameter of no model, make the "
                    "optimizer of (name, parameter) pairs, with names that the model "
                    "does not use."
                )
            members.append(Named(fqn, parameter, find_param(parameter)))
        table.groups.append(members)
    return table


def _names_behind(names: Mapping[int, str], groups: Iterable[Group]) -> dict[int, str]:
    """Return names, by ``id``, of sharded parameters behind full ones in modules."""
    found = (find_leaf(each) for group in groups for each in group["params"])
    behind: dict[int, str] = {}
    for handle in dict.fromkeys(place[0] for place in found if place is not None):
        for table, key, sharded, _ in handle.swaps:
            name = names.get(id(table.get(key)))
            if name is not None and id(sharded) not in names:
                behind.setdefault(id(sharded), name)
    return behind


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter in the tree of ``model``, by ``id``."""
    # By its places: a parameter that ``named_parameters()`` leaves out has a name, too.
    places: dict[int, list[str]] = {}
    for path, module in walk.named(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(join_name(path, name))
    names: dict[int, str] = {}
    # A class may override ``named_parameters``, and its checkpoints have these names.
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), strip_wrapper(name))
    moved = [key for key, name in names.items() if name not in places.get(key, [name])]
    if moved:
        warn(
            f"{type(model).__name__}.named_parameters() gives {names[moved[0]]!r} for "
            f"the parameter at {places[moved[0]][0]!r}"
            f"{f' (and so on, {len(moved)} in all)' if len(moved) > 1 else ''}: some "
            "module overrides named_parameters or named_modules. Optimizer states are "
            "keyed by the names that it gives.",
        )
    return {**{key: found[0] for key, found in places.items()}, **names}


def meet_for_state(
    units: Sequence[_FSDPState],
    what: str,
    *details: str,
    replicas: bool = False,
) -> None:
    """Wait until every rank of the units calls ``what``."""
    meet_over(units, Call(what, details=details), replicas=replicas)


def shard_groups(units: Sequence[_FSDPState]) -> list[dist.ProcessGroup]:
    """Return the shard groups of the units, each once, in the order of the units."""
    groups = [unit.handle.groups.shard for unit in units]
    return list(dict.fromkeys(group for group in groups if group is not None))


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
