"""A GPT-2 whose weights have more than a million elements, tied head included."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import composable_fsdp as cf
from composable_fsdp.hugging_face import NoSplitPolicy, load_pretrained, save_pretrained
from tests.architectures.zoo import needs_transformers
from tests.real_sizes.operations import same
from tests.support.memory import LiveBytes
from tests.support.on_ranks import on_ranks
from tests.support.place import World

pytestmark = needs_transformers
VOCABULARY = 2053
IDS = torch.arange(12).view(2, 6) * 97


def gpt2() -> Any:
    from transformers.models.gpt2 import modeling_gpt2 as m

    torch.manual_seed(0)
    config = m.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=512,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return m.GPT2LMHeadModel(config)


@on_ranks(2)
def test_gpt2_trains_and_saves(world: World, tmp_path: Path) -> None:
    """As the plain model; the plan knows the memory of a step."""
    plain = gpt2()
    model = cf.fully_shard(copy.deepcopy(plain), policy=NoSplitPolicy())
    losses = []
    for each in (plain, model):
        losses.append(each(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    same(losses[1].detach(), losses[0].detach())
    planned = cf.plan(model).peak(optimizer_states=0, device_type="cpu").total
    with LiveBytes() as live:
        for p in model.parameters():
            p.detach().view(-1)
        model(input_ids=IDS[:1, :1]).logits.sum().backward()
    model.zero_grad()

    assert planned == pytest.approx(live.peak, rel=0.05)
    same(model.state_dict(), plain.state_dict())
    save_pretrained(model, tmp_path / "saved")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_pretrained(model, tmp_path / "saved")
    same(model.state_dict(), plain.state_dict())
