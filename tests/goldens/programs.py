"""The programs whose collectives, training states and numbers are recorded.

Each program shards `Net` through one door, trains it for a few steps and returns a
`Recording`. Both doors must leave the same recording.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
    StateDictType,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    get_full_grad,
    get_full_param,
    no_sync,
    optim_state_dict,
    reshard,
    state_dict_type,
    unshard,
    unshard_params,
)
from composable_fsdp.access import (
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_reduce_scatter_unused_params,
    set_requires_all_reduce,
    set_reshard_after_backward,
    set_reshard_after_forward,
)
from composable_fsdp.features import (
    bf16_compress_hook,
    flat_parameters,
    register_comm_hook,
)
from composable_fsdp.features.comm_hooks import LowPrecisionState
from tests.goldens.model import UNITS, Net, Trace, note, sines
from tests.support.world import World

DOORS = ("fully_shard", "FullyShardedDataParallel")
BF16 = torch.bfloat16

Recording = dict[str, Any]
"""``lines``: what happened, in order. ``numbers``: losses and checksums by name."""


@dataclass
class Run:
    """One program on one rank: the sharded model, its optimizer, trace and numbers."""

    world: World
    door: str
    trace: Trace = field(default_factory=Trace)
    numbers: dict[str, float | None] = field(default_factory=dict)
    model: nn.Module = field(default_factory=Net)
    optimizer: torch.optim.Optimizer | None = None
    micro_batches: int = 0

    def shard(self, **options: Any) -> None:
        """Shard the model, a unit for each of `UNITS`, and make its optimizer."""
        chosen = [self.model.get_submodule(unit) for unit in UNITS]
        policy = CustomPolicy(lambda module: any(module is each for each in chosen))
        if self.door == "fully_shard":
            self.model = fully_shard(self.model, policy=policy, **options)
        else:
            options["sharding_strategy"] = options.pop("strategy", None)
            self.model = FullyShardedDataParallel(
                self.model, auto_wrap_policy=policy, **options
            )
        self.trace.model = self.model
        self.optimize(self.model.parameters())
        note("sharded")

    def optimize(self, parameters: Iterable[nn.Parameter]) -> None:
        """Step ``parameters`` from now on, by SGD with momentum."""
        self.optimizer = torch.optim.SGD(
            [p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9
        )

    def block(self, i: int) -> nn.Module:
        return self.model.get_submodule(f"blocks.{i}")

    def forward(
        self, used: tuple[int, ...] = (0, 1, 2), ignored: tuple[int, ...] = ()
    ) -> Tensor:
        """Run a forward on the rank's next input; returns the loss."""
        seed = 10 * self.micro_batches + self.world.rank + 1
        x = sines((4, 5), seed)
        loss: Tensor = self.model(x, used, ignored).float().square().mean()
        self.numbers[f"loss {self.micro_batches}"] = loss.item()
        self.micro_batches += 1
        note("after forward")
        return loss

    def backward(self, loss: Tensor) -> None:
        """Run backward and record a checksum of this rank's gradients."""
        torch.autograd.backward(loss)
        note("after backward")
        for name, param in self.model.named_parameters():
            plain = name.replace("_fsdp_wrapped_module.", "")
            key = f"{plain}.grad {self.micro_batches}"
            self.numbers[key] = None if param.grad is None else checksum(param.grad)

    def step(self) -> None:
        """Step the optimizer and clear the gradients."""
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 2, used: tuple[int, ...] = (0, 1, 2)) -> None:
        """Run forward, backward and optimizer ``steps`` times."""
        for _ in range(steps):
            self.backward(self.forward(used))
            self.step()

    def finish(self) -> Recording:
        """Record checksums of the whole parameters; returns all that was recorded."""
        for name, value in self.model.state_dict().items():
            self.numbers[name] = checksum(value)
        return {"lines": self.trace.lines, "numbers": self.numbers}


def checksum(value: Tensor) -> float:
    flat = value.detach().double().reshape(-1)
    return float((flat * sines(flat.shape, 0.1)).sum())


