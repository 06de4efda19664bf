"""Finding states and handles in a module tree: pure functions, in ``.modules()`` order.

Left to right, depth first, iterative, each module once. Subtrees of incompatible APIs
(``replicate``, DDP) are not entered from above; asked of a module that our
``replicate`` manages, or of a DDP itself, its tree is walked. Nothing here initialises,
changes or sends anything.

Idioms, for any ``module``:

* all states: ``_get_fsdp_states(module)``
* all root states: ``_get_fsdp_root_states(module)``
* all handles: ``_get_fsdp_handles(module)``
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from composable_fsdp.compose.registry import (
    TORCH_DDP,
    get_state,
    incompatible_api,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import TRANSPARENT, join_name
from composable_fsdp.planning.assign import API, REPLICATE
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state


def require_module(module: object, what: str) -> None:
    """Raise TypeError in the name of ``what`` unless ``module`` is one module."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{what} expects a module, got a {type(module).__name__}. Pass the model, "
            "or a module in it."
        )


def no_unit(module: nn.Module, what: str, *, recurse: bool) -> CompositionError:
    """The error of ``what``, which found no unit; it says where the nearest one is."""
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
    kind = "holds no" if recurse else "is no"
    return CompositionError(
        f"{what} was called on a {type(module).__name__} that {kind} fully sharded "
        f"module; {where}."
    )


def walk_states(module: nn.Module) -> Iterator[tuple[str, nn.Module, _FSDPState]]:
    """Yield each state once, after the name of its first module and that module."""
    seen_modules: set[int] = set()
    seen_states: set[int] = set()
    stack = [("", module)]
    while stack:
        fqn, current = stack.pop()
        if id(current) in seen_modules:
            continue
        seen_modules.add(id(current))
        state = get_state(current, API)
        api = incompatible_api(current)
        if api is not None:
            state = get_state(current, REPLICATE)
            if not isinstance(state, _FSDPState):
                if current is not module or api != TORCH_DDP:
                    continue
            elif current is not module and state.parent is None:
                continue  # the top of another tree
        if isinstance(state, _FSDPState) and id(state) not in seen_states:
            seen_states.add(id(state))
            yield fqn, current, state
        if current._modules:
            for name, child in reversed(current._modules.items()):
                if child is not None:
                    path = fqn if name in TRANSPARENT else join_name(fqn, name)
                    stack.append((path, child))


def _get_unit_state(module: nn.Module) -> _FSDPState | None:
    """Return the state of the unit that ``module`` itself is, of either API."""
    state = get_state(module, API) or get_state(module, REPLICATE)
    return state if isinstance(state, _FSDPState) else None


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return the unit that ``module`` is, or that wrappers put around one hold.

    ``module`` may be ``FullyShardedDataParallel``, a wrapper of activations, or one
    around the other. Without a unit inside it is what the innermost wrapper holds.
    """
    while _get_unit_state(module) is None:
        inner = wrapped_in(module)
        if inner is None:
            break
        module = inner
    return module


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """Return what ``module`` holds under a name that wrappers use, if it is one."""
    # Not by truth: a module may have a length, even one it cannot tell.
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
    """Return the states below ``module`` and, aligned, their fully sharded modules."""
    found = [(state, owner) for _, owner, state in walk_states(module)]
    return [state for state, _ in found], [owner for _, owner in found]


def _get_fsdp_states(module: nn.Module) -> list[_FSDPState]:
    """Return the states in the tree of ``module``, itself included, each once."""
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_root_states(module: nn.Module) -> list[_FSDPState]:
    """Return the states in the tree of ``module`` that no other unit holds."""
    return [state for state in _get_fsdp_states(module) if state.parent is None]


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    """Return the handles in the tree of ``module``, in the order of their units."""
    return [state.handle for state in _get_fsdp_states(module)]
