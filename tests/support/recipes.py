"""Recipes: frozen, printable descriptions of small models with everything that is odd.

A property test draws a recipe, never a live module, so a failure prints as one line
that can be pasted into an ``@example``. A module held at two places is a recipe of kind
``again``; a tied parameter is ``tied=True`` on a node whose subtree holds both ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

Kind = Literal[
    "linear",  # weight (width, width), bias (width,)
    "mlp",  # up (width + 1, width), down (width, width + 1)
    "plain",  # no parameters
    "scalar",  # one 0-d parameter
    "tiny",  # one parameter of one element: fewer elements than ranks
    "zero",  # a zero-size parameter (0, width) beside a bias (width,)
    "again",  # the module that another place of the tree already holds
    "list",  # nn.ModuleList of the children
    "dict",  # nn.ModuleDict of the children
]

Dtype = Literal["float32", "bfloat16", "float64"]


class _Short:
    """Prints only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class ModuleRecipe(_Short):
    """One module and what is below it.

    ``name``: under which the parent holds it, made unique there with a number.
    ``frozen``: how many of its own parameters, from the first, need no gradient.
    ``tied``: whether two parameters of equal shape and dtype in different modules of
    its subtree are one object, if there are two such. ``source``: for ``again``, which
    of the modules finished so far it is (counted round). ``replicate``: a mark that
    building does not look at.
    """

    kind: Kind = "linear"
    name: str = "block"
    children: tuple[ModuleRecipe, ...] = ()
    dtype: Dtype = "float32"
    frozen: int = 0
    buffer: bool = False
    tied: bool = False
    source: int = 0
    replicate: bool = False

    @property
    def is_container(self) -> bool:
        """Whether the module is built without a forward."""
        return self.kind in ("list", "dict")

    def named_children(self) -> list[tuple[str, ModuleRecipe]]:
        """Return the children under the names that they get in the built module."""
        if self.kind == "again":
            return []
        taken: set[str] = set()
        named = []
        for index, child in enumerate(self.children):
            name = str(index) if self.kind == "list" else child.name
            if name in taken:
                name = f"{name}_{index}"
            taken.add(name)
            named.append((name, child))
        return named


@dataclass(frozen=True, repr=False)
class ModelRecipe(_Short):
    """A whole model: inputs and outputs are ``(batch, width)``.

    ``sharded``: paths below the root that a test makes units, in ``.modules()`` order;
    the root is one besides.
    """

    root: ModuleRecipe = ModuleRecipe()
    width: int = 3
    seed: int = 0
    sharded: tuple[str, ...] = ()

    def places(self) -> Iterator[tuple[str, ModuleRecipe]]:
        """Yield each place with its path, from the root, whose path is empty."""
        stack = [("", self.root)]
        while stack:
            path, node = stack.pop()
            yield path, node
            below = node.named_children()
            stack.extend((f"{path}.{n}" if path else n, c) for n, c in reversed(below))

    def paths(self) -> list[str]:
        """Return the paths of all places, the root's (empty) first."""
        return [path for path, _ in self.places()]

    def shardable_paths(self) -> list[str]:
        """Return the paths below the root of what is neither container nor repeated."""
        return [
            path
            for path, node in self.places()
            if path and not node.is_container and node.kind != "again"
        ]

    def replicated_paths(self) -> list[str]:
        """Return the paths below the root that carry the ``replicate`` mark."""
        return [path for path, node in self.places() if path and node.replicate]


ODD = ModelRecipe(
    ModuleRecipe(
        children=(
            ModuleRecipe("mlp", "up", frozen=1),
            ModuleRecipe("scalar", "scale"),
            ModuleRecipe("zero", "none"),
            ModuleRecipe("tiny", "one"),
        )
    ),
    width=5,
    sharded=("up",),
)
"""For an ``@example``: the everyday run draws few models, of which one is the least."""
