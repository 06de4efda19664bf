"""A program whose last rank, or first rank, leaves a call out that the others make.

``tests.faults.launch`` runs this file; ``tests/faults/test_torch_waits.py`` says what
the ranks print. Each rank prints the seconds after which its program has ended.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_fsdp import (
    DesyncError,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
)
from composable_fsdp.comm import agreement, watch
from tests.support.short_waits import LONG


def layers(**options: Any) -> nn.Module:
    """Two layers, of which the first is a unit of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def train(model: nn.Module, steps: int = 2) -> None:
    """Some forwards and backwards."""
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()


def clip_alone(rank: int) -> None:
    """Both ranks clip in each step, and rank 1 not in the last one."""
    model = layers()
    for step in range(4):
        train(model, 1)
        if step < 3 or rank == 0:
            clip_grad_norm_(model, 1.0)


def one_more_batch(rank: int) -> None:
    """Rank 0 has a batch more."""
    train(layers(), 2 if rank else 3)


def state_alone(rank: int) -> None:
    """Rank 0 takes a state dict."""
    model = layers()
    train(model)
    if rank == 0:
        model.state_dict()


def end_early(rank: int) -> None:
    """Rank 0 takes a state dict in its last line, and rank 1 has ended."""
    state_alone(rank)


class Block(nn.Module):
    """Two matrices that tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, 8)`` to the same."""
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


def tensor_parallel() -> nn.Module:
    """A block that is cut over ``tp``, and a layer; all sharded over ``dp``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(8, 8))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model[0], mesh["tp"], plan)
    fully_shard(model[0], device_mesh=mesh["dp"])
    return fully_shard(model, device_mesh=mesh["dp"])


def tp_clip(rank: int) -> None:
    """The ranks of the second tensor-parallel index do not clip in step 2."""
    model = tensor_parallel()
    for step in range(4):
        train(model, 1)
        if step != 2 or rank % 2 == 0:
            clip_grad_norm_(model, 1.0)


def tp_forward(rank: int) -> None:
    """The ranks of the second tensor-parallel index leave step 2 out."""
    model = tensor_parallel()
    for step in range(4):
        if step != 2 or rank % 2 == 0:
            train(model, 1)
        if step == 2:
            model.state_dict()


class Mixture(nn.Module):
    """An expert of this rank between two layers of all ranks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleDict({name: nn.Linear(8, 8)})
        self.has_tokens = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, 8)`` to the same."""
        x = self.first(x)
        for expert in self.experts.values() if self.has_tokens else ():
            x = expert(x)
        out: torch.Tensor = self.last(x)
        return out


def no_tokens(rank: int) -> None:
    """The expert of the last rank gets no tokens in the last step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model = Mixture(f"{rank % 2}")
    options: dict[str, Any] = {"device_mesh": mesh["edp"], "expert_mesh": mesh["ep"]}
    fully_shard(next(iter(model.experts.values())), **options)
    fully_shard(model, device_mesh=mesh._flatten("dp"))
    train(model, 3)
    model.has_tokens = rank != 3
    train(model, 1)


def copy(rank: int, **options: Any) -> None:
    """Rank 1 alone uses a copy of the model that all ranks train."""
    model = layers(**options)
    train(model)
    averages = deepcopy(model)
    if rank == 1:
        train(averages)
    train(model)


def copy_hybrid(rank: int) -> None:
    """As ``copy``, over four ranks of two replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    copy(rank, strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


def synced(rank: int) -> None:
    """Rank 1 alone shards another model, with values of rank 0."""
    model = layers()
    train(model)
    if rank == 1:
        layers(sync_module_states=True)
    train(model)


def late(rank: int) -> None:
    """Nothing is wrong: each rank waits in turn for the other, inside of torch."""
    model, work = layers(), None
    train(model)
    if rank == 0:
        time.sleep(4 * LONG)
    dist.barrier()
    # Rank 0 has sent its part before it waits for rank 1 in a forward.
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    else:
        time.sleep(4 * LONG)
        dist.all_reduce(torch.ones(3))
    train(model)
    if work is not None:
        work.wait()
        time.sleep(4 * LONG)
    model.state_dict()


def beside(rank: int, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Nothing is wrong: ranks 0 and 1 train, and rank 0 waits inside of torch for rank
    2, which is late; rank 0 calls ``before`` before that, and rank 1 ``after``."""
    trainers, others = dist.new_group([0, 1]), dist.new_group([0, 2])
    model = None
    if rank < 2:
        model = layers(device_mesh=DeviceMesh.from_group(trainers, "cpu"))
        train(model, 3)
    if rank == 0:
        before()
        dist.barrier(others)
    if rank == 2:
        before()
        time.sleep(4)
        dist.barrier(others)
    if model is not None:
        train(model)
    after()


def messages(rank: int) -> None:
    """Rank 0 has sent messages to rank 2, which gloo counts as collectives."""

    def exchange() -> None:
        if rank == 0:
            dist.send(torch.ones(3), 2)
        else:
            dist.recv(torch.ones(3), 0)

    beside(rank, exchange, lambda: None)


def ahead(rank: int) -> None:
    """Rank 0 has issued an all-reduce that the others issue at their end."""
    works: list[Any] = []

    def begin() -> None:
        if rank == 0:
            works.append(dist.all_reduce(torch.ones(3), async_op=True))

    def end() -> None:
        if rank == 0:
            works[0].wait()
        else:
            dist.all_reduce(torch.ones(3))

    beside(rank, begin, end)


def again(rank: int) -> None:
    """Rank 1 leaves the order, and the program begins anew in the same store: there,
    rank 1 is late, which is no error."""
    model: Any = layers()
    train(model, 3)

    def refuse(*_: object) -> None:
        raise ZeroDivisionError

    if rank == 1:
        hook = model[0].register_forward_pre_hook(refuse, prepend=True)
        with suppress(ZeroDivisionError):
            train(model)
        hook.remove()
    try:
        train(model)
    except DesyncError as error:
        sys.stdout.write(f"the first time: {error}\n")
    del model
    # gloo alone gets other keys: a rank would read where its peer was before.
    store: Any = agreement.key_value_store()
    vars(agreement)["_store"] = lambda: store
    dist.destroy_process_group()
    other = PrefixStore("again", store)
    dist.init_process_group("gloo", store=other, rank=rank, world_size=2)
    model = layers()
    # More operations than before the verdict.
    train(model, 14)
    if rank == 1:
        time.sleep(3)
    train(model)
    threads = [each.name for each in threading.enumerate()]
    assert threads.count("composable_fsdp watch") == 1
    # The late rank has answered where it was, although it had answered before.
    key = f"{watch._WATCH.keys}/position/1"
    assert rank or store.check([key])


PROGRAMS: dict[str, Callable[[int], None]] = {
    each.__name__: each
    for each in (
        clip_alone,
        one_more_batch,
        state_alone,
        end_early,
        tp_clip,
        tp_forward,
        no_tokens,
        copy,
        copy_hybrid,
        synced,
        late,
        messages,
        ahead,
        again,
    )
}
ENDS: dict[str, Callable[[], Any]] = {
    "barrier": dist.barrier,
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "nothing": lambda: None,
}


def main() -> None:
    """Run a program, and a collective of torch at its end."""
    name, end = sys.argv[1:]
    dist.init_process_group("gloo")
    began = time.monotonic()
    try:
        PROGRAMS[name](dist.get_rank())
        ENDS[end]()
    finally:
        sys.stdout.write(f"after {time.monotonic() - began:.1f} s\n")


if __name__ == "__main__":
    main()
