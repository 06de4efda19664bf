"""A tiny Llama, and token sequences that are the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from composable_fsdp import unshard_params
from composable_fsdp.storage.contents import units_in

VOCABULARY = 19
LENGTH = 6


def tiny_llama(**more: Any) -> Any:
    """Return the model with the same weights in every process."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **more,
    )
    return LlamaForCausalLM(config)


class Tokens(Dataset[dict[str, Tensor]]):
    """``count`` sequences; the labels are the inputs, as for a language model."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest difference of any element."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the full parameters. Collective: gathers, if sharded."""
    if not units_in(model):
        return parameters_of(model)
    with unshard_params(model, writeback=False):
        return parameters_of(model)
