"""The arguments that the strategies of the Trainer and of Fabric share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp.config import HYBRID, CPUOffload, ShardingStrategy
from composable_fsdp.integrations.lightning.sharding import AUTO, require_known
from composable_fsdp.planning.options import by_name

NAMES: dict[str, dict[str, Any]] = {
    "composable_fsdp": {},
    "composable_fsdp_offload": {"cpu_offload": True},
    "composable_fsdp_hybrid": {"strategy": ShardingStrategy.HYBRID_SHARD},
}
"""Names for ``strategy=``, with the arguments that they stand for."""

STATE_DICT_TYPES = ("full", "sharded")


def sharding_options(
    options: Mapping[str, Any], own: tuple[str, ...], api: str
) -> dict[str, Any]:
    """Return checked arguments of ``fully_shard``, with the defaults of a strategy.

    Args:
        options: the keyword arguments of the strategy that are not its own.
        own: the names of its own.
        api: its name, for messages.

    Raises: TypeError, for an unknown name or value.
    """
    # In the constructor: at the first fit, errors come from within Lightning.
    require_known(options, own, api)
    chosen = dict(options)
    chosen.setdefault("policy", AUTO)
    # As with DDP: ranks that were not seeded alike start from the weights of rank 0.
    chosen.setdefault("sync_module_states", True)
    # Two modules of a model may share a parameter; the root then holds it.
    chosen.setdefault("tied_params", "promote")
    offload = chosen.get("cpu_offload")
    if isinstance(offload, bool):
        chosen["cpu_offload"] = CPUOffload(offload_params=offload)
    if "strategy" in chosen:
        kind = by_name(ShardingStrategy, chosen["strategy"], argument="strategy")
        chosen["strategy"] = kind
    return chosen


def require_state_dict_type(given: object, api: str) -> None:
    """Refuse a ``state_dict_type`` other than those of ``STATE_DICT_TYPES``.

    Raises: ValueError.
    """
    if given not in STATE_DICT_TYPES:
        raise ValueError(
            f"{api} expects state_dict_type='full' (a file) or 'sharded' (a directory, "
            f"each rank writes its part), got {given!r}."
        )


def on_these_ranks(
    options: Mapping[str, Any], device: torch.device, nodes: int, per_node: int
) -> dict[str, Any]:
    """Return the options with the device and the mesh of the ranks that run.

    Args:
        options: the arguments of ``fully_shard``; ``device_mesh`` may be the shape
            ``(replicas, shards)``.
        device: the compute device of this rank.
        nodes: the number of machines.
        per_node: the number of ranks on each.

    Returns: a copy, for ``fully_shard``.
    Collective: for a mesh, the creation of its groups; all ranks must call.
    """
    chosen = dict(options)
    # The whole model may be on the CPU: only shards and buffers go to the device.
    chosen.setdefault("device_id", device)
    mesh = chosen.get("device_mesh")
    is_hybrid = chosen.get("strategy") in HYBRID
    if mesh is None and chosen.get("process_group") is None and is_hybrid:
        # Lightning's own launcher does not tell the ranks per node to torch.
        mesh = (nodes, per_node)
    if isinstance(mesh, tuple):
        # fully_shard reads a mesh by position; names are for the reader of a message.
        names = ("replicate", "shard")[-len(mesh) :]
        chosen["device_mesh"] = init_device_mesh(
            device.type, mesh, mesh_dim_names=names
        )
    return chosen
