"""Wrappers for activations, under the names that torch's FSDP scripts import.

``checkpoint_wrapper`` recomputes, ``offload_wrapper`` keeps activations on the host.
Each adds one level to the tree and takes it out of the names that state dicts and the
wrapper give; ``checkpoint`` does the same without a level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable_fsdp.entries.checkpoint import run_checkpointed
from composable_fsdp.naming import CHECKPOINTED_MODULE, strip_wrapper
from composable_fsdp.planning import walk
from composable_fsdp.planning.options import by_name
from composable_fsdp.planning.policies import evaluate_policy
from composable_fsdp.planning.wrapping import post_order_apply
from composable_fsdp.state_dict.wrapper_keys import install_wrapper_hooks


class CheckpointImpl(Enum):
    """Which of torch's two ways to recompute; see ``torch.utils.checkpoint``."""

    REENTRANT = auto()
    NO_REENTRANT = auto()


class ActivationWrapper(nn.Module):
    """A module around another one that decides what becomes of its activations."""

    def __init__(self, mod: nn.Module) -> None:
        super().__init__()
        if not isinstance(mod, nn.Module):
            raise TypeError(
                f"{type(self).__name__} expects a module, got a {type(mod).__name__}."
            )
        setattr(self, CHECKPOINTED_MODULE, mod)
        install_wrapper_hooks(self, CHECKPOINTED_MODULE)

    @property
    def _wrapped(self) -> nn.Module:
        wrapped = self._modules[CHECKPOINTED_MODULE]
        assert wrapped is not None
        return wrapped

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped module are attributes of the wrapper."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Half copied or half unpickled, the wrapper has no module to ask.
            if name.startswith("__") or "_modules" not in vars(self):
                raise
            return getattr(self._wrapped, name)

    def __getitem__(self, key: Any) -> Any:
        """Forward indexing, for a wrapped ``nn.Sequential``."""
        return self._wrapped[key]  # type: ignore[index]  # the class decides

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of a plain module: names without the wrapper's component."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield strip_wrapper(name), parameter


class OffloadWrapper(ActivationWrapper):
    """Keeps what backward needs in host memory; made by ``offload_wrapper``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; saved tensors go to the host and come back."""
        # Pinned memory needs an accelerator.
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return self._wrapped(*args, **kwargs)


class CheckpointWrapper(ActivationWrapper):
    """Keeps no activations and recomputes them; made by ``checkpoint_wrapper``."""

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        super().__init__(mod)
        # Torch's own enum, too: a script may import it from there.
        self.checkpoint_impl = by_name(
            CheckpointImpl, checkpoint_impl, argument="checkpoint_impl"
        )
        reentrant = self.checkpoint_impl is CheckpointImpl.REENTRANT
        if checkpoint_fn is None:
            checkpoint_fn = partial(torch_checkpoint, use_reentrant=reentrant)
        self.checkpoint_fn = partial(checkpoint_fn, **checkpoint_fn_kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module through ``checkpoint_fn``."""
        if self.checkpoint_impl is CheckpointImpl.REENTRANT:
            return run_checkpointed(
                self._wrapped, args, kwargs, run=self._reentrant, use_reentrant=True
            )
        return self.checkpoint_fn(self._wrapped, *args, **kwargs)

    def _reentrant(self, function: Any, *args: Any, use_reentrant: bool) -> Any:
        return self.checkpoint_fn(function, *args)


def offload_wrapper(module: nn.Module) -> nn.Module:
    """Wrap ``module`` so that its activations wait for backward in host memory."""
    return OffloadWrapper(module)


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Wrap ``module`` so that its activations are recomputed in backward.

    Args:
        module: what runs twice; inside or outside a fully sharded module.
        checkpoint_impl: which of torch's two ways; only the reentrant one repacks
            keyword arguments.
        checkpoint_fn: called as ``checkpoint_fn(module, *args, **kwargs)`` in place of
            torch's, with ``checkpoint_fn_kwargs``.

    Sends nothing by itself; units inside are gathered again in backward.

    >>> list(checkpoint_wrapper(nn.Linear(2, 2)).state_dict())
    ['weight', 'bias']
    """
    return CheckpointWrapper(
        module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs
    )


def _always(module: nn.Module) -> bool:
    return True


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = _always,
    auto_wrap_policy: object = None,
) -> None:
    """Put a wrapper around every module below ``model`` that is chosen, in place.

    ``auto_wrap_policy`` chooses, in any form that ``fully_shard`` takes, else
    ``check_fn`` does; containers without a forward are never chosen by ``check_fn``.
    ``checkpoint_wrapper_fn`` may return the module itself, as ``checkpoint`` does.
    Inner modules come first, a shared one is wrapped once, ``model`` itself never.
    """
    if auto_wrap_policy is not None:
        targets = evaluate_policy(auto_wrap_policy, model, root_kwargs={})
    else:
        targets = {
            module: {}
            for module in walk.modules(model)
            if module is not model
            and check_fn(module)
            and not walk.is_container(module)
        }
    post_order_apply(
        model, targets, lambda module, kwargs: checkpoint_wrapper_fn(module, **kwargs)
    )
