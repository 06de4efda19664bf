"""``checkpoint``: activation checkpointing in place.

The module's own ``forward`` is what runs twice; its hooks stay outside and run once.
So whichever of ``checkpoint`` and ``fully_shard`` is applied first, the nesting is the
same::

    module(x):  hooks of fully_shard (gather) [ checkpointed forward ] hooks (reshard)
    backward:   gather                        [ forward again, its backward ]  reduce

Units below the module are inside: their hooks run again, gather again if needed, and
leave no trace in the execution order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable_fsdp.compose.contract import contract
from composable_fsdp.errors import CompositionError
from composable_fsdp.planning import walk

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class _CheckpointState:
    """What the registry keeps of one application: the way ``forward`` runs."""

    def __init__(self) -> None:
        self.forward: Callable[..., Any] | None = None
        """The forward that the module had."""
        self.options: dict[str, Any] = {}


@contract(_CheckpointState)
def checkpoint(
    module: nn.Module,
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Contexts | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
) -> None:
    """Keep no activations of ``module``; run its forward again in backward.

    Class, names and parameters stay; the instance gets a ``forward`` of its own, and
    ``checkpoint.state(module)`` says so. Arguments are those of
    ``torch.utils.checkpoint.checkpoint``; keyword arguments of the forward work in both
    modes. With ``use_reentrant=True`` tensors inside containers get no gradient, as in
    torch. Units below are gathered again in backward.

    Collective: none. Raises: CompositionError, applied twice, to a container, or with
    options that torch has for the non-reentrant mode only.

    >>> layer = checkpoint(nn.Linear(2, 2))
    >>> type(layer).__name__
    'Linear'
    """
    for each in [module] if isinstance(module, nn.Module) else module:
        if walk.is_container(each):
            raise CompositionError(
                f"checkpoint got a {type(each).__name__}, which has no forward to run "
                "again. Apply it to its elements."
            )
    if isinstance(module, list | tuple):
        raise CompositionError(
            f"checkpoint got a list of {len(module)} modules; each has a forward of "
            "its own to run again. Apply it to one after the other."
        )
    options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
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
    state.forward = module.forward
    state.options = {"use_reentrant": use_reentrant, **options}
    module.forward = partial(_forward, state)


def _forward(state: _CheckpointState, *args: Any, **kwargs: Any) -> Any:
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
    """Return ``function(*args, **kwargs)``, checkpointed by torch or by ``run``.

    The reentrant mode takes positional arguments only, so names are put back inside.
    """
    if not use_reentrant or not kwargs:
        return run(function, *args, use_reentrant=use_reentrant, **options, **kwargs)
    names, count = tuple(kwargs), len(args)

    def positional(*values: Any) -> Any:
        named = dict(zip(names, values[count:], strict=True))
        return function(*values[:count], **named)

    return run(positional, *args, *kwargs.values(), use_reentrant=True, **options)
