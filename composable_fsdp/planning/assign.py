"""Assigns every parameter of a tree to a unit, in a single walk from left to right.

A parameter belongs to the nearest enclosing unit. A parameter with places in several
units is refused, or promoted to the lowest unit above all these places.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from composable_fsdp.compose.registry import (
    get_state,
    incompatible_api,
    other_apis,
)
from composable_fsdp.config import ShardingStrategy
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.naming import join_name, quoted
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
from composable_fsdp.planning.places import API, REPLICATE
from composable_fsdp.planning.precision import with_full_precision

Chosen = Mapping[nn.Module, tuple[nn.Module, ...]]
"""Per unit, its first module in walking order, and all its modules."""


class PlanRequest(NamedTuple):
    """All inputs of a plan besides the tree.

    Args:
        options: the options of the root; a policy overrides options per unit.
        world_size: number of ranks in all.
        sizes: a function from a strategy to (ranks per shard group, replicas). Default
            None: a single shard group of ``world_size`` ranks.
        api: the API that is applied, ``fully_shard`` (default) or ``replicate``.
        policy: returns the units below the root, ``policies.evaluate_policy`` of the
            caller's policy. Default None: no units.
        chosen: the units below the root, instead of ``policy``, with the root's
            options. Default: none.
        ignored_modules: modules whose own parameters stay unsharded; must hold whole
            subtrees. Default: none.
        ignored_parameters: ids of parameters that stay unsharded. Default: none.
        tied_params: "error" (default) or "promote", for parameters tied across units.
        owner_of: returns the unit of an earlier call that holds a parameter, as text
            for a message, or None. Default: None for every parameter.
    """

    options: UnitOptions
    world_size: int
    sizes: Callable[[ShardingStrategy], tuple[int, int]] | None = None
    api: str = API
    policy: Callable[..., Mapping[nn.Module, Mapping[str, Any]]] | None = None
    chosen: Chosen = {}  # noqa: RUF012  # never changed
    ignored_modules: frozenset[nn.Module] = frozenset()
    ignored_parameters: frozenset[int] = frozenset()
    tied_params: str = "error"
    owner_of: Callable[[nn.Parameter], str | None] = lambda parameter: None


Chain = tuple[tuple[int, int], ...]
"""The units from the root down to the nearest.

An entry is (index of the unit, number of characters of the name of its module).
"""


class Occurrence(NamedTuple):
    """A place of a parameter: ``module._parameters[name]``, ``fqn`` from the root.

    ``chain`` are the enclosing units on this path.
    """

    chain: Chain
    fqn: str
    module: nn.Module
    name: str


@dataclass(slots=True)
class Unit:
    """A unit while the walk collects its parameters, each with every place."""

    fqn: str
    modules: tuple[nn.Module, ...]
    options: UnitOptions
    parent: int = 0
    """Index of the enclosing unit; 0 for the root itself."""
    parameters: list[tuple[nn.Parameter, list[Occurrence]]] = field(
        default_factory=list
    )
    members: list[nn.Module] = field(default_factory=list)
    """The modules whose nearest enclosing unit is this unit, in walking order."""
    units_below: list[object] = field(default_factory=list)
    """States of units of earlier calls directly below this unit."""


def assign_units(modules: Sequence[nn.Module], request: PlanRequest) -> list[Unit]:
    """Return the units with their parameters, in ``.modules()`` order.

    The function reads the tree and changes nothing.

    Raises: PlanError or CompositionError, naming the module, the parameter and the
    remedy.
    """
    for module in modules:
        _check_root(module, request.api)
        if module in request.ignored_modules:
            warnings.warn(_IGNORED_ITSELF.format(type(module).__name__), stacklevel=2)
    units, found = _walk(modules, _evaluate(modules, request), request)
    # Comparing intervals sorts all parameters; the cheap test on storages comes first.
    if share_storage([parameter for parameter, _ in found.values()]):
        refuse_overlapping_storage([(o[0].fqn, p) for p, o in found.values()])
    # With a single unit, as in a call per block, every parameter belongs to unit 0.
    if len(units) == 1:
        units[0].parameters.extend(found.values())
        return units
    for parameter, places in found.values():
        units[_unit_of(places, units, request)].parameters.append((parameter, places))
    return units


_IGNORED_ITSELF = (
    "ignored_modules or ignored_states name the {} that is to be sharded, so none of "
    "its parameters is. Leave it out of them to shard it; to leave it as it is, do not "
    "apply anything to it."
)


def _check_root(module: nn.Module, api: str) -> None:
    """Raise if ``api`` cannot be applied to ``module`` itself."""
    refuse_container(module)
    if api == REPLICATE and get_state(module, API) is not None:
        raise CompositionError(
            f"replicate got a {type(module).__name__} that fully_shard already "
            "manages, gradients included. Apply replicate to a module above it, to "
            "what fully_shard left over, or use HYBRID_SHARD."
        )
    other, foreign = other_apis(module)
    if foreign:
        raise CompositionError(_foreign_text("", foreign))
    # ``replicate`` finds its own name here: the contract registers the state before
    # planning.
    if other and other != api:
        raise CompositionError(
            f"{api} got a {type(module).__name__} that {other} already manages; "
            "the two keep parameters in different places. Apply one of them to this "
            "module."
        )


def _foreign_text(fqn: str, foreign: str) -> str:
    """Return the message for a module that torch's FSDP1 or FSDP2 shards already."""
    return (
        f"Module {quoted(fqn)} is sharded by {foreign}; this package would shard its "
        "pieces again. Use one of the two for the whole model: remove the other call, "
        "or replace it by composable_fsdp's (docs: names of FSDP1 and FSDP2 beside "
        "ours)."
    )


