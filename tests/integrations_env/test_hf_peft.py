"""Claims on PEFT's adapters in sharded models, and on ``generate`` with and without.

The other side is PEFT over the plain model in each process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import Trainer

from composable_fsdp import fully_shard
from composable_fsdp.hugging_face import (
    HFSharding,
    NoSplitPolicy,
    load_pretrained,
    merge_adapters,
    save_pretrained,
)
from composable_fsdp.hugging_face.trainer import ShardedTrainer
from tests.integrations_env.huggingface import alone, arguments, as_torchrun, future
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


def lora(model: Any = None) -> Any:
    """Return the model with adapters whose second matrix is not zero."""
    config = LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    with future():
        made: Any = get_peft_model(tiny_llama() if model is None else model, config)
    torch.manual_seed(7)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def prompts() -> Tensor:
    """Return two prompts."""
    return Tokens(2, seed=3).ids


@pytest.mark.parametrize(
    ("sampled", "with_adapters"), [(False, False), (True, False), (True, True)]
)
@on_ranks(2)
def test_generated_tokens_are_those_of_the_plain_model(
    world: World, sampled: bool, with_adapters: bool
) -> None:
    """Greedy and sampled, with the cache; each rank its own prompt."""
    make = lora if with_adapters else tiny_llama
    prompt = prompts()[world.rank % 2][None]
    more = {"do_sample": sampled, "max_new_tokens": 6, "min_new_tokens": 6}
    plain, model = make().eval(), HFSharding().shard(make().eval())

    torch.manual_seed(9)
    expected = plain.generate(input_ids=prompt, **more)
    torch.manual_seed(9)
    found = model.generate(input_ids=prompt, **more)

    assert torch.equal(found, expected)
    assert found.shape == (1, 12)


@on_ranks(2)
def test_ranks_that_finish_at_different_lengths_pass_synced_gpus(world: World) -> None:
    """The rank that is ready goes on with forwards, and drops their tokens."""
    prompt = prompts()[world.rank][None]
    plain, model = lora().eval(), HFSharding().shard(lora().eval())
    more = {
        "do_sample": False,
        "max_new_tokens": 3 + 4 * world.rank,
        "eos_token_id": -1,
    }
    expected = plain.generate(input_ids=prompt, **more)

    found = model.generate(input_ids=prompt, **more, synced_gpus=True)

    assert torch.equal(found, expected)
    # Training works after it.
    model(input_ids=prompt, labels=prompt).loss.backward()


@pytest.mark.req("N-12")
@on_ranks(1, 2)
def test_lora_trains_as_in_the_plain_trainer(world: World, tmp_path: Path) -> None:
    """Adapters change alike, and the base model does not change."""
    size = 4 * world.world_size
    with alone():
        args = arguments(tmp_path / f"p{world.rank}", per_device_train_batch_size=size)
        plain = Trainer(lora(), args, train_dataset=Tokens(64))
        plain.train()

    with as_torchrun(world):
        sharded = ShardedTrainer(lora(), arguments(tmp_path), train_dataset=Tokens(64))
        sharded.train()

    found, before = full(sharded.model), parameters_of(lora())
    assert distance(found, parameters_of(plain.model)) < CLOSE
    frozen = {name for name in found if "lora_" not in name}
    assert all(torch.equal(found[name], before[name]) for name in frozen)
    assert all(not torch.equal(found[n], before[n]) for n in found.keys() - frozen)


@pytest.mark.req("N-12")
@on_ranks(2)
def test_an_adapter_is_saved_as_peft_saves_it_and_loaded(
    world: World, tmp_path: Path
) -> None:
    """PEFT reads the files; no weight of the base model is among them."""
    plain = lora()
    model = HFSharding().shard(lora())

    save_pretrained(model, tmp_path / "adapter")

    if world.rank == 0:
        plain.save_pretrained(tmp_path / "plain")
        names = [
            sorted(p.name for p in (tmp_path / n).iterdir())
            for n in ("adapter", "plain")
        ]
        assert names[0] == names[1]
        sizes = [
            (tmp_path / n / "adapter_model.safetensors").stat().st_size
            for n in ("adapter", "plain")
        ]
        assert sizes[0] == sizes[1]
    world.barrier()
    with future():
        again = PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")
    assert distance(parameters_of(again), parameters_of(plain)) == 0.0
    HFSharding().shard(again)
    assert distance(full(again), parameters_of(plain)) == 0.0


@pytest.mark.req("N-12")
@on_ranks(2)
def test_adapters_are_merged_unit_by_unit_and_the_base_model_is_saved(
    world: World, tmp_path: Path
) -> None:
    """The files are those of ``merge_and_unload`` of the plain model."""
    expected = lora().merge_and_unload()
    model = HFSharding().shard(lora())
    with pytest.raises(ValueError, match=r"Call merge_adapters\(model\)"):
        save_pretrained(model, tmp_path, merged=True)

    merge_adapters(model)
    save_pretrained(model, tmp_path, merged=True)

    again = type(expected).from_pretrained(tmp_path)
    assert distance(parameters_of(again), parameters_of(expected)) < 1e-7
    with torch.device("meta"):
        other = tiny_llama()
    fully_shard(other, policy=NoSplitPolicy())
    load_pretrained(other, tmp_path)
    assert distance(full(other), parameters_of(expected)) < 1e-7


@on_ranks(2)
def test_training_of_adapters_resumes_and_loads_the_best(
    world: World, tmp_path: Path
) -> None:
    """Adapter and optimizer state of an unbroken run, from the trainer's checkpoint."""
    saving: dict[str, Any] = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 3,
        "eval_steps": 3,
        "load_best_model_at_end": True,
    }
    data: dict[str, Any] = {
        "train_dataset": Tokens(64),
        "eval_dataset": Tokens(16, seed=1),
    }
    with as_torchrun(world):
        whole = ShardedTrainer(lora(), arguments(tmp_path, **saving), **data)
        whole.train()
        again = ShardedTrainer(lora(), arguments(tmp_path / "again", **saving), **data)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    assert not (tmp_path / "checkpoint-3" / "model.safetensors").exists()
    assert distance(full(again.model), full(whole.model)) == 0.0
