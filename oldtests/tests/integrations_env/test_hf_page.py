"""The code blocks of the page on transformers run, in order, in a group of one rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from tests.integrations_env.huggingface import alone, arguments
from tests.integrations_env.tiny_llama import Tokens, tiny_llama
from tests.support.world import single_rank_group
from tests.test_pages import fragments


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block after those above it; the trainer takes two steps."""
    monkeypatch.chdir(tmp_path)
    found = fragments("docs/hugging_face.md")
    names: dict[str, Any] = {
        "DataLoader": DataLoader,
        "LlamaForCausalLM": LlamaForCausalLM,
        "Tokens": Tokens,
        "arguments": lambda folder: arguments(Path(folder), max_steps=2),
        "tiny_llama": tiny_llama,
        "torch": torch,
    }

    with alone(), single_rank_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in found:
            block.run(names)

    assert len(found) == 8
    written = {path.name for path in tmp_path.iterdir()}
    assert {"state", "exported", "adapter", "merged"} <= written
