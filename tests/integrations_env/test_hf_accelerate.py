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
from torch import Tensor, nn
from torch.utils.data import DataLoader

from composable_fsdp import (
    CompositionError,
    MixedPrecision,
    fully_shard,
    unshard_params,
)
from composable_fsdp.hugging_face.trainer import ShardedAccelerator
from composable_fsdp.integrations.hf_accelerate import _require_known_engine
from composable_fsdp.storage.contents import units_in
from tests.integrations_env.huggingface import as_torchrun
from tests.integrations_env.tiny_llama import (
    Tokens,
    distance,
    parameters_of,
    tiny_llama,
)
from tests.support.on_ranks import on_ranks
from tests.support.place import World

CLOSE = 1e-5
MAX_NORM = 0.5


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return full parameters. Collective: gathers."""
    with unshard_params(model, writeback=False):
        return parameters_of(model)


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


@on_ranks(2)
def test_accumulation_reduces_gradients_once_per_step(world: World) -> None:
    """Batches of two per rank, two of them per step."""
    with as_torchrun(world):
        whole = prepared(4)
        norms = steps_of(whole, 3)
        # Each rank's next batch is the other half of what it had as a batch of 4.
        halves = _Halves(4)
        ready = prepared(2, gradient_accumulation_steps=2)
        ready = (*ready[:3], halves.of(whole[3]), ready[4])
        found = steps_of(ready, 3)

    assert found == pytest.approx(norms, rel=1e-4)
    assert distance(full(ready[1]), full(whole[1])) < CLOSE


class _Halves:
    """Divides each batch of a loader into two."""

    def __init__(self, size: int) -> None:
        self.size = size

    def of(self, loader: Any) -> list[dict[str, Tensor]]:
        """Return the halves in order."""
        return [
            {key: value[at : at + self.size // 2] for key, value in batch.items()}
            for batch in loader
            for at in (0, self.size // 2)
        ]


@pytest.mark.req("U-13")
@on_ranks(2)
def test_a_model_that_is_sharded_keeps_its_units(world: World) -> None:
    """No DDP is put around, and the object is the same."""
    model = fully_shard(tiny_llama())

    with as_torchrun(world):
        ready = prepared(4, model)

    assert ready[1] is model
    assert len(units_in(model)) == 1


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
    assert {path.name for path in (tmp_path / "sharded_state").iterdir()} == {"state-2"}


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


@on_ranks(2)
def test_bf16_is_a_mixed_precision_and_not_autocast(world: World) -> None:
    """The forward is the model's own, and parameters stay float32."""
    with as_torchrun(world):
        ready = prepared(4, mixed_precision="bf16")
        steps_of(ready, 1)

    expected = MixedPrecision(torch.bfloat16, torch.float32)
    assert {s.options.mixed_precision for s in units_in(ready[1])} == {expected}
    assert "forward" not in vars(ready[1])
    assert ready[1](torch.tensor([[3, 4]])).logits.dtype is torch.bfloat16


@pytest.mark.parametrize("first", ["model", "optimizer"])
@on_ranks(1, 2, 3)
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


@on_ranks(2)
def test_local_sgd_of_a_sharded_model_is_refused(world: World) -> None:
    """It would average this rank's rows with the rows of others."""
    with as_torchrun(world):
        accelerator = ShardedAccelerator(cpu=True)
        model = accelerator.prepare(tiny_llama())
        with pytest.raises(CompositionError, match="LocalSGD expects a model that"):
            LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2)
        LocalSGD(accelerator, nn.Linear(2, 2), 2, enabled=False)


@on_ranks(2)
def test_the_plain_accelerator_does_not_overwrite_shards(world: World) -> None:
    """It puts DDP around a sharded model, which would send rank 0's rows to all."""
    model = fully_shard(tiny_llama())

    with as_torchrun(world), pytest.raises(CompositionError, match="leave Distributed"):
        Accelerator(cpu=True).prepare(model)

    assert distance(full(model), parameters_of(tiny_llama())) == 0.0


@on_ranks(2)
def test_unknown_settings_are_refused(world: World) -> None:
    """With the nearest name."""
    with as_torchrun(world), pytest.raises(ValueError, match="sharding_strategy"):
        ShardedAccelerator(cpu=True, sharding={"sharding_stratgy": 1})


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
