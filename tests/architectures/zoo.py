"""Real architectures, tiny and with random weights, made from their configs alone.

Each is here for something that it does and a toy model does not::

    gpt2       the head's weight is the embedding's; transposed linear layers
    llama      the same; rotary embeddings are handed from the model to every block
    mixtral    the experts of a block are one parameter of three dimensions; a router
    t5         one weight in four places; a bias that the first block hands to the rest
    bert       a tied weight and a tied bias; integer buffers
    whisper    a parameter that is frozen by design; two classes of layers
    mamba      a scan in place of attention; units within units
    clip       a parameter without dimensions; two towers, with a convolution

transformers is imported when a model is made, so that collecting tests does not wait
for it. Dropout is off, since ranks and reference would draw different numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 17
WIDTH = 8

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="transformers is not installed; it is part of the dev extra",
)


@dataclass(frozen=True)
class Built:
    """A model, and the classes of its layers."""

    model: nn.Module
    layers: tuple[type[nn.Module], ...]


def gpt2() -> Built:
    """GPT-2 with a language head."""
    from transformers.models.gpt2 import modeling_gpt2 as m

    config = m.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Built(m.GPT2LMHeadModel(config), (m.GPT2Block,))


def llama() -> Built:
    """Llama with a tied head, two query heads on one key head."""
    from transformers.models.llama import modeling_llama as m

    config = m.LlamaConfig(**_decoder(), tie_word_embeddings=True)
    return Built(m.LlamaForCausalLM(config), (m.LlamaDecoderLayer,))


def mixtral() -> Built:
    """Mixtral, each token to one of two experts; the router's loss is added."""
    from transformers.models.mixtral import modeling_mixtral as m

    config = m.MixtralConfig(
        **_decoder(),
        num_local_experts=2,
        num_experts_per_tok=1,
        output_router_logits=True,
    )
    return Built(m.MixtralForCausalLM(config), (m.MixtralDecoderLayer,))


def t5() -> Built:
    """T5: shared, encoder's and decoder's embeddings and head are one weight."""
    from transformers.models.t5 import modeling_t5 as m

    config = m.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return Built(m.T5ForConditionalGeneration(config), (m.T5Block,))


def bert() -> Built:
    """BERT with a masked language head, whose weight and bias are tied."""
    from transformers.models.bert import modeling_bert as m

    config = m.BertConfig(
        **_transformer(),
        vocab_size=VOCABULARY,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Built(m.BertForMaskedLM(config), (m.BertLayer,))


def whisper() -> Built:
    """Whisper; the encoder's positions do not train."""
    from transformers.models.whisper import modeling_whisper as m

    config = m.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        num_mel_bins=4,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        max_source_positions=4,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    layers = (m.WhisperEncoderLayer, m.WhisperDecoderLayer)
    return Built(m.WhisperForConditionalGeneration(config), layers)


def mamba() -> Built:
    """Mamba; block and the mixer inside it are both layers."""
    from transformers.models.mamba import modeling_mamba as m

    config = m.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, state_size=4
    )
    return Built(m.MambaForCausalLM(config), (m.MambaBlock,))


def clip() -> Built:
    """CLIP: a tower for text, one for images, and one number that scales."""
    from transformers.models.clip import modeling_clip as m

    text = {
        **_transformer(),
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8,
        "bos_token_id": 0,
        "eos_token_id": 16,
    }
    vision = {**_transformer(), "image_size": 4, "patch_size": 2}
    config = m.CLIPConfig(text_config=text, vision_config=vision, projection_dim=6)
    return Built(m.CLIPModel(config), (m.CLIPEncoderLayer,))


def _transformer() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }


def _decoder() -> dict[str, Any]:
    return {**_transformer(), "vocab_size": VOCABULARY, "num_key_value_heads": 1}


ARCHITECTURES: dict[str, Callable[[], Built]] = {
    each.__name__: each
    for each in (gpt2, llama, mixtral, t5, bert, whisper, mamba, clip)
}


def build(name: str) -> Built:
    """Make the architecture ``name``, ready to train; equal on every call."""
    torch.manual_seed(0)
    built = ARCHITECTURES[name]()
    built.model.train()
    return built


def batch(name: str, step: int, rank: int) -> dict[str, Any]:
    """Arguments of the forward of ``name`` for (step, rank); two examples."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(1, VOCABULARY, (2, 8), generator=generator)
    images = torch.randn(2, 3, 4, 4, generator=generator)
    if name == "clip":
        return {"input_ids": tokens, "pixel_values": images, "return_loss": True}
    if name == "whisper":
        sound = torch.randn(2, 4, 8, generator=generator)
        return {"input_features": sound, "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def own_loss(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """The loss that the model itself computes."""
    loss: Tensor = model(**arguments).loss
    return loss
