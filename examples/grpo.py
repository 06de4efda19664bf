"""Train a Llama by a GRPO-like loss, with generation by a copy in another process.

    python examples/grpo.py
    python examples/grpo.py --trainers 2 --rounds 60

The policy is sharded over the trainers, which are a process group of their own. Another
process, the engine, holds an unsharded copy and generates, as vLLM or SGLang would. In
each round

    1. the trainers send the weights to the engine, bucket by bucket (``stream_full``);
    2. they sleep, so that the engine could have the device to itself (``released``),
       while the engine samples a group of completions per prompt;
    3. each trainer learns from its share of the prompts: a completion is worth its
       reward, compared with the others of its group.

The task: a prompt ends with a digit, and each token of the completion should be the
next digit. The reward is the share of tokens that are right: an eighth by guessing.
"""

# launch: python
# example: --rounds 30
# quick: --rounds 2
# needs: transformers

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lm_world import World, joined_world
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from composable_fsdp import ModuleWrapPolicy, clip_grad_norm_, fully_shard
from composable_fsdp.access import stream_full, stream_plan
from composable_fsdp.features import released

DIGITS, PROMPT, ANSWER = 8, 3, 2
PROMPTS, GROUP = 16, 16
"""Prompts per round, and completions per prompt."""
CLIP, PASSES = 0.2, 4
BUCKET = 1 << 16
"""Bytes of a bucket of weights: small, so that this small model has several."""


class Rollout(NamedTuple):
    """What the engine has sampled in a round, a row per completion."""

    tokens: Tensor
    """Prompt and answer, ``(PROMPTS * GROUP, PROMPT + ANSWER)``."""
    log_probs: Tensor
    """Of the answer's tokens, as the engine sampled them, ``(.., ANSWER)``."""
    rewards: Tensor
    """``(PROMPTS * GROUP,)``, in [0, 1]."""


