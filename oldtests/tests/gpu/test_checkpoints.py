"""Checkpoints of shards that are on GPUs: what was saved is what was there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from torch import nn

from composable_fsdp import (
    CPUOffload,
    async_save,
    load,
    optim_state_dict,
    save,
    verify,
)
from tests.gpu.counts import NEEDS_NCCL
from tests.support.models import TinyGPT
from tests.support.place import _same
from tests.support.reference import (
    adamw,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
)
from tests.support.world import RankPool, World

pytestmark = NEEDS_NCCL


class Trainee:
    """A small sharded GPT on this rank's GPU, with its optimizer."""

    def __init__(self, world: World, path: str, *, offload: bool = False) -> None:
        self.world = world
        plain: nn.Module = TinyGPT().to(world.device)
        self.model = apply_units(
            plain,
            gpt_units(TinyGPT()),
            path=path,
            cpu_offload=CPUOffload(offload_params=offload),
        )
        self.optimizer = adamw(self.model.parameters())

    def step(self, at: int) -> None:
        tokens = gpt_input(at, self.world.rank).to(self.world.device)
        backward(loss_of(self.model, tokens))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def everything(self) -> object:
        state = optim_state_dict(self.model, self.optimizer)
        return copy.deepcopy([dict(self.model.state_dict()), state])


def check_native(world: World, folder: Path, path: str, offload: bool) -> None:
    first, second = (Trainee(world, path, offload=offload) for _ in range(2))
    first.step(0)
    before = first.everything()

    save(folder / "step-1", first.model, first.optimizer)
    # The next step writes the same memory while the file is being written.
    saving = async_save(folder / "step-2", first.model, first.optimizer)
    first.step(1)
    saving.result()

    for name in ("step-1", "step-2"):
        load(folder / name, second.model, second.optimizer)
        assert _same(second.everything(), before)
    second.step(1)
    assert _same(second.everything(), first.everything())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("path", ["composable", "wrapper"])
def test_a_checkpoint_of_shards_on_gpus_resumes(
    pool: RankPool, path: str, offload: bool, tmp_path: Path
) -> None:
    """Also one that was written while training went on: it has the call's values."""
    pool.run(check_native, tmp_path, path, offload, timeout=120)

    assert verify(tmp_path / "step-1")
    assert verify(tmp_path / "step-2")
