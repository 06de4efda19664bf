"""Entry point ``simulate``, a step of the real runtime on fake tensors; its result.

The first step fills caches; the second is followed.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp.access.grads import clip_grad_norm_
from composable_fsdp.comm.operations import running_unit
from composable_fsdp.entries.fully_shard import fully_shard
from composable_fsdp.errors import PlanError
from composable_fsdp.flat.region import FlatParameter, TrainableRegion
from composable_fsdp.naming import ROOT_NAME, size_text
from composable_fsdp.tools import fake_world
from composable_fsdp.tools.activations import StorageLog
from composable_fsdp.tools.fake_world import replaced, simulated_world, tensors_of
from composable_fsdp.tools.machine import Cost, Machine
from composable_fsdp.tools.memory import OPTIMIZERS, DeviceType, Memory, StepMoment
from composable_fsdp.tools.models import check_sizes, guess_units, is_sharded, made_by
from composable_fsdp.tools.plan import plan
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.step_time import (
    COMMUNICATION,
    COMPUTE,
    Clock,
    SimulatedOperation,
)
from composable_fsdp.tools.texts import counted
from composable_fsdp.tree.traversal import walk_states

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Simulation:
    """A training step of a rank that was simulated; ``print()`` shows a summary.

    Args:
        plan: the plan of the model that was simulated, for ``forecast``.
        device_type: "cuda" or "cpu": the order in which memory is freed.
        optimizer: the name of the optimizer.
        machine: the speeds that the times are for.
        timeline: the live bytes, through the step.
        operations: computations and collectives, in the order of the host.
        world_size: number of ranks in all; ``plan.world_size`` has the ranks over which
            the root is sharded.
    """

    plan: ShardingPlan
    device_type: str
    optimizer: str
    machine: Machine
    timeline: tuple[StepMoment, ...]
    operations: tuple[SimulatedOperation, ...]
    world_size: int

    @cached_property
    def peak(self) -> StepMoment:
        """The first moment with most bytes on the device."""
        return max(self.timeline, key=lambda moment: moment.memory.total)

    @property
    def collectives(self) -> tuple[SimulatedOperation, ...]:
        """The collectives, in the order in which they are sent."""
        return tuple([o for o in self.operations if o.kind == COMMUNICATION])

    @property
    def seconds(self) -> float:
        """How long the step takes on ``machine``."""
        return max((each.end for each in self.operations), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds in which the stream of the program computes nothing."""
        busy = [o for o in self.operations if o.kind == COMPUTE and o.stream == 0]
        # A stream computes one thing at a time, so lengths add up.
        return self.seconds - sum(each.end - each.begin for each in busy)

    def __str__(self) -> str:
        sent: dict[str, list[int]] = {}
        for each in self.collectives:
            sent.setdefault(each.name, []).append(each.nbytes)
        lines = [
            f"step of {counted(len(self.plan.units), 'unit')} on "
            f"{counted(self.world_size, 'rank')}, in the order of {self.device_type}, "
            f"optimizer {self.optimizer}",
            f"peak per rank: {size_text(self.peak.memory.total)} in {self.peak.when}",
        ]
        kinds = _kinds(self.peak)
        width = max(map(len, kinds))
        lines += [
            f"  {kind:<{width}}  {size_text(size):>12}"
            for kind, size in kinds.items()
            if size
        ]
        words = [
            f"{len(sizes)} x {op} of {size_text(sum(sizes))} in all"
            for op, sizes in sent.items()
        ]
        lines.append(f"collectives: {', '.join(words) or 'none'}")
        lines.append(
            f"time on the assumed machine: {1e3 * self.seconds:.3g} ms, of which "
            f"{1e3 * self.exposed:.3g} ms wait for collectives"
        )
        return "\n".join(lines)

    def trace(self) -> dict[str, Any]:
        """Return the step in Chrome's trace format, as a dict for ``json``."""
        return {
            "displayTimeUnit": "ms",
            "otherData": {
                "world_size": self.world_size,
                "device_type": self.device_type,
                "optimizer": self.optimizer,
                "times": f"assumed speeds: {self.machine}",
            },
            "traceEvents": list(self._trace_events()),
        }

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write ``trace()`` to ``path``; https://ui.perfetto.dev opens the file."""
        Path(path).write_text(json.dumps(self.trace()))

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events: operations, names of rows, and bytes by kind."""
        # Both rows are there also if nothing is on them.
        rows = [COMPUTE, COMMUNICATION]
        for each in self.operations:
            row, sent = each.kind, {}
            if each.kind == COMMUNICATION:
                sent = {"bytes": each.nbytes, "group": each.group, "ranks": each.ranks}
            elif each.stream:
                row = f"copies and casts of stream {each.stream}"
            rows += [] if row in rows else [row]
            unit = each.unit if each.unit is None else each.unit or ROOT_NAME
            # A complete event.
            yield {
                "ph": "X",
                "pid": 0,
                "tid": rows.index(row),
                "cat": each.kind,
                "name": each.title,
                "ts": _microseconds(each.begin),
                # By the ends, so that the next event begins where this one ends.
                "dur": _microseconds(each.end, since=each.begin),
                "args": {"unit": unit, "phase": each.phase or each.name, **sent},
            }
        names = [("process_name", 0, f"rank 0 of {self.world_size}")]
        names += [("thread_name", *numbered) for numbered in enumerate(rows)]
        for what, number, name in names:
            about = {"ph": "M", "pid": 0, "tid": number}
            yield {**about, "name": what, "args": {"name": name}}
        # Perfetto stacks the kinds of a counter.
        for moment in self.timeline:
            yield {
                "ph": "C",
                "pid": 0,
                "name": "live bytes",
                "ts": _microseconds(moment.seconds),
                "args": _kinds(moment),
            }


def _kinds(moment: StepMoment) -> dict[str, int]:
    """Return the bytes of the kinds that a step on tensors can tell apart."""
    found = moment.memory.by_kind()
    return {k: v for k, v in found.items() if k not in ("ahead", "in_flight")}


def _microseconds(seconds: float, *, since: float = 0.0) -> float:
    """Return the whole nanoseconds from ``since`` to ``seconds``, in microseconds."""
    nanoseconds = round(1e9 * seconds) - round(1e9 * since)
    # Perfetto cuts to nanoseconds, and drops events that overlap. The product with 1000
    # may be just below the whole number, so a quarter is added.
    return (nanoseconds + 0.25) / 1e3


class MemoryLog(StorageLog):  # type: ignore[no-untyped-call]  # torch has no types
    """Follows storages and costs of all operations in the block."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._before = Memory()

    def ran(self, cost: Cost, read: list[Tensor], written: list[Tensor]) -> None:
        unit = running_unit(self._clock.stage)
        self._clock.compute(unit, self._clock.machine.seconds(cost))

    def new_kind(self) -> str:
        # Operations of a forward record a graph, also those that checkpointing repeats
        # in backward; other operations do not.
        recorded = torch.is_grad_enabled() and self._clock.stage != "optimizer step"
        return "activations" if recorded else "temporaries"

    def here(self) -> tuple[float, str]:
        stage = self._clock.stage
        unit = running_unit(stage)
        # The stage alone names moments between units.
        when = stage if unit is None else f"{stage} of {unit or ROOT_NAME}"
        return self._clock.seconds, when

    def place(self) -> str:
        """Return the part of the step that changed memory last, for a message."""
        return self.changes[-1].at[1] if self.changes else self._clock.stage

    def restart(self) -> None:
        """Forget all changes so far; live storages are there from the start."""
        self.changes.clear()
        # The first step has made the storages that stay.
        before = Memory().by_kind()
        for block in self.blocks.values():
            before[block.kind] += block.nbytes
        self._before = Memory(**before, when="start")

    def timeline(self) -> Iterator[StepMoment]:
        """Yield the memory at the start and behind the changes since ``restart``."""
        # Kinds are read here, after the last call of ``mark``.
        now = self._before.by_kind()
        yield StepMoment(self._before)
        latest = 0.0
        following = [*((c.at, c.more > 0) for c in self.changes[1:]), None]
        for (block, more, at), later in zip(self.changes, following, strict=True):
            now[block.kind] += more
            # Of changes at the same time, those that end a row of allocations or of
            # frees: no maximum is left out.
            if later == (at, more > 0):
                continue
            # The host runs ahead of streams: its order is kept where times go back.
            latest = max(latest, at[0])
            yield StepMoment(Memory(**now, when=at[1]), seconds=latest)


