"""From a module tree to a frozen plan; every check comes before a tensor moves."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_fsdp.compose.registry import get_state
from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.naming import WRAPPED_MODULE, join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.assign import (
    API,
    Occurrence,
    Place,
    PlanRequest,
    Unit,
    assign_units,
)
from composable_fsdp.planning.checks import group_of
from composable_fsdp.planning.layout import ParameterSpec, plan_regions, row_block
from composable_fsdp.planning.options import GroupBy, UnitOptions
from composable_fsdp.planning.plan import ShardingPlan
from composable_fsdp.planning.unit_plan import UnitPlan, padding_notes


class Target(NamedTuple):
    """The live objects behind one ``UnitPlan``."""

    plan: UnitPlan
    modules: tuple[nn.Module, ...]
    members: tuple[nn.Module, ...]
    """These and the modules below of which this unit is the nearest above."""
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    """Region by region and slot by slot."""
    places: tuple[Place, ...]
    """Every place of every parameter, in the same order."""
    keys: tuple[str, ...]
    """The parameters' keys there."""
    owners: tuple[nn.Module, ...]
    """The modules at these places."""
    parent: int
    """Index of the unit above; of the first target, itself."""
    units_below: tuple[object, ...]
    """States of earlier applications whose nearest unit above is this one."""


def plan_modules(
    modules: Sequence[nn.Module], request: PlanRequest
) -> tuple[ShardingPlan, tuple[Target, ...]]:
    """Plan one application of ``fully_shard`` to ``modules`` (several form one unit).

    Reads the tree and changes nothing. Units come in ``.modules()`` order.

    Raises: PlanError or CompositionError, naming module, parameter and the way out.
    """
    units = assign_units(modules, request)
    notes: list[str] = []
    targets = tuple(_target(i, unit, request, notes) for i, unit in enumerate(units))
    plan = ShardingPlan(
        tuple(t.plan for t in targets), request.world_size, tuple(notes)
    )
    return plan, targets


def group_sizes(
    strategy: ShardingStrategy, *, world_size: int, shard_world_size: int | None = None
) -> tuple[int, int]:
    """Ranks that share a unit's parameters, and how many copies of them there are.

    Without ``shard_world_size`` there is one group.

    Raises: PlanError, for a hybrid strategy on one group.
    """
    if strategy is ShardingStrategy.NO_SHARD:
        return 1, world_size
    if shard_world_size is not None:
        return shard_world_size, world_size // shard_world_size
    if strategy in (
        ShardingStrategy.HYBRID_SHARD,
        ShardingStrategy._HYBRID_SHARD_ZERO2,
    ):
        raise PlanError(
            f"A plan with {strategy.name} expects shard_world_size, the ranks that "
            "share the parameters. Pass the size of the mesh's shard dim, or of a node."
        )
    return world_size, 1


class _Build(NamedTuple):
    """All of a unit that is integers and names; equal units share one."""

    plan: UnitPlan
    order: tuple[tuple[int, ...], ...]
    """By region, the indices of its parameters as the walk met them."""
    places: tuple[Place, ...]
    keys: tuple[str, ...]
    notes: tuple[str, ...]


_Known = tuple[
    tuple[str, ...],
    tuple[tuple[str, str], ...],
    tuple[int, ...],
    torch.dtype,
    bool,
    Hashable,
]
"""A parameter: its names, (name from the unit, key) of its places, shape, dtype,
whether it is trainable, and its group."""


def _target(index: int, unit: Unit, request: PlanRequest, notes: list[str]) -> Target:
    sizes = request.sizes or partial(group_sizes, world_size=request.world_size)
    found = [_places(occurrences, index) for _, occurrences in unit.parameters]
    known = [
        (
            names,
            places,
            parameter.shape,
            parameter.dtype,
            parameter.requires_grad,
            group_of(unit.options.group_by, join_name(unit.fqn, names[0]), parameter),
        )
        for (names, places, _), (parameter, _) in zip(
            found, unit.parameters, strict=True
        )
    ]
    # A cache would keep what a function of the user's refers to, such as the model.
    build_unit = _build if unit.options.group_by is None else _build.__wrapped__
    build = build_unit(
        unit.fqn,
        type(unit.modules[0]).__name__,
        unit.options,
        tuple(known),
        sizes(unit.options.strategy),
    )
    notes.extend(build.notes)
    return Target(
        build.plan,
        unit.modules,
        tuple(unit.members),
        tuple([tuple([unit.parameters[i][0] for i in r]) for r in build.order]),
        build.places,
        build.keys,
        tuple([owner for r in build.order for i in r for owner in found[i][2]]),
        unit.parent,
        tuple(unit.units_below),
    )


@lru_cache(maxsize=4096)
def _build(
    fqn: str,
    class_name: str,
    options: UnitOptions,
    parameters: tuple[_Known, ...],
    sizes: tuple[int, int],
) -> _Build:
    """Plan one unit. Equal arguments, as of transformer blocks, give the same object.

    ``sizes`` are the ranks that share the parameters and the number of such groups.
    """
    rows = options.block is Block.ROW
    regions = plan_regions(
        [
            ParameterSpec(
                names,
                tuple(shape),
                dtype,
                trainable,
                row_block(shape) if rows else 1,
                group,
            )
            for names, _, shape, dtype, trainable, group in parameters
        ],
        world_size=sizes[0],
    )
    plan = UnitPlan(fqn, class_name, regions, options, *sizes)
    order = tuple(tuple(s.index for s in region.parameters) for region in regions)
    places = [
        Place(name, key, parameters[i][0][0], i)
        for region in order
        for i in region
        for name, key in parameters[i][1]
    ]
    keys = tuple(place.name for place in places)
    return _Build(plan, order, tuple(places), keys, tuple(padding_notes(plan)))


