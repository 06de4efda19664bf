"""A checkpoint with everything that formats trip over, and how two are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.storage.source import Source, TensorInfo


def sample() -> dict[str, Any]:
    """Model, optimizer and extra state, as a user would pass them to ``torch.save``."""
    torch.manual_seed(0)
    tied = torch.randn(5, 3)
    model = {
        "embed.weight": tied,
        "half.weight": torch.randn(7, 3).bfloat16(),
        "scale": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "norm.num_batches_tracked": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "across.weight": torch.randn(4, 6).t(),
        "head.weight": tied,
    }
    optim = {
        "state": {
            "embed.weight": {"exp_avg": torch.randn(5, 3), "step": torch.tensor(3.0)},
            "half.weight": {"exp_avg": torch.randn(7, 3).bfloat16(), "step": 3},
            "scale": {"exp_avg": torch.tensor(0.5), "step": torch.tensor(3.0)},
            "empty": {"momentum_buffer": None, "sum": torch.zeros(0, 4)},
        },
        "param_groups": [
            {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "params": [*model][:2]},
            {"lr": torch.tensor(0.3), "params": ["scale", "empty"]},
        ],
    }
    extra = {
        "epoch": 3,
        "nothing": {},
        "list": [1, {"a": torch.ones(2, dtype=torch.int32)}, []],
        "none": None,
        "name": "run",
        "loss": 1.5,
    }
    return {"model": model, "optim": optim, "extra": extra}


def saved(path: Path) -> Path:
    """``sample()`` in a ``torch.save`` file at ``path``."""
    torch.save(sample(), path)
    return path


def everything(source: Source) -> dict[str, Any]:
    """All that ``source`` holds, tensors read."""

    def read(info: TensorInfo, flat: Tensor) -> Tensor:
        return flat.view(info.shape)

    return {
        "model": {
            name: read(info, source.read_model(name, 0, info.numel))
            for name, info in source.model.items()
        },
        "aliases": dict(source.aliases),
        "optim": {
            name: {
                **{
                    key: read(info, source.read_optim(name, key, 0, info.numel))
                    for key, info in source.optim.get(name, {}).items()
                },
                **source.optim_values.get(name, {}),
            }
            for name in {**source.optim, **source.optim_values}
        },
        "param_groups": source.param_groups,
        "extra": source.extra,
    }
