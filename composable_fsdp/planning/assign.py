"""Assigns every parameter of a tree to a unit, in a single walk from left to right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_fsdp.comm.placements import Choice, Ways
from composable_fsdp.compose.registry import (
    API,
    REGISTRY_KEY,
    REPLICATE,
    get_state,
    incompatible_api,
    other_apis,
)
from composable_fsdp.config import TiedParams
from composable_fsdp.errors import CompositionError, PlanError, warn
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning import walk
from composable_fsdp.planning.checks import (
    SUSPECT,
    WIDE,
    refuse_container,
    refuse_module,
    refuse_overlapping_storage,
    refuse_parameter,
)
from composable_fsdp.planning.options import PER_MODULE, UnitOptions, override

Chosen = Mapping[nn.Module, tuple[nn.Module, ...]]
"""Per unit, its first module in walking order, and all its modules."""


class PlanRequest(NamedTuple):
    """All inputs of a plan besides the tree."""

    options: UnitOptions
    """The options of the root; a policy overrides options per unit."""
    world_size: int
    sizes: Callable[[Choice], Ways] | None = None
    """From a placement to numbers of ranks; None: one shard group."""
    api: str = API
    policy: Callable[..., Mapping[nn.Module, Mapping[str, Any]]] | None = None
    """Returns the units below the root: ``evaluate_policy`` of the caller's policy."""
    chosen: Chosen = {}  # noqa: RUF012  # never changed
    """The units below the root, instead of ``policy``, with the root's options."""
    ignored_modules: frozenset[nn.Module] = frozenset()
    """Modules whose own parameters stay unsharded; whole subtrees."""
    ignored_parameters: frozenset[int] = frozenset()
    tied_params: TiedParams = "error"
    held: Collection[int] = frozenset()
    """Ids of parameters that units of earlier calls may hold."""
    owner_of: Callable[[nn.Parameter], str | None] = lambda parameter: None
    """Of a parameter in ``held``: its unit as text for a message, or None."""


def make_request(
    options: UnitOptions,
    world_size: int,
    *,
    ignored_modules: Iterable[Any] | None = None,
    ignored_states: Iterable[Any] | None = None,
    tied_params: TiedParams = "error",
    **others: Any,
) -> PlanRequest:
    """Return a checked request; ``others`` are further fields of ``PlanRequest``."""
    modules = _as_list(ignored_modules, "ignored_modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"ignored_modules expects modules, got {type(module).__name__}; pass "
                "parameters as ignored_states."
            )
    alone: set[int] = set()
    for each in _as_list(ignored_states, "ignored_states"):
        if isinstance(each, nn.Parameter):
            alone.add(id(each))
        elif isinstance(each, nn.Module):
            modules.append(each)
        else:
            raise TypeError(
                "ignored_states expects parameters or modules, got "
                f"{type(each).__name__}."
            )
    if tied_params not in ("error", "promote"):
        raise PlanError(
            f"tied_params expects 'error' or 'promote', got {tied_params!r}."
        )
    return PlanRequest(
        options,
        world_size,
        # No call without need: each unit of a model may have a call of its own.
        ignored_modules=walk.subtrees(modules) if modules else frozenset(),
        ignored_parameters=frozenset(alone),
        tied_params=tied_params,
        **others,
    )


def _as_list(given: Iterable[Any] | None, argument: str) -> list[Any]:
    """Return the value of ``argument``, which may be an iterator, as a list."""
    # nn.Sequential and torch.Tensor are iterable: a forgotten list is told by type.
    if isinstance(given, (nn.Module, torch.Tensor)) or not isinstance(
        given, (Iterable, NoneType)
    ):
        raise TypeError(
            f"{argument} expects a list, got a {type(given).__name__}. Pass [it]."
        )
    return [] if given is None else list(given)


Chain = tuple[tuple[int, int], ...]
"""The units from the root down to the nearest: index, length of the module's name."""


class Occurrence(NamedTuple):
    """A place of a parameter on one path: a module that holds it, and the key there."""

    chain: Chain
    """The units that enclose the module."""
    prefix: str
    """The beginning of the parameter's name: "", or the module's name and a dot."""
    module: nn.Module
    key: str

    @property
    def unit(self) -> int:
        """Index of the nearest enclosing unit."""
        return self.chain[-1][0]

    @property
    def path(self) -> str:
        """The name from the module that is planned."""
        return self.prefix + self.key

    def name_in(self, unit: int) -> str:
        """Return the name from the module of ``unit``."""
        # A unit's module that is reachable along two paths has two names; the chain has
        # the length of the name on this path.
        length = dict(self.chain)[unit]
        return self.path[length + 1 :] if length else self.path


