"""A composable API gives each application one state, and leaves names as they were."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from composable_fsdp.compose.contract import contract
from composable_fsdp.compose.registry import get_registry, has_api, set_state
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


def add(module: nn.Sequential) -> None:
    module.register_buffer("extra", torch.zeros(1))


def rename(module: nn.Sequential) -> None:
    module[0].register_parameter("kernel", module[0]._parameters.pop("weight"))


def reorder_modules(module: nn.Sequential) -> None:
    module._modules["0"] = module._modules.pop("0")


def remove_module(module: nn.Sequential) -> None:
    del module[2]


def fill_a_gap(module: nn.Sequential) -> None:
    module[1].register_module("late", nn.ReLU())


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


@pytest.mark.req("S1-35")
def test_without_a_state_class_a_state_takes_any_attribute() -> None:
    """As torch's ``contract()``; each application has a state of its own."""

    @contract()
    def note(module: nn.Module, text: str) -> None:
        state = note.state(module)
        assert state is not None
        state.text = text

    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    note(first, "one")
    note(second, "two")

    assert [getattr(note.state(m), "text", "") for m in (first, second)] == [
        "one",
        "two",
    ]


def test_state_is_none_where_the_api_was_not_applied() -> None:
    """Children and parents of a module that carries an API do not carry it."""
    module = tiny_mlp()
    before = dict(module.__dict__)

    mark(module[0])

    assert mark.state(module) is None
    assert mark.state(module[2]) is None
    assert module.__dict__ == before


@pytest.mark.req("S1-35")
def test_applications_to_children_and_parent_have_their_own_states() -> None:
    """A bottom-up application is one application per module."""
    module = tiny_mlp()

    mark(module[0], text="child")
    mark(module, text="parent")

    states = mark.state(module[0]), mark.state(module)
    assert [state and state.texts for state in states] == [["child"], ["parent"]]


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


@pytest.mark.req("S1-35")
def test_a_list_with_one_module_taken_is_refused_as_a_whole() -> None:
    """The error says which module of the list it is; the others are not touched."""
    modules = [nn.Linear(2, 2), mark(nn.Linear(2, 2))]

    with pytest.raises(CompositionError, match="the Linear at position 1; a module"):
        mark(modules)

    assert not get_registry(modules[0])


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


def test_a_module_twice_in_one_list_is_refused() -> None:
    """It would be two applications to one module."""
    module = nn.Linear(2, 2)

    with pytest.raises(CompositionError, match="same Linear at positions 0 and 2"):
        mark([module, nn.ReLU(), module])

    assert not get_registry(module)


# ---- what an API may not do ------------------------------------------------------


@pytest.mark.req("S1-35")
@pytest.mark.parametrize(
    ("body", "difference"),
    [
        (add, "buffer 0 was '1.running_mean' and is now 'extra'"),
        (rename, "parameter 0 was '0.weight' and is now '0.bias'"),
        (reorder_modules, "parameter 0 was '0.weight' and is now '1.weight'"),
        (remove_module, "parameter 4 was '2.weight' and is now absent"),
        (fill_a_gap, "module 3 was '2' and is now '1.late'"),
    ],
)
def test_changed_names_are_refused_with_the_first_position_that_differs(
    body: Callable[[nn.Sequential], None], difference: str
) -> None:
    """Kind, index, before and after are shown; the registry is as before."""
    module = tiny_mlp()

    with pytest.raises(CompositionError) as caught:
        api_of(body)(module)

    text = f"contract violated by body on a Sequential: {difference}. "
    assert str(caught.value).startswith(text)
    assert "_composable_api_states" not in module.__dict__


@pytest.mark.req("S1-35")
def test_a_change_of_order_alone_is_refused() -> None:
    """Equal sets of names in another order are a violation."""

    def reorder(module: nn.Sequential) -> None:
        parameters = module[0]._parameters
        parameters["weight"] = parameters.pop("weight")

    with pytest.raises(
        CompositionError, match=r"parameter 0 was '0.weight' and is now '0.bias'"
    ):
        api_of(reorder)(tiny_mlp())