def options_of(**options: Any) -> Callable[[Run], None]:
    """Return the program that shards with ``options`` and takes two steps."""

    def program(run: Run) -> None:
        run.shard(**options)
        run.train()

    return program


def clipped_and_saved(run: Run) -> None:
    """FULL_SHARD with clipping, evaluation and both kinds of state dicts."""
    run.shard()
    run.backward(run.forward())
    run.numbers["norm"] = clip_grad_norm_(run.model, 0.5).item()
    note("clipped")
    run.step()
    with torch.no_grad():
        run.forward()
    run.model.state_dict()
    note("after a full state dict")
    with state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
        run.model.state_dict()
    note("after a sharded state dict")
    assert run.optimizer is not None
    optim_state_dict(run.model, run.optimizer)
    note("after an optimizer state dict")
    run.train(1)


def hybrid(strategy: ShardingStrategy) -> Callable[[Run], None]:
    """Return the program on two replicas of two shards, the second step summed."""

    def program(run: Run) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        run.shard(strategy=strategy, device_mesh=mesh)
        run.train()
        set_requires_all_reduce(run.model, False)
        run.backward(run.forward())
        set_requires_all_reduce(run.model, True)
        run.train(1)

    return program


def checkpointed(reentrant: bool) -> Callable[[Run], None]:
    """Return the program that recomputes every block in backward."""

    def program(run: Run) -> None:
        for i in range(3):
            checkpoint(run.block(i), use_reentrant=reentrant)
        run.shard()
        run.train()

    return program


def accumulated(strategy: ShardingStrategy) -> Callable[[Run], None]:
    """Return the program with two micro-batches under ``no_sync`` before a third."""

    def program(run: Run) -> None:
        run.shard(strategy=strategy)
        for _ in range(2):
            with no_sync(run.model):
                run.backward(run.forward())
                run.backward(run.forward())
            run.train(1)

    return program


def unused_alike(run: Run) -> None:
    """All ranks leave a block out, first one, then another."""
    run.shard()
    run.train(1, used=(0, 2))
    run.train(1, used=(0, 1))
    run.train(1)


def unused_apart(run: Run) -> None:
    """The loss of each rank ignores a block of its own, which runs all the same."""
    run.shard()
    set_reduce_scatter_unused_params(run.model, True)
    for ignored in ((1, 2), (0, 1), (2, 0)):
        run.backward(run.forward(ignored=(ignored[run.world.rank],)))
        run.step()


def flat(run: Run) -> None:
    """The optimizer steps flat parameters."""
    run.shard()
    flats = flat_parameters(run.model)
    run.optimize(flats)
    for _ in range(2):
        run.backward(run.forward())
        for i, each in enumerate(flats):
            key = f"flat {i}.grad {run.micro_batches}"
            run.numbers[key] = None if each.grad is None else checksum(each.grad)
        run.step()


def summoned(run: Run) -> None:
    """``unshard_params`` of a unit, of all, with gradients, and written by rank 0."""
    run.shard()
    run.train(1)
    with unshard_params(run.model):
        note("inside unshard_params of all")
        with torch.no_grad():
            run.block(0).get_parameter("up.weight").mul_(0.5)
    with unshard_params(run.block(1), recurse=False, writeback=False):
        note("inside unshard_params of blocks.1")
    with unshard_params(run.model, rank0_only=True):
        note("inside unshard_params of rank 0")
    run.backward(run.forward())
    with unshard_params(run.model, with_grads=True):
        note("inside unshard_params with gradients")
    run.step()
    run.numbers["by name"] = checksum(get_full_param(run.model, "blocks.2.up.weight"))
    note("after get_full_param")


def by_hand(run: Run) -> None:
    """Units unsharded and resharded by hand, and gradients asked for by name."""
    run.shard()
    unshard(run.block(1))
    note("blocks.1 unsharded by hand")
    reshard(run.block(1))
    note("blocks.1 resharded by hand")
    handle = unshard(run.block(0), async_op=True)
    note("blocks.0 on its way")
    if handle is not None:
        handle.wait()
    run.backward(run.forward())
    grad = get_full_grad(run.model, "blocks.2.up.weight")
    run.numbers["by name"] = None if grad is None else checksum(grad)
    run.step()


