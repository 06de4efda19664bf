"""Public entry point ``fully_shard``: shard a module in place, without a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.comm.meshes import resolve_device, resolve_ranks
from composable_fsdp.comm.wire_format import WireFormat
from composable_fsdp.compose.contract import contract_after
from composable_fsdp.config import (
    FULL_SHARD,
    Arena,
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    Placement,
    Report,
    RowBlock,
    ShardingStrategy,
    TiedParams,
)
from composable_fsdp.entries.apply import apply
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.naming import did_you_mean, quoted
from composable_fsdp.planning.options import PER_MODULE, UnitOptions
from composable_fsdp.tree.state import _FSDPState

if TYPE_CHECKING:
    from composable_fsdp.planning.policies import AnyPolicy

T = TypeVar("T", bound="nn.Module | Sequence[nn.Module]")
"""A module, or a list of modules that becomes one unit."""

FSDP2_NAMES = {
    "mesh": "device_mesh",
    "dp_mesh_dims": "device_mesh, 1-D or (replicate, shard)",
    "reshard_after_forward": (
        "strategy, FULL_SHARD for True and SHARD_GRAD_OP for False; for a number n of "
        "ranks a placement with between=('shard:n',)"
    ),
    "shard_placement_fn": "block (Block.ROW or Block.ELEMENT)",
    "mp_policy": "mixed_precision",
    "offload_policy": "cpu_offload",
    "ignored_params": "ignored_states",
    "sharding_strategy": "strategy",
    "auto_wrap_policy": "policy",
}
"""Argument names of torch's FSDP, mapped to the names that error messages suggest."""

_ORIGIN = (
    "these are torch FSDP names: {}; fully_shard of composable_fsdp.fsdp2 takes the "
    "names of FSDP2"
)


def unknown_text(
    names: Iterable[str],
    own: Collection[str],
    api: str = "fully_shard",
    translated: Mapping[str, str] = FSDP2_NAMES,
    origin: str = _ORIGIN,
) -> str:
    """Return the error text for unknown arguments ``names`` of ``api``."""
    hints = [f"{n} (here: {translated[n]})" for n in names if n in translated]
    rest = [n for n in names if n not in translated]
    parts = []
    if hints:
        parts.append(origin.format(", ".join(hints)))
    if rest:
        near = ", ".join(name + did_you_mean(name, own) for name in rest)
        parts.append(f"unknown: {near}")
    return (
        f"{api} got unexpected keyword arguments; {'; '.join(parts)}. It takes "
        f"{', '.join(own)}."
    )


def _is_done(module: object, given: Mapping[str, Any]) -> bool:
    """Return whether ``if_sharded="skip"`` leaves nothing to do; refuse others."""
    # Python's own TypeError would not translate names of torch's FSDP.
    unknown = sorted(given.keys() - _OWN_NAMES.keys())
    if unknown:
        raise TypeError(unknown_text(unknown, _OWN_NAMES))
    choice = given.get("if_sharded", "error")
    if choice not in ("error", "skip"):
        raise PlanError(f"if_sharded expects 'error' or 'skip', got {choice!r}.")
    modules = [module] if isinstance(module, nn.Module) else module
    if choice == "error" or not isinstance(modules, (list, tuple)):
        return False
    heads = [m for m in modules[:1] if isinstance(m, nn.Module)]
    state = fully_shard.state(heads[0]) if heads else None
    # Compare only if the first module is sharded already: reading the arguments may
    # exhaust an iterator that the application still needs.
    if state is None:
        return False
    found = _difference(modules, state, given)
    if found:
        raise CompositionError(
            f"fully_shard(if_sharded='skip') found {type(modules[0]).__name__} "
            f"{quoted(state.fqn)} sharded with other settings: {found}. Use the same "
            "settings, or a fresh module."
        )
    return True


