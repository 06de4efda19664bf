"""What a composable API promises: one state per application, names left as they are.

::

    api(module) --> modules checked --> names noted --> state registered --> API runs
                    (nothing touched)                                           |
         module <-- names and their order compared <-- what it returned <-------'
                            '-- anything raised on the way: the registry as before

Names are the price of composability: optimizers, checkpoints and the next API find the
parameters where the user put them. Their order pairs ranks and optimizer states, so it
is compared as well. Torch has such a decorator for its own APIs; here reads do not
write, and a refusal shows the first difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from torch import nn

from composable_fsdp.compose.registry import (
    get_state,
    has_api,
    remove_state,
    set_state,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import join_name, quoted

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T", bound="nn.Module | Sequence[nn.Module]")


@overload
def contract(
    state_cls: Callable[[], S], *, check_names: bool = True
) -> Callable[[Callable[Concatenate[Any, P], object]], Contract[P, S]]: ...


@overload
def contract(
    *, check_names: bool = True
) -> Callable[
    [Callable[Concatenate[Any, P], object]], Contract[P, SimpleNamespace]
]: ...


def contract(
    state_cls: Callable[[], Any] = SimpleNamespace, *, check_names: bool = True
) -> Callable[[Callable[Concatenate[Any, P], object]], Contract[P, Any]]:
    """Turn a function of a module, or of a list of modules, into a composable API.

    Each application makes one ``state_cls()`` and registers it, under the function's
    name, on the module or on every module of the list, before the function runs. The
    function reads it with ``api.state(module)`` and returns None or what it was given.
    Without a class the state is a ``SimpleNamespace``, which takes any attribute.
    ``check_names=False`` skips the comparison of names, if the API cannot change any.

    >>> class Mark:
    ...     text = ""
    >>> @contract(Mark)
    ... def mark(module, text):
    ...     mark.state(module).text = text
    >>> layer = mark(nn.Linear(2, 2), "first")
    >>> mark.state(layer).text
    'first'
    """

    def decorate(api: Callable[Concatenate[Any, P], object]) -> Contract[P, Any]:
        return Contract(api, state_cls, check_names=check_names)

    return decorate


class Contract(Generic[P, S]):
    """A composable API: call it on a module, read its state with ``state``."""

    __name__: str
    __qualname__: str

    def __init__(
        self,
        api: Callable[Concatenate[Any, P], object],
        state_cls: Callable[[], S],
        *,
        check_names: bool,
    ) -> None:
        functools.update_wrapper(cast("Callable[..., object]", self), api)
        self._api = api
        self._state_cls = state_cls
        self._check_names = check_names

    def __call__(self, module: T, *args: P.args, **kwargs: P.kwargs) -> T:
        """Apply the API to ``module``, a module or a list of modules, and return it.

        Raises: CompositionError, if a module carries this API already, or if the API
        returns something else or changes a name or an order; TypeError, if ``module``
        is neither a module nor a list of modules. After any error, also one that the
        API raised, the registries are as they were.
        """
        modules = _as_modules(self.__name__, module)
        self._require_fresh(modules)
        before = [_outline(m) for m in modules] if self._check_names else []
        state = self._state_cls()
        try:
            for each in modules:
                set_state(each, self.__name__, state)
            returned = self._api(module, *args, **kwargs)
            self._require_same(modules, returned)
            self._require_state(modules, state)
            # Not strict: without the check, there is nothing to compare.
            for each, outline in zip(modules, before, strict=False):
                self._require_names(each, outline)
        except BaseException:
            for each in modules:
                remove_state(each, self.__name__)
            raise
        return module

    def state(self, module: nn.Module) -> S | None:
        """Return the state of this API on ``module`` itself, None if not applied."""
        return cast("S | None", get_state(module, self.__name__))

    def __repr__(self) -> str:
        return f"<composable API {self.__module__}.{self.__qualname__}>"

    def __reduce__(self) -> str:
        # As functions do: pickled by name, and a deep copy is the API itself.
        return self.__qualname__

    def _require_fresh(self, modules: Sequence[nn.Module]) -> None:
        for index, module in enumerate(modules):
            if has_api(module, self.__name__):
                raise CompositionError(
                    f"{self.__name__} was already applied to "
                    f"{_described(module, index, len(modules))}; a module takes each "
                    f"API once. Leave it out of this call, or read what is there with "
                    f"{self.__name__}.state(module)."
                )

    def _require_same(self, modules: Sequence[nn.Module], returned: object) -> None:
        """Raise unless ``returned`` is None or the very modules that were passed."""
        if returned is None or (len(modules) == 1 and returned is modules[0]):
            return
        # By identity: a module class may define what it equals.
        if isinstance(returned, list | tuple) and (
            [id(each) for each in returned] == [id(each) for each in modules]
        ):
            return
        raise CompositionError(
            f"contract violated by {self.__name__}: expected it to return None or what "
            f"it was given, got {_kind(returned)}. A composable API works in place; "
            f"it does not put another object in a module's stead."
        )

    def _require_state(self, modules: Sequence[nn.Module], state: S) -> None:
        for index, module in enumerate(modules):
            if self.state(module) is not state:
                raise CompositionError(
                    f"contract violated by {self.__name__}: the state made for this "
                    f"application is gone from "
                    f"{_described(module, index, len(modules))}. Fill the state that "
                    f"{self.__name__}.state(module) gives; do not register another."
                )

    def _require_names(self, module: nn.Module, before: _Outline) -> None:
        after = _outline(module)
        if after == before:
            return
        kind, index, old, new = _names(before).first_difference(_names(after))
        raise CompositionError(
            f"contract violated by {self.__name__} on a {type(module).__name__}: "
            f"{kind} {index} was {old} and is now {new}. A composable API may not add, "
            f"remove, rename or reorder parameters, buffers or modules; change their "
            f"data in place, or use hooks."
        )


@dataclass
class _Names:
    """Names in order, every path to a shared object counted."""

    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def first_difference(self, after: _Names) -> tuple[str, int, str, str]:
        """Return kind, index, and what stands there in ``self`` and in ``after``."""
        pairs = {
            "parameter": (self.parameters, after.parameters),
            "buffer": (self.buffers, after.buffers),
            "module": (self.modules, after.modules),
        }
        for kind, (olds, news) in pairs.items():
            for index, (old, new) in enumerate(zip_longest(olds, news)):
                if old != new:
                    return kind, index, _place(old), _place(new)
        raise AssertionError("asked for the first difference of equal names")


_Outline = list[str | None]
"""The keys below a module in the order of its names; ``None`` ends each kind. ::

    module = parameter* None  buffer* None  (name of child, child as module)* None

