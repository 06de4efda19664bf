"""Claims on Ctrl-C in a save: a whole checkpoint or none, and no rank that waits."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from composable_fsdp import (
    SaveOptions,
    async_save,
    checkpoints,
    load,
    register_storage,
    save,
)
from composable_fsdp.storage import async_save as saving_behind
from composable_fsdp.storage.async_save import snapshot
from tests.storage.test_remote import Folder
from tests.storage.training import make, optimizer_of
from tests.support.on_ranks import on_ranks
from tests.support.sharded import message_of
from tests.support.world import World

pytest.importorskip("fsspec")


class Interrupted(Folder):
    """A storage at one of whose calls the user presses Ctrl-C."""

    after = False

    def _called(self, name: str) -> Path:
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        return self.root / name

    def put(self, name: str, data: bytes, *, absent: bool) -> None:
        calls = self.calls
        super().put(name, data, absent=absent)
        # The object is there, and the caller does not know.
        if self.after and name.endswith("manifest.json") and self.fails_at > calls:
            raise KeyboardInterrupt


@pytest.mark.req("K-03", "K-07")
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupt_at_any_call_to_a_storage_leaves_the_old_or_the_new(
    tmp_path: Path, overwrite: bool
) -> None:
    """Files that a marker names are never removed, also after the commit."""
    own = Interrupted(tmp_path / "own")
    register_storage("own", lambda: own)
    model = torch.nn.Linear(3, 3)
    outcomes = set()
    for number in range(1, 60):
        base = f"own://b{number}"
        target = f"{base}/step-{1 if overwrite else 2}"
        save(f"{base}/step-1", model, extra=1)
        own.calls, own.fails_at = 0, number
        with suppress(KeyboardInterrupt):
            save(
                target, model, extra=2, options=SaveOptions(overwrite=overwrite, keep=1)
            )
        was_reached, own.fails_at = own.calls >= number, 0
        outcomes.add(load(base, model))
        assert all(each.is_whole for each in checkpoints(base))
        if not was_reached:
            break
    assert outcomes == {1, 2}
    own.after, own.calls, own.fails_at = True, 0, 10**9
    with pytest.raises(KeyboardInterrupt):
        save("own://last/step-1", model, extra=5)
    assert load("own://last", model) == 5


@on_ranks(2)
@pytest.mark.req("K-06")
def test_an_interrupt_while_values_are_copied_ends_the_save_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    """The rank raises at once, other futures end, and the next save goes on."""
    model = make("composable")
    optimizer = optimizer_of(model)

    def copied(*args: Any) -> Any:
        if world.rank == 1:
            raise KeyboardInterrupt
        return snapshot(*args)

    with mock.patch.object(saving_behind, "snapshot", copied):
        if world.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                async_save(tmp_path / "step-1", model, optimizer)
        else:
            future = async_save(tmp_path / "step-1", model, optimizer)
            text = message_of(future.result)
            assert "rank 1" in text
            assert "async_save was interrupted (KeyboardInterrupt())" in text
    save(tmp_path / "step-2", model, optimizer, extra=2)
    assert load(tmp_path, model, optimizer) == 2
    assert sorted(os.listdir(tmp_path)) == ["step-2"]