@pytest.mark.req("S1-35")
def test_one_of_two_names_of_a_shared_parameter_may_not_go() -> None:
    """Every path to a shared parameter counts, not only the first."""

    def untie(module: nn.Sequential) -> None:
        module[1].register_parameter("weight", None)

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight

    with pytest.raises(
        CompositionError, match=r"parameter 2 was '1.weight' and is now '1.bias'"
    ):
        api_of(untie)(module)


def test_a_module_of_a_list_that_loses_a_name_takes_all_back() -> None:
    """Names are compared on every module; the registry is rolled back on all."""

    @contract(Mark)
    def spoil_last(modules: list[nn.Module]) -> None:
        del modules[-1].bias

    modules: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]

    with pytest.raises(
        CompositionError, match="parameter 1 was 'bias' and is now absent"
    ):
        spoil_last(modules)

    assert not any(get_registry(module) for module in modules)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (nn.ReLU(), "another module, a ReLU"),
        (3, "3 of type int"),
        ([nn.ReLU()], "a list of 1"),
    ],
)
def test_returning_something_else_is_refused(other: object, shown: str) -> None:
    """An API works in place: a replacement or a non-module is an error, rolled back."""
    module = tiny_mlp()

    with pytest.raises(CompositionError, match=f"what it was given, got {shown}"):
        api_of(lambda _: other)(module)

    assert not get_registry(module)


def test_returning_what_was_given_is_accepted() -> None:
    """The module, the list, or a new list of the same modules may be returned."""

    @contract(Mark)
    def returns(modules: object, value: object) -> object:
        return value

    one, two = nn.Linear(2, 2), nn.Linear(2, 2)

    assert returns(one, one) is one
    assert returns([two], [two]) == [two]


def test_an_api_may_not_replace_its_state() -> None:
    """The state that ``state(module)`` gives is the one that was made for it."""
    module = tiny_mlp()

    with pytest.raises(CompositionError, match="is gone from this Sequential"):
        api_of(lambda m: set_state(m, "body", Mark()))(module)

    assert not get_registry(module)


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


def test_an_api_that_failed_may_be_applied_again() -> None:
    """A failed application does not count as one."""

    @contract(Mark)
    def picky(module: nn.Module, *, fails: bool) -> None:
        if fails:
            raise ValueError("not now")

    module = tiny_mlp()
    with pytest.raises(ValueError, match="not now"):
        picky(module, fails=True)

    picky(module, fails=False)

    assert picky.state(module) is not None


def test_without_the_check_names_may_change() -> None:
    """``check_names=False`` is the API's own promise; nothing is compared."""

    @contract(Mark, check_names=False)
    def extend(module: nn.Module) -> None:
        module.register_buffer("extra", torch.zeros(1))

    assert extend.state(extend(tiny_mlp())) is not None


# ---- it still is the function it was ----------------------------------------------


def test_a_composable_api_keeps_name_docstring_and_signature() -> None:
    """Help and editors show the function that was written."""
    assert mark.__name__ == "mark"
    assert mark.__doc__ == "Note ``text`` on a module."
    signature = inspect.signature(mark)
    assert list(signature.parameters) == ["module", "text"]
    # An API returns its first argument, whatever the function returns.
    assert signature.return_annotation == signature.parameters["module"].annotation
    assert inspect.isroutine(mark)


def test_a_composable_api_is_pickled_and_copied_by_name() -> None:
    """As for a plain function, what comes back is the API itself."""
    assert pickle.loads(pickle.dumps(mark)) is mark
    assert copy.deepcopy(mark) is mark


def test_a_deep_copy_carries_the_api_with_a_state_of_its_own() -> None:
    """The copy counts as applied to, and its state is apart from the original's."""
    module = mark(tiny_mlp())

    copied = copy.deepcopy(module)

    state = mark.state(copied)
    assert has_api(copied, "mark")
    assert state is not None
    assert state is not mark.state(module)
    assert state.texts == ["first"]
