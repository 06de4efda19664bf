"""Let torch's DistributedDataParallel (DDP) ignore the parameters of units.

DDP broadcasts all parameters at construction and expects a gradient for each from
autograd. A unit's parameters are different rows on each rank, and the unit averages
their gradients. So DDP is told to ignore them before DDP communicates; DDP still
averages parameters that no unit holds. Combinations that would leave a gradient wrong
are refused::

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
    """Install the hook that inspects every DDP made from now on, once per process.

    Called when a module is sharded. The hook runs when modules are assembled, not in
    forward.
    """
    global _installed
    if not _installed:
        _installed = True
        # torch's annotation says that the hook returns None; a returned module would
        # replace the registered module.
        register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Adapt a DDP when ``__init__`` registers its attribute ``module``."""
    if name == "module" and child is not None and isinstance(parent, nn.DataParallel):
        _refuse_data_parallel(child)
    # DDP.__init__ sets process_group, parameters_to_ignore and _module_parameters
    # before registering ``module``, and broadcasts afterwards (checked on torch 2.13
    # and 2.11).
    if name == "module" and child is not None and incompatible_api(parent) == TORCH_DDP:
        _ignore_in_ddp(parent, child)


def _refuse_data_parallel(module: nn.Module) -> None:
    """Raise CompositionError if ``nn.DataParallel`` is put around a sharded module."""
    first = first_sharded(module)
    if first is not None:
        raise CompositionError(
            f"nn.DataParallel was put around a {type(module).__name__} whose parameter "
            f"{quoted(first)} is fully sharded; expected a plain module. DataParallel "
            "copies a module to other GPUs of this process, and each copy would hold "
            "this rank's rows alone. Call the sharded module itself, with one process "
            "per GPU (torchrun)."
        )


def _ignore_in_ddp(ddp: Any, module: nn.Module) -> None:
    """Let ``ddp`` ignore the parameters that units in ``module`` hold.

    Raises: CompositionError, on all ranks alike.
    """
    ranks = frozenset(dist.get_process_group_ranks(ddp.process_group))
    taken: dict[int, nn.Parameter] = {}
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
            taken[id(parameter)] = parameter
    if not taken:
        return
    # DDP.__init__ looks for a trainable parameter before registering ``module``, so DDP
    # itself would not notice that none is left.
    if not left:
        raise CompositionError(
            f"DistributedDataParallel was put around a {type(module).__name__} of "
            "which fully sharded modules hold every parameter that requires a "
            f"gradient; expected one that is left for it. Over ranks {sorted(ranks)} "
            "they average their gradients themselves: leave "
            "DistributedDataParallel away and call the model itself."
        )
    ddp.parameters_to_ignore |= _names(module, taken)
    # DDP.__init__ continues with this list, so change the list in place.
    held = ddp._module_parameters
    held[:] = [parameter for parameter in held if id(parameter) not in taken]
    for parameter in taken.values():
        # DDP's own mixed precision reads this attribute of parameters (checked on torch
        # 2.13 and 2.11).
        parameter._ddp_ignored = True  # type: ignore[attr-defined]  # DDP's name


def _is_ignored(
    name: str, handle: FlatParamHandle, ranks: frozenset[int], *, trains: bool
) -> bool:
    """Return whether DDP over ``ranks`` must ignore a parameter of ``handle``.

    Raises: CompositionError, if no average of DDP or of the unit would cover all of
        ``ranks``.
    """
    if not trains:
        # A frozen parameter has no gradient to average. DDP may broadcast the parameter
        # only between ranks that hold the same rows.
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
    """Return whether the unit averages its gradients over all of ``ranks``."""
    row, column = _row_and_column(handle)
    # DDP's ranks lie within the shard group or within the replicate group: the unit's
    # reduction over this group covers them.
    if ranks <= row or ranks <= column or ranks == {dist.get_rank()}:
        return True
    # A rank knows only its own row (shard group) and column (replicate group) of the
    # grid of ranks: compare the union and the number of ranks.
    grid = bool(row and column) and row | column <= ranks
    return grid and len(ranks) == handle.groups.world_size


def _row_and_column(handle: FlatParamHandle) -> list[frozenset[int]]:
    """Return the ranks of the shard group and of the replicate group.

    A group that does not exist is an empty set.
    """
    groups = handle.groups.shard, handle.groups.replicate
    return [
        frozenset(dist.get_process_group_ranks(group) if group is not None else ())
        for group in groups
    ]


def _names(module: nn.Module, taken: dict[int, nn.Parameter]) -> set[str]:
    """Return every name by which DDP may ask for a parameter of ``taken``.

    Tied parameters have a name per place.
    """
    pairs = [
        *module.named_parameters(remove_duplicate=False),
        # DDP also builds names as f"{module_name}.{parameter_name}", which starts with
        # a dot for parameters of the top module.
        *(
            (f"{prefix}.{name}", parameter)
            for prefix, each in module.named_modules()
            for name, parameter in each.named_parameters(recurse=False)
        ),
    ]
    return {name for name, parameter in pairs if id(parameter) in taken}
