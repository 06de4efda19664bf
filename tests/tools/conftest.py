"""The command line as a function."""

from __future__ import annotations

from pathlib import Path

import pytest

from composable_fsdp.tools.command_line import main
from tests.support.scripts import Run

SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, width=64, blocks=6):
        super().__init__()
        self.tokens = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 500, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def in_sequence():
    first = nn.Embedding(500, 64), nn.Sequential(Block(64), Block(64))
    model = nn.Sequential(*first)
    model.last = Block(64)
    return model

def plain_layers():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

def with_inputs():
    return Net(), torch.zeros(2, 16, dtype=torch.long)

def with_loss():
    return *with_inputs(), lambda logits: logits.repeat(1, 1, 40).exp().sum()

def needs(width, depth=3):
    return Net(width)

def number():
    return 3

def reads_values():
    return nn.Linear(2, int(torch.ones(1).item()))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A file with models; the path to write before a colon."""
    path = tmp_path / "models_to_plan.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line: status, standard output and standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        # argparse ends the program for ``--help`` and wrong usage.
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return call
