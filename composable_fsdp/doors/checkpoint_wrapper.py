"""Activation wrappers under the names that torch's FSDP scripts import."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum, auto
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable_fsdp.doors.wrapping import PlainNames, post_order_apply
from composable_fsdp.features.checkpoint import run_checkpointed
from composable_fsdp.features.host_memory.copies import offloaded
from composable_fsdp.naming import CHECKPOINTED_MODULE
from composable_fsdp.planning import walk
from composable_fsdp.planning.options import by_name
from composable_fsdp.planning.policies import AnyPolicy, evaluate_policy

__all__ = [
    "CheckpointImpl",
    "CheckpointWrapper",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_wrapper",
]


class CheckpointImpl(Enum):
    """The implementation of recomputation; see ``torch.utils.checkpoint``."""

    REENTRANT = auto()
    NO_REENTRANT = auto()


class ActivationWrapper(PlainNames):
    """Base class of wrappers that change how a module's activations are kept."""

    _component = CHECKPOINTED_MODULE

    def __init__(self, mod: nn.Module) -> None:
        super().__init__()
        if not isinstance(mod, nn.Module):
            raise TypeError(
                f"{type(self).__name__} expects a module, got a {type(mod).__name__}."
            )
        self._hold(mod)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the wrapped module, if the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # copy and pickle ask a new wrapper for special methods before the wrapper
            # has a module; the lookup of the module would then recurse.
            if name.startswith("__") or "_modules" not in vars(self):
                raise
            return getattr(self._wrapped, name)


class OffloadWrapper(ActivationWrapper):
    """Keep saved tensors in host memory until backward; made by ``offload_wrapper``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; copy its saved tensors to the host and back."""
        with offloaded():
            return self._wrapped(*args, **kwargs)


class CheckpointWrapper(ActivationWrapper):
    """Save no activations and recompute them; made by ``checkpoint_wrapper``."""

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        super().__init__(mod)
        # Not an argument of its own: the signature is torch's.
        self.offload = bool(checkpoint_fn_kwargs.pop("offload", False))
        # Scripts may import the enum from torch instead of this package: match by name.
        self.checkpoint_impl = by_name(
            CheckpointImpl, checkpoint_impl, argument="checkpoint_impl"
        )
        reentrant = self.checkpoint_impl is CheckpointImpl.REENTRANT
        if checkpoint_fn is None:
            checkpoint_fn = partial(torch_checkpoint, use_reentrant=reentrant)
        self.checkpoint_fn = partial(checkpoint_fn, **checkpoint_fn_kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module through ``checkpoint_fn``."""
        # Around the checkpoint: what it saves are the inputs, and nothing else.
        with offloaded() if self.offload else nullcontext():
            if self.checkpoint_impl is CheckpointImpl.NO_REENTRANT:
                return self.checkpoint_fn(self._wrapped, *args, **kwargs)
            # The reentrant mode takes positional arguments only; run_checkpointed
            # repacks keyword arguments.
            return run_checkpointed(
                self._wrapped, args, kwargs, run=self._reentrant, use_reentrant=True
            )

    def _reentrant(self, function: Any, *args: Any, use_reentrant: bool) -> Any:
        """Call ``checkpoint_fn`` without ``use_reentrant``, which is bound already."""
        return self.checkpoint_fn(function, *args)


def offload_wrapper(module: nn.Module) -> nn.Module:
    """Wrap ``module`` to keep saved activations in host memory until backward."""
    return OffloadWrapper(module)


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Wrap ``module`` so that its activations are recomputed in backward.

    Args:
        module: The module to recompute; inside or outside a fully sharded module.
        checkpoint_impl: torch's implementation. Only REENTRANT repacks keyword
            arguments. Default NO_REENTRANT.
        checkpoint_fn: Called as ``checkpoint_fn(module, *args, **kwargs)`` with
            ``checkpoint_fn_kwargs``. Default None: torch's ``checkpoint``.
        **checkpoint_fn_kwargs: Keyword arguments of ``checkpoint_fn``. Besides,
            ``offload=True`` keeps the inputs of the module, which the recomputation
            needs, in host memory. Copies run beside compute, and come back a module
            ahead of backward; those of at most two modules are on the device.

    Returns: the wrapper.
    Collective: none; units inside the module are all-gathered again in backward.

    >>> list(checkpoint_wrapper(nn.Linear(2, 2)).state_dict())
    ['weight', 'bias']
    """
    return CheckpointWrapper(
        module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs
    )


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda module: True,
    auto_wrap_policy: AnyPolicy | None = None,
) -> None:
    """Wrap every selected module below ``model``, in place.

    Inner modules are wrapped first, a shared module is wrapped once, and ``model``
    itself is never wrapped.

    Args:
        model: The root of the walk.
        checkpoint_wrapper_fn: Returns the replacement of a module. The function may
            return the module itself, as ``checkpoint`` does. Default:
            ``checkpoint_wrapper``.
        check_fn: Selects modules; containers without a forward are never selected by
            this function. Default: every module.
        auto_wrap_policy: Selects modules in any form that ``fully_shard`` accepts,
            instead of ``check_fn``. Default None.

    Raises: PlanError, TypeError, for a policy that selects a module outside the tree or
        returns a wrong type.
    """
    if auto_wrap_policy is not None:
        targets = evaluate_policy(auto_wrap_policy, model, root_kwargs={})
    else:
        targets = {
            module: {}
            for module in walk.modules(model)
            if module is not model
            and check_fn(module)
            # An nn.ModuleList has no forward that could run twice.
            and not walk.is_container(module)
        }
    post_order_apply(
        model, targets, lambda module, kwargs: checkpoint_wrapper_fn(module, **kwargs)
    )
