"""A forecast is sums that add up, and says what would make a model fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_fsdp import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    checkpoint,
    forecast,
    fully_shard,
    plan,
    simulate,
)
from composable_fsdp.tools import measure_activations, replan
from composable_fsdp.tools.memory import Traffic
from composable_fsdp.tools.model_commands import smallest_world_size
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.planning.trees import Text, linears
from tests.support.memory import LiveBytes, cuda_order, fake_tensors
from tests.support.reference import backward
from tests.support.tiny import TinyBlock
from tests.support.world import fake_world

LOW = MixedPrecision(param_dtype=torch.bfloat16)
OFFLOAD = CPUOffload(offload_params=True)
HYBRID = ShardingStrategy.HYBRID_SHARD


def gpt() -> Text:
    """A model with room for activations."""
    return Text(5000, 1024, 2)


def text_plan(world_size: int = 8, **options: Any) -> ShardingPlan:
    """A plan with a unit per block, and one inside each."""
    inner = CustomPolicy(lambda m: isinstance(m, (TinyBlock, nn.LayerNorm)))
    model = Text(100, 64, 4)
    model.head.requires_grad_(False)
    return plan(model, world_size=world_size, policy=inner, **options)


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
    options: dict[str, Any], device: Any
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
@pytest.mark.parametrize("name", ["ZERO1", "HFSDP"])
def test_rows_have_the_parameters_that_stay_between_steps(name: str) -> None:
    """Full ones, or pieces of several shards; they sum to the memory after a step."""
    strategy = ShardingStrategy[name]
    found = forecast(text_plan(strategy=strategy, shard_world_size=4))
    end = found.moments[-1].memory

    assert sum(row.sharded for row in found.rows) == end.total - end.temporaries
    assert sum(row.parameters for row in found.rows) > found.plan.parameter_bytes


@pytest.mark.few
@pytest.mark.parametrize("world_size", [1, 3, 64])
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
    assert found.batch == "5x32"

    plain, with_, again = (
        forecast(planned, activations=a).moments
        for a in (None, found, found.with_checkpointing())
    )
    extra = [b.memory.total - a.memory.total for a, b in zip(plain, with_, strict=True)]
    # The root saves its input, the block's output and the result of exp; the block
    # its input and the output of the ReLU, of which checkpointing keeps the input. The
    # loss and its gradient are scalars.
    kept = [[b.memory.activations for b in each] for each in (with_, again)]
    assert [max(each) for each in kept] == [5 * row + 8, 4 * row + 8]
    # Backward of exp: a loss and its gradient, which are scalars, the gradient of the
    # layer's output, and that of its input.
    assert max(extra) == 5 * row + 2 * 4 + 2 * row
    assert extra[-1] == 0
    assert all(m.memory.total == sum(m.memory.by_kind().values()) for m in with_)


@pytest.mark.few(1)
@pytest.mark.req("U-03", "U-08")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("batch", [(2, 64), (4, 256)])
def test_the_peak_with_activations_is_that_of_a_step(
    batch: tuple[int, int], again: bool
) -> None:
    """Counted op by op, with activations that are up to half of the peak.

    Memory inside of operations is not predicted.
    """
    tokens = torch.zeros(*batch, dtype=torch.long)
    with fake_world(8):
        with torch.device("meta"):
            whole = gpt()
        planned = plan(whole, world_size=8, units=["blocks.*"])
        saved = measure_activations(whole, planned, [tokens])
        if again:
            saved = saved.with_checkpointing()
        found = forecast(planned, optimizer="none", activations=saved)
        with fake_tensors(), LiveBytes() as live:
            model = gpt()
            for layer in model.blocks:
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

    assert found.peak.memory.activations > 0.01 * live.peak
    assert found.total == pytest.approx(live.peak, rel=0.001)


class Wide(nn.Module):
    """A block that tensor parallelism cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 256)`` to the same."""
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        return x + hidden


@pytest.mark.req("N-01")
def test_a_model_that_tensor_parallelism_cuts_is_planned_by_a_ranks_part() -> None:
    """A simulation of the step had the same peak."""
    cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    with fake_world(16), torch.device("meta"):
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(*(Wide() for _ in range(3)))
        for block in model:
            parallelize_module(block, mesh["tp"], cuts)
        planned = plan(model, world_size=4, units=["*"])
        saved = measure_activations(model, planned, [torch.zeros(2, 256)])

    assert forecast(planned, activations=saved).total == 3_042_312
    assert planned.whole_numel == 3 * (2 * 256 * 1024 + 1024 + 256)
    assert planned.numel < planned.whole_numel / 3.9


UNITS = ["text", "text.*", "vision", "vision.*"]


class TwoTowers(nn.Module):
    """Runs vision before text, and registers text first, as CLIP does."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("text", "vision"):
            layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
            self.add_module(name, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 64)`` to a number; vision saves most."""
        towers = dict(self.named_children())
        image: Tensor = towers["vision"](x.repeat(40, 1)).sum(0)
        words: Tensor = towers["text"](x)
        return (words * image).sum()


@pytest.mark.req("N-02", "U-08")
def test_the_forecast_follows_the_order_of_the_measured_forward() -> None:
    """The order in which a model registers its towers changes no moment of a step."""
    batch = torch.zeros(8, 64)
    forecasts = []
    for registered in (("vision", "text"), ("text", "vision")):
        with torch.device("meta"):
            model = TwoTowers(*registered)
        planned = plan(model, world_size=4, units=UNITS)
        saved = measure_activations(model, planned, [batch])
        forecasts.append(forecast(planned, optimizer="none", activations=saved))

    def sharded() -> nn.Module:
        made = TwoTowers(*registered)
        for tower in made.children():
            for layer in tower.children():
                fully_shard(layer)
            fully_shard(tower)
        return fully_shard(made)

    real = simulate(sharded, world_size=4, batch=batch, optimizer="none")

    expected, found = forecasts

    names = [unit.fqn for unit in found.plan.units]
    assert names.index("vision.0") < names.index("vision.2") < names.index("text")
    assert [each.memory for each in found.moments] == [
        each.memory for each in expected.moments
    ]
    assert found.peak.when == real.peak.when
    assert found.total == pytest.approx(real.peak.memory.total, rel=0.05)
    # A plan without a batch knows the modules alone, and the units are the same.
    assert [unit.fqn for unit in planned.units][1:3] == ["text", "text.0"]
    assert sorted(names) == sorted(unit.fqn for unit in planned.units)
    assert found.plan.traffic == planned.traffic
