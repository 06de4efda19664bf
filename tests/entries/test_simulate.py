"""A simulated step has the memory and the collectives of a real one and of the plan."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CPUOffload,
    Machine,
    MixedPrecision,
    PhaseError,
    PlanError,
    Simulation,
    apply_activation_checkpointing,
    clip_grad_norm_,
    forecast,
    fully_shard,
    recent_operations,
    simulate,
)
from composable_fsdp.comm import device
from composable_fsdp.planning.unit_costs import Traffic
from composable_fsdp.tools.simulation import _microseconds
from tests.support.memory import LiveBytes
from tests.support.tiny import TinyBlock
from tests.support.world import World, ranks, single_rank_group

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 256
STAND_INS = ("stream", "current_stream", "is_current_stream_capturing")


class Text(nn.Module):
    """A small GPT, whose root holds an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList(TinyBlock(WIDTH, 4) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``(batch, time)`` to logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def on_meta() -> Text:
    """The model without memory."""
    with torch.device("meta"):
        return Text()


def sharded() -> Text:
    """What a training script does."""
    model = Text()
    for block in model.blocks:
        fully_shard(block, mixed_precision=LOW)
    return fully_shard(model, mixed_precision=LOW)


def batch(time: int = 1) -> Tensor:
    """Token ids ``(2, time)``."""
    return torch.zeros(2, time, dtype=torch.long)


def run(model: Any = None, **options: Any) -> Simulation:
    """Simulate a step on 8 ranks, with a unit per block."""
    given = {"world_size": 8, "batch": batch(), "units": ["blocks.*"], **options}
    return simulate(model or on_meta(), **given)


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
    world_size: int, device_type: str, optimizer: str, options: dict[str, Any]
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


@pytest.mark.req("N-02")
def test_the_collectives_are_the_planned_ones() -> None:
    """Calls and bytes, with names of units; and the norm of clipping."""
    found = run(mixed_precision=LOW, max_norm=1.0)

    counted: dict[str, int] = {}
    for each in found.collectives:
        for what, more in (("calls", 1), ("bytes", each.nbytes)):
            key = f"{each.name}_{what}"
            counted[key] = counted.get(key, 0) + more
    counted["all_reduce_calls"] -= 1  # of the norm
    counted["all_reduce_bytes"] = 0
    assert Traffic(**counted) == found.plan.traffic
    assert [each.title for each in found.collectives if each.phase == "forward"] == [
        "all_gather (root)",
        *[f"all_gather blocks.{i}" for i in range(3)],
    ]
    assert found.collectives[-1].phase == "clip"


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


def test_checkpointing_is_seen() -> None:
    """The runtime of the model runs, so what its forward keeps is counted as it is."""

    def checkpointed() -> Text:
        model = Text()
        apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, TinyBlock)
        )
        for block in model.blocks:
            fully_shard(block, mixed_precision=LOW)
        return fully_shard(model, mixed_precision=LOW)

    plain, less = (
        simulate(make, world_size=8, batch=batch(512), optimizer="none")
        for make in (sharded, checkpointed)
    )

    most = max(moment.memory.activations for moment in plain.timeline)
    assert max(m.memory.activations for m in less.timeline) < 0.8 * most


@pytest.mark.req("N-02")
def test_the_trace_has_a_row_of_compute_and_one_of_communication(
    tmp_path: Path,
) -> None:
    """Operations of a row follow each other, and gathers end before their unit runs."""
    found = run(batch=batch(64), machine=Machine(link_bytes_per_second=1e12))
    found.save_trace(tmp_path / "trace.json")

    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert (names[0], names[1]) == ("compute", "communication")
    for row in names:
        spans = [
            (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == row
        ]
        ends = [begin + length for begin, length in spans]
        assert all(b[0] >= end - 1e-3 for b, end in zip(spans[1:], ends, strict=False))
    compute = {e["name"]: e for e in events if e["ph"] == "X" and e["tid"] == 0}
    sent = [e for e in events if e.get("cat") == "communication"]
    gathered = next(e for e in sent if e["name"] == "all_gather blocks.1")
    assert compute["forward blocks.1"]["ts"] >= gathered["ts"] + gathered["dur"] - 1e-3
    memory = [e for e in events if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in memory) == found.peak.memory.total
    assert [e["ts"] for e in memory] == sorted(e["ts"] for e in memory)


@pytest.mark.req("N-02")
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_the_trace_is_one_of_the_trace_event_format(device_type: str) -> None:
    """Keys, types, rows with names, and spans that nest, as the format asks for."""
    options: dict[str, Any] = {"mixed_precision": LOW, "max_norm": 1.0}
    found = run(device_type=device_type, batch=batch(64), world_size=64, **options)

    text = json.dumps(found.trace(), allow_nan=False)
    events = json.loads(text)["traceEvents"]
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
            continue
        assert isinstance(event["ts"], float | int)
        assert event["ts"] >= 0
        if event["ph"] == "C":
            counters.append(event["ts"])
            assert all(isinstance(v, int) for v in event["args"].values())
            continue
        assert event["ph"] == "X", "complete events: no begin is without an end"
        assert event["dur"] >= 0
        assert isinstance(event["cat"], str)
        # Perfetto cuts to nanoseconds, and drops events of a row that overlap.
        begin, length = int(1e3 * event["ts"]), int(1e3 * event["dur"])
        spans.setdefault(event["tid"], []).append((begin, begin + length))
    assert named["process_name"] == {0}
    assert named["thread_name"] >= spans.keys()
    assert counters == sorted(counters)
    for row in spans.values():
        # A row is one stream or the link, which does one thing after the other.
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(row))


