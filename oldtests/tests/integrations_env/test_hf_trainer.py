"""Claims on the Trainer of transformers over a sharded model.

The other side is the plain ``Trainer`` in a single process with the whole batch, and
for bf16 the plain ``Trainer`` under DDP, which computes in bfloat16, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from composable_fsdp import MixedPrecision, fully_shard
from composable_fsdp.hugging_face.trainer import ShardedTrainer
from composable_fsdp.storage.contents import units_in
from tests.integrations_env.huggingface import alone, arguments, as_torchrun
from tests.integrations_env.tiny_llama import (
    Tokens,
    distance,
    full,
    parameters_of,
    tiny_llama,
)
from tests.support.on_ranks import on_ranks
from tests.support.place import World

CLOSE = 2e-5
"""Largest difference of a parameter after six steps of AdamW: the sums of gradients are
in another order, and AdamW divides small gradients by their own size."""


def logged(trainer: Any, key: str) -> list[float]:
    """Return the logged values of ``key`` in the order of steps."""
    return [float(each[key]) for each in trainer.state.log_history if key in each]


def plain_run(folder: Path, world: World, **more: Any) -> Any:
    """Return the trainer that has trained the plain model on the whole batch."""
    size = more.pop("per_device_train_batch_size", 4) * world.world_size
    with alone():
        args = arguments(folder, per_device_train_batch_size=size, **more)
        trainer = Trainer(tiny_llama(), args, train_dataset=Tokens(64))
        trainer.train()
    return trainer


def trained(folder: Path, model: Any = None, **more: Any) -> Any:
    """Return the trainer that has trained the sharded model."""
    own = {key: more.pop(key) for key in ("sharding", "callbacks") if key in more}
    trainer = ShardedTrainer(
        tiny_llama() if model is None else model,
        arguments(folder, **more),
        train_dataset=Tokens(64),
        eval_dataset=Tokens(16, seed=1),
        **own,
    )
    trainer.train()
    return trainer


class StopAt(TrainerCallback):  # type: ignore[misc,unused-ignore]  # Any without types
    """Ends training after a step, as a crash after a save would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.req("N-12", "U-13")
@on_ranks(2)
def test_training_resumes_from_a_checkpoint(world: World, tmp_path: Path) -> None:
    """Weights, optimizer, schedule and order of data of an unbroken run."""
    with as_torchrun(world):
        whole = trained(tmp_path / "whole")
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
        trained(tmp_path / "broken", callbacks=[StopAt(3)], **saving)

        again = ShardedTrainer(
            tiny_llama(),
            arguments(tmp_path / "broken", **saving),
            train_dataset=Tokens(64),
        )
        again.train(resume_from_checkpoint=True)

    assert again.state.global_step == 6
    assert distance(full(again.model), full(whole.model)) == 0.0


@pytest.mark.req("N-12")
@on_ranks(2)
def test_the_best_model_is_loaded_at_the_end(world: World, tmp_path: Path) -> None:
    """The highest loss is called the best, so that the last model is not."""
    with as_torchrun(world):
        sharded = trained(
            tmp_path,
            greater_is_better=True,
            save_strategy="steps",
            eval_strategy="steps",
            save_steps=1,
            eval_steps=1,
            load_best_model_at_end=True,
            max_steps=3,
        )
        loss = sharded.evaluate()["eval_loss"]

    best = Path(sharded.state.best_model_checkpoint)
    kept = type(sharded.model).from_pretrained(best)
    assert loss == pytest.approx(max(logged(sharded, "eval_loss")[:-1]), rel=1e-6)
    assert best.name != "checkpoint-3"
    assert distance(full(sharded.model), parameters_of(kept)) == 0.0


