"""How docstrings and comments of the package read, as counts with limits.

A reader who is not a native speaker stumbles over sentences whose subject is a pronoun:
``what came``, ``the one that``, ``it``. The limits are the upper ends of what the best
code of the field has (optax, equinox, torch's FSDP2), per 1,000 words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import composable_fsdp

ROOT = Path(__file__).parent.parent / "composable_fsdp"
DOCUMENTED = ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
LIMITS = {"what": 1.0, "one": 4.0, "it": 8.0}
"""Most uses in 1,000 words; ``ones`` counts as ``one``, ``its`` as ``it``."""
COMMENT_LINES = 0.06
"""Least part of all lines that are comments."""
WITH_ARGS = 0.95
"""Least part of the functions that users import, with three arguments and more, whose
docstring has ``Args:``."""
SAME = {"ones": "one", "its": "it"}


def texts_of(source: str) -> list[str]:
    """Return docstrings and comments, without instructions to tools."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT]
    documented = [n for n in ast.walk(ast.parse(source)) if isinstance(n, DOCUMENTED)]
    docstrings = [ast.get_docstring(node) or "" for node in documented]
    return docstrings + [text for text in comments if "type: ignore" not in text]


def long_signatures(source: str) -> list[ast.FunctionDef]:
    """Return the functions of a module with three arguments and more."""
    return [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) > 2
    ]


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """The package's files."""
    return [path.read_text() for path in sorted(ROOT.rglob("*.py"))]


def test_sentences_name_their_subjects(sources: list[str]) -> None:
    """Few of the words that stand in the place of a subject."""
    text = " ".join(each for source in sources for each in texts_of(source)).lower()
    words = [SAME.get(word, word) for word in re.findall(r"[a-z']+", text)]
    count = Counter(words)

    too_often = {
        word: 1000 * count[word] / len(words)
        for word, most in LIMITS.items()
        if 1000 * count[word] / len(words) > most
    }
    assert len(words) > 10_000
    assert too_often == {}


def test_comments_stand_beside_the_lines(sources: list[str]) -> None:
    """Reasons are where a reader needs them, and not in headers alone."""
    rows = [row.strip() for source in sources for row in source.splitlines()]

    assert sum(row.startswith("#") for row in rows) / len(rows) >= COMMENT_LINES


def test_public_functions_describe_their_arguments(sources: list[str]) -> None:
    """Those that users import, of three arguments and more, in a section ``Args:``."""
    found = [node for source in sources for node in long_signatures(source)]
    functions = [node for node in found if node.name in composable_fsdp.__all__]
    without = [n.name for n in functions if "Args:" not in (ast.get_docstring(n) or "")]

    assert len(without) <= (1 - WITH_ARGS) * len(functions), without
