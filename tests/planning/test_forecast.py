"""A forecast is sums that add up, and says what would make a model fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    PlanError,
    ShardingStrategy,
    checkpoint,
    forecast,
    fully_shard,
    measure_activations,
    plan,
    replan,
)
from composable_fsdp.planning.plan import ShardingPlan
from composable_fsdp.planning.unit_costs import Traffic
from composable_fsdp.tools.fit import fit, smallest_world_size
from composable_fsdp.tools.forecast import DeviceMemory
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.planning.trees import linears, units
from tests.support.memory import LiveBytes, cuda_order, fake_tensors
from tests.support.reference import backward
from tests.support.tiny import TinyBlock
from tests.support.world import fake_world

LOW = MixedPrecision(param_dtype=torch.bfloat16)
OFFLOAD = CPUOffload(offload_params=True)
HYBRID = ShardingStrategy.HYBRID_SHARD


class Gpt(nn.Module):
    """An embedding, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5000, 1024)
        self.layers = nn.ModuleList(TinyBlock(1024, 4) for _ in range(3))
        self.head = nn.Linear(1024, 5000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids ``(batch, time)`` to logits."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Text(nn.Module):
    """An embedding, blocks with an inner unit each, and a frozen head."""

    def __init__(self, blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(TinyBlock(width, 4) for _ in range(blocks))
        self.head = nn.Linear(width, 100)
        self.head.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids to logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def text_plan(world_size: int = 8, **options: Any) -> ShardingPlan:
    """A plan with a unit per block, and one inside each."""
    inner = CustomPolicy(lambda m: isinstance(m, (TinyBlock, nn.LayerNorm)))
    return plan(Text(), world_size=world_size, policy=inner, **options)


VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "zero2": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "none": {"strategy": ShardingStrategy.NO_SHARD},
    "hybrid": {"strategy": HYBRID, "shard_world_size": 4},
    "low": {"mixed_precision": LOW},
    "offload": {"cpu_offload": OFFLOAD},
    "post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "ahead": {"forward_prefetch": True},
    "element": {"block": Block.ELEMENT},
}


@pytest.mark.req("N-01")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_rows_and_moments_are_the_arithmetic_of_the_plan(
    options: dict[str, Any], device: str
) -> None:
    """Rows sum to the plan's totals; the step's peak is the plan's, kind by kind."""
    planned = text_plan(**options)
    found = forecast(planned, optimizer="adamw-fused", device_type=device)
    rows = found.rows

    assert sum(row.numel for row in rows) == planned.numel
    assert sum(row.padded_numel for row in rows) == planned.padded_numel
    assert sum(row.parameters for row in rows) == planned.parameter_bytes
    assert sum(row.gradients for row in rows) == planned.gradient_bytes
    assert sum((row.traffic for row in rows), Traffic()) == planned.traffic
    assert sum(row.fold.times for row in rows) == len(planned.units)

    peak = planned.peak(device_type=device, optimizer_states=2)
    step = max(found.moments[:-1], key=lambda moment: moment.memory.total)
    now = step.memory
    assert now.total == sum(now.by_kind().values()) == peak.total
    assert (now.parameters, now.optimizer) == (peak.parameters, peak.optimizer)
    assert now.full + now.ahead == peak.full
    assert (now.reduce, now.in_flight) == (peak.reduce, peak.in_flight)
    assert step.when == peak.when
    assert found.total >= peak.total
    kept = sum(row.optimizer for row in rows)
    offloaded = device == "cuda" and "cpu_offload" in options
    assert peak.optimizer == (0 if offloaded else kept)
    assert found.host_bytes == (planned.host_bytes + kept if offloaded else 0)


@pytest.mark.req("N-01")
def test_equal_units_are_a_row() -> None:
    """Names are ranges; units of other sizes, classes or options are other rows."""
    policy = CustomPolicy(lambda m: isinstance(m, (TinyBlock, nn.LayerNorm)))
    model = Text(blocks=12)
    model.blocks[3] = TinyBlock(64, 4).requires_grad_(False)

    names = [
        (row.fold.name, row.fold.times)
        for row in forecast(plan(model, world_size=2, policy=policy)).rows
    ]

    assert names[0] == ("(root)", 1)
    assert names[1] == ("blocks.0-2,4-11", 11)
    assert names[-2][0].startswith("blocks.3")
    assert sum(times for _, times in names) == 1 + 12 + 24


@pytest.mark.parametrize("world_size", [1, 3, 8, 64])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_plan_is_planned_again_without_the_module(
    options: dict[str, Any], world_size: int
) -> None:
    """On any ranks, it equals the plan of the module; so do other options."""
    start = text_plan(4, **options)
    if options.get("strategy") is HYBRID:
        world_size = 4 * world_size

    assert replan(start, world_size=world_size) == text_plan(world_size, **options)
    assert replan(start, block=Block.ELEMENT) == text_plan(
        4, **{**options, "block": Block.ELEMENT}
    )


def test_replicas_keep_the_size_of_their_group() -> None:
    """Fewer ranks are one group; ranks that it does not divide are refused."""
    start = text_plan(16, **VARIANTS["hybrid"])

    assert replan(start, world_size=64).units[0].replicas == 16
    assert replan(start, world_size=2).units[0].shard_world_size == 2
    assert replan(start, shard_world_size=8).units[0].replicas == 2
    with pytest.raises(PlanError, match="groups of 4 ranks, which do not divide 6"):
        replan(start, world_size=6)


@pytest.mark.req("N-01")
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "sgd-momentum"])
def test_an_optimizer_takes_what_its_row_says(name: str) -> None:
    """States, and what its step allocates and frees, counted op by op."""
    make: Callable[[Any], Any] = {
        "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
        "adam": lambda p: torch.optim.Adam(p, foreach=True),
        "sgd": lambda p: torch.optim.SGD(p, foreach=True),
        "sgd-momentum": lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True),
    }[name]
    found = forecast(plan(linears(8, 128), world_size=1), optimizer=name)

    with fake_tensors(), LiveBytes() as live:
        model = linears(8, 128)
        optimizer = make(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.step()
        now = live.now
        live.reset()
        optimizer.step()

    end = found.moments[-1].memory
    # The optimizer keeps a number of steps per parameter.
    steps = 8 * 4 if name.startswith("adam") else 0
    assert now == end.parameters + end.gradients + end.optimizer + steps
    assert live.peak == pytest.approx(end.total + steps, rel=0.001)


def test_an_unknown_optimizer_is_refused_and_bytes_are_taken() -> None:
    """A name, or bytes per element."""
    planned = plan(linears(1), world_size=2)

    assert forecast(planned, optimizer="2.5").rows[0].optimizer == 8 * 2.5
    assert forecast(planned, optimizer=6).rows[0].optimizer == 8 * 6
    for wrong in ("adamq", "nan", -1):
        with pytest.raises(PlanError, match=r"expects one of adamw, .*the bytes that"):
            forecast(planned, optimizer=wrong)


@pytest.mark.req("N-01")
def test_the_smallest_world_size_is_the_smallest() -> None:
    """It fits there, and on a rank less it does not; what cannot fit says so."""
    planned = plan(linears(6, 256), world_size=2, policy=ModuleWrapPolicy({nn.Linear}))
    found = forecast(planned)
    for capacity in (2_000_000, 3_000_000, 5_000_000):
        smallest = smallest_world_size(found, capacity)
        assert smallest is not None
        assert forecast(replan(planned, world_size=smallest)).total <= capacity
        assert forecast(replan(planned, world_size=smallest - 1)).total > capacity

    assert smallest_world_size(found, 256 * 256 * 4) is None
    assert smallest_world_size(found, 1 << 40) == 1


@pytest.mark.req("N-01")
def test_what_would_make_it_fit_does() -> None:
    """Each change alone, with its bytes; then the smallest sets that fit."""
    planned = plan(
        linears(6, 256),
        world_size=2,
        policy=ModuleWrapPolicy({nn.Linear}),
        strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    found = forecast(planned)
    low = replan(planned, mixed_precision=LOW)

    enough = fit(found, found.total)
    single = fit(found, forecast(low).total)
    several = fit(found, 1_000_000)

    assert enough.fits
    assert enough.changes == ()
    by_text = {change.text: change for change in single.changes}
    assert not single.fits
    assert by_text["mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"].fits
    assert by_text["strategy=FULL_SHARD"].total < found.total
    assert not any(" and " in text for text in by_text)
    sets = [change for change in several.changes if " and " in change.text]
    assert sets
    assert all(change.fits and change.total <= 1_000_000 for change in sets)
    assert re.search(r"mixed_precision=.* and cpu_offload", sets[0].text)


def test_replicas_may_become_one_group() -> None:
    """More ranks share, and less is held; NO_SHARD becomes FULL_SHARD, said once."""
    by_layer = ModuleWrapPolicy({nn.Linear})
    hybrid, whole = (
        forecast(plan(linears(6, 256), world_size=8, policy=by_layer, **options))
        for options in (VARIANTS["hybrid"], VARIANTS["none"])
    )
    full = forecast(plan(linears(6, 256), world_size=8, policy=by_layer))

    changes = {c.text: c.total for c in fit(hybrid, full.total).changes}
    assert changes["one shard group of all ranks, without replicas"] == full.total
    changes = {c.text: c.total for c in fit(whole, full.total).changes}
    assert changes["strategy=FULL_SHARD"] == full.total
    assert not any("replicas" in text for text in changes)


class Work(nn.Module):
    """Two layers with a nonlinearity, in the middle of which a unit runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.last = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, 32)`` to the same."""
        return torch.exp(self.last(self.block(self.first(x))))


@pytest.mark.req("N-01")
def test_activations_are_what_forward_saves_for_backward() -> None:
    """By unit, before and after the nested one; each storage counts once."""
    with torch.device("meta"):
        model = Work()
    planned = plan(model, world_size=2, units=["block"])

    found = measure_activations(model, planned, [torch.zeros(5, 32)])

    row = 5 * 32 * 4
    # The root saves its input, the block's output and the result of exp; the block
    # its input and the output of the ReLU.
    assert found.units[""].before == row
    assert found.units[""].after == 2 * row
    assert found.units["block"].before == 2 * row
    assert found.units["block"].inputs == row
    assert found.batch == "5x32"

    plain, with_, again = (
        forecast(planned, activations=a).moments
        for a in (None, found, found.with_checkpointing())
    )
    extra = [b.memory.total - a.memory.total for a, b in zip(plain, with_, strict=True)]
    assert max(b.memory.activations for b in with_) == 5 * row
    # Backward of exp: a loss and its gradient, which are scalars, the gradient of the
    # layer's output, and that of its input.
    assert max(extra) == 5 * row + 2 * 4 + 2 * row
    assert extra[-1] == 0
    kept = [b.memory.activations for b in again]
    assert max(kept) == 5 * row + row - 2 * row + row - row
    assert all(m.memory.total == sum(m.memory.by_kind().values()) for m in with_)


@pytest.mark.few(1)
@pytest.mark.req("U-03", "U-08")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("batch", [(2, 64), (4, 256)])
def test_the_peak_with_activations_is_that_of_a_step(
    batch: tuple[int, int], again: bool
) -> None:
    """Counted op by op, with activations that are up to half of the peak.

    Memory inside of operations is not predicted. Checkpointing is computed from the
    step without checkpointing, and so less exactly.
    """
    tokens = torch.zeros(*batch, dtype=torch.long)
    with fake_world(8):
        whole = Gpt()
        planned = plan(whole, world_size=8, units=["layers.*"])
        saved = measure_activations(whole, planned, [tokens])
        if again:
            saved = saved.with_checkpointing()
        found = forecast(planned, optimizer="none", activations=saved)
        with fake_tensors(), LiveBytes() as live:
            model = Gpt()
            for layer in model.layers:
                fully_shard(layer)
                if again:
                    checkpoint(layer)
            fully_shard(model)
            tokens = torch.zeros(*batch, dtype=torch.long)
            with cuda_order(_get_fsdp_handles(model)):
                for _ in range(2):
                    live.reset()
                    # Scripts keep the output until the next step, too.
                    output = model(tokens)
                    backward(output.float().sum())
                    model.zero_grad()
                    del output

    assert found.peak.memory.activations > 0.02 * live.peak
    assert found.total == pytest.approx(live.peak, rel=0.015 if again else 0.001)


@pytest.mark.req("N-01")
def test_a_suggested_dtype_is_measured_again() -> None:
    """Activations of a step in bfloat16 are those of a model planned in bfloat16."""
    model = Gpt()
    tokens = [torch.zeros(8, 128, dtype=torch.long)]
    found, low = (
        forecast(planned, activations=measure_activations(model, planned, tokens))
        for planned in (
            plan(model, world_size=8, units=["layers.*"], mixed_precision=precision)
            for precision in (None, LOW)
        )
    )

    changes = {c.text: c for c in fit(found, found.total - 1).changes}

    text = "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"
    assert changes[text].total == low.total
    assert low.peak.memory.activations < 0.7 * found.peak.memory.activations


def test_low_precision_and_kwargs_are_measured() -> None:
    """Half the bytes, as the compute dtype says."""
    model = Text()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    by_block = ModuleWrapPolicy({TinyBlock})
    full, low = (
        measure_activations(
            model,
            plan(model, world_size=2, policy=by_block, mixed_precision=precision),
            {"tokens": tokens},
        ).units["blocks.1"]
        for precision in (None, LOW)
    )

    assert 0.4 < low.before / full.before < 0.6
    assert full.inputs == 2 * low.inputs == 2 * 16 * 64 * 4


def test_a_forward_that_fails_is_an_error_with_the_way_out() -> None:
    """The hooks are gone afterwards."""
    model = Text()
    planned = plan(model, world_size=2, units=["blocks.*"])

    with pytest.raises(PlanError, match=r"forward of this Text fails on fake.*batch"):
        measure_activations(model, planned, [torch.zeros(2, 16)])

    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_memory_by_kind_names_every_field() -> None:
    """A new kind of memory cannot be forgotten in the sum."""
    ones = DeviceMemory(*[1] * 9)

    assert ones.total == len(ones.by_kind()) == 9


def test_events_follow_the_step() -> None:
    """Each unit is gathered, computes, and is reduced; backward goes in reverse."""
    planned = plan(linears(3), world_size=2, policy=units({"1": {}, "2": {}}))
    events = planned.step_memory().events
    computes = [
        (event.phase, event.unit) for event in events if event.kind == "compute"
    ]
    gathers = [event.unit for event in events if event.kind == "all-gather"]

    assert gathers == [0, 1, 2, 2, 1]
    assert len(gathers) == planned.traffic.all_gather_calls
    assert computes == [
        ("forward", 0),
        ("forward", 1),
        ("forward", 2),
        ("forward", 0),
        ("backward", 0),
        ("backward", 2),
        ("backward", 1),
        ("backward", 0),
    ]
