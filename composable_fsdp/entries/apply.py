"""Apply sharding to one module: options, plan, checks, build.

``fully_shard``, ``FullyShardedDataParallel`` and ``replicate`` all end in ``apply``::

    prepare   check arguments, resolve ranks     no module is touched
    apply     plan, checks                       every refusal comes before a change
              param_init_fn, broadcast, shard    unit by unit
              hooks: state dict, optimizer, DDP
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_fsdp.comm.compute_device import resolve_device
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.meshes import resolve_ranks
from composable_fsdp.comm.registered_memory import refuse_without_nccl
from composable_fsdp.entries.initial_values import prepare_values
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.flat.handle import LEAVES, find_leaf
from composable_fsdp.naming import WRAPPED_MODULE, join_name, quoted
from composable_fsdp.planning.assign import PlanRequest
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.places import API
from composable_fsdp.planning.planner import (
    Target,
    as_list,
    check_tied,
    expand_ignored,
    ignored_parameters,
    plan_targets,
)
from composable_fsdp.planning.policies import evaluate_policy
from composable_fsdp.planning.precision import ignored_classes, overridden_classes
from composable_fsdp.runtime.build import build_units
from composable_fsdp.runtime.materialize import Init
from composable_fsdp.runtime.meta_values import mark_meta_buffers, watch_shards
from composable_fsdp.tree import moments
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import walk_states
from composable_fsdp.tree.unit_settings import mark_ignored


class Application(NamedTuple):
    """The checked arguments of one application."""

    request: PlanRequest
    """The arguments that planning reads."""
    ranks: RankLayout
    """The shard group and the replicate group that the caller named."""
    device_id: int | torch.device | None
    sync_module_states: bool
    param_init_fn: Init | None
    """The initializer of modules on meta; None leaves them on meta."""


def prepare(
    options: UnitOptions,
    *,
    process_group: Any = None,
    device_mesh: Any = None,
    expert_mesh: Any = None,
    policy: object = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[Any] | None = None,
    device_id: int | torch.device | None = None,
    sync_module_states: bool = False,
    tied_params: str = "error",
    api: str = API,
    param_init_fn: Init | None = None,
) -> Application:
    """Check the arguments and resolve the groups, without touching a module.

    Returns: the checked arguments.
    Raises: TypeError, PlanError, CompositionError, for arguments that cannot be used.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(
            "param_init_fn expects a function of a module, got "
            f"{type(param_init_fn).__name__}."
        )
    # Lists, because iterators would be exhausted by the first reader.
    ignored_modules = as_list(ignored_modules, "ignored_modules")
    ignored_states = as_list(ignored_states, "ignored_states")
    ranks = resolve_ranks(process_group, device_mesh, api, expert_mesh)
    request = PlanRequest(
        options=options,
        world_size=ranks.world_size,
        sizes=ranks.sizes,
        policy=None if policy is None else partial(evaluate_policy, policy),
        ignored_modules=expand_ignored(ignored_modules, ignored_states),
        ignored_parameters=ignored_parameters(ignored_states),
        tied_params=check_tied(tied_params),
        api=api,
        owner_of=owner_of,
    )
    return Application(request, ranks, device_id, sync_module_states, param_init_fn)


