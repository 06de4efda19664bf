"""A tiny Llama and the text that it learns, for the examples of Hugging Face.

Both are made from configurations; nothing is downloaded. The tokenizer has a token per
byte.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

CONTEXT = 64


def tokenizer() -> ByT5Tokenizer:
    """Return a tokenizer of bytes, which needs no file."""
    return ByT5Tokenizer(extra_ids=0)


def config() -> LlamaConfig:
    """Return the configuration of a Llama with 200,000 parameters."""
    return LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Return the model, with the same values on every rank."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config())


class Manual(Dataset[dict[str, Tensor]]):
    """Python's manual in pieces of ``CONTEXT`` bytes, or of a part of the manual.

    Args:
        held_out: the pieces to evaluate with, instead of those to learn. Default False.
    """

    def __init__(self, *, held_out: bool = False) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        # A byte is three more than its token, after the three special tokens.
        values = (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() + 3
        )
        pieces = values[: len(values) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
        self._pieces = pieces[order[:64] if held_out else order[64:]]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self._pieces[index]
        return {"input_ids": piece, "labels": piece}
