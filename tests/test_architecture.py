"""The house of ``docs/development/design.md``, held against the source as it is.

The rules stand in ``tests/import_graph.py`` and ``tests/source_rules.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import composable_fsdp
from tests import budgets, import_graph, source_rules
from tests.import_graph import Module
from tests.support.scripts import run_script

ROOT = Path(composable_fsdp.__file__).parent

FRESH = """
import os, sys
for name in [n for n in sys.modules if n.partition(".")[0] == "composable_fsdp"]:
    del sys.modules[name]  # of the process that starts others
if os.fork() == 0:
    from composable_fsdp import fully_shard
    print(sum(m.split(".")[0] == "composable_fsdp" for m in sys.modules), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.fixture(scope="module")
def package() -> dict[str, Module]:
    return import_graph.read_package(ROOT)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many modules ``fully_shard`` alone loads."""
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "fresh.py").write_text(FRESH)
    status, output = run_script("fresh.py", ranks=1, folder=folder)
    assert status == 0, output
    return int(output)


Rule = Callable[[dict[str, Module]], list[str]]
RULES: list[Rule] = [
    import_graph.layer_violations,
    import_graph.cycles,
    source_rules.forbidden_uses,
    source_rules.collective_uses,
    source_rules.group_makers,
    source_rules.placeless_tensors,
    source_rules.door_logic,
]


@pytest.mark.req("S1-20")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_breaks_no_rule(package: dict[str, Module], rule: Rule) -> None:
    """The docstring of each rule says what it holds."""
    assert len(package) > 100
    assert rule(package) == []


def test_the_layers_of_the_design_page_are_those_that_are_held() -> None:
    """The design page draws the layers that exist, in the order that is checked."""
    page = (ROOT.parent / "docs" / "development" / "design.md").read_text()
    (drawn,) = re.findall(r"one further left:\n\n(`.*?)\n\n", page, re.DOTALL)
    layers = [set(re.findall(r"`(\w+)`", layer)) for layer in drawn.split("<")]
    there = {path.stem for path in ROOT.iterdir()}

    assert layers == [set(layer & there) for layer in import_graph.LAYERS]


@pytest.mark.parametrize("page", ["tour", "design", "concepts", "performance"])
def test_every_file_and_function_that_a_page_names_exists(page: str) -> None:
    """A page about the code names no file and no function that is not there."""
    text = (ROOT.parent / "docs" / "development" / f"{page}.md").read_text()

    assert source_rules.absent_names(text, [ROOT, ROOT.parent]) == []
    assert page != "tour" or len(source_rules.NAMED.findall(text)) > 50


def test_local_variables_of_other_functions_are_not_read(
    package: dict[str, Module],
) -> None:
    """Torch may rename its variables; the audit reads those of users."""
    assert [
        name
        for name, each in package.items()
        if "f_locals" in each.path.read_text() and ".features.audit" not in name
    ] == []


def test_files_and_functions_stay_small(package: dict[str, Module]) -> None:
    """No file exceeds 500 lines, no function 60 lines of code."""
    assert source_rules.large(package) == []


@pytest.mark.req("S1-20", "S1-41")
def test_figures_are_at_their_budgets(package: dict[str, Module], loaded: int) -> None:
    """No figure rises, and one that has fallen lowers its budget."""
    found = budgets.measured(package, ROOT)
    found["modules that fully_shard loads"] = loaded

    assert budgets.off_budget(found) == []


def test_directories_of_tests_are_no_packages() -> None:
    """A rank imports a test module by the name that pytest gave it: its whole path."""
    tests = Path(__file__).parent

    assert [str(p.relative_to(tests)) for p in tests.rglob("__init__.py")] == []