def llama() -> LlamaForCausalLM:
    """Return the policy, with the same values in every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=DIGITS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=PROMPT + ANSWER,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def log_probs_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of the answers' tokens."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
    every = logits.float().log_softmax(-1)
    found: Tensor = every.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
    return found


# ---- the engine -----------------------------------------------------


@torch.no_grad()
def sample(model: Any, generator: torch.Generator) -> Rollout:
    """Sample a group of answers per prompt."""
    prompts = torch.randint(DIGITS, (PROMPTS, PROMPT), generator=generator)
    tokens = prompts.repeat_interleave(GROUP, 0)
    for _ in range(ANSWER):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1].float()
        following = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, following], 1)
    right = tokens[:, PROMPT:] == (tokens[:, PROMPT - 1 : PROMPT] + 1) % DIGITS
    return Rollout(tokens, log_probs_of(model, tokens), right.float().mean(1))


def receive_weights(model: Any, names: list[str]) -> None:
    """Load the weights that the first trainer sends, in the order of ``names``."""
    # An engine that shards otherwise would narrow each tensor to its part here.
    own = model.state_dict()
    for name in names:
        dist.recv(own[name], src=0)


def engine(world: World, rounds: int) -> None:
    """Generate until the trainers have had all rounds."""
    model = llama()
    names: list[Any] = [None]
    dist.broadcast_object_list(names, src=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        receive_weights(model, names[0])
        for each in sample(model, generator):
            dist.broadcast(each, src=world.rank)


# ---- the trainers ---------------------------------------------------


def send_weights(model: Any, world: World) -> None:
    """Send the whole weights to the engine, from the first trainer."""
    for _, tensor in stream_full(model, max_bytes=BUCKET, ranks=[0]):
        dist.send(tensor.contiguous(), dst=world.size - 1)


def receive_rollout(world: World) -> Rollout:
    """Return what the engine has sampled."""
    rows = PROMPTS * GROUP
    rollout = Rollout(
        torch.empty(rows, PROMPT + ANSWER, dtype=torch.int64),
        torch.empty(rows, ANSWER),
        torch.empty(rows),
    )
    for each in rollout:
        dist.broadcast(each, src=world.size - 1)
    return rollout


def learn(model: Any, optimizer: Any, mine: Rollout) -> float:
    """Improve the policy on this rank's groups; return how far it is off the engine.

    That is the largest difference of a log-probability before the first step.
    """
    rewards = mine.rewards.view(-1, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    apart = 0.0
    for turn in range(PASSES):
        now = log_probs_of(model, mine.tokens)
        if turn == 0:
            apart = (now - mine.log_probs).abs().max().item()
        ratio = (now - mine.log_probs).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        # The mean over this rank's completions: its share of the mean over all, since
        # ranks have equally many, and gradients are averaged over ranks.
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        torch.autograd.backward(loss)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return apart


def held(model: Any, optimizer: Any) -> int:
    """Return the bytes of parameters and optimizer states on the device."""
    states = [v for state in optimizer.state.values() for v in state.values()]
    tensors = [*model.parameters(), *filter(torch.is_tensor, states)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def train(world: World, trainers: Any, rounds: int) -> bool:
    """Train the policy; return whether the reward went up."""
    model = fully_shard(
        llama(), policy=ModuleWrapPolicy({LlamaDecoderLayer}), process_group=trainers
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = stream_plan(model, max_bytes=BUCKET, ranks=[0])
    names = [name for bucket in plan.buckets for name in bucket.names]
    dist.broadcast_object_list([names], src=0)
    world.say(
        f"{world.size - 1} trainers, 1 engine; {len(names)} weights in "
        f"{len(plan.buckets)} buckets, at most {plan.peak_nbytes / 1e3:.0f} kB at once"
    )
    world.say("round  reward  engine off by  awake / asleep  send  sample  learn")
    rewards = []
    for number in range(1, rounds + 1):
        times = [time.perf_counter()]
        send_weights(model, world)
        times.append(time.perf_counter())
        awake = held(model, optimizer)
        with released(model, optimizer):
            asleep = held(model, optimizer)
            rollout = receive_rollout(world)
        times.append(time.perf_counter())
        rows = PROMPTS * GROUP // (world.size - 1) // GROUP * GROUP
        share = slice(rows * world.rank, rows * (world.rank + 1))
        apart = learn(model, optimizer, Rollout(*[each[share] for each in rollout]))
        times.append(time.perf_counter())
        rewards.append(rollout.rewards.mean().item())
        took = [1e3 * (end - begin) for begin, end in pairwise(times)]
        if number == 1 or number % 5 == 0 or number == rounds:
            world.say(
                f"{number:5d}  {rewards[-1]:6.3f}  {apart:13.1e}  "
                f"{awake / 1e3:4.0f} / {asleep / 1e3:.0f} kB     "
                f"{took[0]:3.0f}  {took[1]:6.0f}  {took[2]:5.0f} ms"
            )
    world.say(
        f"reward: {rewards[0]:.3f} in the first round, {rewards[-1]:.3f} in the last"
    )
    return rewards[-1] > rewards[0]


def main() -> None:
    """Run the program of the command line."""
    parser = argparse.ArgumentParser(description="Train by a GRPO-like loss.")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--worker", action="store_true", help="run a rank")
    args = parser.parse_args()
    if not args.worker:
        ranks = ["--nproc-per-node", str(args.trainers + 1)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks]
        given = ["--worker", "--rounds", str(args.rounds)]
        sys.exit(subprocess.run([*launch, __file__, *given], check=False).returncode)
    with joined_world() as world:
        last = world.size - 1
        trainers = dist.new_group(list(range(last)))
        if world.rank == last:
            engine(world, args.rounds)
        # A few rounds prove nothing.
        elif not train(world, trainers, args.rounds) and args.rounds >= 10:
            sys.exit("The reward did not go up.")


if __name__ == "__main__":
    main()
