"""Let torch's DistributedDataParallel (DDP) ignore the parameters of units.

DDP broadcasts all parameters at construction and expects a gradient for each from
autograd. A unit's parameters are different rows on each rank, and the unit averages
their gradients. So DDP is told to ignore them before DDP communicates; a combination
that would leave a gradient wrong is refused::

    ranks of DDP       0 1 2 3    0 1 2 3    0 1 . .    0 . 2 .
    ranks of a unit    0 1 2 3    0 1 . .    0 1 2 3    0 1 . .
                       ignored    refused    ignored    refused
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from composable_fsdp.compose.registry import TORCH_DDP, incompatible_api
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.param_ref import first_sharded
from composable_fsdp.naming import quoted

_installed = False


def install_ddp_hook() -> None:
    """Install the hook that inspects every DDP made from now on, once per process."""
    global _installed
    if not _installed:
        _installed = True
        register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Adapt a DDP when ``__init__`` registers its attribute ``module``."""
    if name != "module" or child is None:
        return
    first = first_sharded(child) if isinstance(parent, nn.DataParallel) else None
    if first is not None:
        raise CompositionError(
            f"nn.DataParallel was put around a {type(child).__name__} whose parameter "
            f"{quoted(first)} is fully sharded; expected a plain module. DataParallel "
            "copies a module to other GPUs of this process, and each copy would hold "
            "this rank's rows alone. Call the sharded module itself, with one process "
            "per GPU (torchrun)."
        )
    # DDP.__init__ sets process_group, parameters_to_ignore and _module_parameters
    # before registering ``module``, and broadcasts afterwards (checked on torch 2.13
    # and 2.11).
    if incompatible_api(parent) == TORCH_DDP:
        _ignore_in_ddp(parent, child)


def _ignore_in_ddp(ddp: Any, module: nn.Module) -> None:
    """Let ``ddp`` ignore the parameters that units in ``module`` hold."""
    ranks = set(dist.get_process_group_ranks(ddp.process_group))
    taken: set[int] = set()
    left = 0
    for fqn, parameter in module.named_parameters():
        # The user told DDP already to ignore the parameter.
        if fqn in ddp.parameters_to_ignore:
            continue
        found = find_leaf(parameter)
        if found is None:
            left += parameter.requires_grad
        # DDP would broadcast rank 0's rows into the shards of all other ranks.
        elif _is_ignored(quoted(fqn), found[0], ranks, trains=parameter.requires_grad):
            taken.add(id(parameter))
            # Read by DDP's own mixed precision (checked on torch 2.13 and 2.11).
            parameter._ddp_ignored = True  # type: ignore[attr-defined]  # DDP's name
    # DDP.__init__ looks for a trainable parameter before registering ``module``, so DDP
    # itself would not notice that none is left.
    if taken and not left:
        raise CompositionError(
            f"DistributedDataParallel was put around a {type(module).__name__} of "
            "which fully sharded modules hold every parameter that requires a "
            f"gradient; expected one that is left for it. Over ranks {sorted(ranks)} "
            "they average their gradients themselves: leave "
            "DistributedDataParallel away and call the model itself."
        )
    ddp.parameters_to_ignore |= {
        # DDP builds names from those of modules, also "." and a name at the top.
        name
        for prefix, each in module.named_modules(remove_duplicate=False)
        for key, parameter in each.named_parameters("", False, False)
        if id(parameter) in taken
        for name in (f"{prefix}.{key}", f"{prefix}.{key}".lstrip("."))
    }
    # DDP.__init__ continues with this list, so change the list in place.
    held = ddp._module_parameters
    held[:] = [parameter for parameter in held if id(parameter) not in taken]


def _is_ignored(
    name: str, handle: FlatParamHandle, ranks: set[int], *, trains: bool
) -> bool:
    """Return whether DDP over ``ranks`` must ignore a parameter of ``handle``.

    Raises: CompositionError, if no average of DDP or of the unit would cover all of
        ``ranks``.
    """
    groups, own = handle.groups, {dist.get_rank()}
    row, column = (
        own if group is None else set(dist.get_process_group_ranks(group))
        for group in (groups.shard, groups.replicate)
    )
    if not trains:
        # A frozen parameter has no gradient to average. DDP may broadcast the parameter
        # only between ranks that hold the same rows.
        return len(ranks & row) > 1
    # A rank knows only its own row (shard group) and column (replicate group) of the
    # grid of ranks: compare the union and the number of ranks.
    is_grid = row | column <= ranks and len(ranks) == groups.world_size
    if ranks <= row or ranks <= column or is_grid:
        return True
    raise CompositionError(
        f"DistributedDataParallel over ranks {sorted(ranks)} was put around {name}, "
        f"whose unit averages its gradients over ranks {sorted(row | column)}; expected"
        " a unit that averages over all of them. DistributedDataParallel sees no "
        "gradient of a unit's parameters and cannot do the rest. Give the unit both "
        "dimensions, by a device_mesh of (replicate, shard) with "
        "ShardingStrategy.HYBRID_SHARD, or call replicate(model, process_group=...) of "
        "this package instead of DistributedDataParallel."
    )
