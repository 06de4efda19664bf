"""Train on two nodes, on one machine: two agents of torchrun that find each other.

    python examples/multi_node.py
    python examples/multi_node.py --ranks-per-node 2

On real nodes you run one command per node, with the address of one of the nodes; the
program prints the command of each. With more than one rank per node, the parameters are
sharded within a node and replicated across nodes (HYBRID_SHARD).
"""

# launch: python
# example: --steps 20
# quick: --steps 2

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import torch
from lm_model import GPT, Block, loss_of
from lm_recipe import MAX_NORM, Recipe
from lm_text import load_corpus
from lm_world import World, joined_world

from composable_fsdp import (
    ModuleWrapPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    describe,
    fully_shard,
)

NODES = 2


def train(steps: int, world: World) -> None:
    """Train on every rank of every node."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    node = int(os.environ.get("GROUP_RANK", 0))
    print(f"rank {world.rank} of {world.size} runs on node {node}", flush=True)
    recipe = Recipe(steps=steps, seed=0)
    corpus = load_corpus(
        file=None, stdlib=False, windows=world.size, context=recipe.context
    )
    torch.manual_seed(recipe.seed)
    hybrid = local > 1
    strategy = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
    model = fully_shard(
        GPT().to(world.device), policy=ModuleWrapPolicy({Block}), strategy=strategy
    )
    world.say(str(describe(model)).splitlines()[1])
    optimizer = recipe.optimizer(model.parameters())
    for step in range(steps):
        inputs, targets = corpus.batch(
            recipe.batch, recipe.context, seed=0, step=step, rank=world.rank
        )
        recipe.set_learning_rate(optimizer, step)
        loss = loss_of(model, inputs.to(world.device), targets.to(world.device))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub lacks types
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean = world.mean(loss.item())
        if (step + 1) % 10 == 0 or step + 1 == steps:
            world.say(f"step {step + 1:3}  loss {mean:.3f}")


def start(node: int, port: int, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the agent of a node, which starts the ranks of the node."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(NODES), "--node-rank", str(node)]
    command += ["--nproc-per-node", str(arguments.ranks_per_node)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    # Both agents are on one host, so the host name does not say who listens.
    command += ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", "localhost"]
    command += [__file__, "--worker", "--steps", str(arguments.steps)]
    print("$ " + " ".join(["torchrun", *command[3:]]), flush=True)
    return subprocess.Popen(command, text=True)


def main() -> int:
    """Start the agents; or, in a rank, train."""
    parser = argparse.ArgumentParser(description="Two nodes on one machine.")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        with joined_world() as world:
            train(arguments.steps, world)
        return 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [start(node, port, arguments) for node in range(NODES)]
    return max(abs(agent.wait()) for agent in agents)


if __name__ == "__main__":
    sys.exit(main())
