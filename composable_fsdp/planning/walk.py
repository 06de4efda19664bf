"""Walks over a module tree without recursion, so that depth has no limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from composable_fsdp.naming import TRANSPARENT

# Classes of torch that hold modules or parameters and define no forward.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def children(parent: nn.Module) -> list[nn.Module]:
    """Return the distinct modules directly under ``parent``, from left to right."""
    # dict.fromkeys() removes duplicates and keeps the order, unlike a set.
    found = dict.fromkeys(parent._modules.values())
    return [child for child in found if child is not None]


def modules(root: nn.Module) -> Iterable[nn.Module]:
    """Return ``root`` and all modules below, in the order of ``root.modules()``."""
    # By id, because a class may define ``__eq__``. A dict and no generator, because
    # clipping calls this function at every step.
    found: dict[int, nn.Module] = {}
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        key = id(module)
        if module is not None and key not in found:
            found[key] = module
            if module._modules:
                # Reversed, because the stack pops the last entry first.
                stack += reversed(module._modules.values())
    return found.values()


def below(
    name: str, module: nn.Module, hidden: str | None = None
) -> list[tuple[str, nn.Module]]:
    """Return the children of ``module`` and their plain names, from right to left."""
    start = f"{name}." if name else ""
    return [
        (name if key in TRANSPARENT or key == hidden else start + key, child)
        for key, child in reversed(module._modules.items())
        if child is not None
    ]


def named(
    root: nn.Module,
    *,
    enter: Callable[[nn.Module], bool] | None = None,
    every_path: bool = False,
    hidden: Callable[[nn.Module], str | None] | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    """Yield plain names and modules, in the order of ``root.modules()``."""
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        name, module = stack.pop()
        if not every_path:
            if id(module) in seen:
                continue
            seen.add(id(module))
        if enter is None or enter(module):
            yield name, module
            if module._modules:
                stack += below(name, module, None if hidden is None else hidden(module))


def post_order(root: nn.Module) -> list[nn.Module]:
    """Return all modules, each module after all modules below; ``root`` comes last."""
    order: list[nn.Module] = []
    seen = {root}
    # Children from right to left. A plain reverse of ``modules`` would be wrong for a
    # module with two parents: one parent would come before this child.
    stack = [(root, iter(children(root)[::-1]))]
    while stack:
        module, pending = stack[-1]
        child = next(pending, None)
        if child is None:
            order.append(module)
            stack.pop()
        elif child not in seen:
            seen.add(child)
            stack.append((child, iter(children(child)[::-1])))
    return order


def subtrees(roots: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """Return ``roots`` and all modules below."""
    return frozenset(module for root in roots for module in modules(root))


def is_container(module: nn.Module) -> bool:
    """Return whether ``module`` only holds others and has no forward."""
    # A user's subclass of a container may define forward.
    return isinstance(module, _CONTAINERS) and not has_forward(module)


def has_forward(module: nn.Module) -> bool:
    """Return whether the module can be called, so that hooks on it run."""
    # ``nn.Module.forward`` is a placeholder that raises. ``forward`` may also be set on
    # the instance. TorchScript classes do not have the attribute.
    method = getattr(type(module), "forward", None)
    return method is not nn.Module.forward or "forward" in vars(module)


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of ``module`` itself; repeat a parameter under two keys."""
    return (param for param in module._parameters.values() if param is not None)


def name_of(root: nn.Module, module: nn.Module) -> str:
    """Return the first plain name of ``module`` below ``root``; KeyError, if none."""
    for name, each in named(root):
        if each is module:
            return name
    raise KeyError(module)
