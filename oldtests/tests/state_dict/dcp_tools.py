"""torch.distributed.checkpoint for tests: save, load, and what they send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp import (
    Block,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
    state_dict_type,
)

SHARDED = StateDictType.SHARDED_STATE_DICT


def sharded(model: nn.Module, **options: Any) -> dict[str, Any]:
    """The model's state dict of sharded values."""
    with state_dict_type(model, SHARDED, ShardedStateDictConfig(**options)):
        return model.state_dict()


class Payload(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base
    """Notes collectives that carry numbers, while it is entered.

    Objects are pickled into tensors of bytes, which do not count: plans are objects.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's base
        self.sent: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            flat = _pytree.tree_leaves((args, kwargs))
            tensors = [t for t in flat if isinstance(t, Tensor)]
            if any(t.is_floating_point() and t.numel() for t in tensors):
                self.sent.append(str(func))
        return func(*args, **(kwargs or {}))


def save_sending_nothing(state: dict[str, Any], folder: Path) -> None:
    """``dcp.save``; no rank may send a number."""
    with Payload() as mode:
        dcp_save(state, checkpoint_id=folder)
    assert mode.sent == []


def load_sending_nothing(state: dict[str, Any], folder: Path) -> None:
    """``dcp.load`` into ``state``, the same."""
    with Payload() as mode:
        dcp_load(state, checkpoint_id=folder)
    assert mode.sent == []


class Corners(nn.Module):
    """What boxes have trouble with: no dimension, no element, one element."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {
            "scale": (),
            "one": (1,),
            "empty": (0, 4),
            "flat": (3, 0),
            "cube": (3, 2, 2),
            "bias": (5,),
        }.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(value))
        self.register_buffer("seen", torch.tensor(float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + torch.stack([p.sum() for p in self.parameters()]).sum()
        return total


def corners(path: str, block: Block, seed: int) -> tuple[nn.Module, Any]:
    model: nn.Module = Corners(seed)
    if path == "composable":
        fully_shard(model, block=block)
    elif path == "wrapper":
        model = FullyShardedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