def apply(
    modules: Sequence[nn.Module], state: _FSDPState, application: Application
) -> None:
    """Shard ``modules``; several modules form one unit.

    Collective: with ``sync_module_states`` a broadcast per parameter and buffer over
        the shard (and replicate) group; for the first hybrid unit that shards within a
        node the creation of the node groups; else none.
    Raises: PlanError, CompositionError, DesyncError; the modules are
        then unchanged. An exception of ``param_init_fn`` comes after the first change.
    """
    # Every check runs before the first change, so that a refusal leaves the modules as
    # they were.
    for module in modules:
        _refuse_owned(module, application.request.api)
    ranks = application.ranks
    targets, _ = plan_targets(modules, application.request)
    _refuse_started(modules[0], targets)
    parameters = [p for t in targets for region in t.parameters for p in region]
    device = _device_of(targets, parameters, application)
    _refuse_ranks(modules[0], targets, parameters, ranks, device)
    init, sync = application.param_init_fn, application.sync_module_states
    # Without an initializer the shards of a model on meta stay on meta until to_empty
    # or a state dict gives them values; a unit with both kinds is refused.
    on_meta = any(map(attrgetter("is_meta"), parameters))
    stays_on_meta = on_meta and init is None and not sync
    if stays_on_meta:
        _refuse_mixed_meta(targets)
    if sync:
        for meet in moments.BEFORE_SYNC:
            meet(application.request.api, modules[0], ranks)
    # build_units calls ``before`` just before sharding each unit, so at most a single
    # unit has full values beside the shards.
    before = prepare_values(
        targets,
        init=init,
        sync=sync,
        ranks=ranks,
        device=device,
        ignored=application.request.ignored_parameters,
    )
    # Read before build_units, which runs param_init_fn: the first forward checks that
    # buffers which were on meta have been filled.
    awaiting = _with_meta_buffers(targets) if on_meta else []
    if stays_on_meta:
        for target in targets:
            mark_meta_buffers(target.members)
    states = build_units(
        targets,
        state,
        ranks=ranks,
        device=device,
        before=before,
        awaiting=awaiting,
        synced=sync,
        api=application.request.api,
    )
    if stays_on_meta:
        for state in states:
            watch_shards(state.handle)
    _tell_built(states, targets)
    # The optimizer check warns of gradients that no rank reduces, except for parameters
    # that the caller ignored by name.
    mark_ignored(_ignored(modules, application.request))
    options = application.request.options
    if application.request.policy is not None and options.mixed_precision:
        # targets[0] is the root unit, whose options are the caller's own choice.
        _keep_full_precision(targets[1:], options)


def _tell_built(states: Sequence[_FSDPState], targets: Sequence[Target]) -> None:
    """Call what is called after units were built."""
    for state, target in zip(states, targets, strict=True):
        for built in moments.UNIT_BUILT:
            built(state, target.members)
    for sharded in moments.MODULES_SHARDED:
        sharded()


def _device_of(
    targets: Sequence[Target],
    parameters: Sequence[nn.Parameter],
    application: Application,
) -> torch.device:
    """Return the compute device of the units.

    Raises: PlanError, if this device is a GPU and torch finds none.
    """
    # A root may hold no parameters of its own; its device is then that of nested units.
    below = [
        unit.device
        for target in targets
        for unit in target.units_below
        if isinstance(unit, _FSDPState)
    ]
    device = resolve_device(application.device_id, application.ranks, parameters, below)
    # resolve_device follows the mesh and the backend, also where torch finds no GPU.
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            f"The compute device is {device} (device_id={application.device_id}), and "
            "this torch finds no CUDA device. Leave device_id out, or pass "
            "torch.device('cpu')."
        )
    return device


def _with_meta_buffers(targets: Sequence[Target]) -> list[int]:
    """Return the indices of the targets whose modules hold a buffer on meta."""
    return [
        index
        for index, target in enumerate(targets)
        if any(
            buffer is not None and buffer.is_meta
            for module in target.members
            for buffer in module._buffers.values()
        )
    ]


def _ignored(modules: Sequence[nn.Module], request: PlanRequest) -> list[nn.Parameter]:
    """Return the parameters that the caller ignored by argument."""
    by_module = [p for m in request.ignored_modules for p in m._parameters.values()]
    alone = request.ignored_parameters
    # Walk over all parameters only if some are ignored individually: fully_shard is
    # called once per block, so a walk in every call would cost quadratic time.
    by_itself = [p for m in modules if alone for p in m.parameters() if id(p) in alone]
    return [p for p in (*by_module, *by_itself) if p is not None]


def _keep_full_precision(units: Sequence[Target], options: UnitOptions) -> None:
    """Let units of the ignored classes compute in their own dtype, and warn."""
    # As in FSDP1, where the ignored classes are BatchNorm by default.
    classes = ignored_classes(options.mixed_precision)
    kept = [u.modules[0] for u in units if isinstance(u.modules[0], classes)]
    for module in kept:
        for keep in moments.KEEPS_PRECISION:
            keep(module)
    found = overridden_classes(kept, options.mixed_precision)
    if found:
        names = ", ".join(sorted(each.__name__ for each in found))
        warnings.warn(
            f"Mixed precision and a policy were given, and the tree has modules of "
            f"{names}: each becomes a unit of its own without mixed precision "
            "(MixedPrecision(_module_classes_to_ignore=()) casts them, too).",
            stacklevel=2,
        )