@dataclass(slots=True)
class Unit:
    """A unit while the walk collects its parameters, each with every place."""

    fqn: str
    modules: tuple[nn.Module, ...]
    options: UnitOptions
    parent: int = 0
    parameters: list[tuple[nn.Parameter, list[Occurrence]]] = field(
        default_factory=list
    )
    members: list[nn.Module] = field(default_factory=list)
    """The modules whose nearest enclosing unit is this unit, in walking order."""
    units_below: list[object] = field(default_factory=list)
    """States of units of earlier calls directly below this unit."""


def assign_units(modules: Sequence[nn.Module], request: PlanRequest) -> list[Unit]:
    """Return the units with their parameters, in ``.modules()`` order."""
    for module in modules:
        _check_root(module, request.api)
        if module in request.ignored_modules:
            warn(_IGNORED_ITSELF.format(type(module).__name__))
    done = _Walk(modules, _units_below(modules, request), request)
    units, found = done.units, done.found
    refuse_overlapping_storage(found.values())
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
        raise _foreign("", foreign)
    # The contract has registered the state of ``api`` itself before planning.
    if other and other != api:
        raise CompositionError(
            f"{api} got a {type(module).__name__} that {other} already manages; "
            "the two keep parameters in different places. Apply one of them to this "
            "module."
        )


def _foreign(fqn: str, foreign: str) -> CompositionError:
    """Return the error for a module that torch's FSDP1 or FSDP2 shards already."""
    return CompositionError(
        f"Module {quoted(fqn)} is sharded by {foreign}; this package would shard its "
        "pieces again. Use one of the two for the whole model: remove the other call, "
        "or replace it by composable_fsdp's (docs: names of FSDP1 and FSDP2 beside "
        "ours)."
    )


