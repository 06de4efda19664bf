"""Finding states and handles in a module tree; functions without side effects.

Subtrees of incompatible APIs (``replicate``, DDP) are not entered from above.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from composable_fsdp.compose.registry import (
    API,
    REGISTRY_KEY,
    REPLICATE,
    TORCH_DDP,
    get_state,
    other_apis,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import TRANSPARENT
from composable_fsdp.planning.walk import named
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state


def require_module(module: object, what: str) -> None:
    """Raise TypeError, naming the function ``what``, unless ``module`` is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{what} expects a module, got a {type(module).__name__}. Pass the model, "
            "or a module in it."
        )


def no_unit(module: nn.Module, what: str, *, recurse: bool) -> CompositionError:
    """Return the error for a function that found no unit."""
    owner = _get_module_fsdp_state(module)
    if owner is not None:
        where = (
            f"its parameters belong to the fully sharded {owner.title} above it. Pass "
            "that one"
        )
    elif not recurse and _get_fsdp_states(module):
        where = "there are such modules below it. Pass one of those"
    else:
        where = "nor is it in one. Apply fully_shard first"
    # A function that does not search below needs ``module`` itself to be a unit.
    kind = "holds no" if recurse else "is no"
    return CompositionError(
        f"{what} was called on a {type(module).__name__} that {kind} fully sharded "
        f"module; {where}."
    )


def walk_states(module: nn.Module) -> Iterator[tuple[str, nn.Module, _FSDPState]]:
    """Yield each state once: FQN of its first module, the module, the state."""

    def enter(current: nn.Module) -> bool:
        api = other_apis(current)[0]
        if api is None:
            return True
        # The subtree belongs to ``replicate`` or DDP.
        state = get_state(current, REPLICATE)
        if isinstance(state, _FSDPState):
            # A unit without a parent is the top of another tree, made by ``replicate``.
            return current is module or state.parent is not None
        # A DDP given by the caller is walked; a DDP below is skipped.
        return current is module and api == TORCH_DDP

    seen: set[int] = set()
    for fqn, current in named(module, enter=enter):
        # Most modules have no registry: no call for these.
        marked = REGISTRY_KEY in current.__dict__
        state = _get_unit_state(current) if marked else None
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield fqn, current, state


def _get_unit_state(module: nn.Module) -> _FSDPState | None:
    """Return the state of the unit that ``module`` itself is, for either API."""
    state = get_state(module, API) or get_state(module, REPLICATE)
    return state if isinstance(state, _FSDPState) else None


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return the unit at or inside ``module``, looking through wrappers."""
    while _get_unit_state(module) is None:
        inner = wrapped_in(module)
        if inner is None:
            break
        module = inner
    return module


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """Return the module that the wrapper ``module`` holds; ``None`` if no wrapper."""
    # Compared with ``is not None`` and not by truth value: a module may define
    # ``__len__``, even a ``__len__`` that raises.
    return next(
        (
            module._modules[name]
            for name in TRANSPARENT
            if module._modules.get(name) is not None
        ),
        None,
    )


def _get_fsdp_states_with_modules(
    module: nn.Module,
) -> tuple[list[_FSDPState], list[nn.Module]]:
    """Return the states in the tree of ``module`` and, aligned, their modules."""
    found = [(state, owner) for _, owner, state in walk_states(module)]
    return [state for state, _ in found], [owner for _, owner in found]


def _get_fsdp_states(module: nn.Module) -> list[_FSDPState]:
    """Return the states in the tree of ``module``, including ``module``, each once."""
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_root_states(module: nn.Module) -> list[_FSDPState]:
    """Return the states in the tree of ``module`` that have no unit above."""
    return [state for state in _get_fsdp_states(module) if state.parent is None]


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    """Return the handles in the tree of ``module``, in the order of their units."""
    return [state.handle for state in _get_fsdp_states(module)]
