"""The state of a replica, for replicas that die and join again while others train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import join_name, quoted, takes_optimizer
from composable_fsdp.tree.traversal import require_module, walk_states


@takes_optimizer
def replica_state_dict(
    module: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return this rank's shards, buffers and optimizer state, without copies.

    Another thread may call this function during forward and backward.

    Args:
        module: the sharded model.
        optim: its optimizer.

    Returns: a dict for ``load_replica_state_dict`` on the same rank of another replica.
    Raises: TypeError, if ``module`` is no module.
    """
    require_module(module, "replica_state_dict")
    return {
        "tensors": {name: each.detach() for name, each in _tensors(module)},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optim.param_groups
        ],
        # By position: replicas make equal optimizers, also over flat parameters.
        "states": [dict(optim.state.get(p, {})) for p, _ in _parameters(optim)],
    }


@takes_optimizer
@torch.no_grad()
def load_replica_state_dict(
    module: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Take over the state of the same rank of another replica.

    All checks come before the first change. Call between backward and the next forward.

    Args:
        module: the sharded model, sharded as in the other replica.
        optim: its optimizer, made as in the other replica.
        state: the result of ``replica_state_dict``; its tensors are copied.

    Raises: CheckpointError, with the name, if the replicas differ in names, shapes or
        dtypes of this rank's tensors, or in the optimizer's parameters.
    """
    require_module(module, "load_replica_state_dict")
    ours, theirs = dict(_tensors(module)), state["tensors"]
    _require_same(ours, theirs)
    parameters = _parameters(optim)
    groups, states = state["groups"], state["states"]
    if len(groups) != len(optim.param_groups) or len(states) != len(parameters):
        raise CheckpointError(
            f"load_replica_state_dict got optimizer state of {len(groups)} groups and "
            f"{len(states)} parameters; this replica's optimizer has "
            f"{len(optim.param_groups)} and {len(parameters)}. Make the optimizers of "
            "all replicas alike."
        )
    # The ranks of a replica are not compared in which of them took over a state: a
    # manager chooses the source for each rank by itself, and before the first step some
    # ranks have the state that others take.
    for name, each in ours.items():
        # In place, so that views, flat buffers and references stay good.
        each.copy_(theirs[name])
    for group, options in zip(optim.param_groups, groups, strict=True):
        group.update(options)
    for (parameter, group), values in zip(parameters, states, strict=True):
        # A rank without elements of the parameter has no state, and an optimizer takes
        # an empty entry for state.
        optim.state.pop(parameter, None)
        if values:
            optim.state[parameter] = {
                key: _own(value, parameter, group) for key, value in values.items()
            }


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of sharded parameters, other parameters and buffers."""
    seen: set[int] = set()
    # Names by the walk: a handle knows its name from its first forward on, and a
    # replica that joins has run none.
    for number, (fqn, _, state) in enumerate(walk_states(module)):
        handle = state.handle
        for region in handle.layout.regions:
            for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True):
                # Not by the modules, which show full parameters during a forward. The
                # numbers tell parameters of equal names in a list of modules apart.
                name = join_name(fqn, slot.fqn)
                yield f"{name} (unit {number}, parameter {slot.index})", leaf
        seen.update(map(id, handle.leaves), map(id, handle.form.placed))
    for name, parameter in module.named_parameters():
        if id(parameter) not in seen:
            yield name, parameter
    yield from module.named_buffers()


def _require_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for the first tensor that differs in name or form."""
    for name in dict.fromkeys([*theirs, *ours]):
        got, has = (
            "nothing" if each is None else f"{tuple(each.shape)} {each.dtype}"
            for each in (theirs.get(name), ours.get(name))
        )
        if got != has:
            raise CheckpointError(
                f"load_replica_state_dict got {got} for {quoted(name)} of this rank; "
                f"this replica has {has}. Replicas need the same model, sharded by the "
                "same calls over the same number of ranks, and frozen alike."
            )


def _parameters(
    optim: torch.optim.Optimizer,
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return the parameters of all groups in order, each with its group."""
    return [(p, group) for group in optim.param_groups for p in group["params"]]


def _own(value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """Return a copy of a value of state, on the device that the optimizer wants."""
    if not isinstance(value, Tensor):
        return value
    on_device = value.ndim > 0 or group.get("capturable") or group.get("fused")
    return value.detach().to(parameter.device if on_device else "cpu", copy=True)
