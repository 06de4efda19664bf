"""A composable API gives each application one state, and leaves names as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
from torch import nn

from composable_fsdp.compose.contract import contract
from composable_fsdp.compose.registry import get_registry, has_api
from composable_fsdp.errors import CompositionError


class Mark:
    """The state of ``mark``."""

    def __init__(self) -> None:
        self.texts: list[str] = []


@contract(Mark)
def mark(module: nn.Module | Sequence[nn.Module], text: str = "first") -> None:
    """Note ``text`` on a module."""
    first = module if isinstance(module, nn.Module) else module[0]
    state = mark.state(first)
    assert state is not None
    state.texts.append(text)


def tiny_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def api_of(
    body: Callable[[nn.Sequential], object],
) -> Callable[[nn.Sequential], object]:
    """Return a composable API called ``body`` that does what ``body`` does."""

    def api(module: nn.Sequential) -> object:
        return body(module)

    api.__name__ = "body"
    return contract(Mark)(api)


# ---- one state per application -------------------------------------------------


@pytest.mark.req("S1-35", "B-01")
def test_an_application_returns_the_same_module_with_its_state() -> None:
    """The class stays, the module comes back, the state is the one that was filled."""
    module = tiny_mlp()

    marked = mark(module, text="second")

    state = mark.state(module)
    assert marked is module
    assert type(module) is nn.Sequential
    assert isinstance(state, Mark)
    assert state.texts == ["second"]
    assert dict(get_registry(module)) == {"mark": state}


@pytest.mark.req("S1-35", "B-01")
def test_a_second_application_is_refused_and_changes_nothing() -> None:
    """Applying an API twice raises before the API runs; the first state stays."""
    module = mark(tiny_mlp())
    before = dict(module.__dict__), mark.state(module)

    with pytest.raises(CompositionError) as caught:
        mark(module, text="second")

    assert str(caught.value) == (
        "mark was already applied to this Sequential; a module takes each API once. "
        "Leave it out of this call, or read what is there with mark.state(module)."
    )
    assert (dict(module.__dict__), mark.state(module)) == before
    assert get_registry(module)["mark"].texts == ["first"]  # type: ignore[attr-defined]


@pytest.mark.req("S1-35")
def test_a_list_of_modules_shares_one_state() -> None:
    """One application is registered on each module; the list comes back."""
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]

    marked = mark(modules)

    state = mark.state(modules[0])
    assert marked is modules
    assert state is not None
    assert state is mark.state(modules[1])
    assert state.texts == ["first"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model", "mark expects a module or a list .* got 'model' of type str"),
        ([], "got a list of 0. Pass the module itself: mark\\(model\\)"),
        ([nn.ReLU(), 3], "expects a list of modules, got 3 of type int at position 1"),
    ],
)
def test_what_is_no_module_is_refused(given: object, message: str) -> None:
    """The ``TypeError`` says what was expected, what came and where."""
    with pytest.raises(TypeError, match=message):
        mark(given)  # type: ignore[type-var]


# ---- what an API may not do ------------------------------------------------------


@pytest.mark.req("S1-35")
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_api_that_raises_leaves_the_registry_as_it_was(error: BaseException) -> None:
    """Its error comes out as it is, no empty registry stays, other APIs keep theirs."""

    def fail(module: nn.Sequential) -> None:
        raise error

    plain, marked = tiny_mlp(), mark(tiny_mlp())
    before = dict(plain.__dict__), dict(marked.__dict__)

    for module in (plain, marked):
        with pytest.raises(type(error)) as caught:
            api_of(fail)(module)
        assert caught.value is error

    assert (plain.__dict__, marked.__dict__) == before


# ---- it still is the function it was ----------------------------------------------


def test_a_deep_copy_carries_the_api_with_a_state_of_its_own() -> None:
    """The copy counts as applied to, and its state is apart from the original's."""
    module = mark(tiny_mlp())

    copied = copy.deepcopy(module)

    state = mark.state(copied)
    assert has_api(copied, "mark")
    assert state is not None
    assert state is not mark.state(module)
    assert state.texts == ["first"]
