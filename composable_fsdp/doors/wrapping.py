"""Applies a policy's choice to a tree; wraps modules during construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import quoted, strip_wrapper
from composable_fsdp.planning import walk


class PlainNames(nn.Module):
    """A wrapper that shows the names and the items of the module that it wraps."""

    @property
    def _wrapped(self) -> nn.Module:
        """Return the wrapped module."""
        raise NotImplementedError

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module, for a wrapped ``nn.Sequential``."""
        return self._wrapped[key]  # type: ignore[index]  # the class decides

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the plain model's names and parameters, without wrapper components."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield strip_wrapper(name), parameter


Apply = Callable[[nn.Module, dict[str, Any]], nn.Module | None]
"""Applies an API to a module: returns None (in place) or a replacement."""


def post_order_apply(
    root: nn.Module, targets: Mapping[nn.Module, Mapping[str, Any]], fn: Apply
) -> None:
    """Call ``fn(module, options)`` for each target, after all targets below.

    Each module is visited once; a replacement that ``fn`` returns takes its place under
    every name and parent. ``root`` is skipped: only the caller can replace it.

    Raises: PlanError, before any call, if a target is not below ``root``; TypeError, if
        ``fn`` returns neither a module nor None.
    """
    order = walk.post_order(root)
    # Check all targets before the first change of the tree.
    for foreign in targets.keys() - set(order):
        raise PlanError(
            f"post_order_apply got a {type(foreign).__name__} that is not below the "
            f"{type(root).__name__}; targets come from a policy asked about that tree."
        )
    # Find all places before the first change: a replacement hides the module inside.
    places: dict[nn.Module, list[walk.Edge]] = {module: [] for module in targets}
    for parent in order:
        for edge in walk.edges(parent):
            if edge.child in places:
                places[edge.child].append(edge)
    for module in order:
        if module is not root and module in targets:
            replacement: object = fn(module, dict(targets[module]))
            _put(replacement, places[module])


def _put(replacement: object, places: list[walk.Edge]) -> None:
    """Put ``replacement`` at all ``places`` of a module; None keeps the module."""
    if replacement is None:
        return
    if not isinstance(replacement, nn.Module):
        raise TypeError(
            "post_order_apply expects fn to return a module or None, got "
            f"{replacement!r} for the {type(places[0].child).__name__} that its parent "
            f"calls {quoted(places[0].name)}."
        )
    for parent, name, _ in places:
        setattr(parent, name, replacement)


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """The arguments of ``enable_wrap``."""

    wrapper_cls: Callable[..., nn.Module]
    kwargs: Mapping[str, Any]


# A context variable: threads and tasks that build models concurrently do not see each
# other's block.
_current: ContextVar[_Wrapper | None] = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(
    *, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any
) -> Iterator[None]:
    """Make ``wrap`` call ``wrapper_cls(module, **wrapper_kwargs)`` in this block.

    Blocks nest: the inner block replaces the outer block completely until the inner
    block ends, also by an exception. Other threads are not affected.

    Raises: TypeError, if ``wrapper_cls`` is not callable.
    """
    made: object = wrapper_cls
    if not callable(made):
        raise TypeError(
            "enable_wrap(wrapper_cls=...) expects a class or function that takes a "
            f"module, such as FullyShardedDataParallel, got {made!r}."
        )
    token = _current.set(_Wrapper(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        # reset() restores the outer block, if any.
        _current.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module`` wrapped by the ``enable_wrap`` block; unchanged outside.

    ``wrap_overrides`` replace the block's options of the same name.

    >>> with enable_wrap(wrapper_cls=nn.Sequential):
    ...     wrap(nn.ReLU())
    Sequential(
      (0): ReLU()
    )
    >>> wrap(nn.ReLU())
    ReLU()
    """
    current = _current.get()
    if current is None:
        return module
    return current.wrapper_cls(module, **{**current.kwargs, **wrap_overrides})