def _places(
    occurrences: list[Occurrence], index: int
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[nn.Module, ...]]:
    """All names of a parameter from its unit; the places that hold it, and who does.

    A module that is met along two paths holds the parameter once and names it twice.
    """
    if len(occurrences) == 1:
        o = occurrences[0]
        first = _relative(o, index)
        return (first,), ((first, o.name),), (o.module,)
    names: dict[str, None] = {}
    places: dict[tuple[int, str], tuple[str, str]] = {}
    owners: dict[tuple[int, str], nn.Module] = {}
    for o in occurrences:
        fqn = _relative(o, index)
        names[fqn] = None
        places.setdefault((id(o.module), o.name), (fqn, o.name))
        owners.setdefault((id(o.module), o.name), o.module)
    return tuple(names), tuple(places.values()), tuple(owners.values())


def _relative(place: Occurrence, index: int) -> str:
    for unit, length in reversed(place.chain):
        if unit == index:
            return place.fqn[length + 1 :] if length else place.fqn
    raise AssertionError(f"{place.fqn} is not below unit {index}")


def plan(
    module: nn.Module,
    *,
    world_size: int,
    shard_world_size: int | None = None,
    policy: object = None,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    block: Block = Block.ROW,
    group_by: GroupBy | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    tied_params: str = "error",
) -> ShardingPlan:
    """Say what ``fully_shard`` would do with ``module`` on ``world_size`` ranks.

    Needs no process group, works on meta-device models and touches nothing; ``print()``
    the result for a report. ``world_size`` counts ranks; with ``shard_world_size`` so
    many of them share parameters and the rest hold copies, as on a 2-D mesh
    ``(world_size // shard_world_size, shard_world_size)``. Sizes are in elements, bytes
    as the fields say.

    Raises: PlanError or CompositionError, as ``fully_shard`` itself would.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    >>> plan(model, world_size=4).units[0].regions[0].shard_numel
    40
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"plan expects a module, got a {type(module).__name__}.")
    if get_state(module._modules.get(WRAPPED_MODULE) or module, API) is not None:
        raise CompositionError(
            f"plan expects a module that is not sharded yet; fully_shard was already "
            f"applied to this {type(module).__name__}. Ask before, or ask a fresh "
            "model, on meta for example."
        )
    if (
        isinstance(world_size, bool)
        or not isinstance(world_size, int)
        or world_size < 1
    ):
        raise PlanError(
            f"world_size expects a positive number of ranks, got {world_size!r}."
        )
    if shard_world_size is not None and (
        not isinstance(shard_world_size, int)
        or shard_world_size < 1
        or world_size % shard_world_size
    ):
        raise PlanError(
            "shard_world_size expects a number of ranks that divides world_size="
            f"{world_size}, got {shard_world_size!r}."
        )
    ignored_modules = as_list(ignored_modules, "ignored_modules")
    ignored_states = as_list(ignored_states, "ignored_states")
    request = PlanRequest(
        options=UnitOptions(
            strategy=strategy,
            block=block,
            mixed_precision=mixed_precision,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            group_by=group_by,
        ),
        world_size=world_size,
        sizes=partial(
            group_sizes, world_size=world_size, shard_world_size=shard_world_size
        ),
        policy=policy,
        ignored_modules=expand_ignored(ignored_modules, ignored_states),
        ignored_parameters=ignored_parameters(ignored_states),
        tied_params=check_tied(tied_params),
    )
    return plan_modules([module], request)[0]


def as_list(given: Iterable[Any] | None, argument: str) -> list[Any]:
    """Return what was given for ``argument``, which may be an iterator, as a list."""
    if given is None:
        return []
    if isinstance(given, (nn.Module, torch.Tensor)) or not isinstance(given, Iterable):
        raise TypeError(
            f"{argument} expects a list, got a {type(given).__name__}. Pass [it]."
        )
    return list(given)


def expand_ignored(
    ignored_modules: Sequence[nn.Module] | None, ignored_states: Sequence[Any] | None
) -> frozenset[nn.Module]:
    """All modules that are ignored, with everything below them."""
    if not ignored_modules and not ignored_states:
        return frozenset()
    given = list(ignored_modules or ())
    given += [state for state in ignored_states or () if isinstance(state, nn.Module)]
    for module in given:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"ignored_modules expects modules, got {type(module).__name__}; pass "
                "parameters as ignored_states."
            )
    return walk.subtrees(given)


def ignored_parameters(ignored_states: Sequence[Any] | None) -> frozenset[int]:
    """Identities of the parameters that are ignored by themselves."""
    if not ignored_states:
        return frozenset()
    for state in ignored_states:
        if not isinstance(state, (nn.Parameter, nn.Module)):
            raise TypeError(
                "ignored_states expects parameters or modules, got "
                f"{type(state).__name__}."
            )
    return frozenset(
        id(state) for state in ignored_states if isinstance(state, nn.Parameter)
    )


def check_tied(value: str) -> str:
    """Return ``value`` if it says what to do with a parameter tied across units."""
    if value not in ("error", "promote"):
        raise PlanError(f"tied_params expects 'error' or 'promote', got {value!r}.")
    return value
