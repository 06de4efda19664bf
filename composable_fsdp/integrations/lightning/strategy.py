"""What the strategies of Lightning's Trainer and of Fabric share."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchmetrics import Metric

from composable_fsdp.config import HYBRID, CPUOffload, ShardingStrategy
from composable_fsdp.entries.fully_shard import FSDP2_NAMES, fully_shard, unknown_text
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.integrations.lightning.sharding import AUTO
from composable_fsdp.planning.options import by_name

NAMES: dict[str, dict[str, Any]] = {
    "composable_fsdp": {},
    "composable_fsdp_offload": {"cpu_offload": True},
    "composable_fsdp_hybrid": {"strategy": HYBRID[0]},
}
"""Names for ``strategy=``, with the arguments that they stand for."""

_LIGHTNINGS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision", "precision_plugin", "process_group_backend", "timeout"),
    "start_method",
)
"""Arguments of Lightning's ``DDPStrategy`` that do not concern DDP."""

FULL, SHARDED = STATE_DICT_TYPES = ("full", "sharded")

_CHECKPOINT = "checkpoint(block) in configure_model"
_OTHER_NAMES = {
    **FSDP2_NAMES,
    "activation_checkpointing_policy": _CHECKPOINT,
    "activation_checkpointing": _CHECKPOINT,
}
_ORIGIN = "these are names of torch's FSDP and of Lightning's FSDPStrategy: {}"


class ShardingStrategyMixin:
    """The arguments of both strategies; stands before Lightning's ``DDPStrategy``.

    From ``DDPStrategy`` come the processes, the group and its functions.

    Args:
        state_dict_type: "full" (default): a checkpoint is a file as of any strategy,
            gathered on rank 0. "sharded": a directory; each rank writes its part.
        forward_methods: names of methods of the module, beside ``forward`` and the
            steps, that compute with parameters and are called from outside of a step.
        process_group_backend: the backend. Default: NCCL for GPUs, else gloo.
        timeout: the timeout of the process group. Default 30 minutes.
        start_method: how the ranks start, if torchrun or a cluster did not start them:
            "popen" (default), or "spawn", "fork", "forkserver".
        accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin (of the Trainer), precision (of Fabric): see Lightning's
            ``DDPStrategy``.
        **sharding: arguments of ``fully_shard``, with other defaults: ``policy="auto"``
            makes repeated layers units, ``sync_module_states=True`` gives all ranks the
            weights of rank 0, and ``tied_params="promote"``. ``cpu_offload`` may be a
            bool, ``device_mesh`` a shape ``(replicas, shards)``.

    Raises: TypeError, for an unknown argument; ValueError, for a ``state_dict_type``.
    """

    root_device: torch.device
    num_nodes: int
    num_processes: int

    def __init__(
        self,
        *,
        state_dict_type: str = FULL,
        forward_methods: tuple[str, ...] = (),
        **sharding: Any,
    ) -> None:
        api = type(self).__name__
        if state_dict_type not in STATE_DICT_TYPES:
            raise ValueError(
                f"{api} expects state_dict_type='full' (a file) or 'sharded' (a "
                f"directory, each rank writes its part), got {state_dict_type!r}."
            )
        theirs = inspect.signature(super().__init__).parameters
        own = [name for name in _LIGHTNINGS if name in theirs]
        super().__init__(**{n: sharding.pop(n) for n in own if n in sharding})
        # In the constructor: at the first fit, errors come from within Lightning.
        # fully_shard would name its own arguments alone, and not those of the strategy.
        taken = ["state_dict_type", "forward_methods", *own]
        taken += inspect.signature(fully_shard).parameters
        taken = [name for name in taken if name not in ("module", "if_sharded")]
        if unknown := sorted(sharding.keys() - set(taken)):
            raise TypeError(unknown_text(unknown, taken, api, _OTHER_NAMES, _ORIGIN))
        self._options = {
            "policy": AUTO,
            # As with DDP: ranks that were not seeded alike start from the weights of
            # rank 0.
            "sync_module_states": True,
            # Two modules of a model may share a parameter; the root then holds it.
            "tied_params": "promote",
            **sharding,
        }
        offload = sharding.get("cpu_offload")
        if isinstance(offload, bool):
            self._options["cpu_offload"] = CPUOffload(offload_params=offload)
        if "strategy" in sharding:
            self._options["strategy"] = by_name(
                ShardingStrategy, sharding["strategy"], argument="strategy"
            )
        self._state_dict_type = state_dict_type
        self.forward_methods = tuple(forward_methods)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this strategy."""
        for name, defaults in NAMES.items():
            # ``register`` has an argument ``strategy`` of its own, so ours are bound.
            made = partial(cls, **defaults)
            strategy_registry.register(name, made, cls.__name__, override=True)

    def _options_here(self) -> dict[str, Any]:
        """Return the options of ``fully_shard``, with the device and the mesh."""
        # The whole model may be on the CPU: only shards and buffers go to the device.
        chosen = {"device_id": self.root_device, **self._options}
        mesh = chosen.get("device_mesh")
        is_hybrid = chosen.get("strategy") in HYBRID
        if mesh is None and chosen.get("process_group") is None and is_hybrid:
            # Lightning's own launcher does not tell the ranks per node to torch.
            mesh = (self.num_nodes, self.num_processes)
        if isinstance(mesh, tuple):
            # fully_shard reads a mesh by position; names are for a reader of messages.
            chosen["device_mesh"] = init_device_mesh(
                self.root_device.type,
                mesh,
                mesh_dim_names=("replicate", "shard")[-len(mesh) :],
            )
        return chosen


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move plain parameters, buffers and metrics of ``module`` to ``device``."""
    for each in module.modules():
        # States of metrics are attributes, which only the metric itself can move.
        if isinstance(each, Metric):
            each.to(device)
            continue
        for parameter in each._parameters.values():
            if parameter is not None and find_leaf(parameter) is None:
                # Through .data, because optimizers and ties hold the parameter.
                parameter.data = parameter.to(device)
        for name, buffer in each._buffers.items():
            # Buffers on meta wait for a checkpoint, and the first forward refuses them.
            if buffer is not None and not buffer.is_meta:
                each._buffers[name] = buffer.to(device)
    # A LightningModule returns this device as ``self.device``.
    _update_properties(module, device=device)
