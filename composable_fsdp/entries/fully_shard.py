"""``fully_shard``: the composable door."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.compose.contract import Contract
from composable_fsdp.config import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.entries.apply import Application, apply, prepare
from composable_fsdp.entries.same_application import is_same_application
from composable_fsdp.errors import PlanError
from composable_fsdp.planning.checks import refuse_container
from composable_fsdp.planning.options import PER_MODULE, UnitOptions
from composable_fsdp.tree.state import _FSDPState

T = TypeVar("T", bound="nn.Module | Sequence[nn.Module]")

_FSDP2_NAMES = {
    "mesh": "device_mesh",
    "dp_mesh_dims": "device_mesh, 1-D or (replicate, shard)",
    "reshard_after_forward": "strategy (ShardingStrategy.FULL_SHARD or SHARD_GRAD_OP)",
    "shard_placement_fn": "block (Block.ROW or Block.ELEMENT)",
    "mp_policy": "mixed_precision",
    "offload_policy": "cpu_offload",
    "ignored_params": "ignored_states",
    "sharding_strategy": "strategy",
    "auto_wrap_policy": "policy",
}


def _shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
    device_mesh: DeviceMesh | None = None,
    policy: object = None,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
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
    block: Block = Block.ROW,
    group_by: Callable[[str, nn.Parameter], Hashable] | None = None,
    if_sharded: str = "error",
    tied_params: str = "error",
    use_orig_params: bool = True,
    **unknown: object,
) -> None:
    """Shard a module's parameters, gradients and optimizer state over ranks, in place.

    The module keeps its class and every name; each parameter stays the same object, its
    data now this rank's rows (``(k, *trailing)``; see ``Block``). Forward and backward
    gather and reduce by themselves. Apply it to children first: a call manages what
    nested calls (and ``replicate``) left over. A list of modules becomes one unit.

    Args:
        module: a module, or a list that becomes one unit (not the root).
        process_group: the ranks to shard over, or a pair (shard, replicate); the
            default group if nothing is given, within which hybrid units shard by node
            (LOCAL_WORLD_SIZE) and replicate across nodes.
        device_mesh: the same as a mesh: 1-D shards, 2-D is (replicate, shard).
        policy: which modules below become units: a policy object, a function
            ``(module, recurse, nonwrapped_numel) -> bool``, or one that returns
            ``{module: options}``. Units made by hand before are boundaries.
        strategy: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, or a hybrid one, which wants a
            pair, a 2-D mesh, or nothing. A pair or a 2-D mesh makes the first two
            hybrid as well: ranks say who shares, the strategy says when.
        mixed_precision: a ``MixedPrecision`` with the dtypes of compute, reduction,
            buffers, inputs and outputs; else everything keeps its own.
        cpu_offload: with ``CPUOffload(offload_params=True)`` shards and their gradients
            live on the host, where the optimizer then works; compute stays on the
            device. While a backward runs their ``.grad`` is None.
        ignored_modules, ignored_states: modules or parameters to leave as they are.
        device_id: compute device; else the mesh's, else cuda under NCCL, else where the
            parameters are. Of several GPUs the one where they are, else the current
            one, which torchrun's local rank chooses if nobody did.
        param_init_fn: called once with each module that holds parameters or buffers on
            meta, to give them memory and values; unit by unit, so that memory holds one
            unit above the shards. Without it a model on meta is sharded on meta, and
            ``to_empty`` or a state dict gives the shards values before the first
            forward.
        sync_module_states: give every rank the values of rank 0 first; a model on meta
            gets memory for them, and on rank 0, if it is on meta there, values from
            each module's ``reset_parameters``.
        backward_prefetch: when the next unit is gathered in backward: BACKWARD_PRE,
            before this one computes (if nothing is given), BACKWARD_POST, after it, or
            None, when it is needed.
        forward_prefetch: gather the unit that came next in the last forward of this
            kind before it is needed. Not done if nothing is given.
        limit_all_gathers: keep at most one resharded unit's memory waiting for the GPU.
        block: what a shard boundary may not cut: Block.ROW (if nothing is given) or
            Block.ELEMENT.
        group_by: a function of a parameter's name in ``module`` and the parameter.
            Those with different answers lie in regions of their own, so that
            ``flat_parameter_groups`` can tell them apart. Equal on all ranks. One group
            if nothing is given.
        if_sharded: "error" (if nothing is given), or "skip" to return a module that is
            sharded as this call asks: the same units with the same parameters, options,
            ranks and device, however they are spelled. Another is refused.
        tied_params: what to do with a parameter tied across units: "error" (if
            nothing is given), or "promote" to the lowest unit above all its places.

    Collective: one broadcast per parameter and buffer with ``sync_module_states``; the
    nodes' groups are made for the first hybrid unit that is given no ranks; else none.
    All ranks must make the same calls in the same order.
    Raises: CompositionError, PlanError, TypeError; the module is as it was.

    >>> for block in model.blocks:
    ...     fully_shard(block)
    >>> fully_shard(model)
    """
    del if_sharded  # decided before the contract is asked
    if unknown:
        raise TypeError(_unknown_text(sorted(unknown)))
    state = fully_shard.state(module if isinstance(module, nn.Module) else module[0])
    assert state is not None
    options = UnitOptions(
        strategy=strategy,
        block=block,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
        use_orig_params=use_orig_params,
        mixed_precision=mixed_precision,
        cpu_offload=cpu_offload,
        group_by=group_by,
    )
    application = prepare(
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
    modules = [module] if isinstance(module, nn.Module) else list(module)
    for each in modules:
        refuse_container(each)
    apply(modules, state, application)


def _unknown_text(names: list[str]) -> str:
    hints = [f"{n} (here: {_FSDP2_NAMES[n]})" for n in names if n in _FSDP2_NAMES]
    rest = [n for n in names if n not in _FSDP2_NAMES]
    parts = []
    if hints:
        parts.append(f"these are torch FSDP names: {', '.join(hints)}")
    if rest:
        parts.append(f"unknown: {', '.join(map(_with_nearest, rest))}")
    return (
        f"fully_shard got unexpected keyword arguments; {'; '.join(parts)}. It takes "
        f"{', '.join(_OWN_NAMES)}."
    )


def _with_nearest(name: str) -> str:
    near = difflib.get_close_matches(name, _OWN_NAMES, n=1)
    return f"{name} (did you mean {near[0]}?)" if near else name


class _FullyShard(Contract[Any, _FSDPState]):
    """The contract, plus the choice of what a second application does."""

    def __call__(self, module: T, *args: Any, **kwargs: Any) -> T:
        """Apply ``fully_shard``; see the function's own documentation."""
        choice = kwargs.get("if_sharded", "error")
        if choice not in ("error", "skip"):
            raise PlanError(f"if_sharded expects 'error' or 'skip', got {choice!r}.")
        modules = [module] if isinstance(module, nn.Module) else module
        # Asked of what is sharded alone: to read the arguments may use an iterator up.
        if (
            choice == "skip"
            and isinstance(modules, (list, tuple))
            and any(isinstance(m, nn.Module) and self.state(m) for m in modules[:1])
            and is_same_application(modules, _application(kwargs))
        ):
            return module
        return super().__call__(module, *args, **kwargs)


def _application(given: Mapping[str, Any]) -> Application:
    """The application that these keyword arguments ask for."""
    unknown = sorted(given.keys() - set(_OWN_NAMES))
    if unknown:
        raise TypeError(_unknown_text(unknown))
    options = {name: given[name] for name in PER_MODULE if name in given}
    rest = given.keys() - options.keys() - {"if_sharded"}
    return prepare(UnitOptions(**options), **{name: given[name] for name in rest})


_OWN_NAMES = tuple(_shard.__kwdefaults__ or ())
# The registry keeps states under the function's name.
_shard.__name__ = _shard.__qualname__ = "fully_shard"
fully_shard = _FullyShard(_shard, _FSDPState, check_names=True)
