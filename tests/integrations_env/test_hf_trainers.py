"""``ShardedTrainer`` as a mixin of every trainer of transformers and TRL.

The other side of training is the same trainer of TRL on DDP.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForSequenceClassification, Trainer

from composable_fsdp.hugging_face.trainer import ShardedTrainer
from composable_fsdp.storage.contents import units_in
from tests.integrations_env.huggingface import arguments, as_torchrun, future
from tests.integrations_env.test_hf_trainer import CLOSE, logged
from tests.integrations_env.tiny_llama import (
    Tokens,
    distance,
    full,
    parameters_of,
    tiny_llama,
)
from tests.support.on_ranks import on_ranks
from tests.support.place import World

trl = pytest.importorskip("trl")

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmno"]


def trainers() -> list[str]:
    """The names of the trainer classes, ``trl.DPOTrainer`` and so on."""
    return [
        f"{package.__name__}.{name}"
        for package in (transformers, trl)
        for name in sorted(dir(package))
        if name.endswith("Trainer")
        and inspect.isclass(getattr(package, name))
        and issubclass(getattr(package, name), Trainer)
    ]


def tokenizer() -> Any:
    """A tokenizer of single letters, made without files."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def preferences(count: int) -> Any:
    """Prompts with a chosen and a rejected end, as TRL reads them."""
    datasets = pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(1)

    def letters() -> list[str]:
        drawn = torch.randint(4, len(WORDS), (count, 4), generator=generator)
        return [" ".join(WORDS[i] for i in row) + " " for row in drawn.tolist()]

    columns = {name: letters() for name in ("prompt", "chosen", "rejected")}
    return datasets.Dataset.from_dict(columns)


def dataset(name: str) -> Any:
    """The data that the trainer ``name`` expects."""
    if name.startswith("transformers."):
        return Tokens(8)
    found = preferences(8)
    if name in ("trl.SFTTrainer", "trl.DistillationTrainer", "trl.KTOTrainer"):
        found = found.rename_column("chosen", "completion").remove_columns("rejected")
    if name == "trl.KTOTrainer":
        found = found.add_column("label", [True, False] * 4)
    return found


@pytest.mark.req("N-12")
@pytest.mark.parametrize("name", trainers())
@on_ranks(1)
def test_every_trainer_is_constructed_with_arguments_by_position_and_by_name(
    world: World, name: str, tmp_path: Path
) -> None:
    """Reference models, teachers and rewards keep their places; a unit per layer."""
    package, _, kind = name.partition(".")
    own: Any = getattr({"transformers": transformers, "trl": trl}[package], kind)
    settings = kind.replace("Trainer", "Config" if package == "trl" else "") or ""
    if package == "transformers":
        settings = f"{settings}TrainingArguments"
    config = getattr(transformers if package == "transformers" else trl, settings)
    given = {"use_cpu": True, "report_to": [], "per_device_train_batch_size": 8}
    if package == "trl":
        given["bf16"] = False
    if kind == "RLOOTrainer":
        # Otherwise it loads a reference by the name of the model.
        given["beta"] = 0.0
    model = tiny_llama()
    if kind == "RewardTrainer":
        model.config.num_labels = 1
        model = LlamaForSequenceClassification(model.config)
    others = {
        "ref_model": copy.deepcopy(model),
        "teacher_model": copy.deepcopy(model),
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
    }
    between = list(inspect.signature(own.__init__).parameters)[2:]
    before = [others[each] for each in between[: between.index("args")]]
    more: dict[str, Any] = {"train_dataset": dataset(name)}
    if package == "trl":
        more["processing_class"] = tokenizer()
    mixed = type("Mixed", (ShardedTrainer, own), {})

    with as_torchrun(world), future():
        args = config(str(tmp_path), **given)
        by_position = mixed(copy.deepcopy(model), *before, args, **more)
        names = dict(zip(between, before, strict=False))
        by_name = mixed(model=model, args=args, **names, **more)

    for trainer in (by_position, by_name):
        assert units_in(trainer.model)
        assert type(trainer.args) is config
        for field in ("ref_model", "teacher_model"):
            if field in names:
                assert not units_in(getattr(trainer, field))


@pytest.mark.req("N-12")
@pytest.mark.parametrize("name", ["DPO", "DPO with an adapter", "SFT", "GRPO"])
@on_ranks(2)
def test_trl_trains_as_on_ddp(world: World, name: str, tmp_path: Path) -> None:
    """Losses, norms, rewards and weights; GRPO generates with the sharded model, and
    with an adapter the base is the reference of DPO."""
    kind, _, adapter = name.partition(" ")
    own: Any = getattr(trl, f"{kind}Trainer")

    def trained(trainer: Any, folder: Path) -> Any:
        rows = dataset(f"trl.{kind}Trainer")
        given: list[Any] = [tiny_llama()]
        more: dict[str, Any] = {}
        steps: dict[str, Any] = {"max_steps": 2, "bf16": False}
        if kind == "GRPO":
            rows = rows.remove_columns(["chosen", "rejected"])
            given.append(early_letters)
            steps |= {"num_generations": 2, "max_completion_length": 4}
        elif adapter:
            from peft import LoraConfig

            more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        elif kind == "DPO":
            # A reference apart from the model, so that losses are not log 2 at first.
            given.append(tiny_llama())
            with torch.no_grad():
                for parameter in given[1].parameters():
                    parameter.mul_(1.05)
        args = arguments(folder, config=getattr(trl, f"{kind}Config"), **steps)
        torch.manual_seed(0)
        words = tokenizer()
        more |= {"args": args, "train_dataset": rows, "processing_class": words}
        made = trainer(*given, **more)
        made.train()
        return made

    sharded_trainer = type("Sharded", (ShardedTrainer, own), {})
    with as_torchrun(world), future():
        plain = trained(own, tmp_path / "plain")
    with as_torchrun(world), future():
        sharded = trained(sharded_trainer, tmp_path / "sharded")

    assert units_in(sharded.model)
    for value in ("loss", "grad_norm", *(["reward"] if kind == "GRPO" else [])):
        expected = logged(plain, value)
        assert any(expected)
        assert logged(sharded, value) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    weights = parameters_of(getattr(plain.model, "module", plain.model))
    assert distance(full(sharded.model), weights) < CLOSE


def early_letters(completions: list[str], **_: Any) -> list[float]:
    """A reward: how many of the first letters of the alphabet were written."""
    return [float(sum(w in "abcdef" for w in each.split())) for each in completions]