def test_other_threads_see_no_stand_in() -> None:
    """A thread that uses a GPU meanwhile calls torch, as before."""
    before = {name: getattr(torch.cuda, name) for name in STAND_INS}
    seen: list[tuple[bool, bool]] = []

    def loss(output: Tensor) -> Tensor:
        def look() -> None:
            with pytest.raises(Exception, match=r"CUDA|NVIDIA|cuda"):
                torch.cuda.current_stream()
            seen.append((device.as_cuda(), device.live_streams() is device._live))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        seen.append((device.as_cuda(), device.live_streams() is device._live))
        return output.sum()

    run(loss=loss)

    assert seen == 2 * [(False, True), (True, False)]
    assert {name: getattr(torch.cuda, name) for name in STAND_INS} == before


def test_a_slower_link_takes_longer_and_the_same_memory() -> None:
    """Times are those of the machine; bytes are not."""
    fast, slow = (
        run(machine=Machine(link_bytes_per_second=speed)) for speed in (1e11, 1e9)
    )

    assert slow.seconds > 10 * fast.seconds
    assert slow.exposed > fast.exposed > 0
    assert slow.peak.memory == fast.peak.memory


def test_a_function_may_make_a_mesh_and_its_batch() -> None:
    """As a training script does; a number that is read from a tensor is 1."""
    read: list[float] = []

    def make() -> tuple[nn.Module, Any]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(Text(), device_mesh=mesh), {"tokens": batch()}

    def loss(output: Tensor) -> Tensor:
        found = output.square().mean()
        read.append(found.item())
        return found

    found = simulate(make, world_size=4, loss=loss, optimizer=torch.optim.AdamW)

    assert (found.world_size, found.optimizer) == (4, "AdamW")
    assert read == [1.0, 1.0]


def test_nothing_stays_behind() -> None:
    """The module, the process groups and torch's streams are as before."""
    model = on_meta()
    before = [getattr(torch.cuda, name) for name in STAND_INS]

    run(model)
    with pytest.raises(PlanError, match="fails on fake tensors"):
        run(model, batch=torch.zeros(2, 3, 4))

    assert all(p.is_meta and p.grad is None for p in model.parameters())
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
        ({"shard_world_size": 3}, "divides world_size=8, got 3"),
        ({"optimizer": "muon"}, "optimizer expects one of adamw.*'muon'"),
        ({"device_type": "tpu"}, '"cuda" or "cpu", got \'tpu\''),
        ({"batch": None}, "simulate expects a batch"),
        ({"model": sharded}, "units or options of fully_shard"),
        ({"model": lambda: 3}, "returns a module.*got a int"),
        ({"loss": lambda output: 1 / 0}, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    """What is expected, what was given, and the way out."""
    with pytest.raises(PlanError, match=message):
        run(options.pop("model", None), **options)


def test_a_summary_has_the_peak_by_kind() -> None:
    """Kinds, collectives and time."""
    text = str(run(max_norm=1.0))

    for words in ("4 units on 8 ranks", "optimizer AdamW", "peak per rank", "full  "):
        assert words in text
    assert "7 x all_gather" in text


def test_operations_that_follow_each_other_do_not_overlap_in_whole_nanoseconds() -> (
    None
):
    """Perfetto cuts the product with 1,000, and drops an event that begins too soon."""
    times = [index * 1.23456789e-4 for index in range(500)]
    for begin, end in itertools.pairwise(times):
        start, duration = _microseconds(begin), _microseconds(end, since=begin)
        assert int(1e3 * start) + int(1e3 * duration) == int(1e3 * _microseconds(end))
        assert int(1e3 * start) == round(1e9 * begin)
