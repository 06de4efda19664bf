"""Recipes of programs: odd modules, how they are sharded, and what a script does.

Everything here is frozen and printable, so a failure can be pasted into an example. The
words are keys of tables: ``program_cores.CORES``, ``program_forms.FORMS`` and its
neighbours, and functions of ``program_actions``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal

from tests.support.recipes import _Short

Action = tuple[Any, ...]
"""Name of a function of ``program_actions``, and its arguments."""
Dtype = Literal["float64", "float32", "bfloat16"]
Unit = Literal["", "piece", "core", "both"]


@dataclass(frozen=True, repr=False)
class Part(_Short):
    """One module of the tree.

    ``core``: what it computes with parameters of its own. ``form``: how its result
    leaves it. ``call`` and ``use``: how its parent calls it, and what it does to the
    result. ``unit``: what becomes a unit, the module, its core, or both. ``frozen``:
    how many of the core's parameters need no gradient. ``again``: the module is
    one that was built before (counted round).
    """

    core: str = "linear"
    form: str = "tensor"
    call: str = "plain"
    use: str = "take"
    children: tuple[Part, ...] = ()
    unit: Unit = "piece"
    dtype: Dtype = "float64"
    frozen: int = 0
    again: int | None = None


@dataclass(frozen=True, repr=False)
class Options(_Short):
    """How units are sharded, and what steps them."""

    strategy: str = "FULL_SHARD"
    door: Literal["composable", "wrapper"] = "composable"
    style: Literal["manual", "auto"] = "manual"
    prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = False
    offload: bool = False
    limit: bool = True
    block: Literal["ROW", "ELEMENT", "TENSOR", "rows(3)"] = "ROW"
    optimizer: str = "sgd"
    early: bool = False
    """The optimizer is made before the model is sharded."""
    keep_full: bool = False
    """Units stay full between steps (``set_reshard_after_backward``)."""
    pairs: bool = False
    """Neighbours become one unit, two by two (a list of modules)."""
    apart: bool = False
    """The root of the model is no unit: each of its children is a root."""
    fill: bool = False
    """Unused parameters take part with zeros (``set_reduce_scatter_unused_params``)."""
    replicas: int = 1
    """Of a hybrid strategy, as far as the number of ranks can be divided by it."""
    low: bool = False
    """Units have ``mix`` (``MixedPrecision``); the plain model is in float64."""
    mix: Literal["compute", "float32", "reduce", "output"] = "compute"
    """What ``low`` has in float32 (``program_side.MIXES``)."""
    wrapped: Literal["", "recomputed", "reentered"] = ""
    """Checkpoint wrappers around all pieces below the root, on both sides."""
    methods: bool = False
    """``compute`` of every unit is a forward, too (``register_forward_method``)."""
    wire: bool = False
    """All-gathers are encoded, by a format that loses nothing (``Verbatim``)."""
    arena: Literal["", "shared", "apart"] = ""
    """Full parameters lie in poisoned slots, shared or one per unit (``Arena``)."""
    groups: bool = False
    """The optimizer has two groups, with every other parameter and another rate."""
    second: str = ""
    """The strategy of every other unit, by hand."""
    hook: bool = False
    """A communication hook averages gradients."""
    flat: bool = False
    """The optimizer is made over ``flat_parameters``, which have the gradients."""
    factor: float = 0.0
    """What sums of gradients are divided by, if not by the number of ranks."""

    def replicas_of(self, world_size: int) -> int:
        """The number of ranks that hold the same part of a unit."""
        if self.strategy == "NO_SHARD":
            return world_size
        return gcd(self.replicas, world_size) if "HYBRID" in self.strategy else 1


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A model, sharded in one way, in one script."""

    root: Part = Part()
    width: int = 4
    seed: int = 0
    options: Options = field(default_factory=Options)
    actions: tuple[Action, ...] = (("train", 0),)

    def parts(self) -> Iterator[Part]:
        """Yield every part, each before its children."""
        stack = [self.root]
        while stack:
            part = stack.pop()
            yield part
            stack.extend(part.children)

    def words(self) -> set[str]:
        """Every word of the recipe, as ``kind:word``."""
        found = {f"action:{name}" for name, *_ in self.actions}
        for _, *arguments in self.actions:
            found |= {f"argument:{a}" for a in arguments if isinstance(a, str)}
        for part in self.parts():
            found |= {f"core:{part.core}", f"form:{part.form}", f"dtype:{part.dtype}"}
            if part is not self.root:
                found |= {f"call:{part.call}", f"use:{part.use}"}
        found |= {
            f"option:{v}" for v in vars(self.options).values() if isinstance(v, str)
        }
        found |= {f"option:{k}" for k, v in vars(self.options).items() if v is True}
        return found