@pytest.mark.req("N-12")
@on_ranks(2)
def test_bf16_of_the_arguments_is_a_mixed_precision(
    world: World, tmp_path: Path
) -> None:
    """Compute in bfloat16, parameters and reduction in float32; near DDP's autocast."""
    with as_torchrun(world):
        ddp = Trainer(
            tiny_llama(),
            arguments(tmp_path / "ddp", bf16=True),
            train_dataset=Tokens(64),
        )
        ddp.train()
        full = logged(trained(tmp_path / "full"), "loss")
        sharded = trained(tmp_path, bf16=True)

    expected = MixedPrecision(torch.bfloat16, torch.float32)
    assert {s.options.mixed_precision for s in units_in(sharded.model)} == {expected}
    assert {p.dtype for p in sharded.model.parameters()} == {torch.float32}
    losses = logged(sharded, "loss")
    assert losses != full
    assert losses == pytest.approx(logged(ddp, "loss"), rel=5e-3)


@on_ranks(2)
def test_fsdp_settings_of_the_arguments_are_followed(
    world: World, tmp_path: Path
) -> None:
    """A script for torch's FSDP runs with the class exchanged."""
    config = {
        "transformer_layer_cls_to_wrap": "LlamaMLP",
        "activation_checkpointing": True,
    }

    with as_torchrun(world):
        args = arguments(tmp_path, fsdp=True, fsdp_config=config)
        sharded = ShardedTrainer(tiny_llama(), args, train_dataset=Tokens(64))
        sharded.train()

    assert args.fsdp is True
    names = [type(s.module).__name__ for s in units_in(sharded.model)]
    assert names == ["LlamaForCausalLM", "LlamaMLP", "LlamaMLP"]


@on_ranks(2)
def test_the_state_of_a_plain_trainer_is_refused_with_the_way_out(
    world: World, tmp_path: Path
) -> None:
    """The optimizer state of the plain trainer is in another form."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    folder = tmp_path / "plain"
    if world.rank == 0:
        plain_run(folder, world, **saving)
    world.barrier()

    with as_torchrun(world):
        sharded = ShardedTrainer(
            tiny_llama(), arguments(tmp_path), train_dataset=Tokens(64)
        )
        with pytest.raises(ValueError, match=r"Remove optimizer\.pt"):
            sharded.train(resume_from_checkpoint=str(folder / "checkpoint-3"))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
    },
    "recomputed": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
    "recomputed reentrant": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "sharded before": {},
}


@pytest.mark.req("N-12", "S3-10", "U-13")
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_losses_norms_and_weights_are_those_of_the_plain_trainer(
    world: World, name: str, tmp_path: Path
) -> None:
    """Six steps, clipped by the norm over all ranks; each layer is a unit."""
    more = SETTINGS[name]
    told = {key: more[key] for key in more if "checkpointing" not in key}
    plain = plain_run(tmp_path / f"plain{world.rank}", world, **told)
    model = fully_shard(tiny_llama()) if name == "sharded before" else None

    with as_torchrun(world):
        sharded = trained(tmp_path, model, **more)

    assert len(units_in(sharded.model)) == (1 if model is not None else 3)
    assert logged(sharded, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    norms = logged(plain, "grad_norm")
    assert min(norms) > 0.5
    # Operations follow from all elements of the parameters, and from all tokens.
    assert sharded.state.total_flos == plain.state.total_flos > 0
    assert logged(sharded, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert distance(full(sharded.model), full(plain.model)) < CLOSE


@pytest.mark.parametrize(
    ("model", "bf16", "sharding", "words"),
    [
        ("sharded", True, None, "sharded before without"),
        ("plain", False, {"sharding_stratgy": "FULL_SHARD"}, "sharding_strategy"),
    ],
)
@on_ranks(2)
def test_settings_that_would_have_no_effect_are_refused(
    world: World, model: str, bf16: bool, sharding: Any, words: str, tmp_path: Path
) -> None:
    """bf16 for units that were made without it, and an unknown name."""
    given = fully_shard(tiny_llama()) if model == "sharded" else tiny_llama()

    with as_torchrun(world), pytest.raises(ValueError, match=words):
        ShardedTrainer(given, arguments(tmp_path, bf16=bf16), sharding=sharding)
