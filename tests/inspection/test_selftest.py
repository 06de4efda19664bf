"""``selftest``: passes on a good installation, and says what is broken on a bad one."""

from __future__ import annotations

import json
import socket

import pytest

from composable_fsdp.inspection import selftest
from composable_fsdp.inspection.command_line import main


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a rank of torchrun, in a job of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in selftest._environment(0, 1, port).items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.req("N-10")
def test_two_ranks_train_as_the_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks are started, and their results are one JSON object."""
    status = main(["selftest", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert (status, found["ok"], found["ranks"]) == (0, True, 2)
    assert [check["ok"] for check in found["checks"]] == [True, True, True]


@pytest.mark.usefixtures("alone")
def test_a_rank_of_torchrun_uses_its_own_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No rank is started, and the last line is the verdict."""
    assert main(["selftest", "--backend", "gloo"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("1 rank, gloo on cpu")
    assert out.endswith("all checks passed\n")


@pytest.mark.req("N-10")
@pytest.mark.usefixtures("alone")
def test_training_that_differs_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here without clipping; the name of the first tensor is told, with status 1."""
    monkeypatch.setattr(selftest, "clip_grad_norm_", lambda *_: None)
    monkeypatch.setattr(selftest, "MAX_NORM", 1e-6)

    assert main(["selftest", "--backend", "gloo"]) == 1

    out = capsys.readouterr().out
    assert "FAILED  training equals the plain model" in out
    assert "'0.weight' differs from the plain model by" in out
    assert "a checkpoint" not in out
    assert out.endswith("a check failed\n")


@pytest.mark.req("N-10")
def test_ranks_that_end_early_are_told_with_their_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where torch cannot be imported; one message and status 1."""
    monkeypatch.setattr(selftest, "_START", "raise SystemExit('no torch here')")

    status = main(["selftest", "--json"])

    out, err = capsys.readouterr()
    assert status == 1
    assert "rank 1: no torch here" in err
    assert json.loads(out)["ok"] is False