def _difference(
    modules: Sequence[nn.Module], state: _FSDPState, given: Mapping[str, Any]
) -> str:
    """Describe the first difference of ``given`` arguments; empty if there is none."""
    if list(map(id, modules)) != list(map(id, state.modules)):
        return (
            f"it is one unit of {len(state.modules)} modules, this call asks for a "
            f"unit of {len(modules)}"
        )
    options = UnitOptions(**{name: given[name] for name in PER_MODULE if name in given})
    for name in PER_MODULE:
        has, asked = getattr(state.options, name), getattr(options, name)
        if has != asked:
            return f"it has {name}={has}, this call asks for {asked}"
    ranks = resolve_ranks(
        given.get("process_group"), given.get("device_mesh"), "fully_shard"
    )
    here, there = _members(state.ranks), _members(ranks)
    if here != there:
        return f"it is over {here}, this call asks for {there}"
    # Without device_id any device is accepted: the parameters are there already.
    if given.get("device_id") is not None:
        device = resolve_device(given["device_id"], ranks, ())
        if device != state.device:
            return f"it computes on {state.device}, this call asks for {device}"
    return ""


def _members(ranks: RankLayout) -> str:
    """Describe the ranks that a caller chose, in words."""
    named = (("ranks", ranks.shard), ("copies on", ranks.replicate))
    return ", ".join(
        f"{name} {sorted(dist.get_process_group_ranks(group))}"
        for name, group in named
        if group is not None
    )


