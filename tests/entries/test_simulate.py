"""A simulated step has the memory and the collectives of a real one and of the plan."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    forecast,
    fully_shard,
    simulate,
)
from composable_fsdp.comm import device
from composable_fsdp.config import HYBRID
from composable_fsdp.errors import PhaseError, PlanError
from composable_fsdp.features import recent_operations
from composable_fsdp.tools import Machine, Simulation
from composable_fsdp.tools.memory import Traffic
from composable_fsdp.tools.simulated_world import SimulatedOperation
from tests.planning.trees import Text
from tests.support.memory import LiveBytes
from tests.support.world import World, ranks, single_rank_group

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STAND_INS = ("stream", "current_stream", "is_current_stream_capturing")


def text() -> Text:
    """A small GPT, whose root holds an embedding and a head."""
    return Text(1000, 256, 2)


def sharded() -> Text:
    """What a training script does."""
    model = text()
    for block in model.blocks:
        fully_shard(block, mixed_precision=LOW)
    return fully_shard(model, mixed_precision=LOW)


def batch(time: int = 1) -> Tensor:
    """Token ids ``(2, time)``."""
    return torch.zeros(2, time, dtype=torch.long)


def sums_over_ranks(output: Tensor) -> Tensor:
    """A loss that sends by itself, as layers of tensor parallelism do."""
    group: Any = dist.group.WORLD
    total: Tensor = all_reduce(output, "sum", group).sum()
    return total


OWN = ("world_size", "batch", "loss", "optimizer", "max_norm", "device_type", "machine")


def run(
    build: Any = None, make: Callable[[], nn.Module] = text, **given: Any
) -> Simulation:
    """Simulate a step on 8 ranks, with a unit per block; options are those of units."""
    own: dict[str, Any] = {"world_size": 8, "batch": batch()}
    own |= {name: given.pop(name) for name in OWN if name in given}

    def model() -> nn.Module:
        made: Any = make()
        if size := given.pop("shard_world_size", None):
            sizes = own["world_size"] // size, size
            given["device_mesh"] = init_device_mesh("cpu", sizes)
        for block in made.blocks:
            fully_shard(block, **given)
        whole: nn.Module = fully_shard(made, **given)
        return whole

    return simulate(build or model, **own)


@pytest.mark.few(2)
@pytest.mark.req("N-02")
@pytest.mark.parametrize(
    ("world_size", "device_type", "optimizer", "options"),
    [
        (2, "cpu", "sgd", {}),
        (64, "cuda", "adamw", {"mixed_precision": LOW}),
        (16384, "cuda", "adamw-fused", {}),
        (8, "cuda", "adamw", {"shard_world_size": 4}),
        (8, "cuda", "sgd", {"cpu_offload": CPUOffload(offload_params=True)}),
    ],
)
def test_the_peak_is_the_planned_one(
    world_size: int, device_type: Any, optimizer: str, options: dict[str, Any]
) -> None:
    """Within 1 %, on any number of ranks, also where regions are coalesced."""
    found = run(
        world_size=world_size, device_type=device_type, optimizer=optimizer, **options
    )

    planned = forecast(found.plan, optimizer=optimizer, device_type=device_type)
    assert found.peak.memory.total == pytest.approx(planned.total, rel=0.01)
    memory = found.peak.memory
    assert memory.parameters + memory.host == pytest.approx(
        planned.peak.memory.parameters + planned.host_bytes, rel=0.01
    )


@cache
def step_on_64_ranks(link: float) -> Simulation:
    """A step that clips, over a link of so many bytes per second."""
    return run(
        world_size=64,
        batch=batch(64),
        mixed_precision=LOW,
        max_norm=1.0,
        machine=Machine(link_bytes_per_second=link),
    )


FAST, SLOW = 1e11, 1e8


def traffic_of(sent: Sequence[SimulatedOperation]) -> Traffic:
    """The calls and bytes of collectives."""
    counted: Counter[str] = Counter()
    for each in sent:
        counted[f"{each.name}_calls"] += 1
        counted[f"{each.name}_bytes"] += each.nbytes
    return Traffic(**counted)


@pytest.mark.req("N-02")
def test_the_collectives_are_the_planned_ones() -> None:
    """Calls and bytes, with names of units; and the norm of clipping."""
    found = step_on_64_ranks(FAST)

    *steps, norm = found.collectives
    assert traffic_of(steps) == found.plan.traffic
    assert [each.title for each in found.collectives if each.phase == "forward"] == [
        "all_gather (root)",
        "all_gather blocks.0",
        "all_gather blocks.1",
    ]
    assert norm.phase == "clip"


@pytest.mark.req("N-02")
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_regions_that_are_sent_together_count_once(strategy: ShardingStrategy) -> None:
    """Two regions per block, in each strategy: calls and bytes are the planned ones."""

    def two_dtypes() -> Text:
        model = text()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.ndim < 2:
                    module._parameters[name] = nn.Parameter(parameter.bfloat16())
        return model

    found = run(
        make=two_dtypes,
        strategy=strategy,
        **({"shard_world_size": 4} if strategy in HYBRID else {}),
        mixed_precision=LOW,
    )

    assert traffic_of(found.collectives) == found.plan.traffic


def test_a_slower_link_takes_longer_and_the_same_memory() -> None:
    """Times are those of the machine; bytes are not."""
    fast, slow = step_on_64_ranks(FAST), step_on_64_ranks(SLOW)

    assert slow.seconds > 10 * fast.seconds
    assert slow.exposed > fast.exposed > 0
    assert slow.peak.memory == fast.peak.memory
    gather = next(o for o in slow.operations if o.title == "all_gather blocks.0")
    # Casts come before it, on a stream of their own.
    own = [o for o in slow.operations if o.stream == 0]
    used = next(o for o in own if o.title == "forward blocks.0")
    assert used.begin >= gather.end > gather.begin


def real_step(world: World, steps: int) -> tuple[int, list[tuple[str, str]]]:
    """Peak of the last step with real tensors, and the collectives of the step."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with LiveBytes() as live:
        for _ in range(steps):
            before = time.time()  # the ring of operations may be full
            live.reset()
            model(batch(64)).sum().backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            model.zero_grad()
    sent = [each for each in recent_operations() if each.issued >= before]
    return live.peak, [(each.op, each.unit.strip("'\"")) for each in sent]


