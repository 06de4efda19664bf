"""How gradients are reduced, set between steps: functions that take the module first.

Names and meanings are those of FSDP2's methods. Each takes any module that is or holds
fully sharded modules; ``recurse=False`` means the unit that the module itself is. All
ranks must make the same calls. None of them sends anything.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from composable_fsdp.config import ShardingStrategy
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.build import set_divisions
from composable_fsdp.tree.root import outermost
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import (
    _get_fsdp_states,
    inside_wrappers,
    no_unit,
    require_module,
)

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def set_requires_gradient_sync(
    module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True
) -> None:
    """Set whether backward reduces gradients; ``no_sync`` as a switch.

    With False each unit keeps a full reduce buffer ``(padded_numel,)`` in the reduce
    dtype; the next backward with True reduces the sum. Sets
    ``set_requires_all_reduce``, too.

    Raises: CompositionError, if there is no unit to set it on; TypeError, if the
    setting is neither True nor False.
    """
    require_flag("set_requires_gradient_sync", requires_gradient_sync)
    for state in units_of(module, "set_requires_gradient_sync", recurse=recurse):
        state.sync_gradients = requires_gradient_sync
        state.handle.rule.all_reduce = requires_gradient_sync


def set_requires_all_reduce(
    module: nn.Module, requires_all_reduce: bool, *, recurse: bool = True
) -> None:
    """Set whether a reduction goes over the replicas, where there are any.

    With False a hybrid unit reduce-scatters and keeps the sums, ``(shard_numel,)`` in
    the reduce dtype, and ``.grad`` stays as it is; the next reduction with True
    all-reduces the total. Means nothing without replicas.

    Raises: CompositionError, if there is no unit to set it on; TypeError, if the
    setting is neither True nor False.
    """
    require_flag("set_requires_all_reduce", requires_all_reduce)
    for state in units_of(module, "set_requires_all_reduce", recurse=recurse):
        state.handle.rule.all_reduce = requires_all_reduce


def set_is_last_backward(module: nn.Module, is_last_backward: bool) -> None:
    """Set whether the next backward is the last one of the step; for the whole tree.

    With False the end of backward does not wait for the last reduction: its ``.grad``
    comes with the next backward, which must follow before gradients are read.

    Raises: CompositionError, if there is no unit; TypeError, if the setting is neither
    True nor False.
    """
    require_flag("set_is_last_backward", is_last_backward)
    for state in units_of(module, "set_is_last_backward", recurse=True):
        outermost(state).is_last_backward = is_last_backward


def set_gradient_divide_factor(module: nn.Module, factor: float) -> None:
    """Divide sums over ranks by ``factor`` and not by the number of ranks.

    On the module's own unit, as FSDP2; call it on each that needs it. A communication
    hook divides as it likes.

    Raises: CompositionError, if ``module`` is no fully sharded module; ValueError, if
    ``factor`` is not positive.
    """
    if not isinstance(factor, (int, float)) or not factor > 0:
        raise ValueError(
            "set_gradient_divide_factor expects a positive number, got "
            f"{factor!r}. Sums over ranks are divided by it; the number of ranks is "
            "what it is without the call."
        )
    for state in units_of(module, "set_gradient_divide_factor", recurse=False):
        state.handle.rule.factor = float(factor)
        set_divisions(state.handle)


def set_reduce_scatter_unused_params(
    module: nn.Module, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Set whether parameters without a gradient on this rank take part, with zeros.

    For models whose ranks use different parameters (experts, modalities). Every
    trainable parameter then gets the average as ``.grad`` on every rank, and a unit
    that ran forward and got no gradient here is gathered and reduced in its turn, so
    that all ranks send the same collectives. Without it ``.grad`` stays None where
    nothing arrived, and ranks have to agree. ``torch.autograd.grad`` with respect to
    inputs gives parameters none; all ranks run the same kind of backward. Takes effect
    with the next forward.

    Raises: CompositionError, if there is no unit to set it on; TypeError, if the
    setting is neither True nor False.
    """
    name = "set_reduce_scatter_unused_params"
    require_flag(name, reduce_scatter_unused_params)
    for state in units_of(module, name, recurse=recurse):
        state.handle.rule.fill = reduce_scatter_unused_params


def register_comm_hook(
    module: nn.Module, state: object, hook: Callable[..., object]
) -> None:
    """Have ``hook`` reduce gradients in place of the collectives; FSDP1's contract.

    ``hook(state, gradient, output)`` where parameters are sharded, ``hook(state,
    gradient)`` where each rank holds them whole; once per region and reduction. See
    ``composable_fsdp.runtime.comm_hooks`` for what it may do, and for
    ``allreduce_hook``, ``reduce_scatter_hook``, ``fp16_compress_hook`` and
    ``bf16_compress_hook``; those of torch work as well.

    Raises: CompositionError, for hybrid strategies, or if a unit has a hook already;
    TypeError, if ``hook`` cannot be called. Nothing is registered then.
    """
    if not callable(hook):
        raise TypeError(
            "register_comm_hook expects a function hook(state, gradient[, output]), "
            f"got {type(hook).__name__}."
        )
    units = units_of(module, "register_comm_hook", recurse=True)
    for unit in units:
        if unit.options.strategy in _HYBRID:
            raise CompositionError(
                f"register_comm_hook was called with unit {unit.name} of strategy "
                f"{unit.options.strategy.name}: a hook reduces over one group, and "
                "hybrid units need two. Use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD."
            )
        if unit.handle.rule.hook is not None:
            raise CompositionError(
                f"register_comm_hook was called twice for unit {unit.name}; a unit "
                "takes one hook. Register one that does both."
            )
    for unit in units:
        unit.handle.rule.hook, unit.handle.rule.hook_state = hook, state


def require_flag(name: str, value: object) -> None:
    """Raise TypeError, in the name of function ``name``, unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} expects True or False, got {value!r}. Compare, if it is a number "
            "or a text: (step + 1) % 4 == 0."
        )


def units_of(module: nn.Module, name: str, *, recurse: bool) -> list[_FSDPState]:
    """The units in the tree of ``module``; without ``recurse`` the one that it is.

    Raises: CompositionError, in the name of function ``name``, if there is none.
    """
    require_module(module, name)
    states = _get_fsdp_states(module)
    if not recurse:
        inner = inside_wrappers(module)
        states = [s for s in states if any(m is inner for m in s.modules)]
    if not states:
        raise no_unit(module, name, recurse=recurse)
    return states
