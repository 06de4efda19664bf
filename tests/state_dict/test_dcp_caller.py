"""Arguments of torch.distributed.checkpoint's functions reach the hooks they call."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs

from composable_fsdp import CheckpointError, fully_shard
from composable_fsdp.state_dict import dcp_caller
from tests.support.world import World


def test_functions_of_a_module_that_is_imported_later_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its import, once; another name of it stays as it is."""
    (tmp_path / "later_dcp.py").write_text("def f(a, b=2): return a + b\ng = f\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[dict[str, Any]] = []

    def front(run: Any, given: dict[str, Any]) -> Any:
        seen.append(given)
        return run()

    monkeypatch.setitem(dcp_caller._waiting, "later_dcp", {"f": front, "gone": front})
    dcp_caller.install()
    module: Any = importlib.import_module("later_dcp")

    assert (module.f(1), module.f(1, b=4), module.g(1)) == (3, 5, 3)
    assert seen == [{"a": 1}, {"a": 1, "b": 4}]
    assert not hasattr(module, "gone")


def test_a_call_whose_options_are_not_known_is_refused(
    one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a version of torch that names its functions otherwise."""
    model = fully_shard(nn.Linear(2, 2))
    untyped: Any = torchs
    plain = untyped._get_model_state_dict.__wrapped__
    monkeypatch.setattr(torchs, "_get_model_state_dict", plain)

    with pytest.raises(CheckpointError, match="expected its options in 'info'"):
        torchs.get_model_state_dict(model)

    monkeypatch.undo()
    found = torchs.get_model_state_dict(model)
    assert found.keys() == {"weight", "bias"}


def test_nothing_is_kept_after_a_call_that_raised(one_rank: World) -> None:
    """The request ends with the call."""
    model = fully_shard(nn.Linear(2, 2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    torchs.get_state_dict(model, optim)
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        torchs.set_model_state_dict(model, {"weight": 3})

    assert dcp_caller.dcp_request() is None
    assert not dcp_caller.is_state_init_step()