def _evaluate(
    modules: Sequence[nn.Module], request: PlanRequest
) -> Mapping[nn.Module, Mapping[str, Any]]:
    """Return the units below the root, with the options of each unit."""
    if request.policy is None:
        return {module: {} for module in request.chosen}
    if len(modules) != 1:
        raise PlanError(
            f"A policy looks for units below one module; got a list of {len(modules)}. "
            "Apply fully_shard with the policy to each module, or pass the list "
            "without a policy."
        )
    # Modules that an earlier call or an incompatible API manages. The policy may not
    # make units of these modules or of modules below.
    boundaries = frozenset(
        m for m in walk.modules(modules[0]) if m is not modules[0] and _is_boundary(m)
    )
    root_kwargs = as_keywords(request.options)
    targets = request.policy(
        modules[0],
        ignored_modules=request.ignored_modules,
        ignored_params=request.ignored_parameters,
        boundaries=boundaries,
        root_kwargs=root_kwargs,
    )
    # Modules of ignored classes become units even if the policy did not select them.
    return with_full_precision(
        targets,
        modules[0],
        mixed_precision=request.options.mixed_precision,
        left_out=walk.subtrees([*request.ignored_modules, *boundaries]),
        root_kwargs=root_kwargs,
    )


def _is_boundary(module: nn.Module) -> bool:
    """Return whether an earlier call or an incompatible API manages ``module``."""
    return get_state(module, API) is not None or incompatible_api(module) is not None


_Found = dict[int, tuple[nn.Parameter, list[Occurrence]]]
"""Per id of a parameter: the parameter, and every place of the parameter."""


def _walk(
    modules: Sequence[nn.Module],
    overrides: Mapping[nn.Module, Mapping[str, Any]],
    request: PlanRequest,
) -> tuple[list[Unit], _Found]:
    """Visit every path from left to right; return the units and the parameters.

    A module that is reachable along two paths is visited once per path.
    """
    units = [Unit("", tuple(modules), request.options)]
    index_of = {id(module): 0 for module in modules}
    found: _Found = {}
    skipped: list[tuple[str, nn.Module]] = []
    # A walk of its own: each path carries the chain of units above, and shared modules
    # are entered once per path. Reversed, because the stack pops the last entry first.
    stack: list[tuple[nn.Module, str, Chain]] = [(m, "", ()) for m in reversed(modules)]
    while stack:
        module, fqn, chain = stack.pop()
        index = index_of.get(id(module))
        # A shared module becomes a unit on the first path; later paths find its index.
        if index is None and module in overrides:
            index = len(units)
            made = request.chosen.get(module, (module,))
            index_of.update((id(each), index) for each in made)
            options = override(request.options, overrides[module], fqn=fqn)
            units.append(Unit(fqn, made, options, chain[-1][0]))
        if index is not None:
            # Names inside a unit are relative to the unit's module: the module's own
            # name has ``len(fqn)`` characters on this path.
            chain = (*chain, (index, len(fqn)))
        nearest = units[chain[-1][0]]
        nearest.members.append(module)
        if module not in request.ignored_modules:
            _note_parameters(module, fqn, chain, found, request)
        for path, child in walk.below(fqn, module) if module._modules else ():
            incompatible, foreign = other_apis(child)
            if foreign:
                raise CompositionError(_foreign_text(path, foreign))
            below = get_state(child, API)
            # The walk does not enter subtrees of earlier calls, of ignored modules and
            # of incompatible APIs. A module of this call also carries a state, because
            # the contract registers the state before planning; ``index_of`` holds the
            # modules of this call.
            if below is not None and id(child) not in index_of:
                nearest.units_below.append(below)
            elif child not in request.ignored_modules and not incompatible:
                stack.append((child, path, chain))
            else:
                skipped.append((path, child))
    # Check after the walk, when ``found`` holds every parameter that gets sharded.
    seen: set[nn.Module] = set()
    for path, child in skipped:
        seen |= _refuse_outside_use(path, child, found, request)
    # Ignored modules that are not below the modules of this call.
    for module in request.ignored_modules - seen:
        _refuse_outside_use(f"({type(module).__name__})", module, found, request)
    return units, found


