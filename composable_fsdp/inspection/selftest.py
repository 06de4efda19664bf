"""``python -m composable_fsdp selftest``: does this installation train as it should?

::

    alone            start two ranks on this machine, with gloo on the CPU
    under torchrun   use the ranks that torchrun has started, with their backend
                     '-- each rank: reach the others | train as the plain model does |
                                    save and load

The plain model trains beside the sharded one, on the batches of all ranks.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.grads import clip_grad_norm_
from composable_fsdp.comm import collectives
from composable_fsdp.entries.fully_shard import fully_shard
from composable_fsdp.errors import FSDPError
from composable_fsdp.inspection.progress import waiting
from composable_fsdp.inspection.sizes import count, seconds
from composable_fsdp.storage.load import load
from composable_fsdp.storage.save import save

ABOUT = "train a small model on two ranks, and compare it with the plain model"

EXAMPLES = """\
examples:
  python -m composable_fsdp selftest
  python -m composable_fsdp selftest --ranks 4 --json
  torchrun --nproc-per-node 8 -m composable_fsdp selftest
  torchrun --nnodes 2 ... -m composable_fsdp selftest

Under torchrun, the ranks that torchrun has started are tested, with nccl if there are
GPUs, else with gloo.

exit status: 0 all checks passed, 1 a check failed, 2 wrong usage
"""

FAILED = 1
"""Exit status if a check has failed."""

STEPS = 3
MAX_NORM = 0.5
WIDTH = 16

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from composable_fsdp.__main__ import main; raise SystemExit(main())"
)
"""The program of a rank: the command line, with the search path of this process."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``selftest`` to its parser."""
    command.add_argument(
        "--ranks",
        type=count,
        default=2,
        metavar="N",
        help="ranks to start (default: 2)",
    )
    command.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="backend (default: gloo; under torchrun nccl, if there are GPUs)",
    )
    command.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="longest wait of a rank for the others (default: 60)",
    )


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Run the checks, and return the results.

    Raises: FSDPError, if a rank ends without results; SystemExit, on the ranks that
        print nothing.
    """
    # torchrun sets both, and so does ``_start`` for the ranks of this command.
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _rank(given)
    return _start(given)


def _start(given: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks on this machine, and return the results of rank 0."""
    # A port that is free now; nothing else is known to want it in this moment.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["selftest", "--json", "--timeout", str(given.timeout)]
    arguments += ["--backend", given.backend or "gloo"]
    with ExitStack() as files:
        folder = files.enter_context(tempfile.TemporaryDirectory())
        # Files and not pipes: a rank that prints much must not wait for a reader.
        outputs = [
            files.enter_context(Path(folder, f"rank_{rank}").open("w+"))
            for rank in range(given.ranks)
        ]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), *arguments],
                env=_environment(rank, given.ranks, port),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        with waiting(f"training on {given.ranks} ranks", wanted=not given.json):
            _wait(ranks, given.timeout)
        # The ranks have written through the same open files, up to the end.
        for output in outputs:
            output.seek(0)
        return _result([output.read() for output in outputs])


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank.

    Args:
        rank: the rank.
        world_size: number of ranks, all on this machine.
        port: the port at which rank 0 will listen.

    Returns: the variables that torchrun would set, with those of this process.
    Collective: none.
    """
    return {
        # A thread per rank: the model is small, and the machine may be busy.
        "OMP_NUM_THREADS": "1",
        # The loopback device, whatever the name of this machine resolves to.
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait for the ranks, and end all ranks that are left behind."""
    # A start takes seconds before the first collective, more on a busy machine.
    end = time.monotonic() + 3 * timeout
    try:
        for rank in ranks:
            rank.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for rank in ranks:
            # After a success no rank is left.
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def _result(texts: list[str]) -> dict[str, Any]:
    """Return the results of rank 0. Raises: FSDPError, if there are none."""
    for line in reversed(texts[0].splitlines()):
        # Warnings of torch may stand before.
        if line.startswith('{"ok"'):
            found: dict[str, Any] = json.loads(line)
            return found
    told = "\n".join(
        f"rank {rank}: {line}"
        for rank, text in enumerate(texts)
        for line in text.splitlines()[-5:]
    )
    raise FSDPError(
        f"The ranks of the self-test ended without a result. They printed:\n{told}\n"
        "`python -m composable_fsdp env` shows what belongs into a report."
    )


def _rank(given: argparse.Namespace) -> dict[str, Any]:
    """Run the checks on this rank; only rank 0 returns."""
    on_gpu = torch.cuda.is_available() and given.backend != "gloo"
    backend = given.backend or ("nccl" if on_gpu else "gloo")
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=given.timeout))
    try:
        checks = _checks(device)
        found = {
            "ok": all(check["ok"] for check in checks),
            "ranks": dist.get_world_size(),
            "backend": backend,
            "device": device.type,
            "checks": checks,
        }
        rank = dist.get_rank()
    finally:
        dist.destroy_process_group()
    # One report is enough.
    if rank:
        raise SystemExit(status(found))
    return found


