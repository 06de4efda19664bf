"""How many ranks of NCCL this machine can run, one per GPU."""

from __future__ import annotations

import pytest
import torch

GPUS = torch.cuda.device_count()
RANK_COUNTS = (1, 2, 3, 4, 8)
RUNNABLE = sorted({c for c in RANK_COUNTS if c <= GPUS} | {GPUS or 1})
"""Those counts that there are GPUs for, and all GPUs together."""

NEEDS_NCCL = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no CUDA device: NCCL was not tried at all"),
]
