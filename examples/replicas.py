"""Train on replicas of which one is killed, and joins again while the other trains.

    python examples/replicas.py
    python examples/replicas.py --ranks 2 --steps 60

Each replica is a torchrun of its own that shards the model over its ranks. The manager
of torchft averages gradients over the replicas that are alive, and gives the weights
and optimizer states to a replica that joins. The program starts two replicas, of which
the second joins after the first step of the first. All ranks of the second replica are
killed by SIGKILL in a backward; the program starts this replica again once the other
has taken steps alone, and compares the weights at the end.
On real machines each replica is a job of the cluster, which starts a lost job again.
"""

# launch: python
# example: --steps 20
# quick: --steps 12
# needs: torchft

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp import clip_grad_norm_, fully_shard
from composable_fsdp.features import (
    ReplicaState,
    load_replica_state_dict,
    register_comm_hook,
    replica_hook,
    replica_state_dict,
)

REPLICAS = 2
WIDTH = 32
PAUSE = 0.1
"""Seconds per step, so that a replica has time to join."""


def build() -> nn.Sequential:
    """Return the model, with the same weights in every replica."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        for _ in range(3)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def loss_of(model: nn.Module, step: int, replica: int, rank: int) -> Tensor:
    """Return the loss on the batch of a rank of a replica in a step."""
    seed = 10_000 * step + 100 * replica + rank
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    return nn.functional.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))


def train(replica: int, steps: int, folder: Path, dies_after: int | None) -> None:
    """Train as a rank of a replica, which may have to kill itself after some steps."""
    import torchft

    logging.getLogger("torchft").setLevel(logging.WARNING)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"there-{replica}-{rank}").touch()
    wait_for_turn(replica, folder)
    model = build()
    for block in list(model)[:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=lambda s: load_replica_state_dict(model, optimizer, s),
        state_dict=lambda: replica_state_dict(model, optimizer),
        min_replica_size=1,
        # The weights of a replica that joins are there before its forward.
        use_async_quorum=False,
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=20),
    )
    state = ReplicaState(dist.group.WORLD, manager)  # type: ignore[arg-type]  # of torch
    register_comm_hook(model, state, replica_hook)
    alone, joins, taken = True, 0, 0
    # Both replicas end after the same step: the last of ``steps``, or the first step
    # that they take together again. Replica 0 sees the other replica join twice.
    needed = REPLICAS - replica if dies_after is None else REPLICAS
    while manager.current_step() < steps or joins < needed:
        optimizer.zero_grad()
        manager.start_quorum()
        step = manager.current_step()
        loss = loss_of(model, step, replica, rank)
        if taken == dies_after:
            # In backward, while the other replica waits for these gradients.
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]  # of torch
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks types
        # Gradients are averages over all replicas, so each replica has the same norm.
        clip_grad_norm_(model, 1.0)
        # False on all ranks if a replica was lost in this step: nobody takes the step.
        if not manager.should_commit():
            continue
        optimizer.step()
        taken += 1
        alive = manager.num_participants()
        joins += alone and alive == REPLICAS
        alone = alive < REPLICAS
        if rank == 0:
            told = {"step": step, "replicas": alive}
            with (folder / f"replica-{replica}.jsonl").open("a") as log:
                log.write(json.dumps(told) + "\n")
        time.sleep(PAUSE)
    weights = model.state_dict()
    if rank == 0:
        torch.save(weights, folder / f"replica-{replica}.pt")
    manager.shutdown(wait=False)
    dist.destroy_process_group()


def wait_for_turn(replica: int, folder: Path) -> None:
    """Wait until all ranks are there, and replica 0 has taken a step alone."""
    # Without this wait either replica might take the first steps alone.
    there = REPLICAS * dist.get_world_size()
    while len(list(folder.glob("there-*"))) < there:
        time.sleep(0.05)
    while replica > 0 and not steps_of(folder, 0):
        time.sleep(0.05)


def steps_of(folder: Path, replica: int) -> list[dict[str, int]]:
    """Return the steps that a replica has taken, with the replicas that took part."""
    path = folder / f"replica-{replica}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def start(
    replica: int, folder: Path, asked: argparse.Namespace, *more: str
) -> subprocess.Popen[bytes]:
    """Start the torchrun of a replica, in a session of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(asked.ranks), __file__]
    command += ["--replica", str(replica), "--steps", str(asked.steps)]
    command += ["--folder", str(folder), "--lighthouse", asked.lighthouse]
    return subprocess.Popen([*command, *more], start_new_session=True)


def wait_for(folder: Path, replica: int, number: int) -> None:
    """Wait until a replica has taken ``number`` more steps."""
    there = len(steps_of(folder, replica)) + number
    while len(steps_of(folder, replica)) < there:
        time.sleep(0.05)


def lose_and_join(folder: Path, asked: argparse.Namespace) -> int:
    """Start two replicas, kill one, start it again; return the exit status."""
    from torchft.coordination import LighthouseServer

    # Decides which replicas take part in the next step, and tells much.
    os.environ.setdefault("RUST_LOG", "warn")
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=1000,
        heartbeat_timeout_ms=2000,
    )
    port = lighthouse.address().rpartition(":")[2]
    asked.lighthouse = f"http://127.0.0.1:{port}"
    replicas = [start(0, folder, asked), start(1, folder, asked, "--dies-after", "3")]
    try:
        replicas[1].wait()
        print(f"replica 1 was killed after step {steps_of(folder, 1)[-1]['step']}")
        wait_for(folder, 0, 3)
        replicas[1] = start(1, folder, asked)
        status = max(each.wait() for each in replicas)
    finally:
        for each in replicas:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
        lighthouse.shutdown()
    taken = steps_of(folder, 0)
    alone = sum(each["replicas"] == 1 for each in taken)
    print(f"replica 0 took {len(taken)} steps, {alone} of them alone")
    print(f"replica 1 took the steps {[each['step'] for each in steps_of(folder, 1)]}")
    first, second = (torch.load(folder / f"replica-{n}.pt") for n in (0, 1))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    print(f"weights of both replicas are {'equal' if equal else 'DIFFERENT'}")
    return status or int(not equal)


def main() -> int:
    """Run as the program, or as a rank of a replica."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps (40)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks per replica (2)")
    parser.add_argument("--folder", type=Path, help="where to write weights and steps")
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    parser.add_argument("--dies-after", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.replica is not None:
        os.environ["TORCHFT_LIGHTHOUSE"] = asked.lighthouse
        train(asked.replica, asked.steps, asked.folder, asked.dies_after)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return lose_and_join(folder, asked)


if __name__ == "__main__":
    sys.exit(main())