def several_forwards(run: Run) -> None:
    """Two forwards, then their two backwards in reverse."""
    run.shard()
    for _ in range(2):
        first, second = run.forward(), run.forward()
        run.backward(second)
        run.backward(first)
        run.step()


def listed_prefetch(run: Run) -> None:
    """Units to gather ahead given by lists."""
    run.shard()
    first, second, third = (run.block(i) for i in range(3))
    set_modules_to_forward_prefetch(first, [second, third])
    set_modules_to_backward_prefetch(third, [second, first])
    run.train()


def hooked(run: Run) -> None:
    """Gradients reduced by a communication hook, in bfloat16."""
    run.shard()
    register_comm_hook(
        run.model, LowPrecisionState(run.world.group), bf16_compress_hook
    )
    run.train()


def scaled(run: Run) -> None:
    """A step through the gradient scaler, in half precision."""
    half = MixedPrecision(torch.float16, torch.float16)
    run.shard(mixed_precision=half)
    scaler = ShardedGradScaler("cpu", init_scale=64.0)
    assert run.optimizer is not None
    for _ in range(2):
        run.backward(scaler.scale(run.forward()))
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        note("after the scaler")


class _Broken(Exception):
    """What a program raises on purpose."""


def _break(*_: object) -> None:
    raise _Broken


def recovered(run: Run) -> None:
    """A forward and a backward raise on all ranks; steps before and after."""
    run.shard()
    run.train(1)
    # Inside the unit: on the unit itself a hook runs before or after ours by the door.
    norm = run.block(1).get_submodule("norm")
    hook = norm.register_forward_pre_hook(_break)
    with pytest.raises(_Broken):
        run.forward()
    note("after a forward that raised")
    hook.remove()
    loss = run.forward()
    backward_hook = norm.register_full_backward_pre_hook(_break)
    with pytest.raises(_Broken):
        run.backward(run.forward())
    note("after a backward that raised")
    backward_hook.remove()
    del loss
    run.model.zero_grad()
    run.train(2)


def frozen_later(run: Run) -> None:
    """Parameters frozen, and unfrozen, between steps."""
    run.shard()
    run.train(1)
    for trained in (False, True):
        run.block(0).get_parameter("up.weight").requires_grad_(trained)
        run.block(2).requires_grad_(trained)
        run.train(1)


def changed_outside(run: Run) -> None:
    """Parameters given other data, and replaced, between sharding and a forward."""
    run.shard()
    up = run.block(0).get_submodule("up")
    with torch.no_grad():
        up.get_parameter("weight").data = up.get_parameter("weight").detach() * 0.5
    down = run.block(2).get_submodule("down")
    value = down.get_parameter("weight").detach().clone()
    down.register_parameter("weight", nn.Parameter(value + 0.25))
    run.optimize(run.model.parameters())
    run.train()


def synced(run: Run) -> None:
    """Values of rank 0 are sent to all ranks first."""
    with torch.no_grad():
        for param in run.model.parameters():
            param.add_(run.world.rank)
    run.shard(sync_module_states=True)
    run.train()


def kept_full(run: Run) -> None:
    """Units that stay full after forward, or after backward, as set one by one."""
    run.shard()
    set_reshard_after_forward(run.block(0), False)
    set_reshard_after_backward(run.block(2), False)
    for _ in range(2):
        run.backward(run.forward())
        run.backward(run.forward())
        reshard(run.block(2))
        note("blocks.2 resharded by hand")
        run.step()


