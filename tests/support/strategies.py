"""Hypothesis strategies for recipes, world sizes and shapes, and the two profiles.

Only this module imports Hypothesis, so the other test tools work without it. Strategies
draw lists directly, and list the simplest value first: that is what failures shrink to.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from composable_fsdp.config import Block, RowBlock
from tests.support.recipes import ModelRecipe, ModuleRecipe

PROFILE_VARIABLE = "COMPOSABLE_FSDP_HYPOTHESIS"
EXAMPLES_VARIABLE = "COMPOSABLE_FSDP_HYPOTHESIS_EXAMPLES"

FEATURES = frozenset(
    {
        "buffers",
        "containers",
        "dtypes",
        "frozen",
        "names",
        "odd_shapes",
        "replicate",
        "shared",
        "tied",
    }
)
"""What a recipe may contain besides plain float32 layers."""

NAMES = (
    "block",
    "layer",
    "module",
    "my_fsdp_wrapped_module",
    "_fsdp_wrapped_module_x",
)
"""Names of children; the last three contain or resemble the wrapper's own component."""


def register_profiles() -> None:
    """Register the profiles and load the one named by COMPOSABLE_FSDP_HYPOTHESIS.

    ``everyday`` (the default): fixed examples, 8 unless
    COMPOSABLE_FSDP_HYPOTHESIS_EXAMPLES says otherwise, as continuous integration does
    (16). ``long``: 2000 random ones.
    """
    settings.register_profile(
        "everyday",
        derandomize=True,
        deadline=None,  # a first collective or a cold import is no failure
        max_examples=int(os.environ.get(EXAMPLES_VARIABLE, "8")),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile(
        "long",
        deadline=None,
        max_examples=2000,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(os.environ.get(PROFILE_VARIABLE, "everyday"))


def world_sizes(max_size: int = 8) -> st.SearchStrategy[int]:
    """Draw a number of ranks; shrinks to 1."""
    return st.integers(1, max_size)


def block_named(name: str) -> Block | RowBlock:
    """Return the block of a recipe: the name of a member, or ``rows(n)``."""
    number = name.removeprefix("rows(").removesuffix(")")
    return Block.rows(int(number)) if name.startswith("rows(") else Block[name]


def shapes(max_dims: int = 4, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw a tensor's shape, 0-d and zero-size ones included."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def module_recipes(
    max_depth: int = 3,
    max_children: int = 3,
    features: Collection[str] = FEATURES,
) -> st.SearchStrategy[ModuleRecipe]:
    """Draw one module and at most ``max_depth`` levels below it; see ``FEATURES``.

    Raises: ValueError, for an unknown feature.
    """
    if unknown := set(features) - FEATURES:
        raise ValueError(f"features expects some of {sorted(FEATURES)}, got {unknown}.")
    below: st.SearchStrategy[tuple[ModuleRecipe, ...]] = st.just(())
    for _ in range(max_depth):
        node = _nodes(below, features, is_root=False)
        # Alone, the first branch would leave half of all models without a child.
        below = st.one_of(
            st.lists(node, max_size=max_children),
            st.lists(node, min_size=min(2, max_children), max_size=max_children),
        ).map(tuple)
    return _nodes(below, features, is_root=True)


def _nodes(
    children: st.SearchStrategy[tuple[ModuleRecipe, ...]],
    features: Collection[str],
    *,
    is_root: bool,
) -> st.SearchStrategy[ModuleRecipe]:
    """Draw a module whose children come from ``children``."""
    kinds = ["linear", "mlp", "plain"]
    kinds += ["scalar", "tiny", "zero"] if "odd_shapes" in features else []
    if not is_root:
        kinds += ["again"] if "shared" in features else []
        kinds += ["list", "dict"] if "containers" in features else []
    dtypes = ["float32", "bfloat16", "float64"]

    def flag(feature: str) -> st.SearchStrategy[bool]:
        return st.booleans() if feature in features else st.just(False)

    return st.builds(
        ModuleRecipe,
        kind=st.sampled_from(kinds),
        name=st.sampled_from(NAMES if "names" in features else NAMES[:2]),
        children=children,
        dtype=st.sampled_from(dtypes if "dtypes" in features else dtypes[:1]),
        frozen=st.integers(0, 2 if "frozen" in features else 0),
        buffer=flag("buffers"),
        tied=flag("tied"),
        source=st.integers(0, 7 if "shared" in features else 0),
        replicate=flag("replicate"),
    )


def model_recipes(
    max_depth: int = 3,
    max_children: int = 3,
    features: Collection[str] = FEATURES,
    max_width: int = 5,
) -> st.SearchStrategy[ModelRecipe]:
    """Draw a model and which of its modules to make units.

    The units may part tied parameters: pass them through ``models.legal_units`` where
    that matters. Shrinks to one linear layer of width 1 without units below it.
    """
    # Made here and not at each draw: to make them takes longer than to draw.
    roots = module_recipes(max_depth, max_children, features)
    return _models(roots, st.integers(1, max_width), st.integers(0, 3))


@st.composite
def _models(
    draw: st.DrawFn,
    roots: st.SearchStrategy[ModuleRecipe],
    widths: st.SearchStrategy[int],
    seeds: st.SearchStrategy[int],
) -> ModelRecipe:
    recipe = ModelRecipe(root=draw(roots), width=draw(widths), seed=draw(seeds))
    paths = recipe.shardable_paths()
    if not paths:
        return recipe
    chosen = draw(_some_of(len(paths)))
    return replace(recipe, sharded=tuple(paths[i] for i in sorted(chosen)))


@cache
def _some_of(count: int) -> st.SearchStrategy[list[int]]:
    """Draw some of the numbers below ``count``, or at least half of them."""
    number = st.sampled_from(range(count))
    few = st.lists(number, unique=True)
    many = st.lists(number, unique=True, min_size=(count + 1) // 2)
    return st.one_of(few, many)
