"""torch's DistributedDataParallel around units: it leaves their parameters alone.

DDP gives all ranks the first one's parameters when it is made, and expects a gradient
of each from autograd. A unit's parameters are other rows on each rank, and their
gradients are averaged by the unit. So DDP is told to ignore them, before it sends
anything; it goes on to average what no unit holds. What that would leave wrong is
refused::

    ranks of DDP       0 1 2 3    0 1 2 3    0 1 . .    0 . 2 .
    ranks of a unit    0 1 2 3    0 1 . .    0 1 2 3    0 1 . .
                       ignored    refused    ignored    refused

DDP is met where it registers ``module``, by torch's public hook for that. Names of DDP,
checked on torch 2.13 and 2.11: ``process_group``, ``parameters_to_ignore`` and
``_module_parameters``, all set before ``module``; ``_ddp_ignored`` on parameters.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from composable_fsdp.compose.registry import TORCH_DDP, incompatible_api
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.naming import quoted

_installed = False


def install_ddp_hook() -> None:
    """Have every DDP looked at that is made from now on; called when a module is cut.

    The hook runs where modules are put together, not where they run.
    """
    global _installed
    if not _installed:
        _installed = True
        # As typed in torch it returns nothing, and a returned module would be used.
        register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if name == "module" and child is not None and incompatible_api(parent) == TORCH_DDP:
        _ignore_in_ddp(parent, child)


def _ignore_in_ddp(ddp: Any, module: nn.Module) -> None:
    """Have ``ddp`` ignore what units in ``module`` hold. Sends nothing.

    Raises: CompositionError, on all ranks alike.
    """
    ranks = frozenset(dist.get_process_group_ranks(ddp.process_group))
    taken: dict[int, nn.Parameter] = {}
    left = 0
    for fqn, parameter in module.named_parameters():
        if fqn in ddp.parameters_to_ignore:
            continue
        found = find_leaf(parameter)
        if found is None:
            left += parameter.requires_grad
        elif _is_ignored(quoted(fqn), found[0], ranks, trains=parameter.requires_grad):
            taken[id(parameter)] = parameter
    if not taken:
        return
    if not left:
        raise CompositionError(
            f"DistributedDataParallel was put around a {type(module).__name__} of "
            "which fully sharded modules hold every parameter that requires a "
            f"gradient; expected one that is left for it. Over ranks {sorted(ranks)} "
            "they average their gradients themselves: leave "
            "DistributedDataParallel away and call the model itself."
        )
    ddp.parameters_to_ignore |= _names(module, taken)
    held = ddp._module_parameters
    held[:] = [parameter for parameter in held if id(parameter) not in taken]
    for parameter in taken.values():
        # Its own mixed precision asks the parameters.
        parameter._ddp_ignored = True  # type: ignore[attr-defined]  # DDP's name


def _is_ignored(
    name: str, handle: FlatParamHandle, ranks: frozenset[int], *, trains: bool
) -> bool:
    """Whether DDP over ``ranks`` is to ignore a parameter of ``handle``.

    Raises: CompositionError, if nobody would average it over all of ``ranks``.
    """
    if not trains:
        # Nobody averages it. DDP may give it to ranks that hold the same rows.
        shard = handle.groups.shard
        cut_over = dist.get_process_group_ranks(shard) if shard is not None else []
        return len(ranks.intersection(cut_over)) > 1
    if _averages_over(handle, ranks):
        return True
    own = sorted({dist.get_rank()}.union(*_row_and_column(handle)))
    raise CompositionError(
        f"DistributedDataParallel over ranks {sorted(ranks)} was put around {name}, "
        f"whose unit averages its gradients over ranks {own}; expected a unit that "
        "averages over all of them. DistributedDataParallel sees no "
        "gradient of a unit's parameters and cannot do the rest. Give the unit both "
        "dimensions, by a device_mesh of (replicate, shard) with "
        "ShardingStrategy.HYBRID_SHARD, or call replicate(model, process_group=...) of "
        "this package instead of DistributedDataParallel."
    )


def _averages_over(handle: FlatParamHandle, ranks: frozenset[int]) -> bool:
    """Whether the unit's average is over all of ``ranks``."""
    row, column = _row_and_column(handle)
    if ranks <= row or ranks <= column or ranks == {dist.get_rank()}:
        return True
    # Of the grid a rank knows its row and its column.
    grid = bool(row and column) and row | column <= ranks
    return grid and len(ranks) == handle.groups.world_size


def _row_and_column(handle: FlatParamHandle) -> list[frozenset[int]]:
    """The ranks of the shard and of the replicate group; empty where there is none."""
    groups = handle.groups.shard, handle.groups.replicate
    return [
        frozenset(dist.get_process_group_ranks(group) if group is not None else ())
        for group in groups
    ]


def _names(module: nn.Module, taken: dict[int, nn.Parameter]) -> set[str]:
    """Every name by which DDP may ask for one of ``taken``: all places of tied ones.

    Of parameters at the top it asks with a dot in front, too.
    """
    pairs = [
        *module.named_parameters(remove_duplicate=False),
        *(
            (f"{prefix}.{name}", parameter)
            for prefix, each in module.named_modules()
            for name, parameter in each.named_parameters(recurse=False)
        ),
    ]
    return {name for name, parameter in pairs if id(parameter) in taken}
