"""Applies a policy's choice to a tree, wraps modules, and FSDP1's policy functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from torch import nn

from composable_fsdp.naming import strip_wrapper
from composable_fsdp.planning import walk
from composable_fsdp.planning.policies import is_named
from composable_fsdp.state_dict.hooks import install_wrapper_hooks


class PlainNames(nn.Module):
    """A wrapper that shows the names and the items of the module that it wraps."""

    _component: ClassVar[str]
    """The attribute that holds the wrapped module."""

    @property
    def _wrapped(self) -> nn.Module:
        """Return the wrapped module."""
        wrapped = self._modules[self._component]
        assert wrapped is not None
        return wrapped

    def _hold(self, module: nn.Module) -> None:
        """Wrap ``module``."""
        setattr(self, self._component, module)
        install_wrapper_hooks(self, self._component)

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
    """Replace each target but ``root`` by ``fn(module, options)``, bottom up."""
    order = walk.post_order(root)
    # Find all places before the first change: a replacement hides the module inside.
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {m: [] for m in targets}
    for parent in order:
        for name, child in parent._modules.items():
            if child in places:
                places[child].append((parent, name))
    for module in order:
        if module is not root and module in targets:
            made = fn(module, dict(targets[module]))
            for parent, name in places[module] if made is not None else ():
                setattr(parent, name, made)


# The class and the options of the block. A context variable: threads and tasks that
# build models concurrently do not see each other's block.
_current: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None]
_current = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(
    *, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any
) -> Iterator[None]:
    """Make ``wrap`` call ``wrapper_cls(module, **wrapper_kwargs)`` in this block.

    An inner block replaces the outer one. Other threads are not affected.
    """
    token = _current.set((wrapper_cls, wrapper_kwargs))
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
    wrapper_cls, options = current
    return wrapper_cls(module, **{**options, **wrap_overrides})


# FSDP1's policies as functions: ``(module, recurse, nonwrapped_numel) -> bool``.


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Return whether ``module`` is of a layer class; always True on the way down.

    Raises: PlanError, if the module is a container such as ``nn.ModuleList``.
    """
    return recurse or is_named(module, tuple(transformer_layer_cls))


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Return ``lambda_fn(module)``; True on the way down; see ``CustomPolicy``."""
    return recurse or lambda_fn(module)


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Return True: every module becomes a unit."""
    return True


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    """Return whether any of ``policies`` returns True."""
    # By keyword, as FSDP1 does: a policy may order its parameters differently.
    ask = {"module": module, "recurse": recurse, "nonwrapped_numel": nonwrapped_numel}
    return any(policy(**ask) for policy in policies)
