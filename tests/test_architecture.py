"""The house of ``docs/development/design.md``, held against the source as it is.

The rules stand in ``tests/import_graph.py``, ``tests/source_rules.py`` and
``tests/field_rules.py``. A small tree
that breaks each shows that none passes because it looks at nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import composable_fsdp
from tests import budgets, field_rules, import_graph, source_rules
from tests.import_graph import Module

ROOT = Path(composable_fsdp.__file__).parent

FRESH = """
import importlib, os, pkgutil, sys
import torch  # once, for both
if os.fork() == 0:
    from composable_fsdp import fully_shard
    print(sum(m.split(".")[0] == "composable_fsdp" for m in sys.modules), flush=True)
    os._exit(0)
os.wait()
import composable_fsdp.api
import composable_fsdp
EXTRAS = {
    "accelerate", "lightning", "matplotlib", "peft", "rich", "torchmetrics",
    "transformers",
}
for found in pkgutil.walk_packages(composable_fsdp.__path__, "composable_fsdp."):
    if found.name.endswith(".__main__"):
        continue  # runs the command line
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
"""


@pytest.fixture(scope="module")
def package() -> dict[str, Module]:
    return import_graph.read_package(ROOT)


@pytest.fixture(scope="module")
def loaded() -> int:
    """How many modules ``fully_shard`` alone loads, in a fresh interpreter.

    The interpreter imports ``api`` first, and then everything: no import is circular.
    """
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def fake_package(root: Path, files: dict[str, str]) -> dict[str, Module]:
    """Write a ``composable_fsdp`` below ``root`` from ``{"flat/handle": source}``."""
    for name, text in {"__init__": "", **files}.items():
        path = root / import_graph.PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return import_graph.read_package(root / import_graph.PACKAGE)


Rule = Callable[[dict[str, Module]], list[str]]
RULES: list[Rule] = [
    import_graph.layer_violations,
    import_graph.cycles,
    source_rules.forbidden_uses,
    source_rules.collective_uses,
    source_rules.group_makers,
    source_rules.placeless_tensors,
    source_rules.door_logic,
    field_rules.wide_classes,
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


def test_sharding_a_module_needs_nothing_of_optimizers(
    package: dict[str, Module],
) -> None:
    """No module that ``entries.apply`` imports, directly or not, is in ``optim``."""
    reached = import_graph.reached_from(package, "composable_fsdp.entries.apply")

    assert "composable_fsdp.runtime.forward" in reached
    assert [name for name in reached if ".optim." in name] == []


def test_local_variables_of_other_functions_are_not_read(
    package: dict[str, Module],
) -> None:
    """Torch may rename its variables; the audit reads those of users and its own."""
    assert [
        name
        for name, each in package.items()
        if "f_locals" in each.path.read_text() and ".features.audit." not in name
    ] == []


def test_files_and_functions_stay_small(package: dict[str, Module]) -> None:
    """No file exceeds 500 lines, no function 60 lines of code."""
    report, broken = source_rules.sizes(package)
    print("\n".join(report))

    assert broken == []


@pytest.mark.req("S1-20", "S1-41")
def test_figures_are_at_their_budgets(package: dict[str, Module], loaded: int) -> None:
    """No figure rises, and one that has fallen lowers its budget."""
    found = budgets.measured(package, ROOT)
    found["modules that fully_shard loads"] = loaded

    assert budgets.off_budget(found) == []


BROKEN: list[tuple[Rule, str, str, str]] = [
    (
        import_graph.layer_violations,
        "flat/handle",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    import composable_fsdp.tree",
        "flat/handle.py:3 -> composable_fsdp.tree: 'tree' stands above 'flat'",
    ),
    (
        import_graph.cycles,
        "runtime/hooks",
        "def f():\n    from composable_fsdp.runtime.other import g",
        "composable_fsdp.runtime.hooks -> composable_fsdp.runtime.other -> ",
    ),
    (
        source_rules.forbidden_uses,
        "errors",
        "from torch import nn\nx = nn.parallel.DistributedDataParallel",
        "errors.py:2 -> torch.nn.parallel: this is a rewrite",
    ),
    (
        source_rules.collective_uses,
        "runtime/reduce",
        "from torch.distributed import barrier as wait\nwait()",
        "reduce.py:2 -> torch.distributed.barrier: only composable_fsdp.comm.coll",
    ),
    (
        source_rules.group_makers,
        "tree/root",
        "import torch.distributed as dist\ngroup = dist.new_group([0])",
        "root.py:2 -> torch.distributed.new_group: only composable_fsdp.comm.nodes",
    ),
    (
        source_rules.placeless_tensors,
        "tree/root",
        "import torch\nx = torch.zeros(3, device=y)\ny = torch.empty(0)",
        "root.py:3 -> torch.empty: no device=",
    ),
    (
        source_rules.door_logic,
        "wrap",
        '"""Names."""\nfrom composable_fsdp.errors import FSDPError\nlimit = 3',
        "wrap.py:3: a door holds imports, __all__ and a docstring",
    ),
]


@pytest.mark.parametrize(("rule", "file", "text", "message"), BROKEN)
def test_a_broken_rule_is_found(
    tmp_path: Path, rule: Rule, file: str, text: str, message: str
) -> None:
    """Each rule names the place and the reason in a package that breaks it once."""
    around = {"runtime/other": "from . import hooks", "tree/__init__": ""}
    package = fake_package(tmp_path, {**around, file: text})

    (found,) = rule(package)
    assert message in found


def test_directories_of_tests_are_no_packages() -> None:
    """A rank imports a test module by the name that pytest gave it: its whole path."""
    tests = Path(__file__).parent

    assert [str(p.relative_to(tests)) for p in tests.rglob("__init__.py")] == []
