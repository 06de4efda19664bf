"""The contract of a composable API: a single state per call, and unchanged names.

Optimizers, checkpoints and the next API find parameters by name and order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, repeat, zip_longest
from operator import is_not
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

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
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T", bound="nn.Module | Sequence[nn.Module]")

First = Callable[[Any, Mapping[str, Any]], bool]
"""Called with module and keyword arguments before any change; true ends the call."""


class Contract(Protocol[P, S_co]):
    """A composable API: a function of a module, or of a list of modules."""

    __name__: str

    def __call__(self, module: T, *args: P.args, **kwargs: P.kwargs) -> T:
        """Apply the API to ``module``, and return ``module``."""

    def state(self, module: nn.Module) -> S_co | None:
        """Return this API's state on ``module`` itself; None if not applied."""


@overload
def contract(
    state_cls: Callable[[], S],
) -> Callable[[Callable[Concatenate[Any, P], object]], Contract[P, S]]: ...


@overload
def contract() -> Callable[
    [Callable[Concatenate[Any, P], object]], Contract[P, SimpleNamespace]
]: ...


def contract(
    state_cls: Callable[[], Any] = SimpleNamespace,
) -> Callable[[Callable[Concatenate[Any, P], object]], Contract[P, Any]]:
    """Turn a function of a module, or of a list of modules, into a composable API.

    Each call makes one ``state_cls()`` and registers it, under the function's name, on
    every module. Then the function runs, which returns None or its first argument.

    Args:
        state_cls: makes the state of a call. Default SimpleNamespace, which accepts any
            attribute.

    Returns: a decorator that makes a ``Contract``.

    >>> class Mark:
    ...     text = ""
    >>> @contract(Mark)
    ... def mark(module, text):
    ...     mark.state(module).text = text
    >>> layer = mark(nn.Linear(2, 2), "first")
    >>> mark.state(layer).text
    'first'
    """

    return contract_after(None, state_cls)


