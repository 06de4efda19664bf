"""Which unit each parameter of a tree belongs to: one walk, from left to right.

A parameter goes to the nearest unit above it. Subtrees that an earlier application of
``fully_shard`` or an incompatible API holds are not entered. A parameter that is found
under two units would be gathered by one and used by both, so it is refused, or promoted
to the lowest unit above all its places.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from composable_fsdp.compose.registry import (
    foreign_fsdp,
    get_state,
    incompatible_api,
    other_apis,
)
from composable_fsdp.config import ShardingStrategy
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.naming import TRANSPARENT, join_name, quoted
from composable_fsdp.planning import walk
from composable_fsdp.planning.checks import (
    SUSPECT,
    refuse_container,
    refuse_module,
    refuse_overlapping_storage,
    refuse_parameter,
    share_storage,
)
from composable_fsdp.planning.options import UnitOptions, as_keywords, override
from composable_fsdp.planning.policies import evaluate_policy
from composable_fsdp.planning.precision import with_full_precision

API = "fully_shard"
"""Name under which the registry holds the states of this package."""

REPLICATE = "replicate"
"""The same for units of ``replicate``, whose subtrees the walks leave alone."""


class Place(NamedTuple):
    """One place of a parameter, without the module: units of equal build share it.

    ``primary`` is the first owner's name from the unit, ``slot_index`` tells parameters
    apart (in a list of modules two may bear one name).
    """

    fqn: str
    name: str
    primary: str
    slot_index: int


class ParamInfo(NamedTuple):
    """One place of a parameter: ``module._parameters[name]``, ``fqn`` from the unit.

    The rest is as in ``Place``.
    """

    fqn: str
    module: nn.Module
    name: str
    primary: str
    slot_index: int


class PlanRequest(NamedTuple):
    """Everything a plan depends on besides the tree.

    ``owner_of`` tells which unit of an earlier application holds a parameter, if any.
    ``sizes`` gives, by strategy, the ranks that share a unit's parameters and the
    number of copies; the default is one group of ``world_size`` ranks.
    """

    options: UnitOptions
    world_size: int
    sizes: Callable[[ShardingStrategy], tuple[int, int]] | None = None
    api: str = API
    policy: object = None
    ignored_modules: frozenset[nn.Module] = frozenset()
    ignored_parameters: frozenset[int] = frozenset()
    tied_params: str = "error"
    owner_of: Callable[[nn.Parameter], str | None] = lambda parameter: None


Chain = tuple[tuple[int, int], ...]
"""Units from the root down to the nearest: (index, length of its module's name)."""


class Occurrence(NamedTuple):
    chain: Chain
    fqn: str
    module: nn.Module
    name: str


@dataclass(slots=True)
class Unit:
    fqn: str
    modules: tuple[nn.Module, ...]
    options: UnitOptions
    parent: int = 0
    parameters: list[tuple[nn.Parameter, list[Occurrence]]] = field(
        default_factory=list
    )
    members: list[nn.Module] = field(default_factory=list)
    """Its modules and those below them that are nearest to it, in walking order."""
    units_below: list[object] = field(default_factory=list)


def assign_units(modules: Sequence[nn.Module], request: PlanRequest) -> list[Unit]:
    """Return the units with their parameters, in ``.modules()`` order.

    Only reads.

    Raises: PlanError or CompositionError, naming module, parameter and the way out.
    """
    for module in modules:
        _check_root(module, request.api)
        if module in request.ignored_modules:
            warnings.warn(_IGNORED_ITSELF.format(type(module).__name__), stacklevel=2)
    units, found = _walk(modules, _evaluate(modules, request), request)
    if share_storage([parameter for parameter, _ in found.values()]):
        refuse_overlapping_storage([(o[0].fqn, p) for p, o in found.values()])
    for parameter, places in found.values():
        index = _unit_of(places, units, request) if len(units) > 1 else 0
        units[index].parameters.append((parameter, places))
    return units


_IGNORED_ITSELF = (
    "ignored_modules or ignored_states name the {} that is to be sharded, so none of "
    "its parameters is. Leave it out of them to shard it; to leave it as it is, do not "
    "apply anything to it."
)


def _check_root(module: nn.Module, api: str) -> None:
    refuse_container(module)
    if api == REPLICATE and get_state(module, API) is not None:
        raise CompositionError(
            f"replicate got a {type(module).__name__} that fully_shard already "
            "manages, gradients included. Apply replicate to a module above it, to "
            "what fully_shard left over, or use HYBRID_SHARD."
        )
    if foreign := foreign_fsdp(module):
        raise CompositionError(_foreign_text("", foreign))
    if (other := incompatible_api(module)) and other != api:
        raise CompositionError(
            f"{api} got a {type(module).__name__} that {other} already manages; "
            "the two keep parameters in different places. Apply one of them to this "
            "module."
        )


def _foreign_text(fqn: str, foreign: str) -> str:
    return (
        f"Module {quoted(fqn)} is sharded by {foreign}; this package would shard its "
        "pieces again. Use one of the two for the whole model: remove the other call, "
        "or replace it by composable_fsdp's (docs: names of FSDP1 and FSDP2 beside "
        "ours)."
    )


def _evaluate(
    modules: Sequence[nn.Module], request: PlanRequest
) -> Mapping[nn.Module, Mapping[str, Any]]:
    if request.policy is None:
        return {}
    if len(modules) != 1:
        raise PlanError(
            f"A policy looks for units below one module; got a list of {len(modules)}. "
            "Apply fully_shard with the policy to each module, or pass the list "
            "without a policy."
        )
    boundaries = frozenset(
        m for m in walk.modules(modules[0]) if m is not modules[0] and _is_boundary(m)
    )
    root_kwargs = as_keywords(request.options)
    targets = evaluate_policy(
        request.policy,
        modules[0],
        ignored_modules=request.ignored_modules,
        ignored_params=request.ignored_parameters,
        boundaries=boundaries,
        root_kwargs=root_kwargs,
    )
    return with_full_precision(
        targets,
        modules[0],
        mixed_precision=request.options.mixed_precision,
        left_out=walk.subtrees([*request.ignored_modules, *boundaries]),
        root_kwargs=root_kwargs,
    )


def _is_boundary(module: nn.Module) -> bool:
    return get_state(module, API) is not None or incompatible_api(module) is not None


_Found = dict[int, tuple[nn.Parameter, list[Occurrence]]]


def _walk(
    modules: Sequence[nn.Module],
    overrides: Mapping[nn.Module, Mapping[str, Any]],
    request: PlanRequest,
) -> tuple[list[Unit], _Found]:
    """Visit every path from left to right; shared modules are met once per path."""
    units = [Unit("", tuple(modules), request.options)]
    index_of = {id(module): 0 for module in modules}
    found: _Found = {}
    skipped: list[tuple[str, nn.Module]] = []
    stack: list[tuple[nn.Module, str, Chain]] = [(m, "", ()) for m in reversed(modules)]
    while stack:
        module, fqn, chain = stack.pop()
        index = index_of.get(id(module))
        if index is None and module in overrides:
            index = index_of[id(module)] = len(units)
            options = override(request.options, overrides[module], fqn=fqn)
            units.append(Unit(fqn, (module,), options, chain[-1][0]))
        if index is not None:
            # A name is relative to the unit's module: its path is that many characters.
            chain = (*chain, (index, len(fqn)))
        nearest = units[chain[-1][0]]
        nearest.members.append(module)
        if module not in request.ignored_modules:
            _note_parameters(module, fqn, chain, found, request)
        for name, child in reversed(module._modules.items()):
            if child is None:
                continue
            path = fqn if name in TRANSPARENT else join_name(fqn, name)
            incompatible, foreign = other_apis(child)
            if foreign:
                raise CompositionError(_foreign_text(path, foreign))
            below = get_state(child, API)
            if below is not None and id(child) not in index_of:
                nearest.units_below.append(below)
            elif child not in request.ignored_modules and not incompatible:
                stack.append((child, path, chain))
            else:
                skipped.append((path, child))
    for path, child in skipped:
        _refuse_outside_use(path, child, found)
    return units, found


def _refuse_outside_use(fqn: str, module: nn.Module, found: _Found) -> None:
    """Refuse a parameter that a skipped subtree uses too: it would see only a shard."""
    for inner in walk.modules(module):
        for name, parameter in inner._parameters.items():
            if parameter is None or id(parameter) not in found:
                continue
            where = join_name(fqn, join_name(walk.name_of(module, inner), name))
            raise PlanError(
                f"Parameter {quoted(found[id(parameter)][1][0].fqn)} is tied to "
                f"{quoted(where)}, which is ignored (ignored_modules, or replicate): "
                "that module would compute with this rank's shard. Ignore both places, "
                "or neither."
            )


def _note_parameters(
    module: nn.Module,
    fqn: str,
    chain: Chain,
    found: _Found,
    request: PlanRequest,
) -> None:
    """Add the module's own parameters, and refuse those that cannot be sharded."""
    if isinstance(module, SUSPECT):
        refuse_module(module, fqn)
    prefix = f"{fqn}." if fqn else ""
    for name, parameter in module._parameters.items():
        if parameter is None or id(parameter) in request.ignored_parameters:
            continue
        where = prefix + name
        owner = request.owner_of(parameter)
        if owner is not None:
            raise PlanError(_owned_text(where, owner))
        refuse_parameter(parameter, where)
        place = Occurrence(chain, where, module, name)
        known = found.get(id(parameter))
        if known is None:
            found[id(parameter)] = (parameter, [place])
        else:
            known[1].append(place)


def _owned_text(where: str, owner: str) -> str:
    return (
        f"Parameter {quoted(where)} is tied to {owner}, which another fully_shard "
        "call already manages: one unit would gather it and both would use it. "
        "Apply fully_shard to the lowest module that holds both places, instead of "
        "to the inner one."
    )


def _unit_of(places: list[Occurrence], units: list[Unit], request: PlanRequest) -> int:
    """Index of the unit that takes a parameter: the nearest above all its places."""
    if len(places) == 1:
        return places[0].chain[-1][0]
    nearest = {place.chain[-1][0] for place in places}
    if len(nearest) == 1:
        return nearest.pop()
    common = 0
    for steps in zip(*(place.chain for place in places), strict=False):
        if len({index for index, _ in steps}) > 1:
            break
        common = steps[0][0]
    if request.tied_params == "promote":
        return common
    first = places[0]
    other = next(p for p in places if p.chain[-1][0] != first.chain[-1][0])
    ancestor = lowest_common_ancestor([place.fqn for place in places])
    raise PlanError(
        f"Parameter {quoted(first.fqn)} of unit "
        f"{quoted(units[first.chain[-1][0]].fqn)} "
        f"is the same object as {quoted(other.fqn)} of unit "
        f"{quoted(units[other.chain[-1][0]].fqn)}: one unit would gather it and both "
        f"would use it. Their lowest common ancestor is {quoted(ancestor)}: shard that "
        "module as one unit and leave the two out of the policy, or pass "
        "tied_params='promote' to keep the parameter in the unit that holds both."
    )


def lowest_common_ancestor(fqns: Sequence[str]) -> str:
    """Name of the deepest module that holds all the parameters named.

    >>> lowest_common_ancestor(["enc.emb.weight", "enc.head.weight"])
    'enc'
    """
    shared: list[str] = []
    for parts in zip(*(fqn.split(".")[:-1] for fqn in fqns), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