@pytest.mark.req("N-02")
def test_the_step_is_the_real_one() -> None:
    """The peak of two real ranks within 5 %, and their collectives in their order."""
    peak, sent = ranks(2).run(real_step, 3)[0]

    found = simulate(
        sharded,
        world_size=2,
        batch=batch(64),
        optimizer="adamw-fused",
        max_norm=1.0,
        device_type="cpu",
    )

    assert found.peak.memory.total == pytest.approx(peak, rel=0.05)
    assert [
        (each.name, "(root)" if each.unit == "" else each.unit or "")
        for each in found.collectives
    ] == [(op, unit) for op, unit in sent if "digest" not in op]


@pytest.mark.req("N-02")
def test_the_trace_is_one_of_the_trace_event_format() -> None:
    """Keys, types, rows with names, and spans that nest, as the format asks for."""
    found = step_on_64_ranks(FAST)

    events = json.loads(json.dumps(found.trace(), allow_nan=False))["traceEvents"]
    named: dict[str, set[int]] = {"process_name": set(), "thread_name": set()}
    spans: dict[int, list[tuple[int, int]]] = {}
    counters: list[float] = []
    for event in events:
        assert isinstance(event["name"], str)
        assert event["pid"] == 0
        # Metadata has no time; counters belong to the process.
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            named[event["name"]].add(event["tid"])
        elif event["ph"] == "C":
            counters.append(event["ts"])
            assert all(isinstance(v, int) for v in event["args"].values())
        else:
            assert event["ph"] == "X", "complete events: no begin is without an end"
            assert isinstance(event["cat"], str)
            # Perfetto cuts to nanoseconds, and drops events of a row that overlap.
            begin, length = int(1e3 * event["ts"]), int(1e3 * event["dur"])
            assert min(begin, length) >= 0
            spans.setdefault(event["tid"], []).append((begin, begin + length))
    assert named["process_name"] == {0}
    assert named["thread_name"] >= spans.keys()
    assert counters == sorted(counters)
    for row in spans.values():
        # A row is one stream or the link, which does one thing after the other.
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(row))


def test_nothing_stays_behind() -> None:
    """The process groups and torch's streams are as before, also after an error."""
    before = [getattr(torch.cuda, name) for name in STAND_INS]

    run()
    with pytest.raises(PlanError, match="fails on fake tensors"):
        run(batch=torch.zeros(2, 3, 4))

    assert not device.as_cuda()
    assert device.live_streams() is device._live
    assert not dist.is_initialized()
    assert [getattr(torch.cuda, name) for name in STAND_INS] == before
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_process_group_of_the_program_is_left_alone() -> None:
    """Refused by name, with the way out."""
    with single_rank_group():
        with pytest.raises(PhaseError, match="before init_process_group"):
            run()
        assert dist.get_backend() == "gloo"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "positive number of ranks, got 0"),
        ({"optimizer": "muon"}, "optimizer expects one of adamw.*'muon'"),
        ({"device_type": "tpu"}, '"cuda" or "cpu", got \'tpu\''),
        ({"batch": None}, "simulate expects a batch"),
        ({"build": lambda: 3}, "expects to return a module.*got [0-9]"),
        ({"loss": lambda output: 1 / 0}, "ZeroDivisionError: division by zero"),
        ({"loss": sums_over_ranks}, "own layers, and the model sends all_reduce"),
        (
            {"loss": lambda output: output[output > 0].sum()},
            "no values, in forward.*: .*shapes may not depend on values",
        ),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    """What is expected, what was given, and the way out."""
    with pytest.raises(PlanError, match=message):
        run(**options)
