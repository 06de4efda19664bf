"""Apply sharding to one module: plan, checks, build."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.meshes import resolve_device, resolve_ranks, sizes_for
from composable_fsdp.compose.registry import API
from composable_fsdp.errors import CompositionError, PlanError, warn
from composable_fsdp.flat.handle import LEAVES, find_leaf
from composable_fsdp.naming import WRAPPED_MODULE, join_name, quoted
from composable_fsdp.planning.assign import PlanRequest, make_request
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.planner import Target, plan_targets
from composable_fsdp.runtime.build import build_units
from composable_fsdp.tree import moments
from composable_fsdp.tree.state import IGNORED, _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import walk_states

if TYPE_CHECKING:
    from composable_fsdp.entries.initial_values import Init, PreparedValues
    from composable_fsdp.planning.policies import AnyPolicy

_is_meta, _has_no_form = attrgetter("is_meta"), attrgetter("is_plain")


def apply(
    modules: Sequence[nn.Module],
    state: _FSDPState,
    options: UnitOptions,
    *,
    process_group: Any = None,
    device_mesh: Any = None,
    device_id: int | torch.device | None = None,
    sync_module_states: bool = False,
    api: str = API,
    param_init_fn: Init | None = None,
    **given: Any,
) -> None:
    """Shard ``modules``, which form one unit; ``given``: see ``request_for``.

    Collective: with ``sync_module_states`` a broadcast per tensor; creation of groups.
    Raises: TypeError, PlanError, CompositionError, DesyncError, before any change.
    """
    # Every check runs before the first change.
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(
            "param_init_fn expects a function of a module, got "
            f"{type(param_init_fn).__name__}."
        )
    ranks = resolve_ranks(process_group, device_mesh, api)
    request = request_for(
        options, ranks.world_size, sizes=partial(sizes_for, ranks), api=api, **given
    )
    targets = _plan(modules, request)
    parameters = [p for t in targets for p in chain(*t.parameters)]
    device = _device_of(targets, parameters, device_id, ranks)
    # Equal units share their layouts, so plain models pay one test per region.
    if not all(map(_is_plain, targets)):
        for check in moments.UNITS_PLANNED:
            check(targets, ranks, device)
    values = _prepare_values(
        targets,
        request,
        ranks,
        device,
        init=param_init_fn,
        sync=sync_module_states,
        on_meta=any(map(_is_meta, parameters)),
    )
    states = build_units(
        targets,
        state,
        ranks=ranks,
        device=device,
        # Called just before each unit is sharded, so at most one unit has full values
        # beside the shards.
        before=None if values is None else values.before,
        awaiting=() if values is None else values.awaiting,
        synced=sync_module_states,
        api=api,
    )
    if values is not None:
        values.built(states)
    for sharded in moments.MODULES_SHARDED:
        sharded()
    _mark_ignored(modules, request)
    if request.policy is not None:
        # targets[0] is the root unit, whose options are the caller's own choice.
        _keep_full_precision(targets[1:], options)


def request_for(
    options: UnitOptions,
    world_size: int,
    *,
    policy: AnyPolicy | None = None,
    **given: Any,
) -> PlanRequest:
    """Return the checked inputs of a plan; ``given``: see ``make_request``."""
    units = None
    if policy is not None:
        # Imported when used.
        from composable_fsdp.planning.policies import evaluate_policy

        units = partial(evaluate_policy, policy)
    return make_request(
        options, world_size, policy=units, held=LEAVES, owner_of=_owner_of, **given
    )


def _plan(modules: Sequence[nn.Module], request: PlanRequest) -> tuple[Target, ...]:
    """Return the units; raise CompositionError if earlier calls stand against them."""
    for module in modules:
        owner = _get_module_fsdp_state(module)
        # The wrapper itself is no unit, but shares the state of the wrapped unit.
        if module._modules.get(WRAPPED_MODULE) is not None and owner is not None:
            raise CompositionError(
                f"{request.api} got a {type(module).__name__}, which holds a module "
                "that is sharded already. Use one of the two, on the plain module."
            )
        # An earlier unit above has moved the parameters into its flat buffer already.
        if owner is not None and all(module is not m for m in owner.modules):
            raise CompositionError(
                f"{request.api} got a {type(module).__name__} whose parameters belong "
                f"to the fully sharded {owner.title} above it. Apply {request.api} to "
                "the children first and to the parent last."
            )
    targets = plan_targets(modules, request)
    for state in chain(*[target.units_below for target in targets]):
        # Streams and execution order of its own, which a unit above could not share
        # any more.
        if isinstance(state, _FSDPState) and state.context is not None:
            fqn = next((n for n, _, s in walk_states(modules[0]) if s is state), "")
            raise CompositionError(
                f"fully_shard was called on a {type(modules[0]).__name__} whose unit "
                f"{quoted(fqn)} ({type(state.module).__name__}) has already run as "
                "its own root. Apply fully_shard to the whole model before its "
                "first forward."
            )
    return targets


def _prepare_values(
    targets: Sequence[Target],
    request: PlanRequest,
    ranks: RankLayout,
    device: torch.device,
    *,
    init: Init | None,
    sync: bool,
    on_meta: bool,
) -> PreparedValues | None:
    """Return what gives units their values; None if all values are there."""
    # With a CPU as the compute device no buffer is moved.
    if not (on_meta or init or sync or device.type != "cpu"):
        return None
    # Imported when used.
    from composable_fsdp.entries.initial_values import PreparedValues, own_forms

    if sync:
        forms = own_forms(targets)
        for meet in moments.BEFORE_SYNC:
            meet(request.api, targets[0].modules[0], ranks, forms)
    ignored = request.ignored_parameters
    return PreparedValues(targets, ranks, device, ignored, init, sync, on_meta)


def _is_plain(target: Target) -> bool:
    """Return whether planning needs no check that knows the groups."""
    plan = target.plan
    return plan.options.arena is None and all(map(_has_no_form, plan.regions))


def _device_of(
    targets: Sequence[Target],
    parameters: Sequence[nn.Parameter],
    device_id: int | torch.device | None,
    ranks: RankLayout,
) -> torch.device:
    """Return the compute device of the units; PlanError, if torch finds no such GPU."""
    # A root may hold no parameters of its own; its device is then that of nested units.
    below = [
        unit.device
        for target in targets
        for unit in target.units_below
        if isinstance(unit, _FSDPState)
    ]
    device = resolve_device(device_id, ranks, parameters, below)
    # resolve_device follows the mesh and the backend, also where torch finds no GPU.
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            f"The compute device is {device} (device_id={device_id}), and "
            "this torch finds no CUDA device. Leave device_id out, or pass "
            "torch.device('cpu')."
        )
    return device


def _mark_ignored(modules: Sequence[nn.Module], request: PlanRequest) -> None:
    """Mark what the caller ignored, so that no check warns of its gradients."""
    found = [p for m in request.ignored_modules for p in m._parameters.values()]
    # No walk without need: in a call per block it would cost quadratic time.
    if alone := request.ignored_parameters:
        found += [p for m in modules for p in m.parameters() if id(p) in alone]
    for parameter in found:
        if parameter is not None:
            setattr(parameter, IGNORED, True)


def _keep_full_precision(units: Sequence[Target], options: UnitOptions) -> None:
    """Let units of the ignored classes compute in their own dtype, and warn."""
    mixed = options.mixed_precision
    if mixed is None:
        return
    # As in FSDP1, where the ignored classes are BatchNorm by default.
    classes = tuple(mixed._module_classes_to_ignore)
    kept = [u.modules[0] for u in units if isinstance(u.modules[0], classes)]
    for module in kept:
        for keep in moments.KEEPS_PRECISION:
            keep(module)
    found = {c.__name__ for module in kept for c in classes if isinstance(module, c)}
    if found:
        warn(
            f"Mixed precision and a policy were given, and the tree has modules of "
            f"{', '.join(sorted(found))}: each becomes a unit of its own without mixed "
            "precision (MixedPrecision(_module_classes_to_ignore=()) casts them, too).",
        )


def _owner_of(parameter: nn.Parameter) -> str | None:
    """Return how messages describe an already sharded parameter, or ``None``."""
    found = find_leaf(parameter)
    if found is None:
        return None
    handle, index = found
    fqn = join_name(handle.layout.plan.fqn, handle._fqns[index])
    kind = handle.layout.plan.class_name
    return f"{quoted(fqn)} of an earlier fully sharded {kind}"
