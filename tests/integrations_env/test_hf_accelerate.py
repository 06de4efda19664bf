"""Claims on accelerate's ``Accelerator`` over sharded models.

The other side is a loop without accelerate over the plain model and the whole batch.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils.data import DataLoader

from composable_fsdp import fully_shard
from composable_fsdp.errors import CompositionError
from composable_fsdp.hugging_face.trainer import ShardedAccelerator
from composable_fsdp.integrations.hf_accelerate import _require_known_engine
from composable_fsdp.storage.contents import units_in
from tests.integrations_env.huggingface import as_torchrun
from tests.integrations_env.tiny_llama import (
    Tokens,
    distance,
    full,
    parameters_of,
    tiny_llama,
)
from tests.support.on_ranks import on_ranks
from tests.support.place import World

CLOSE = 1e-5
MAX_NORM = 0.5


def plain_run(steps: int, batch: int) -> tuple[dict[str, Tensor], list[float]]:
    """Return parameters and norms of a loop over the plain model."""
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms: list[float] = []
    data = Tokens(64).ids
    for step in range(steps):
        ids = data[step * batch : (step + 1) * batch]
        model(input_ids=ids, labels=ids).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model), norms


def prepared(batch: int, model: Any = None, **more: Any) -> tuple[Any, ...]:
    """Return accelerator, model, optimizer, loader and schedule."""
    accelerator = ShardedAccelerator(cpu=True, **more)
    model = tiny_llama() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(Tokens(64), batch_size=batch)
    ready = accelerator.prepare(model, optimizer, loader, schedule)
    return accelerator, *ready


def steps_of(ready: tuple[Any, ...], steps: int, start: int = 0) -> list[float]:
    """Train for some steps, and return the norms before clipping."""
    accelerator, model, optimizer, loader, schedule = ready
    norms: list[float] = []
    for at, batch in enumerate(loader):
        if at < start:
            continue
        if len(norms) == steps:
            break
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                norms.append(float(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.req("N-12")
@on_ranks(1, 2)
def test_prepare_shards_and_training_is_that_of_the_plain_model(
    world: World,
) -> None:
    """Losses are averaged, and clipping is by the norm over all ranks."""
    expected, norms = plain_run(4, 8)

    with as_torchrun(world):
        ready = prepared(8 // world.world_size)
        found = steps_of(ready, 4)

    assert len(units_in(ready[1])) == 3
    assert type(ready[1]) is type(tiny_llama())
    assert min(norms) > MAX_NORM
    assert found == pytest.approx(norms, rel=1e-4)
    assert distance(full(ready[1]), expected) < CLOSE


@pytest.mark.req("N-12", "U-13")
@on_ranks(2)
def test_a_state_is_saved_and_loaded(world: World, tmp_path: Path) -> None:
    """Model, optimizer and schedule; a second save replaces the first."""
    with as_torchrun(world):
        ready = prepared(4)
        steps_of(ready, 1)
        ready[0].save_state(str(tmp_path))
        steps_of(ready, 1, start=1)
        ready[0].save_state(str(tmp_path))
        steps_of(ready, 2, start=2)
        again = prepared(4)
        again[0].load_state(str(tmp_path))
        steps_of(again, 2, start=2)

    assert distance(full(again[1]), full(ready[1])) == 0.0
    names = {path.name for path in tmp_path.iterdir()}
    # No file of a single rank's shards.
    assert not names & {"model.safetensors", "optimizer.bin"}
    files = sorted(path.name for path in (tmp_path / "sharded_state").iterdir())
    assert (files[0], len(files)) == ("manifest.json", 3)


@on_ranks(2)
def test_save_model_writes_the_full_weights(world: World, tmp_path: Path) -> None:
    """``get_state_dict`` gives them to the first rank alone."""
    with as_torchrun(world):
        ready = prepared(4)
        count = len(ready[0].get_state_dict(ready[1]))
        ready[0].save_model(ready[1], str(tmp_path))
    world.barrier()
    ready[1].config.save_pretrained(tmp_path)

    assert count == (0 if world.rank else len(tiny_llama().state_dict()))
    again = type(ready[1]).from_pretrained(tmp_path)
    assert distance(parameters_of(again), parameters_of(tiny_llama())) == 0.0


@pytest.mark.parametrize("first", ["model", "optimizer"])
@on_ranks(3)
def test_state_made_at_construction_is_cut(world: World, first: str) -> None:
    """Adagrad, prepared behind the model or before it."""
    plain, data = tiny_llama(), Tokens(8).ids
    models = (plain, tiny_llama())
    optimizers: list[Any] = [
        torch.optim.Adagrad(each.parameters(), 1e-2, initial_accumulator_value=0.1)
        for each in models
    ]
    with as_torchrun(world):
        accelerator = ShardedAccelerator(cpu=True)
        given = (models[1], optimizers[1])
        ready = accelerator.prepare(*given[:: 1 if first == "model" else -1])
        model, optimizers[1] = ready[:: 1 if first == "model" else -1]
        for _ in range(3):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                each(input_ids=data, labels=data).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    assert distance(full(model), parameters_of(plain)) < CLOSE


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"distributed_type": DistributedType.FSDP}, "without an engine of its own"),
        ({"parallelism_config": object()}, "expects no parallelism_config"),
        ({"mixed_precision": "fp16"}, "'no' or 'bf16', got 'fp16'"),
    ],
)
def test_engines_of_accelerate_are_refused(changed: dict[str, Any], words: str) -> None:
    """They need GPUs, so an object with the same attributes stands for each."""
    plain = {
        "distributed_type": DistributedType.MULTI_CPU,
        "parallelism_config": None,
        "mixed_precision": "no",
    }
    _require_known_engine(SimpleNamespace(**plain))

    with pytest.raises(ValueError, match=words):
        _require_known_engine(SimpleNamespace(**{**plain, **changed}))


@on_ranks(2)
def test_a_plain_model_can_be_prepared_for_evaluation(world: World) -> None:
    """A teacher stays plain, and its parameters whole."""
    with as_torchrun(world):
        accelerator = ShardedAccelerator(cpu=True)
        teacher = accelerator.prepare_model(tiny_llama(), evaluation_mode=True)

    assert units_in(teacher) == []
    assert distance(parameters_of(teacher), parameters_of(tiny_llama())) == 0.0


@on_ranks(2)
def test_what_would_take_shards_for_whole_parameters_is_refused(world: World) -> None:
    """LocalSGD asks for a wrapper; the plain accelerator puts DDP around."""
    with as_torchrun(world):
        accelerator = ShardedAccelerator(cpu=True)
        model = accelerator.prepare(tiny_llama())
        with (
            pytest.raises(AttributeError, match="no_sync"),
            LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2),
        ):
            pass
    model = fully_shard(tiny_llama())
    with as_torchrun(world), pytest.raises(CompositionError, match="leave Distributed"):
        Accelerator(cpu=True).prepare(model)

    assert distance(full(model), parameters_of(tiny_llama())) == 0.0