def contract_after(
    first: First | None, state_cls: Callable[[], S], users: Sequence[str] = ()
) -> Callable[[Callable[Concatenate[Any, P], object]], Contract[P, S]]:
    """Return what ``contract`` does, for an API that asks ``first`` before a call."""
    # ``users``: the arguments that bring code of the user. A call without any of these
    # compares no names, since tests hold that the API itself keeps them.

    def decorate(api: Callable[Concatenate[Any, P], object]) -> Contract[P, S]:
        name, signature = api.__name__, inspect.signature(api)
        kinds = [each.kind for each in signature.parameters.values()]
        # Without the module.
        most = sum(kind in _POSITIONAL for kind in kinds) - 1
        is_open = inspect.Parameter.VAR_POSITIONAL in kinds

        # A function and not an object with ``__call__``: ``help``, ``pickle`` and
        # ``copy`` treat functions by their name and signature.
        @functools.wraps(api)
        def composable(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Python's own TypeError tells the number alone, and not the way out.
            if len(args) > most and not is_open:
                raise TypeError(
                    f"{name} expects {most + 1} positional argument(s), the module "
                    f"first, and got {len(args) + 1}. Pass each option by keyword, as "
                    f"help({name}) names it: {name}(model, name=value)."
                )
            # Before the registry is asked: an API may accept a second application.
            if first is not None and first(module, kwargs):
                return module
            modules = _as_modules(name, module)
            _require_fresh(name, modules)
            # Take the outline first: after the API has run, the old names are gone.
            compares = not users or any(kwargs.get(key) is not None for key in users)
            before = [_outline(m) for m in modules] if compares else []
            state = state_cls()
            try:
                for each in modules:
                    set_state(each, name, state)
                returned = api(module, *args, **kwargs)
                _require_kept(name, modules, returned, state)
                for each, outline in zip(modules, before, strict=False):
                    _require_names(name, each, outline)
            # BaseException includes KeyboardInterrupt: an interrupted call must leave
            # no state behind, or the next call would be refused.
            except BaseException:
                for each in modules:
                    remove_state(each, name)
                raise
            return module

        def state_of(module: nn.Module) -> Any:
            """Return this API's state on ``module`` itself; None if not applied."""
            return get_state(module, name)

        made: Any = composable
        made.state = state_of
        # The function may be declared to return None, but the API returns its argument.
        module = next(iter(signature.parameters.values()))
        made.__signature__ = signature.replace(return_annotation=module.annotation)
        return cast("Contract[P, S]", made)

    return decorate


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def _require_fresh(api: str, modules: Sequence[nn.Module]) -> None:
    """Raise CompositionError if a module carries this API already."""
    for index, module in enumerate(modules):
        if has_api(module, api):
            raise CompositionError(
                f"{api} was already applied to {_described(module, index, modules)}; a "
                "module takes each API once. Leave it out of this call, or read what "
                f"is there with {api}.state(module)."
            )


def _require_kept(
    api: str, modules: Sequence[nn.Module], returned: object, state: object
) -> None:
    """Raise unless the API returned None or its argument, and kept its state."""
    # Compare by identity: a module class may define ``__eq__``.
    several = returned if isinstance(returned, list | tuple) else (returned,)
    if returned is not None and [*map(id, several)] != [*map(id, modules)]:
        raise CompositionError(
            f"contract violated by {api}: expected it to return None or what it was "
            f"given, got {_kind(returned)}. A composable API works in place; it does "
            "not put another object in a module's stead."
        )
    for index, module in enumerate(modules):
        if get_state(module, api) is not state:
            raise CompositionError(
                f"contract violated by {api}: the state made for this application is "
                f"gone from {_described(module, index, modules)}. Fill the state that "
                f"{api}.state(module) gives; do not register another."
            )


def _require_names(api: str, module: nn.Module, before: _Outline) -> None:
    """Raise if the names below ``module`` differ from the outline ``before``."""
    after = _outline(module)
    if after == before:
        return
    # Only a refusal needs names as strings; for equal outlines no name is built.
    olds, news = _names(before), _names(after)
    kind, index, *pair = next(
        (kind, index, old, new)
        for kind in olds
        for index, (old, new) in enumerate(zip_longest(olds[kind], news[kind]))
        if old != new
    )
    old, new = ("absent" if each is None else quoted(each) for each in pair)
    raise CompositionError(
        f"contract violated by {api} on a {type(module).__name__}: {kind} {index} was "
        f"{old} and is now {new}. A composable API may not add, remove, rename or "
        "reorder parameters, buffers or modules; change their data in place, or use "
        "hooks."
    )


_Outline = list[Sequence[str]]
"""The keys of each module, once per path; compared in a third of the time of names."""


def _outline(module: nn.Module) -> _Outline:
    """Return the outline of ``module``."""
    outline: _Outline = []
    # A stack instead of recursion: the depth of the tree has no limit. The walks of
    # ``planning.walk`` build names, and stand above this layer.
    stack: list[nn.Module | None] = [module]
    nones = repeat(None)
    while stack:
        current = stack.pop()
        if current is None:
            continue
        # ``nn.Module`` finds these attributes by ``__getattr__``, which is slower.
        held = current.__dict__
        children = held["_modules"]
        # A key registered with None has no name in ``named_parameters()``. Most tables
        # are empty, and no Python runs for the others.
        outline += [
            tuple(compress(table, map(is_not, table.values(), nones))) if table else ()
            for table in (held["_parameters"], held["_buffers"], children)
        ]
        if children:
            stack += reversed(children.values())
    return outline


def _names(outline: _Outline) -> dict[str, list[str]]:
    """Return the names that ``named_*(remove_duplicate=False)`` give, by kind."""
    names: dict[str, list[str]] = {"parameter": [], "buffer": [], "module": []}
    tables = iter(outline)
    stack = [""]
    while stack:
        name = stack.pop()
        names["module"].append(name)
        for kind in ("parameter", "buffer"):
            names[kind] += [join_name(name, key) for key in next(tables)]
        stack += [join_name(name, key) for key in reversed(next(tables))]
    return names


def _as_modules(api: str, module: object) -> Sequence[nn.Module]:
    """Return the modules that the argument ``module`` names, as a sequence."""
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
        # By id: a module class may define ``__eq__`` or be unhashable.
        if seen.setdefault(id(each), index) != index:
            raise CompositionError(
                f"{api} got the same {type(each).__name__} at positions "
                f"{seen[id(each)]} and {index} of the list; name each module once."
            )
    return module


def _described(module: nn.Module, index: int, modules: Sequence[nn.Module]) -> str:
    """Return a phrase for a module; messages here do not know the name in the model."""
    kind = type(module).__name__
    return f"this {kind}" if len(modules) == 1 else f"the {kind} at position {index}"


def _kind(value: object) -> str:
    """Return a phrase with type and value of a wrong argument."""
    if isinstance(value, nn.Module):
        return f"another module, a {type(value).__name__}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    # A long repr, for example of a tensor, would hide the message.
    if len(text) > 60:
        return f"a {type(value).__name__}"
    return f"{text} of type {type(value).__name__}"