# Any: revealed types show no private class.
@contract_after(
    _is_done, cast("Callable[[], Any]", _FSDPState), users=("policy", "param_init_fn")
)
def fully_shard(
    module: T,
    *,
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
    device_mesh: DeviceMesh | None = None,
    policy: AnyPolicy | None = None,
    strategy: ShardingStrategy = FULL_SHARD,
    placement: Placement | None = None,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    device_id: int | torch.device | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    block: Block | RowBlock = Block.ROW,
    if_sharded: Literal["error", "skip"] = "error",
    tied_params: TiedParams = "error",
    check_weights: Report = "warn",
    wire: WireFormat | None = None,
    arena: Arena | None = None,
    use_orig_params: bool = True,
) -> T:
    """Shard a module's parameters, gradients and optimizer state over ranks, in place.

    Class and names of the module stay unchanged. Each parameter stays the same object,
    with this rank's rows as data, ``(k, *trailing)`` (see ``Block``). The module's
    forward and backward all-gather parameters and reduce gradients through hooks. Apply
    ``fully_shard`` to child modules first: a call manages all parameters that nested
    calls (and ``replicate``) do not manage yet. A list of modules becomes one unit.

    Args:
        module: The module to shard, or a list of modules that becomes one unit (a list
            cannot be the root).
        process_group: The shard group, or a pair (shard group, replicate group).
            Default: the default process group; hybrid units then shard within a node
            (LOCAL_WORLD_SIZE ranks) and replicate across nodes.
        device_mesh: The ranks as a mesh instead of ``process_group``: a 1-D mesh
            shards, a 2-D mesh is (replicate, shard), and dims of a larger mesh are
            taken by their names: ``dp``, ``dp_shard``, ``fsdp``, ``cp`` and the like
            shard, ``replicate``, ``dp_replicate`` and ``ddp`` replicate.
        policy: Selects the modules below ``module`` that become units: a policy object,
            a function ``(module, recurse, nonwrapped_numel) -> bool``, or a function
            that returns ``{module: options}``. The policy does not enter units made by
            earlier calls. Default None: only ``module`` becomes a unit.
        strategy: FULL_SHARD (default), SHARD_GRAD_OP, NO_SHARD, ZERO1, ZERO2, or a
            hybrid strategy (HYBRID_SHARD, HFSDP). A
            hybrid strategy requires a pair of groups, a 2-D mesh, or neither argument.
            With a pair or a 2-D mesh, FULL_SHARD and SHARD_GRAD_OP are hybrid, too: the
            groups decide which ranks share parameters, the strategy decides when
            parameters are sharded.
        placement: The dims of the mesh over which parameters, gradients and states are
            divided, instead of a strategy. Default None: those of ``strategy``.
        mixed_precision: A ``MixedPrecision`` with the dtypes of compute, reduction,
            buffers, inputs and outputs. Default None: every tensor keeps its dtype.
        cpu_offload: With ``CPUOffload(offload_params=True)`` sharded parameters and
            sharded gradients are in host memory, where the optimizer steps; forward and
            backward run on the compute device. ``.grad`` is None while a backward runs.
            Default None: no offload.
        ignored_modules, ignored_states: Modules, or parameters, that are not sharded.
        device_id: The compute device. Default: the mesh's device type, else cuda if the
            backend is NCCL, else the device of the parameters. Among several GPUs the
            default is the GPU that holds the parameters, else the current device; if no
            GPU has been used yet, the current device becomes the GPU of torchrun's
            local rank.
        param_init_fn: Called once for each module that holds parameters or buffers on
            meta, to allocate and initialize them. Units are initialized in turn, so the
            peak memory is a single unsharded unit plus the shards. Default None: a
            model on meta is sharded on meta, and ``init_weights``, or ``to_empty`` and
            a checkpoint, must give it values before the first forward.
        sync_module_states: Broadcast the values of rank 0 to every rank before
            sharding. A model on meta is allocated first; on rank 0 a model on meta is
            initialized by each module's ``reset_parameters``. Default False.
        backward_prefetch: When backward all-gathers the next unit: BACKWARD_PRE
            (default), before the current unit computes; BACKWARD_POST, after the
            current unit has computed; None, when the next unit needs its parameters.
        forward_prefetch: All-gather the next unit early in forward, in the order of the
            previous forward of the same kind. Default False.
        limit_all_gathers: Keep the memory of at most one resharded unit waiting for the
            GPU. Default True.
        block: The piece that no shard boundary cuts: Block.ROW (default),
            Block.rows(n), Block.TENSOR or Block.ELEMENT.
        if_sharded: "error" (default), or "skip" to return a module that is already
            sharded with equal options over equal ranks on the same device. A module
            sharded with other options is refused. The policy is not compared.
        tied_params: Treatment of a parameter that several units share: "error"
            (default), or "promote" to assign the parameter to the lowest unit that
            contains all its places.
        check_weights: What happens if ranks were given different values: "warn"
            (default) or "error", at the first gather, on all ranks, with the name of
            the first parameter that differs; "off" compares no values. Values are
            compared by a hash. ``sync_module_states`` makes them equal instead; values
            on meta are left out.
        wire: The format in which all-gathers send matrices: ``Int8Wire()``,
            ``Float8Wire()``, or your ``WireFormat`` (``composable_fsdp.features``).
            Forward and backward compute with decoded values; shards, optimizer, state
            dicts and checkpoints are exact. Default None: the compute dtype.
        arena: ``composable_fsdp.features.Arena()`` keeps memory for full parameters at
            the same addresses in every step, as graphs need. Default None: memory is
            allocated at each all-gather.
        use_orig_params: An argument of FSDP1. False gives a warning and is treated as
            True, the default: parameters stay the original objects.

    Returns: ``module``, the same object.
    Collective: with ``sync_module_states`` an all-gather of names, dtypes and shapes,
        and a broadcast per parameter and buffer; for
        the first hybrid unit without explicit ranks the creation of the node groups;
        else none. All ranks must make the same calls in the same order.
    Raises: CompositionError, PlanError, TypeError; the module is then unchanged.

    >>> for block in model.blocks:
    ...     fully_shard(block)
    >>> fully_shard(model)
    """
    del if_sharded  # ``_is_done`` has read it, before this call
    # The contract has registered the new state on every module of a list.
    state = fully_shard.state(module if isinstance(module, nn.Module) else module[0])
    assert state is not None
    # UnitOptions holds the arguments that a policy may override per module; all other
    # arguments apply to the whole call.
    options = UnitOptions(
        strategy=strategy,
        placement=placement,
        block=block,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
        use_orig_params=use_orig_params,
        mixed_precision=mixed_precision,
        cpu_offload=cpu_offload,
        check_weights=check_weights,
        wire=wire,
        arena=arena,
    )
    apply(
        [module] if isinstance(module, nn.Module) else list(module),
        state,
        options,
        process_group=process_group,
        device_mesh=device_mesh,
        policy=policy,
        ignored_modules=ignored_modules,
        ignored_states=ignored_states,
        device_id=device_id,
        sync_module_states=sync_module_states,
        tied_params=tied_params,
        param_init_fn=param_init_fn,
    )
    return module


# The keyword-only arguments: listed in error texts, and accepted by _is_done.
_OWN_NAMES: dict[str, Any] = vars(fully_shard)["__wrapped__"].__kwdefaults__
