"""Which parameter of the plain model each of an optimizer's parameters is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from composable_fsdp.access.single import region_of
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import TRANSPARENT, join_name, strip_wrapper
from composable_fsdp.optim.flat_state import originals
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.planning.walk import edges


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter of the optimizer: its name, and its slot if a unit holds it."""

    fqn: str
    parameter: torch.Tensor
    handle: FlatParamHandle | None
    region: FlatParameter | None
    slot: ParameterSlot | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the plain model."""
        return self.slot.shape if self.slot else tuple(self.parameter.shape)

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold parts of it."""
        return self.handle is not None and self.handle.groups.shard is not None

    @property
    def holders(self) -> range:
        """The ranks of the shard group that hold elements of it; all, of an empty one.

        Of a parameter that a unit holds.
        """
        assert self.region is not None
        assert self.slot is not None
        return self.region.layout.holders(self.slot)

    @property
    def is_absent(self) -> bool:
        """Whether other ranks hold elements of it, and this one has none to step on."""
        return is_absent(self.parameter)

    @property
    def speaks_for_absent(self) -> bool:
        """Whether this rank is the first that holds elements, and another has none."""
        assert self.region is not None
        return self.has_absent and self.region.rank == self.holders[0]

    @property
    def has_absent(self) -> bool:
        """Whether a rank of the shard group holds nothing of it; alike on all."""
        assert self.region is not None
        return len(self.holders) < self.region.layout.world_size


def require_pair(model: object, optim: object, what: str) -> None:
    """Raise TypeError in the name of ``what`` unless this is a model and an optimizer.

    An optimizer is what has ``param_groups``: some wrap one and are none.
    """
    if not isinstance(model, nn.Module) or not hasattr(optim, "param_groups"):
        raise TypeError(
            f"{what} expects a model and its optimizer, got a {type(model).__name__} "
            f"and a {type(optim).__name__}."
        )


def require_pairs(model: object, optim: object, what: str) -> list[Any]:
    """As ``require_pair``, of one optimizer or several; they are returned as a list.

    Raises: TypeError; CheckpointError, as ``optimizers_of``.
    """
    found = optimizers_of(optim)
    for each in found:
        require_pair(model, each, what)
    return found


Group = dict[str, Any]
"""One of an optimizer's ``param_groups``."""

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer, or several over different parameters of one model."""


def optimizers_of(optim: object) -> list[Any]:
    """``optim`` as a list: one, or a list or tuple of several.

    Raises: CheckpointError, for a parameter that is in two of them.
    """
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


def groups_of(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: Iterable[Any] | None,
    what: str,
) -> list[Group]:
    """The parameter groups of ``optim``, or those an optimizer would be made from.

    ``optim_input``: parameters or groups, as an optimizer takes them. With neither, one
    group of all parameters, as FSDP1 has it.

    Raises: TypeError in the name of ``what``, for an ``optim`` that is none.
    """
    if optim is not None:
        require_pair(model, optim, what)
        return optim.param_groups
    given = list(model.parameters() if optim_input is None else optim_input)
    if given and not isinstance(given[0], dict):
        return [{"params": given}]
    return [{**group, "params": list(group["params"])} for group in given]


def given_names(optim: object) -> dict[int, str]:
    """The names that ``optim`` itself keeps for parameters, by ``id``.

    Groups have them if it was made of ``named_parameters()``; torch's
    ``_NamedOptimizer`` and TorchRec's optimizers have a mapping.
    """
    names: dict[int, str] = {}
    for attribute in ("named_parameters", "params"):
        table = getattr(optim, attribute, None)
        if isinstance(table, Mapping):
            names.update((id(parameter), str(key)) for key, parameter in table.items())
    for group in getattr(optim, "param_groups", ()):
        pairs = zip(group["params"], group.get("param_names", ()), strict=False)
        names.update((id(parameter), name) for parameter, name in pairs)
    return names


def name_parameters(
    model: nn.Module,
    param_groups: Iterable[Group],
    given: Mapping[int, str] | None = None,
) -> list[list[Named]]:
    """Name the parameters of each of the optimizer's groups, as ``model`` calls them.

    In the place of a flat parameter are its originals. Those that ``model`` does not
    hold have the name that is ``given``, and every rank holds them whole. Units may
    show their full leaves. Only reads.

    Raises: CheckpointError, for a parameter that is not in ``model`` and has no name,
    or one that ``model`` uses.
    Warns: if ``model`` calls a parameter otherwise than its modules do.
    """
    members_of = originals(list(param_groups))
    names = names_of(model)
    names |= _names_behind(names, members_of)
    taken = set(names.values())
    groups = []
    for g, group in enumerate(members_of):
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
            members.append(_named(fqn, parameter))
        groups.append(members)
    return groups


def _names_behind(names: Mapping[int, str], groups: Iterable[Group]) -> dict[int, str]:
    """Names of sharded leaves in whose places full ones are shown, by ``id``."""
    found = (find_leaf(each) for group in groups for each in group["params"])
    handles = {id(place[0]): place[0] for place in found if place is not None}
    behind: dict[int, str] = {}
    for handle in handles.values():
        for table, key, sharded, _ in handle.swaps:
            name = names.get(id(table.get(key)))
            if name is not None and id(sharded) not in names:
                behind.setdefault(id(sharded), name)
    return behind


def names_of(model: nn.Module) -> dict[int, str]:
    """The name of each parameter in the tree of ``model`` by ``id``, the first it has.

    That is what ``model.named_parameters()`` says, without wrappers: a class may
    override it, to show what it wraps as its own. What it leaves out has the name of
    its place. Only reads.

    Warns: if a name is that of no place.
    """
    places: dict[int, list[str]] = {}
    for name, parameter in _places(model):
        places.setdefault(id(parameter), []).append(name)
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), strip_wrapper(name))
    moved = [key for key, name in names.items() if name not in places.get(key, [name])]
    if moved:
        warnings.warn(
            f"{type(model).__name__}.named_parameters() gives {names[moved[0]]!r} for "
            f"the parameter at {places[moved[0]][0]!r}"
            f"{f' (and so on, {len(moved)} in all)' if len(moved) > 1 else ''}: some "
            "module overrides named_parameters or named_modules. Optimizer states are "
            "keyed by the names that it gives.",
            stacklevel=2,
        )
    return {**{key: found[0] for key, found in places.items()}, **names}


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every place of every parameter, by the plain model's names; each module once."""
    stack, seen = [("", model)], set()
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield join_name(path, name), parameter
        for edge in reversed(list(edges(module))):
            inside = path if edge.name in TRANSPARENT else join_name(path, edge.name)
            stack.append((inside, edge.child))


def _named(fqn: str, parameter: torch.Tensor) -> Named:
    found = find_leaf(parameter)
    if found is None:
        return Named(fqn, parameter, None, None, None)
    return Named(fqn, parameter, found[0], *place_of(*found))


def place_of(
    handle: FlatParamHandle, index: int
) -> tuple[FlatParameter, ParameterSlot]:
    """Region and slot of the unit's leaf number ``index``."""
    region, at = region_of(handle, index)
    return region, region.layout.parameters[at]


def is_absent(parameter: object) -> bool:
    """Whether ranks hold elements of a unit's parameter, and this one none.

    It has no state then; unless a flat parameter has it, which steps on padding.
    """
    if not isinstance(parameter, torch.Tensor) or parameter.numel():
        return False
    found = find_leaf(parameter)
    if found is None:
        return False
    region, slot = place_of(*found)
    return slot.numel > 0 and region.flat is None