def _checks(device: torch.device) -> list[dict[str, Any]]:
    """Run the checks in turn, and return their results; stop at the first failure."""
    trained: list[nn.Module] = []
    checks: list[tuple[str, Callable[[], str]]] = [
        ("ranks reach each other", lambda: _reach(device)),
        ("training equals the plain model", lambda: _train(device, trained)),
    ]
    # Several nodes may have no common directory.
    world_size = os.environ["WORLD_SIZE"]
    if os.environ.get("LOCAL_WORLD_SIZE", world_size) == world_size:
        checks.append(("a checkpoint holds the model", lambda: _checkpoint(trained[0])))
    found: list[dict[str, Any]] = []
    for name, check in checks:
        begin = time.monotonic()
        try:
            ok, told = True, check()
        # Whatever goes wrong is the answer of this command.
        except Exception as error:
            ok, told = False, f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - begin, 2)
        found.append({"name": name, "ok": ok, "seconds": seconds, "result": told})
        # The ranks may be at different places now.
        if not ok:
            break
    return found


def _reach(device: torch.device) -> str:
    """Sum a number over the ranks."""
    group = dist.group.WORLD
    assert group is not None
    total = torch.ones(1, device=device)
    collectives.all_reduce(total, group)
    expected = dist.get_world_size()
    if int(total) != expected:
        raise FSDPError(f"An all-reduce of ones gave {float(total)}, not {expected}.")
    return f"all-reduce over {expected} ranks"


def _model() -> nn.Module:
    """Return the model: layers of which two become units, and a tied weight."""
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
    return nn.Sequential(first, *middle, last)


def _batch(step: int, rank: int) -> Tensor:
    """Return the batch of a rank, which is the same on every machine."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, device="cpu")


def _train(device: torch.device, trained: list[nn.Module]) -> str:
    """Train the sharded and the plain model, and compare weights after the steps."""
    plain = _model().to(device)
    model = copy.deepcopy(plain)
    for layer in list(model.children())[1:3]:
        fully_shard(layer)
    fully_shard(model)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        torch.autograd.backward(model(_batch(step, rank).to(device)).square().mean())
        clip_grad_norm_(model, MAX_NORM)
        ours.step()
        ours.zero_grad()
        # The mean over the batches of all ranks, as the sharded model reduces.
        whole = torch.cat([_batch(step, each) for each in range(world_size)])
        torch.autograd.backward(plain(whole.to(device)).square().mean())
        nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        theirs.step()
        theirs.zero_grad()
    trained.append(model)
    return _compare(model.state_dict(), plain.state_dict(), "the plain model")


def _compare(found: dict[str, Any], expected: dict[str, Any], what: str) -> str:
    """Compare two state dicts; return the largest difference in words.

    Args:
        found: the state dict to check.
        expected: the state dict as it should be.
        what: where ``expected`` comes from, for the message.

    Raises: FSDPError, naming the first tensor that differs.
    Collective: none.
    """
    most = 0.0
    for name, value in expected.items():
        far = float((found[name].to(value.device) - value).abs().max())
        # Sums over ranks are added in another order than sums over a batch.
        if not far <= 1e-4:
            raise FSDPError(f"{name!r} differs from {what} by {far:.3g}.")
        most = max(most, far)
    return f"{len(expected)} tensors, largest difference {most:.2g}"


def _checkpoint(model: nn.Module) -> str:
    """Save the model, change it, load it, and compare."""
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    # All ranks write into one directory, which rank 0 chooses.
    made = tempfile.mkdtemp(prefix="composable_fsdp_selftest_") if rank == 0 else ""
    folder = collectives.broadcast_object(made, group)
    try:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        path = os.path.join(folder, "checkpoint")
        save(path, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load(path, model)
        return _compare(model.state_dict(), before, "what was saved")
    finally:
        # ``load`` has met all ranks, so no rank reads any more.
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def show(found: dict[str, Any]) -> None:
    """Print the results as text."""
    count = f"{found['ranks']} rank{'' if found['ranks'] == 1 else 's'}"
    print(f"{count}, {found['backend']} on {found['device']}")
    for check in found["checks"]:
        word = "ok    " if check["ok"] else "FAILED"
        print(f"  {word}  {check['name']} ({check['seconds']} s): {check['result']}")
    # The last line is what a reader of a log looks for.
    print("all checks passed" if found["ok"] else "a check failed")


def status(found: dict[str, Any]) -> int:
    """Return the exit status of the results."""
    return 0 if found["ok"] else FAILED
