"""The Llama of the benchmark is the published one, and its command runs."""

from __future__ import annotations

import pytest
import torch

from benchmarks import llama


def test_the_parameters_are_those_of_llama_3_8b() -> None:
    """In all, and without the embedding, which multiplies nothing."""
    with torch.device("meta"):
        model = llama.Llama(llama.Shape(), 32)

    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert llama.Shape().parameters == 8_030_261_248 - 128256 * 4096


def test_the_command_prints_a_row_for_each_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At a tiny size on the CPU."""
    options = ["--device", "cpu", "--small", "--how", "eager", "--rounds", "1"]
    assert llama.main(options) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row for row in rows if row and row[0] in ("plain", *llama.NAMES)}
    assert set(found) == {"plain", *llama.NAMES}
    # What is extrapolated from two tiny depths may be anything.
    assert all(float(found[name][1]) > 0 for name in llama.NAMES)
