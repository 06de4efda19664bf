"""What a program gets that imports ``fully_shard`` alone, or no name at all.

The processes of other tests have imported all of the package, so only here it shows
if a check is installed by an import that a user need not make.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from composable_fsdp import MixedPrecision
from composable_fsdp.state_dict import ShardedValue

SCRIPT = Path(__file__).with_name("fresh_programs.py")


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Return the result of each program, or its error, and its warnings."""
    folder = tmp_path_factory.mktemp("fresh")
    part = ShardedValue(torch.ones(2), (4,), 0, 2, 0, 2)
    torch.save(part, folder / "shards.pt")
    settings = pickle.dumps(MixedPrecision(torch.bfloat16))
    (folder / "settings.pickle").write_bytes(settings)
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[object]] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("lbfgs", "CompositionError: LBFGS takes inner products"),
        ("optimizer_file", "CheckpointError: optimizer.state_dict() holds"),
        ("ddp_around", "CompositionError: DistributedDataParallel was put around"),
        ("strategy_of_lightning", "CompositionError: FSDPStrategy was put around"),
        ("local_sgd", "CompositionError: LocalSGD was put around"),
        (
            "unknown_optimizer",
            "composable_fsdp: shard taken for the parameter: norm in Normed",
        ),
        ("late_module", "Parameters '1.weight', '1.bias' were registered after"),
    ],
)
def test_each_refusal_is_there(
    met: dict[str, list[object]], program: str, told: str
) -> None:
    """Optimizers, their state, the audit and wrappers."""
    assert any(str(each).startswith(told) for each in met[program]), met[program]


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("model_state", [[[8, 8], [8]], True]),
        ("dcp_state", ["0.bias", "0.weight"]),
        ("file_of_shards", ["ShardedValue", [4], [1.0, 1.0]]),
        ("pickle_of_settings", repr(MixedPrecision(torch.bfloat16))),
        ("submodules", ["composable_fsdp.errors", "composable_fsdp.wrap"]),
        ("star", True),
    ],
)
def test_each_feature_is_there(
    met: dict[str, list[object]], program: str, result: object
) -> None:
    """State dicts, files with objects of the package, and ways to reach its names."""
    assert met[program] == [result]
