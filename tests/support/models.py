"""Small models for tests: built from a recipe, or one of two that train.

Initial values come from a generator of their own. The default one is shared by the
threads that play ranks, and would give each run of a test other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.recipes import Kind, ModelRecipe, ModuleRecipe
from tests.support.tiny import TinyBlock, TinyGPT, tiny_mlp

__all__ = [
    "ModelRecipe",
    "ModuleRecipe",
    "Node",
    "TinyBlock",
    "TinyGPT",
    "build",
    "legal_units",
    "module_at",
    "shardable_paths",
    "tiny_mlp",
]

Make = Callable[..., Tensor]


class Node(nn.Module):
    """A module that owns parameters, computes with them, then runs its children."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, width)`` to ``(batch, width)``."""
        own = {n: p.to(x.dtype) for n, p in self.named_parameters(recurse=False)}
        x = _TERMS[self.kind](x, own)
        for _, buffer in self.named_buffers(recurse=False):
            x = x + buffer.to(x.dtype)
        for child in self._modules.values():
            x = _run(child, x)
        return x


def _run(module: nn.Module | None, x: Tensor) -> Tensor:
    """Call ``module``, or what it holds if it is a container."""
    if isinstance(module, nn.ModuleList):
        inner: Iterable[nn.Module] = module
    elif isinstance(module, nn.ModuleDict):
        inner = module.values()
    else:
        return x if module is None else cast(Tensor, module(x))
    for child in inner:
        x = _run(child, x)
    return x


def _linear(x: Tensor, own: dict[str, Tensor]) -> Tensor:
    return x + torch.tanh(F.linear(x, own["weight"], own["bias"]))


def _mlp(x: Tensor, own: dict[str, Tensor]) -> Tensor:
    return x + F.linear(torch.tanh(F.linear(x, own["up"])), own["down"])


_TERMS: dict[Kind, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "linear": _linear,
    "mlp": _mlp,
    "plain": lambda x, own: x,
    "scalar": lambda x, own: x + torch.sin(x) * own["scale"],
    "tiny": lambda x, own: x + own["shift"],
    "zero": lambda x, own: x + own["bias"] + own["nothing"].sum(),
}


def _own_shapes(kind: Kind, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[Kind, dict[str, tuple[int, ...]]] = {
        "linear": {"weight": (width, width), "bias": (width,)},
        "mlp": {"up": (width + 1, width), "down": (width, width + 1)},
        "scalar": {"scale": ()},
        "tiny": {"shift": (1,)},
        "zero": {"nothing": (0, width), "bias": (width,)},
    }
    return shapes.get(kind, {})


def build(recipe: ModelRecipe) -> nn.Module:
    """Build the model that ``recipe`` describes; equal recipes give equal values.

    ``model(x)`` maps ``(batch, width)`` to ``(batch, width)`` and gives a gradient to
    every trainable parameter. A root that would be a container or ``again`` is
    built as ``plain``, and so is ``again`` where no module is finished yet.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    finished: list[nn.Module] = []

    def draw(*shape: int) -> Tensor:
        value = torch.randn(shape, generator=generator, device="cpu") * 0.3
        return value.to(torch.get_default_device())

    return _build(recipe.root, recipe.width, draw, finished, is_root=True)


def _build(
    node: ModuleRecipe,
    width: int,
    draw: Make,
    finished: list[nn.Module],
    *,
    is_root: bool = False,
) -> nn.Module:
    if node.kind == "again" and finished:
        # A finished module is no ancestor of this place, so the tree has no cycle.
        return finished[node.source % len(finished)]
    module = _own_part(node, width, draw, is_root=is_root)
    for name, child in node.named_children():
        module.add_module(name, _build(child, width, draw, finished))
    if node.tied:
        _tie_first_pair(module)
    if isinstance(module, Node):
        finished.append(module)
    return module


def _own_part(
    node: ModuleRecipe, width: int, draw: Make, *, is_root: bool
) -> nn.Module:
    """Build the module of ``node`` without its children."""
    if node.is_container and not is_root:
        return nn.ModuleList() if node.kind == "list" else nn.ModuleDict()
    module = Node("plain" if node.is_container or node.kind == "again" else node.kind)
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(
        node.dtype, torch.float32
    )
    for index, (name, shape) in enumerate(_own_shapes(module.kind, width).items()):
        value = draw(*shape).to(dtype)
        trainable = index >= node.frozen
        module.register_parameter(name, nn.Parameter(value, requires_grad=trainable))
    if node.buffer:
        module.register_buffer("running", draw(width))
    return module


def _tie_first_pair(root: nn.Module) -> None:
    """Make one object of the first two parameters that could be one."""
    seen: dict[tuple[torch.Size, torch.dtype], tuple[nn.Module, nn.Parameter]] = {}
    for module in root.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            key = (param.shape, param.dtype)
            holder, first = seen.setdefault(key, (module, param))
            if holder is not module and first is not param:
                module.register_parameter(name, first)
                return


def module_at(model: nn.Module, path: str) -> nn.Module:
    """Return the module at ``path``; the empty path is ``model``."""
    return model.get_submodule(path)


def shardable_paths(model: nn.Module) -> list[str]:
    """Return the paths below the root that can be units, in ``.modules()`` order."""
    containers = (nn.ModuleList, nn.ModuleDict)
    return [
        path
        for path, module in model.named_modules()
        if path and not isinstance(module, containers)
    ]


def legal_units(model: nn.Module, paths: Iterable[str]) -> tuple[str, ...]:
    """Return ``paths`` without those that would part the places of one parameter.

    A parameter with several places (tied, or of a module that has several parents)
    must have one unit above all of them; the root is always one.
    """
    chosen = {module_at(model, path): path for path in paths if path}
    while True:
        clashing = _clashing(model, chosen.keys())
        if not clashing:
            return tuple(chosen.values())
        for module in clashing:
            del chosen[module]


def _clashing(model: nn.Module, units: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the units that own some but not all places of a parameter."""
    chosen = set(units)
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    stack = [(model, model)]
    while stack:
        module, above = stack.pop()
        owner = module if module in chosen else above
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(owner)
        below = (child for child in module._modules.values() if child is not None)
        stack.extend((child, owner) for child in below)
    parted = [having for having in owners.values() if len(having) > 1]
    return {unit for having in parted for unit in having} - {model}