def _refuse_outside_use(
    fqn: str, module: nn.Module, found: _Found, request: PlanRequest
) -> frozenset[nn.Module]:
    """Raise PlanError if a skipped subtree uses a parameter that a unit shards.

    The skipped module would compute with this rank's shard instead of the parameter.
    Return the modules of the subtree.
    """
    # A subtree of an incompatible API is a boundary as a whole, and so has no module
    # that could use a parameter of an earlier call unnoticed.
    below = walk.subtrees([module])
    units = walk.subtrees(each for each in below if _is_boundary(each))
    for inner in walk.modules(module):
        for name, parameter in inner._parameters.items():
            if parameter is None:
                continue
            known = found.get(id(parameter))
            owner = quoted(known[1][0].fqn) if known else None
            # A unit of an earlier call in the subtree may hold the parameter itself.
            if known is None and inner not in units:
                owner = request.owner_of(parameter)
            if owner is None:
                continue
            where = join_name(fqn, join_name(walk.name_of(module, inner), name))
            raise PlanError(
                f"Parameter {owner} is tied to {quoted(where)}, which is ignored "
                "(ignored_modules, or replicate): that module would compute with this "
                "rank's shard. Ignore both places, or neither."
            )
    return below


def _note_parameters(
    module: nn.Module,
    fqn: str,
    chain: Chain,
    found: _Found,
    request: PlanRequest,
) -> None:
    """Add the module's own parameters; refuse parameters that cannot be sharded."""
    # Only few classes can be refused; the isinstance test saves a call per module.
    if isinstance(module, SUSPECT):
        refuse_module(module, fqn)
    prefix = f"{fqn}." if fqn else ""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        key = id(parameter)
        if key in request.ignored_parameters:
            continue
        where = prefix + name
        # A parameter that a unit of an earlier call holds is tied across calls.
        owner = request.owner_of(parameter)
        if owner is not None:
            raise PlanError(_owned_text(where, owner, module))
        refuse_parameter(parameter, where)
        place = Occurrence(chain, where, module, name)
        known = found.get(key)
        # Tied parameters are the same object, so the id identifies a parameter.
        if known is None:
            found[key] = (parameter, [place])
        else:
            known[1].append(place)


def _owned_text(where: str, owner: str, module: nn.Module) -> str:
    """Return the message for a parameter that a unit of an earlier call manages."""
    return (
        f"In this {type(module).__name__}, parameter {quoted(where)} is tied to "
        f"{owner}, which another fully_shard call already manages: one unit would "
        "gather it and both would use it. Make one unit of both places: "
        "fully_shard([embedding, head]) with the two modules, or fully_shard of the "
        "lowest module that holds both alone; with policy=..., tied_params='promote' "
        "does the latter."
    )


def _unit_of(places: list[Occurrence], units: list[Unit], request: PlanRequest) -> int:
    """Return the index of the lowest unit above all places of a parameter.

    Raises: PlanError, if the places are in several units and ``tied_params`` is
    "error".
    """
    if len(places) == 1:
        return places[0].chain[-1][0]
    nearest = {place.chain[-1][0] for place in places}
    if len(nearest) == 1:
        return nearest.pop()
    common = 0
    # The chains start at the root; the last common entry is the lowest common unit.
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
    """Return the name of the deepest module that holds all parameters in ``fqns``.

    >>> lowest_common_ancestor(["enc.emb.weight", "enc.head.weight"])
    'enc'
    """
    shared: list[str] = []
    for parts in zip(*(fqn.split(".")[:-1] for fqn in fqns), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
