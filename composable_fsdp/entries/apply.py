"""Apply sharding to one module: options, plan, checks, build.

``fully_shard``, ``FullyShardedDataParallel`` and ``replicate`` all end in ``apply``::

    prepare   check arguments, resolve ranks     no module is touched
    apply     plan, checks                       every refusal comes before a change
              param_init_fn, broadcast, shard    unit by unit
              hooks: state dict, optimizer, DDP
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.meshes import resolve_device, resolve_ranks, sizes_for
from composable_fsdp.compose.registry import API
from composable_fsdp.config import TiedParams
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
    from composable_fsdp.entries.initial_values import Init
    from composable_fsdp.planning.policies import AnyPolicy

# Imported when used: policies and initial values.

_is_plain = attrgetter("is_plain")


class Application(NamedTuple):
    """The checked arguments of one application."""

    request: PlanRequest
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
    policy: AnyPolicy | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[Any] | None = None,
    device_id: int | torch.device | None = None,
    sync_module_states: bool = False,
    tied_params: TiedParams = "error",
    api: str = API,
    param_init_fn: Init | None = None,
) -> Application:
    """Check the arguments and resolve the groups, without touching a module.

    Raises: TypeError, PlanError, CompositionError, for arguments that cannot be used.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(
            "param_init_fn expects a function of a module, got "
            f"{type(param_init_fn).__name__}."
        )
    modules = as_list(ignored_modules, "ignored_modules")
    states = as_list(ignored_states, "ignored_states")
    units = None
    if policy is not None:
        from composable_fsdp.planning.policies import evaluate_policy

        units = partial(evaluate_policy, policy)
    ranks = resolve_ranks(process_group, device_mesh, api)
    request = make_request(
        options,
        ranks.world_size,
        ignored_modules=modules,
        ignored_states=states,
        tied_params=tied_params,
        sizes=partial(sizes_for, ranks),
        policy=units,
        api=api,
        held=LEAVES,
        owner_of=owner_of,
    )
    return Application(request, ranks, device_id, sync_module_states, param_init_fn)


def as_list(given: Iterable[Any] | None, argument: str) -> list[Any]:
    """Return the value of ``argument``, which may be an iterator, as a list.

    Raises: TypeError, naming ``argument``, for a module, a tensor or no iterable.
    """
    if given is None:
        return []
    # nn.Sequential and torch.Tensor are iterable: a forgotten list is told by type.
    if isinstance(given, (nn.Module, torch.Tensor)) or not isinstance(given, Iterable):
        raise TypeError(
            f"{argument} expects a list, got a {type(given).__name__}. Pass [it]."
        )
    return list(given)


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
    request, ranks = application.request, application.ranks
    # Every check runs before the first change.
    for module in modules:
        _refuse_owned(module, request.api)
    targets = plan_targets(modules, request)
    _refuse_started(modules[0], targets)
    parameters = [p for t in targets for region in t.parameters for p in region]
    device = _device_of(targets, parameters, application)
    _refuse_ranks(targets, ranks, device)
    init, sync = application.param_init_fn, application.sync_module_states
    on_meta = any(map(attrgetter("is_meta"), parameters))
    before: Callable[[int], None] | None = None
    awaiting: tuple[int, ...] = ()
    values = None
    # Else all values are there: with a CPU as the compute device no buffer is moved.
    if on_meta or init is not None or sync or device.type != "cpu":
        from composable_fsdp.entries.initial_values import own_forms, prepare_values

        if sync:
            forms = own_forms(targets)
            for meet in moments.BEFORE_SYNC:
                meet(request.api, modules[0], ranks, forms)
        values = prepare_values(
            targets,
            init=init,
            sync=sync,
            ranks=ranks,
            device=device,
            ignored=request.ignored_parameters,
            on_meta=on_meta,
        )
        before, awaiting = values.before, values.awaiting
    states = build_units(
        targets,
        state,
        ranks=ranks,
        device=device,
        # Called just before each unit is sharded, so at most one unit has full values
        # beside the shards.
        before=before,
        awaiting=awaiting,
        synced=sync,
        api=request.api,
    )
    if values is not None:
        values.built(states)
    for sharded in moments.MODULES_SHARDED:
        sharded()
    if request.ignored_modules or request.ignored_parameters:
        _mark_ignored(modules, request)
    if request.policy is not None:
        # targets[0] is the root unit, whose options are the caller's own choice.
        _keep_full_precision(targets[1:], request.options)


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


def _mark_ignored(modules: Sequence[nn.Module], request: PlanRequest) -> None:
    """Mark what the caller ignored, so that no check warns of its gradients."""
    by_module = [p for m in request.ignored_modules for p in m._parameters.values()]
    alone = request.ignored_parameters
    # No walk without need: in a call per block it would cost quadratic time.
    by_itself = [p for m in modules if alone for p in m.parameters() if id(p) in alone]
    for parameter in (*by_module, *by_itself):
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


def owner_of(parameter: nn.Parameter) -> str | None:
    """Return how messages describe an already sharded parameter, or ``None``."""
    found = find_leaf(parameter)
    if found is None:
        return None
    handle, index = found
    fqn = join_name(handle.layout.plan.fqn, handle._fqns[index])
    kind = handle.layout.plan.class_name
    return f"{quoted(fqn)} of an earlier fully sharded {kind}"


def _refuse_owned(module: nn.Module, api: str) -> None:
    """Raise CompositionError for a wrapper of a unit, or a module inside of a unit."""
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
    """Raise CompositionError for a unit below that has run as a root already."""
    for target in targets:
        for state in target.units_below:
            # Streams and execution order of its own, which a unit above could not share
            # any more.
            if isinstance(state, _FSDPState) and state.context is not None:
                fqn = next((n for n, _, s in walk_states(module) if s is state), "")
                raise CompositionError(
                    f"fully_shard was called on a {type(module).__name__} whose unit "
                    f"{quoted(fqn)} ({type(state.module).__name__}) has already run as "
                    "its own root. Apply fully_shard to the whole model before its "
                    "first forward."
                )


def _refuse_ranks(
    targets: Sequence[Target], ranks: RankLayout, device: torch.device
) -> None:
    """Refuse targets that do not fit the groups; planning knows only their sizes."""
    # Equal units share their layouts, so plain models pay one test per region.
    layouts = [layout for target in targets for layout in target.plan.regions]
    is_plain = all(map(_is_plain, layouts))
    for target in targets:
        is_plain = is_plain and target.plan.options.arena is None
    if not is_plain:
        for check in moments.UNITS_PLANNED:
            check(targets, ranks, device)
