"""What ``import composable_fsdp`` promises: names that exist and are documented."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import composable_fsdp

_OTHERS = [
    f"composable_fsdp.{home}"
    for home in (
        "access",
        "api",
        "doors.checkpoint_wrapper",
        "errors",
        "features",
        "optim",
        "state_dict",
        "storage",
        "tools",
    )
]
"""The modules with further public names, by topic."""


NAMES = composable_fsdp.__all__


def test_public_names_are_sorted_and_unique() -> None:
    """``__all__`` is in sorted order without repeats."""
    assert list(NAMES) == sorted(set(NAMES))


def test_public_names_can_be_imported() -> None:
    """Every listed name exists."""
    missing = [name for name in NAMES if not hasattr(composable_fsdp, name)]

    assert missing == []


@pytest.mark.parametrize("home", _OTHERS)
def test_names_of_a_subpackage_are_no_modules(home: str) -> None:
    """A submodule of a name's spelling would take its place once it is imported."""
    module = import_module(home)
    things = {name: getattr(module, name) for name in module.__all__}

    assert [name for name, thing in things.items() if inspect.ismodule(thing)] == []


def test_a_name_of_another_module_is_answered_by_its_import() -> None:
    """A name that has moved says from where to import it."""
    with pytest.raises(
        ImportError, match=r"Import Source from composable_fsdp\.storage\."
    ):
        exec("from composable_fsdp import Source", {})
    assert not hasattr(composable_fsdp, "Source")


@pytest.mark.req("S1-41")
def test_public_classes_and_functions_have_docstrings_of_their_own() -> None:
    """Whatever can be called is documented, not by what it inherits."""
    things = {name: getattr(composable_fsdp, name, None) for name in NAMES}
    bare = [
        name
        for name, thing in things.items()
        if inspect.isroutine(thing) or inspect.isclass(thing)
        if not (vars(thing) if inspect.isclass(thing) else {}).get("__doc__")
        and not (inspect.isroutine(thing) and thing.__doc__)
    ]

    assert bare == []


@pytest.mark.req("N-08")
def test_the_reference_has_every_public_name_once() -> None:
    """Each name is on one page of the API reference, and in its table of contents."""
    folder = Path(__file__).parents[1] / "docs" / "reference"
    pages = [path.read_text() for path in sorted(folder.glob("*.md"))]
    text = "\n".join(pages)
    documented = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)
    last = [name.rpartition(".")[2] for name in documented]
    listed = re.findall(r"`(\w+)`", (folder / "index.md").read_text())

    others = {name for home in _OTHERS for name in import_module(home).__all__}
    assert {*NAMES, *others} - set(last) == set()
    assert sorted(last) == sorted(set(last))
    assert set(last) - set(listed) == set()


@pytest.mark.req("N-08")
def test_the_reference_shows_every_name_in_an_example() -> None:
    """In the examples of a topic's page, or of the docstring; all of them run."""
    folder = Path(__file__).parents[1] / "docs" / "reference"
    fence = re.compile(r"^```py(?:con|thon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    shown = [fence.findall(path.read_text()) for path in folder.glob("*.md")]
    used = set(re.findall(r"\w+", " ".join(code for page in shown for code in page)))
    docs = {name: getattr(composable_fsdp, name).__doc__ or "" for name in NAMES}

    assert [n for n in NAMES if n not in used and ">>> " not in docs[n]] == []


FIRST = """
    fully_shard clip_grad_norm_ save load no_sync MixedPrecision ModuleWrapPolicy
    ShardingStrategy plan register_forward_method
"""
"""The names that most programs need."""


@pytest.mark.req("N-08")
@pytest.mark.parametrize("name", FIRST.split())
def test_the_docstring_of_a_first_name_ends_with_an_example(name: str) -> None:
    """``help`` shows how it is used; tests/test_doctests.py runs it."""
    doc = inspect.getdoc(getattr(composable_fsdp, name)) or ""

    assert ">>> " in doc.rstrip().rpartition("\n\n")[2]
