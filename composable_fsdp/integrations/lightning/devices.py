"""Moves the part of a model that no unit holds to the compute device."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import nn
from torchmetrics import Metric

from composable_fsdp.flat.handle import find_leaf


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move plain parameters, buffers and metrics of ``module`` to ``device``.

    Parameters of units stay: ``fully_shard`` has put them on the device, or into host
    memory with ``cpu_offload``, where the optimizer steps.

    Raises: ValueError, for a plain parameter on meta.
    """
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
