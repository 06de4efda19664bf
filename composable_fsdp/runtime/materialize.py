"""Initialization of parameters on meta, unit by unit, before each unit is sharded.

The memory above the shards is therefore that of a single unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.planning.planner import Target
from composable_fsdp.planning.walk import name_of
from composable_fsdp.runtime.meta_values import as_unfilled

Init = Callable[[nn.Module], object]


class MetaModule(NamedTuple):
    """A module that holds meta tensors directly."""

    top: nn.Module
    """The module at which names start."""
    module: nn.Module
    held: tuple[tuple[dict[str, Any], str, Tensor], ...]
    """The module's dict of parameters or buffers, the key, and the tensor."""
    first: frozenset[str]
    """Keys of tensors that no earlier module holds, in ``.modules()`` order."""

    @property
    def fqn(self) -> str:
        """Return the FQN of the module, for error messages."""
        return name_of(self.top, self.module)


def reset_parameters(module: nn.Module) -> None:
    """Call ``module.reset_parameters()``; the tensors of the module have memory."""
    reset: Any = module.reset_parameters
    reset()


def keep_uninitialized(module: nn.Module) -> None:
    """Initialize nothing: the values are broadcast from the first rank."""


def with_memory(init: Init, device: torch.device) -> Init:
    """Return ``init`` preceded by an allocation of meta tensors on ``device``."""
    return partial(_give_memory_and_call, init, device)


def _give_memory_and_call(init: Init, device: torch.device, module: nn.Module) -> None:
    """Replace meta tensors by empty tensors on ``device``, then call ``init``."""
    for table in (module._parameters, module._buffers):
        for key, tensor in table.items():
            if tensor is not None and tensor.is_meta:
                table[key] = empty_like(tensor, device)
    init(module)


def empty_like(tensor: Tensor, device: torch.device) -> Any:
    """Return an empty tensor or parameter like ``tensor`` on ``device``."""
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def find_meta_modules(
    targets: Sequence[Target], kept: frozenset[int]
) -> list[list[MetaModule]]:
    """Return the modules to initialize per target, without tensors in ``kept``."""
    first: dict[int, tuple[int, str]] = {}
    for top in targets[0].modules:
        for module in top.modules():
            for table, key, tensor in _on_meta(module, kept):
                # The first module in ``.modules()`` order initializes a shared tensor.
                first.setdefault(id(tensor), (id(table), key))
    return [
        [
            MetaModule(
                targets[0].modules[0],
                module,
                held,
                frozenset(k for t, k, v in held if first[id(v)] == (id(t), k)),
            )
            for module in target.members
            if (held := _on_meta(module, kept))
        ]
        for target in targets
    ]


def _on_meta(
    module: nn.Module, kept: frozenset[int]
) -> tuple[tuple[dict[str, Any], str, Tensor], ...]:
    """Return the parameters and buffers of the module that are on meta and not kept."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return tuple(
        (table, key, tensor)
        for table in tables
        for key, tensor in table.items()
        if tensor is not None and tensor.is_meta and id(tensor) not in kept
    )


def require_reset_parameters(waiting: Sequence[MetaModule]) -> None:
    """Raise PlanError if a module on meta has no ``reset_parameters``."""
    for each in waiting:
        if not callable(getattr(each.module, "reset_parameters", None)):
            raise PlanError(
                f"{type(each.module).__name__} {quoted(each.fqn)} holds "
                f"{listed(repr(key) for _, key, _ in each.held)} on meta and has no "
                "reset_parameters() to initialise it. Give it one, or pass "
                "param_init_fn."
            )


@torch.no_grad()
def materialize(waiting: MetaModule, init: Init) -> None:
    """Run ``init`` on a module; afterwards no tensor of the module is on meta."""
    for table, key, tensor in waiting.held:
        # A tensor that several modules hold gets the values of the first module.
        # Initializers of the other modules run, too, each on a temporary tensor, as in
        # a model that ties weights after all layers were made.
        if key not in waiting.first:
            table[key] = empty_like(tensor, torch.device("meta"))
        elif table is waiting.module._buffers:
            table[key] = as_unfilled(tensor)
    # Tensors of inference mode have no version counter and cannot be trained.
    with torch.inference_mode(False):
        init(waiting.module)
    for table, key, tensor in waiting.held:
        made = table.get(key)
        table[key] = tensor
        if key in waiting.first:
            made = _require_like(waiting, key, tensor, made)
            if made is not tensor:
                _swap(waiting, key, tensor, made)


def _require_like(
    waiting: MetaModule, key: str, tensor: Tensor, made: object
) -> Tensor:
    """Return the tensor ``made`` by ``init``; raise PlanError if unlike ``tensor``."""
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
        f"{quoted(waiting.fqn)} and left {key!r} as {got}; expected "
        f"{tuple(tensor.shape)} {tensor.dtype} with values. Let it call "
        "module.to_empty(device=..., recurse=False) and then set them."
    )


def _swap(waiting: MetaModule, key: str, tensor: Tensor, made: Tensor) -> None:
    """Give the object ``tensor`` the contents of ``made``, and keep old attributes."""
    trainable = tensor.requires_grad
    # ``vars``: ``swap_tensors`` is untyped in torch.
    swap: Callable[[Tensor, Tensor], None] = vars(torch.utils)["swap_tensors"]
    # The original objects stay, so that tied weights and optimizers made earlier still
    # refer to the parameters.
    try:
        swap(tensor, made)
    except RuntimeError as error:
        raise PlanError(
            f"{quoted(join_name(waiting.fqn, key))} on meta cannot be given values in "
            "place "
            f"({error}): something else refers to it, as nn.LSTM does weakly. "
            "Initialise the model before fully_shard."
        ) from error
    # ``swap_tensors`` also exchanges the attributes; exchange them back.
    tensor.__dict__, made.__dict__ = made.__dict__, tensor.__dict__
    tensor.requires_grad_(trainable)