def penalised(run: Run) -> None:
    """The loss has the norm of the input's gradient: a backward of a backward."""
    run.shard()
    for _ in range(2):
        x = sines((4, 5), run.world.rank + 1).requires_grad_()
        loss = run.model(x, (0, 1, 2), ()).square().mean()
        (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
        note("after autograd.grad")
        run.micro_batches += 1
        run.backward(loss + grad.square().sum())
        run.step()


def list_unit(run: Run) -> None:
    """Two blocks are one unit."""
    root = run.model
    fully_shard([root.get_submodule("blocks.0"), root.get_submodule("blocks.1")])
    fully_shard(root)
    run.trace.model = root
    run.optimize(root.parameters())
    run.train()


def copied(run: Run) -> None:
    """A deep copy of the sharded model trains."""
    run.shard()
    run.train(1)
    run.model = run.trace.model = copy.deepcopy(run.model)
    run.optimize(run.model.parameters())
    run.train(1)


@dataclass(frozen=True)
class Program:
    """A program, the number of its ranks and how close its numbers must come."""

    run: Callable[[Run], None]
    ranks: int = 2
    tolerance: float = 1e-4
    doors: tuple[str, ...] = DOORS


STRATEGY = ShardingStrategy
PROGRAMS: dict[str, Program] = {
    "full_shard": Program(options_of(strategy=STRATEGY.FULL_SHARD)),
    "full_shard_one_rank": Program(options_of(strategy=STRATEGY.FULL_SHARD), ranks=1),
    "full_shard_by_element": Program(options_of(block=Block.ELEMENT), doors=DOORS[:1]),
    "shard_grad_op": Program(options_of(strategy=STRATEGY.SHARD_GRAD_OP)),
    "no_shard": Program(options_of(strategy=STRATEGY.NO_SHARD)),
    "hybrid_shard": Program(hybrid(STRATEGY.HYBRID_SHARD), ranks=4),
    "hybrid_shard_zero2": Program(hybrid(STRATEGY._HYBRID_SHARD_ZERO2), ranks=4),
    "mixed_precision": Program(
        options_of(mixed_precision=MixedPrecision(BF16, torch.float32)),
        tolerance=3e-2,
    ),
    "mixed_precision_reduced_low": Program(
        options_of(
            mixed_precision=MixedPrecision(BF16, BF16, keep_low_precision_grads=False),
            strategy=STRATEGY.SHARD_GRAD_OP,
        ),
        tolerance=3e-2,
    ),
    "cpu_offload": Program(options_of(cpu_offload=CPUOffload(offload_params=True))),
    "checkpoint": Program(checkpointed(reentrant=False)),
    "checkpoint_reentrant": Program(checkpointed(reentrant=True)),
    "no_sync": Program(accumulated(STRATEGY.FULL_SHARD)),
    "no_sync_shard_grad_op": Program(accumulated(STRATEGY.SHARD_GRAD_OP)),
    "unused_alike": Program(unused_alike),
    "unused_apart": Program(unused_apart),
    "flat_parameters": Program(flat),
    "backward_prefetch_post": Program(
        options_of(backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    ),
    "backward_prefetch_none": Program(options_of(backward_prefetch=None)),
    "forward_prefetch": Program(options_of(forward_prefetch=True)),
    "listed_prefetch": Program(listed_prefetch),
    "several_forwards": Program(several_forwards),
    "clipped_and_saved": Program(clipped_and_saved),
    "summoned": Program(summoned),
    "by_hand": Program(by_hand),
    "recovered": Program(recovered),
    "frozen_later": Program(frozen_later),
    "changed_outside": Program(changed_outside),
    "synced": Program(synced),
    "kept_full": Program(kept_full),
    "penalised": Program(penalised),
    "list_unit": Program(list_unit, doors=DOORS[:1]),
    "copied": Program(copied),
    "comm_hook": Program(hooked, tolerance=3e-2),
    "grad_scaler": Program(scaled, tolerance=1e-2),
}


def run_programs(world: World, names: list[str]) -> dict[tuple[str, str], Recording]:
    """Run programs on this rank through both doors; recordings by name and door."""
    recordings = {}
    for name in names:
        for door in PROGRAMS[name].doors:
            run = Run(world, door)
            with run.trace.recording():
                PROGRAMS[name].run(run)
            recordings[name, door] = run.finish()
    return recordings