def owner_of(parameter: nn.Parameter) -> str | None:
    """Return how messages describe an already sharded parameter, or ``None``."""
    # Most parameters are in no unit; the lookup saves a call for each.
    found = find_leaf(parameter) if id(parameter) in LEAVES else None
    if found is None:
        return None
    handle, index = found
    fqn = join_name(handle.layout.plan.fqn, handle._fqns[index])
    kind = handle.layout.plan.class_name
    return f"{quoted(fqn)} of an earlier fully sharded {kind}"


def _refuse_owned(module: nn.Module, api: str) -> None:
    """Refuse a module that is wrapped or belongs to an earlier unit above.

    Raises: CompositionError.
    """
    owner = _get_module_fsdp_state(module)
    # The wrapper itself is no unit, but shares the state of the wrapped unit.
    if module._modules.get(WRAPPED_MODULE) is not None and owner is not None:
        raise CompositionError(
            f"{api} got a {type(module).__name__}, which holds a module that is "
            "sharded already. Use one of the two, on the plain module."
        )
    # An earlier unit above has moved the parameters into its flat buffer already.
    if owner is not None and all(module is not m for m in owner.modules):
        raise CompositionError(
            f"{api} got a {type(module).__name__} whose parameters belong to the "
            f"fully sharded {owner.title} above it. Apply {api} to the children first "
            "and to the parent last."
        )


def _refuse_started(module: nn.Module, targets: Sequence[Target]) -> None:
    """Refuse a unit below that lazy initialization has already made a root.

    Raises: CompositionError.
    """
    for target in targets:
        for state in target.units_below:
            # Lazy initialization has given this unit a context (streams, execution
            # order) of its own, which a unit above could not share any more.
            if isinstance(state, _FSDPState) and state._is_root is not None:
                fqn = next((n for n, _, s in walk_states(module) if s is state), "")
                raise CompositionError(
                    f"fully_shard was called on a {type(module).__name__} whose unit "
                    f"{quoted(fqn)} ({type(state.module).__name__}) has already run as "
                    "its own root. Apply fully_shard to the whole model before its "
                    "first forward."
                )


def _refuse_ranks(
    module: nn.Module,
    targets: Sequence[Target],
    parameters: Sequence[nn.Parameter],
    ranks: RankLayout,
    device: torch.device,
) -> None:
    """Refuse targets that do not fit the groups; planning knows only their sizes."""
    for check in moments.UNITS_PLANNED:
        check(targets, ranks)
    # Other ranks would wait for this rank where they exchange names and norms.
    if ranks.experts is not None and not parameters:
        raise PlanError(
            f"fully_shard with an expert_mesh got a {type(module).__name__} "
            "without parameters on this rank; expected an expert on each rank, because "
            "norms and state dicts are exchanged where experts are. Use fewer "
            "ranks, or stacked experts as DTensors, of which a rank may have none."
        )
    for target in targets:
        arena = target.plan.options.arena
        if arena is not None and arena.comm_memory:
            refuse_without_nccl(device, ranks)


def _refuse_mixed_meta(targets: Sequence[Target]) -> None:
    """Refuse a unit that has parameters on meta and parameters with values.

    Raises: PlanError, with the names of the parameters on meta.
    """
    for target in targets:
        for layout, parameters in zip(
            target.plan.regions, target.parameters, strict=True
        ):
            meta = [
                s.fqn
                for s, p in zip(layout.parameters, parameters, strict=True)
                if p.is_meta
            ]
            if meta and len(meta) < len(parameters):
                raise PlanError(
                    f"Unit {quoted(target.plan.fqn)} has parameters on meta "
                    f"({', '.join(meta)}) beside parameters with values. Give all of "
                    "them values, or none, or pass param_init_fn."
                )
