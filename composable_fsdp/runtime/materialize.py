"""Giving parameters on meta their values, unit by unit, before each is sharded.

::

    per unit, inner ones first     init(module) for each module that holds meta tensors
                                   broadcast from the first rank, if asked for
                                   shard; the full values are freed

So the memory above the shards is that of one unit. The original objects stay: what
``init`` puts into a module is swapped into them, so that ties, and optimizers made
earlier, hold.

A tensor that several modules hold takes the values of the first, in ``.modules()``
order. The initialisers of the others run as well, once each, on a stand-in of their
own: as when a model ties its weights after it has made all its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.compose.registry import incompatible_api
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join, shown
from composable_fsdp.planning.planner import Target
from composable_fsdp.tree.state import OWNERS

Init = Callable[[nn.Module], object]
Named = tuple[str, nn.Module]


class Waiting(NamedTuple):
    """A module that holds meta tensors directly: which, and which it has first."""

    fqn: str
    module: nn.Module
    held: tuple[tuple[dict[str, Any], str, Tensor], ...]
    """The module's table of parameters or buffers, key, and the tensor."""
    first: frozenset[str]


def reset_parameters(module: nn.Module) -> None:
    """Initialise a module whose tensors have memory, as torch's own layers do."""
    reset: Any = module.reset_parameters
    reset()


def leave_empty(module: nn.Module) -> None:
    """Initialise nothing: the values come from the first rank."""


def with_memory(init: Init, device: torch.device) -> Init:
    """``init``, after what ``module`` holds on meta has got memory on ``device``."""
    return partial(_give_memory_and_call, init, device)


def _give_memory_and_call(init: Init, device: torch.device, module: nn.Module) -> None:
    for table in (module._parameters, module._buffers):
        for key, tensor in table.items():
            if tensor is not None and tensor.is_meta:
                table[key] = _empty_like(tensor, device)
    init(module)


def _empty_like(tensor: Tensor, device: torch.device) -> Any:
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def own_modules(
    targets: Sequence[Target], ignored: frozenset[nn.Module]
) -> list[list[Named]]:
    """Per target, the modules of the unit and of no unit below it, with names."""
    inner = {id(module) for target in targets for module in target.modules}
    done: set[int] = set()
    return [list(_own_modules(target, inner, ignored, done)) for target in targets]


def find_waiting(
    targets: Sequence[Target],
    own: Sequence[Sequence[Named]],
    kept: frozenset[int],
) -> list[list[Waiting]]:
    """Per target, the modules that have to be initialised, in ``.modules()`` order.

    ``own`` is what ``own_modules`` returned; ``kept`` are identities of parameters that
    are left on meta, because they are ignored.
    """
    first: dict[int, tuple[int, str]] = {}
    for top in targets[0].modules:
        for module in top.modules():
            for table, key, tensor in _on_meta(module, kept):
                first.setdefault(id(tensor), (id(table), key))
    return [
        [
            Waiting(
                fqn,
                module,
                held,
                frozenset(k for t, k, v in held if first[id(v)] == (id(t), k)),
            )
            for fqn, module in modules
            if (held := _on_meta(module, kept))
        ]
        for modules in own
    ]


def _on_meta(
    module: nn.Module, kept: frozenset[int]
) -> tuple[tuple[dict[str, Any], str, Tensor], ...]:
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return tuple(
        (table, key, tensor)
        for table in tables
        for key, tensor in table.items()
        if tensor is not None and tensor.is_meta and id(tensor) not in kept
    )


def _own_modules(
    target: Target, inner: set[int], ignored: frozenset[nn.Module], done: set[int]
) -> Iterator[Named]:
    stack = [(target.plan.fqn, module) for module in reversed(target.modules)]
    while stack:
        fqn, module = stack.pop()
        if id(module) in done:
            continue
        done.add(id(module))
        yield fqn, module
        children = [(n, c) for n, c in module._modules.items() if c is not None]
        stack.extend(
            (join(fqn, name), child)
            for name, child in reversed(children)
            if id(child) not in inner
            and child not in ignored
            and OWNERS.get(child) is None
            and incompatible_api(child) is None
        )


def require_reset_parameters(waiting: Sequence[Waiting]) -> None:
    """Refuse modules on meta that torch's convention cannot initialise."""
    for fqn, module, held, _ in waiting:
        if not callable(getattr(module, "reset_parameters", None)):
            raise PlanError(
                f"{type(module).__name__} {shown(fqn)} holds "
                f"{', '.join(repr(key) for _, key, _ in held)} on meta and has no "
                "reset_parameters() to initialise it. Give it one, or pass "
                "param_init_fn."
            )


@torch.no_grad()
def materialize(waiting: Waiting, init: Init) -> None:
    """Run ``init`` on one module; afterwards nothing that was on meta is.

    Sends nothing.

    Raises: PlanError, if ``init`` left a tensor on meta or changed its shape or dtype.
    """
    for table, key, tensor in waiting.held:
        if key not in waiting.first:
            table[key] = _empty_like(tensor, torch.device("meta"))
    with torch.inference_mode(False):
        init(waiting.module)
    for table, key, tensor in waiting.held:
        made = table.get(key)
        table[key] = tensor
        if key in waiting.first:
            made = _require_like(waiting, key, tensor, made)
            if made is not tensor:
                _swap(join(waiting.fqn, key), tensor, made)


def _require_like(waiting: Waiting, key: str, tensor: Tensor, made: object) -> Tensor:
    if (
        isinstance(made, Tensor)
        and not made.is_meta
        and made.shape == tensor.shape
        and made.dtype == tensor.dtype
    ):
        return made
    got = type(made).__name__
    if isinstance(made, Tensor):
        got = f"{tuple(made.shape)} {made.dtype} on {made.device}"
    raise PlanError(
        f"param_init_fn was called with {type(waiting.module).__name__} "
        f"{shown(waiting.fqn)} and left {key!r} as {got}; expected "
        f"{tuple(tensor.shape)} {tensor.dtype} with values. Let it call "
        "module.to_empty(device=..., recurse=False) and then set them."
    )


def _swap(fqn: str, tensor: Tensor, made: Tensor) -> None:
    """Make the object ``tensor`` hold what ``made`` does, and keep its attributes."""
    trainable = tensor.requires_grad
    swap: Callable[[Tensor, Tensor], None] = vars(torch.utils)["swap_tensors"]
    try:
        swap(tensor, made)
    except RuntimeError as error:
        raise PlanError(
            f"{shown(fqn)} on meta cannot be given values in place ({error}): "
            "something else refers to it, as nn.LSTM does weakly. Initialise the model "
            "before fully_shard."
        ) from error
    tensor.__dict__, made.__dict__ = made.__dict__, tensor.__dict__
    tensor.requires_grad_(trainable)
