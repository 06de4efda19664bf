"""``checkpoint``: activation checkpointing in place.

Module hooks stay outside of what runs twice, so it may come before ``fully_shard`` or
after it. Units below run again and are not recorded in the execution order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, cast

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable_fsdp.compose.contract import contract
from composable_fsdp.errors import CompositionError
from composable_fsdp.planning import walk

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns the contexts of the first forward and of the recomputation."""


class _CheckpointState:
    """The registry's state of one application: the original forward and the options."""

    def __init__(self) -> None:
        self.forward: Callable[..., Any] | None = None
        self.options: dict[str, Any] = {}


@contract(cast("Callable[[], Any]", _CheckpointState))
def checkpoint(
    module: nn.Module,
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Contexts | None = None,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
    early_stop: bool = True,
) -> None:
    """Save no activations of ``module``; recompute its forward in backward.

    Class, parameters and names stay unchanged; the instance gets an own ``forward``.
    With ``use_reentrant=True`` tensors inside containers get no gradient, as in torch.
    Units below the module are all-gathered again in backward.

    Args:
        module: The module to recompute.
        use_reentrant: Use torch's reentrant implementation. Default False.
        preserve_rng_state: Restore the RNG state for the recomputation. Default True.
        context_fn: Returns the contexts of the forward and of the recomputation,
            non-reentrant mode only. Default None: no contexts.
        determinism_check: The check of recomputed tensors, non-reentrant mode only.
            Default "default": compare shapes, dtypes and devices.
        debug: Record operators for error messages, non-reentrant mode only. Default
            False.
        early_stop: Stop the recomputation at the last saved tensor, non-reentrant mode
            only. Default True.

    Returns: ``module``, the same object.
    Raises: CompositionError, for a second application, a container, a list of modules,
        or options that torch accepts only in the non-reentrant mode.

    >>> layer = checkpoint(nn.Linear(2, 2))
    >>> type(layer).__name__
    'Linear'
    """
    if not isinstance(module, nn.Module) or walk.is_container(module):
        raise CompositionError(
            f"checkpoint got a {type(module).__name__}, which has no forward to run "
            "again. Apply it to its elements, one after the other."
        )
    options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
    # torch would refuse these options only when the module runs for the first time.
    if use_reentrant and (context_fn is not None or debug):
        raise CompositionError(
            "checkpoint(use_reentrant=True) has neither context_fn nor debug; torch "
            "has them for use_reentrant=False. Leave them out, or use_reentrant."
        )
    if not use_reentrant:
        options.update(
            determinism_check=determinism_check, debug=debug, early_stop=early_stop
        )
        if context_fn is not None:
            options["context_fn"] = context_fn
    state = checkpoint.state(module)
    assert state is not None
    # The bound method, so that a forward set on the instance earlier is kept, too.
    state.forward = module.forward
    state.options = {"use_reentrant": use_reentrant, **options}
    # On the instance: nn.Module.__call__ runs the module's hooks around ``forward``, so
    # the hooks stay outside the recomputation.
    module.forward = partial(_forward, state)


def _forward(state: _CheckpointState, *args: Any, **kwargs: Any) -> Any:
    """Run the original forward of ``state`` checkpointed; set as ``module.forward``."""
    assert state.forward is not None
    return run_checkpointed(state.forward, args, kwargs, **state.options)


def run_checkpointed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    run: Callable[..., Any] = torch_checkpoint,
    use_reentrant: bool,
    **options: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``, checkpointed by ``run``."""
    if not use_reentrant or not kwargs:
        return run(function, *args, use_reentrant=use_reentrant, **options, **kwargs)
    # torch's reentrant mode accepts positional arguments only: pass the values by
    # position and restore the names inside the recomputed function.
    names, count = tuple(kwargs), len(args)

    def positional(*values: Any) -> Any:
        named = dict(zip(names, values[count:], strict=True))
        return function(*values[:count], **named)

    return run(positional, *args, *kwargs.values(), use_reentrant=True, **options)