class _Step(NamedTuple):
    """The model, its inputs, and the functions of a step."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer | None
    max_norm: float | None
    streams: bool

    def run(self, clock: Clock, log: MemoryLog) -> None:
        """Run a step, and name its tensors while gradients exist."""
        clock.stage = "forward"
        # The output stays alive in the caller of a training step, as here.
        output = self.model(*self.args, **self.kwargs)
        loss = self.loss(output)
        clock.stage = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        self.mark(log)
        if self.max_norm is not None:
            clock.stage = "clip"
            clip_grad_norm_(self.model, self.max_norm)
        if self.optimizer is not None:
            clock.stage = "optimizer step"
            self.optimizer.step()
        # The states of the first step are new.
        self.mark(log)
        # The module frees its gradients, as ``set_to_none`` is torch's default.
        clock.stage = "end of the step"
        self.model.zero_grad()

    def mark(self, log: MemoryLog) -> None:
        """Say of which kind the storages are that exist now."""
        # Later marks replace earlier ones, so the general ones come first.
        log.mark(tensors_of((self.args, self.kwargs)), "activations")
        log.mark(self.model.buffers(), "buffers")
        log.mark(self.model.parameters(), "parameters")
        log.mark((p.grad for p in self.model.parameters()), "gradients")
        offloaded: set[int] = set()
        for _, _, state in walk_states(self.model):
            if (source := state.handle.form.source) is not None:
                log.mark(source.kept, "parameters" if source.at_rest else "full")
            for region in state.handle.layout.regions:
                offloaded |= self._mark_region(log, region)
        # States of offloaded parameters are beside them, in host memory.
        states_of = {} if self.optimizer is None else self.optimizer.state
        for parameter, found in states_of.items():
            kind = "host" if id(parameter) in offloaded else "optimizer"
            log.mark(tensors_of(found), kind)

    def _mark_region(self, log: MemoryLog, region: FlatParameter) -> set[int]:
        """Do so for a region; return the ids of leaves in host memory."""
        # On CPU the host's memory is the device's.
        on_host = self.streams and region.offload
        leaves = region.leaves if on_host else []
        log.mark([region.shard], "host" if on_host else "parameters")
        log.mark([region.gradient.shard], "host" if on_host else "gradients")
        log.mark([*leaves, *(leaf.grad for leaf in leaves)], "host")
        # Without a buffer of its own, the full region is the shard.
        if region.full.is_own:
            log.mark([region.full.buffer], "full")
        # Regions of frozen parameters have no reduce buffer.
        if isinstance(region, TrainableRegion):
            log.mark([region.reduce.buffer], "reduce")
        return set(map(id, leaves))


def simulate(
    build: Callable[[], Any],
    *,
    world_size: int,
    batch: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    max_norm: float | None = None,
    device_type: DeviceType = "cuda",
    machine: Machine | None = None,
) -> Simulation:
    """Run a training step of rank 0 of ``world_size`` ranks without memory or devices.

    The step is that of the runtime itself, with tensors that have shapes and no values:
    forward, backward, clipping, optimizer. The first step makes optimizer states and
    the like; the second step is returned.

    Tensors are on the CPU, also in the order of CUDA: kernels that save other tensors
    on a GPU are counted as those of a CPU. A real number that is read, as by
    ``loss.item()``, is 1; shapes may not depend on values.

    Args:
        build: a function without arguments that builds and shards a module as the
            training script does, in a process group of ``world_size`` ranks. It returns
            the module, or the module, the arguments of its forward and perhaps a loss.
            A module that is not sharded is sharded as the command ``plan`` does it:
            by the layers that repeat.
        world_size: number of ranks.
        batch: a tensor, or positional or keyword arguments of the forward, of a single
            rank; tensors may be on meta. Default None: as the function returned.
        loss: a function from the output to the loss. Default None: the output's
            ``loss``, or else the sum of its tensors of real numbers.
        optimizer: a name ("adamw", the default; "adamw-fused", "adam", "adam-fused",
            "sgd", "sgd-momentum", "none"), or a function from parameters to an
            optimizer.
        max_norm: the norm to which gradients are clipped. Default None: no clipping.
        device_type: "cuda" (default): memory is allocated and freed in the order in
            which the host does it for a GPU; or "cpu".
        machine: the speeds for times. Default None: ``Machine()``.

    Returns: the memory through the step, the collectives, and a trace.
    Raises: PhaseError, if this process has a default process group; PlanError, if the
        step fails on fake tensors, or for a wrong argument; and the errors of
        ``fully_shard``.

    Example, in a process without a default process group::

        def build():
            net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            for layer in net:
                fully_shard(layer)
            return fully_shard(net)

        found = simulate(build, world_size=4, batch=torch.zeros(2, 8))
        print(found.peak.memory.total, [each.title for each in found.collectives])
    """
    check_sizes(world_size, None)
    _check(build, optimizer, device_type)
    name = getattr(build, "__name__", "build")
    # A default in the signature would print all speeds in ``help``.
    clock = Clock(machine or Machine())
    log = MemoryLog(clock)
    # The order of CUDA needs streams, which stand-ins are.
    streams = device_type == "cuda"
    with (
        simulated_world(world_size, clock, streams=streams),
        fake_world.fake_tensors(sends=False),
        # The ranges of a profiler tell which unit is running.
        replaced(torch.autograd.profiler, "_is_profiler_enabled", True),
        log,
        fake_world.explained(name, log.place),
    ):
        built = made_by(build, name)
        module, given = built.module, built.inputs if batch is None else batch
        if not is_sharded(module):
            # Inner modules first, as in a training script.
            for unit in reversed(guess_units(module)[0]):
                fully_shard(module.get_submodule(unit))
            fully_shard(module)
        # A step without inputs is no step of training.
        if given is None:
            raise PlanError(
                "simulate expects a batch: the arguments of the forward on a rank, "
                "such as batch=torch.zeros(8, 1024, device='meta'); "
                "or a function that returns (module, arguments)."
            )
        args, kwargs = fake_world.fake_arguments(given)
        made = _optimizer(optimizer, module, streams=streams)
        loss = loss or built.loss or fake_world.default_loss
        step = _Step(module, args, kwargs, loss, made, max_norm, streams)
        step.run(clock, log)
        # Cycles of the first step would be counted as living in the second.
        gc.collect()
        clock.restart()
        log.restart()
        step.run(clock, log)
        return Simulation(
            plan(module),
            device_type,
            "none" if made is None else type(made).__name__,
            clock.machine,
            tuple(log.timeline()),
            tuple(clock.operations),
            world_size,
        )


def _check(build: object, optimizer: Any, device_type: object) -> None:
    """Raise PlanError or TypeError for wrong arguments."""
    if isinstance(build, nn.Module) or not callable(build):
        raise TypeError(
            "simulate expects a function that builds a module and applies fully_shard, "
            f"got a {type(build).__name__}. Build and shard inside of the function."
        )
    # A function is called with the parameters; a wrong name is found here.
    if optimizer not in list(OPTIMIZERS) and (
        isinstance(optimizer, str) or not callable(optimizer)
    ):
        raise PlanError(
            f"optimizer expects one of {', '.join(OPTIMIZERS)}, or a function from "
            f"parameters to an optimizer; got {optimizer!r}."
        )
    if device_type not in ("cuda", "cpu"):
        raise PlanError(f'device_type expects "cuda" or "cpu", got {device_type!r}.')


def _optimizer(
    given: str | MakeOptimizer, model: nn.Module, *, streams: bool
) -> torch.optim.Optimizer | None:
    """Return the optimizer of the trainable parameters; None if there is none."""
    # Frozen parameters have no states.
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return None
    # The user's function chooses the form of its optimizer itself.
    if not isinstance(given, str):
        return given(parameters)
    # torch chooses the form by the device, which stands for a GPU here.
    form = {"foreach": True} if streams and not given.endswith("fused") else {}
    make = OPTIMIZERS[given].make
    return make and make(parameters, lr=1e-3, **form)