Equal outlines are equal names, and without a string made cost a third of them.
"""


def _outline(module: nn.Module) -> _Outline:
    outline: _Outline = []
    _collect(module, outline)
    return outline


def _collect(module: nn.Module, outline: _Outline) -> None:
    for table in (module._parameters, module._buffers):
        for key, value in table.items():
            if value is not None:
                outline.append(key)
        outline.append(None)
    for key, child in module._modules.items():
        if child is not None:
            outline.append(key)
            _collect(child, outline)
    outline.append(None)


def _names(outline: _Outline) -> _Names:
    """Return the names that ``named_*(remove_duplicate=False)`` give, in order."""
    names = _Names()
    _spell(iter(outline), "", names)
    return names


def _spell(keys: Iterator[str | None], name: str, names: _Names) -> None:
    names.modules.append(name)
    for found in (names.parameters, names.buffers):
        while (key := next(keys)) is not None:
            found.append(join_name(name, key))
    while (key := next(keys)) is not None:
        _spell(keys, join_name(name, key), names)


def _as_modules(api: str, module: object) -> Sequence[nn.Module]:
    """Return the modules meant by ``module``, or raise if it is no module or list."""
    if isinstance(module, nn.Module):
        return (module,)
    if not isinstance(module, list | tuple) or not module:
        raise TypeError(
            f"{api} expects a module or a list of at least one module, got "
            f"{_kind(module)}. Pass the module itself: {api}(model)."
        )
    seen: dict[int, int] = {}
    for index, each in enumerate(module):
        if not isinstance(each, nn.Module):
            raise TypeError(
                f"{api} expects a list of modules, got {_kind(each)} at position "
                f"{index}. Take it out of the list."
            )
        if seen.setdefault(id(each), index) != index:
            raise CompositionError(
                f"{api} got the same {type(each).__name__} at positions "
                f"{seen[id(each)]} and {index} of the list; name each module once."
            )
    return module


def _described(module: nn.Module, index: int, count: int) -> str:
    """Say which of ``count`` modules this is; names in the model are not known here."""
    kind = type(module).__name__
    return f"this {kind}" if count == 1 else f"the {kind} at position {index}"


def _kind(value: object) -> str:
    if isinstance(value, nn.Module):
        return f"another module, a {type(value).__name__}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    if len(text) > 60:
        return f"a {type(value).__name__}"
    return f"{text} of type {type(value).__name__}"


def _place(name: str | None) -> str:
    return "absent" if name is None else quoted(name)
