"""Claims on checkpoints in S3, against a server of moto that the test starts."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import (
    LoadOptions,
    SaveOptions,
    async_save,
    checkpoints,
    load,
    save,
    verify,
)
from composable_fsdp.storage import remove_stale
from composable_fsdp.storage.storages import storage_of
from tests.storage.training import everything, make, same
from tests.support.sharded import message_of

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder in a bucket of a server of its own."""
    started = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    # The environment is all that s3fs, and so a user, needs to tell.
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    storages = sys.modules["composable_fsdp.storage.storages"]
    monkeypatch.setattr(storages, "_open", {})
    import s3fs

    # Servers of one process share their buckets.
    bucket = f"runs-{secrets.token_hex(4)}"

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(bucket)
    yield f"s3://{bucket}/runs"
    started.stop()


@pytest.mark.req("K-07")
def test_every_call_works_on_s3(runs: str) -> None:
    """A large tensor goes up in parts; the marker is put if absent."""
    model = nn.Sequential(make("plain"), nn.Linear(1500, 4000))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for number in (1, 2, 3):
        save(
            f"{runs}/step-{number}",
            model,
            optimizer,
            {"n": number},
            options=SaveOptions(keep=2),
        )
    async_save(
        f"{runs}/step-4", model, optimizer, {"n": 4}, options=SaveOptions(keep=2)
    ).result()
    before = everything(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    extra = load(runs, model, optimizer)

    assert extra == {"n": 4}
    assert same(everything(model, optimizer), before)
    found = checkpoints(runs)
    assert [(each.step, each.is_whole) for each in found] == [(3, True), (4, True)]
    assert verify(runs)
    text = message_of(lambda: save(f"{runs}/step-4", model))
    assert "step-4 exists already" in text
    save(f"{runs}/step-4", model, extra=5, options=SaveOptions(overwrite=True))
    assert load(runs, model) == 5


@pytest.mark.req("K-07", "K-03")
def test_an_upload_that_was_not_committed_is_no_checkpoint(runs: str) -> None:
    """And can be listed and removed."""
    model = make("plain")
    save(f"{runs}/step-1", model, extra=1)
    save(f"{runs}/step-2", model, extra=2)
    storage, name = storage_of(f"{runs}/step-2/manifest.json")
    storage.delete(name)

    assert load(runs, model) == 1
    assert remove_stale(runs, dry_run=True) == remove_stale(runs) == [f"{runs}/step-2"]
    assert remove_stale(runs, dry_run=True) == []
    storage.put(name, b"first", absent=True)
    with pytest.raises(FileExistsError):
        storage.put(name, b"second", absent=True)


def weights(value: float) -> nn.Linear:
    """A model of 6 MB, which goes up in two parts."""
    made = nn.Linear(1200, 1200)
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    return made


def value_in(path: str) -> float:
    made = weights(-1)
    load(path, made, options=LoadOptions(rng=False))
    return made.weight[-1, -1].item()


def small_parts() -> Any:
    """Uploads in the smallest parts that S3 takes."""
    storages = sys.modules["composable_fsdp.storage.storages"]
    return mock.patch.object(storages, "_PART", 5 << 20)


def save_and_die(path: str, number: int, overwrite: bool, said: dict[str, str]) -> None:
    """Save 3.0 in a process of its own, which dies after the request ``number``."""
    session = pytest.importorskip("aiobotocore.httpsession").AIOHTTPSession
    os.environ.update(said)
    real, count = session.send, 0

    async def send(*args: Any) -> Any:
        nonlocal count
        answer = await real(*args)
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    with mock.patch.object(session, "send", send), small_parts():
        save(path, weights(3.0), options=SaveOptions(keep=3, overwrite=overwrite))


@pytest.mark.few(1)
@pytest.mark.req("K-03", "X-04", "K-07")
@pytest.mark.parametrize("overwrite", [False, True])
def test_after_a_crash_at_any_request_a_run_goes_on(overwrite: bool, runs: str) -> None:
    """Load takes the newest whole checkpoint, and the same save can be repeated."""
    # Forked from a process without threads, as the client of S3 has one.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    said = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    found = []
    for number in range(1, 100):
        base = f"{runs}/{number}"
        save(f"{base}/step-1", weights(1.0))
        if overwrite:
            save(f"{base}/step-2", weights(2.0))
        given = f"{base}/step-2", number, overwrite, said
        child = processes.Process(target=save_and_die, args=given)
        child.start()
        child.join()

        assert child.exitcode in (0, -signal.SIGKILL)
        found.append(value_in(base))
        assert verify(base)
        is_there = len(checkpoints(base)) == 2
        options = SaveOptions(overwrite=is_there)
        save(f"{base}/step-2", weights(4.0), options=options)
        assert value_in(base) == 4.0
        assert [(each.step, each.is_whole) for each in checkpoints(base)] == [
            (1, True),
            (2, True),
        ]
        assert remove_stale(base) == []
        if not child.exitcode:
            break
    # Once the new checkpoint is found, no later crash loses it.
    assert found == sorted(found)
    assert set(found) == {2.0 if overwrite else 1.0, 3.0}
    assert len(found) > 12