def _units_below(
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
    root, options = modules[0], request.options
    # The policy makes no units of these modules nor of modules below.
    earlier = (m for m in walk.modules(root) if m is not root and _is_boundary(m))
    left_out = walk.subtrees([*request.ignored_modules, *earlier])
    root_kwargs = {name: getattr(options, name) for name in PER_MODULE}
    targets = request.policy(
        root,
        ignored_modules=left_out,
        ignored_params=request.ignored_parameters,
        root_kwargs=root_kwargs,
    )
    mixed = options.mixed_precision
    # Modules of these classes become units in full precision, whatever the policy says.
    classes = () if mixed is None else tuple(mixed._module_classes_to_ignore)
    kept = {
        module: {**root_kwargs, **targets.get(module, {}), "mixed_precision": None}
        for module in (walk.modules(root) if classes else ())
        if isinstance(module, classes) and module is not root and module not in left_out
    }
    return {**targets, **kept}


def _is_boundary(module: nn.Module) -> bool:
    """Return whether an earlier call or an incompatible API manages ``module``."""
    return get_state(module, API) is not None or incompatible_api(module) is not None


class _Walk:
    """Visits every path from left to right: a shared module once per path."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        overrides: Mapping[nn.Module, Mapping[str, Any]],
        request: PlanRequest,
    ) -> None:
        self.request, self.overrides = request, overrides
        self.units = [Unit("", tuple(modules), request.options)]
        self.found: dict[int, tuple[nn.Parameter, list[Occurrence]]] = {}
        """Per id of a parameter: the parameter, and every place of the parameter."""
        self.index_of = {id(module): 0 for module in modules}
        self.skipped: list[tuple[str, nn.Module]] = []
        # Reversed, because the stack pops the last entry first.
        self.stack: list[tuple[nn.Module, str, Chain]] = [
            (m, "", ()) for m in reversed(modules)
        ]
        while self.stack:
            self._visit(*self.stack.pop())
        # Only now does ``found`` hold every parameter that gets sharded.
        seen: set[nn.Module] = set()
        for path, child in self.skipped:
            seen |= self._refuse_outside_use(path, child)
        # Ignored modules that are not below the modules of this call.
        for module in request.ignored_modules - seen:
            self._refuse_outside_use(f"({type(module).__name__})", module)

    def _visit(self, module: nn.Module, fqn: str, chain: Chain) -> None:
        """Note a module on one path, and put its children on the stack."""
        index = self.index_of.get(id(module))
        # A shared module becomes a unit on the first path; later paths find its index.
        if index is None and module in self.overrides:
            index = self._begin_unit(module, fqn, chain[-1][0])
        if index is not None:
            # Names inside a unit are relative to the unit's module, whose own name has
            # ``len(fqn)`` characters on this path.
            chain = (*chain, (index, len(fqn)))
        nearest = self.units[chain[-1][0]]
        nearest.members.append(module)
        if module not in self.request.ignored_modules:
            # Few classes can be refused, and the test saves a call per module.
            if isinstance(module, SUSPECT):
                refuse_module(module, fqn)
            if module._parameters:
                self._note_parameters(chain, f"{fqn}." if fqn else "", module)
        for path, child in walk.below(fqn, module) if module._modules else ():
            incompatible, foreign = other_apis(child)
            if foreign:
                raise _foreign(path, foreign)
            marked = REGISTRY_KEY in child.__dict__
            below = get_state(child, API) if marked else None
            # The contract has registered a state on the modules of this call, too.
            if below is not None and id(child) not in self.index_of:
                nearest.units_below.append(below)
            elif child in self.request.ignored_modules or incompatible:
                self.skipped.append((path, child))
            else:
                self.stack.append((child, path, chain))

    def _begin_unit(self, module: nn.Module, fqn: str, parent: int) -> int:
        """Make ``module`` a unit, with the modules that were chosen with it."""
        request, index = self.request, len(self.units)
        made = request.chosen.get(module, (module,))
        self.index_of.update((id(each), index) for each in made)
        options = override(request.options, self.overrides[module], fqn=fqn)
        self.units.append(Unit(fqn, made, options, parent))
        return index

    def _note_parameters(self, chain: Chain, prefix: str, module: nn.Module) -> None:
        """Add the module's own parameters; refuse those that cannot be sharded."""
        request, found = self.request, self.found
        for name, parameter in module._parameters.items():
            key = id(parameter)
            if parameter is None or key in request.ignored_parameters:
                continue
            if key in request.held and (owner := request.owner_of(parameter)):
                raise _tied_across_calls(prefix + name, owner, module)
            # Nearly all parameters need no call.
            if (
                type(parameter) is not nn.Parameter
                or parameter.dtype not in WIDE
                or parameter.layout is not torch.strided
            ):
                refuse_parameter(parameter, prefix + name)
            # Tied parameters are the same object, so the id identifies a parameter.
            place = Occurrence(chain, prefix, module, name)
            if key in found:
                found[key][1].append(place)
            else:
                found[key] = (parameter, [place])

    def _refuse_outside_use(self, fqn: str, module: nn.Module) -> frozenset[nn.Module]:
        """Return a skipped subtree; refuse one that uses a parameter of a unit."""
        # It would compute with this rank's shard.
        request = self.request
        below = walk.subtrees([module])
        # Of these, an earlier call has moved the parameters itself.
        units = walk.subtrees(each for each in below if _is_boundary(each))
        for inner in walk.modules(module):
            for name, parameter in inner._parameters.items():
                known = self.found.get(id(parameter))
                owner = quoted(known[1][0].path) if known else None
                if not known and parameter is not None and inner not in units:
                    owner = request.owner_of(parameter)
                if owner is None:
                    continue
                where = join_name(fqn, join_name(walk.name_of(module, inner), name))
                raise PlanError(
                    f"Parameter {owner} is tied to {quoted(where)}, which is ignored "
                    "(ignored_modules, or replicate): that module would compute with "
                    "this rank's shard. Ignore both places, or neither."
                )
        return below


def _tied_across_calls(where: str, owner: str, module: nn.Module) -> PlanError:
    """Return the error for a parameter that a unit of an earlier call manages."""
    return PlanError(
        f"In this {type(module).__name__}, parameter {quoted(where)} is tied to "
        f"{owner}, which another fully_shard call already manages: one unit would "
        "gather it and both would use it. Make one unit of both places: "
        "fully_shard([embedding, head]) with the two modules, or fully_shard of the "
        "lowest module that holds both alone; with policy=..., tied_params='promote' "
        "does the latter."
    )


def _unit_of(places: list[Occurrence], units: list[Unit], request: PlanRequest) -> int:
    """Return the index of the lowest unit above all places of a parameter."""
    first, *others = places
    if not others:
        return first.unit
    nearest = {place.unit for place in places}
    if len(nearest) == 1:
        return nearest.pop()
    if request.tied_params == "promote":
        common = 0
        # The chains start at the root; the last common entry is the lowest common unit.
        for steps in zip(*(place.chain for place in places), strict=False):
            if len({index for index, _ in steps}) > 1:
                break
            common = steps[0][0]
        return common
    other = next(place for place in others if place.unit != first.unit)
    paths = zip(*(place.path.split(".")[:-1] for place in places), strict=False)
    shared: list[str] = []
    for parts in paths:
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    raise PlanError(
        f"Parameter {quoted(first.path)} of unit {quoted(units[first.unit].fqn)} "
        f"is the same object as {quoted(other.path)} of unit "
        f"{quoted(units[other.unit].fqn)}: one unit would gather it and both "
        f"would use it. Their lowest common ancestor is {quoted('.'.join(shared))}: "
        "shard that module as one unit and leave the two out of the policy, or pass "
        "tied_params='promote' to keep the parameter in the unit that holds both."
    )
