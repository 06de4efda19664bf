"""What a plan says: bytes and calls worked out by hand, and the report."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

from composable_fsdp.compose.registry import set_state
from composable_fsdp.config import (
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.entries.plan import plan
from composable_fsdp.planning.memory import PeakMemory
from composable_fsdp.planning.plan import ShardingPlan
from composable_fsdp.planning.unit_costs import Traffic
from tests.planning.trees import linears, units

MATRIX = 16 * 4
"""Bytes of the one weight of each layer of ``linears``."""


def three_units(strategy: ShardingStrategy, world_size: int = 2) -> ShardingPlan:
    """A root with one matrix over two units with one matrix each."""
    return plan(
        linears(3),
        world_size=world_size,
        policy=units({"1": {}, "2": {}}),
        strategy=strategy,
    )


@pytest.mark.parametrize(
    ("strategy", "calls"),
    [
        (ShardingStrategy.FULL_SHARD, 5),
        (ShardingStrategy.SHARD_GRAD_OP, 3),
    ],
)
def test_a_step_gathers_each_unit_and_again_what_was_resharded(
    strategy: ShardingStrategy, calls: int
) -> None:
    """One gather per unit in forward, one more in backward for all but the root."""
    assert three_units(strategy).traffic == Traffic(
        all_gather_calls=calls,
        all_gather_bytes=calls * MATRIX,
        reduce_scatter_calls=3,
        reduce_scatter_bytes=3 * MATRIX,
    )


def test_without_sharding_a_step_only_averages_gradients() -> None:
    """NO_SHARD gathers nothing and all-reduces each unit's gradients whole."""
    assert three_units(ShardingStrategy.NO_SHARD).traffic == Traffic(
        all_reduce_calls=3, all_reduce_bytes=3 * MATRIX
    )


def test_hybrid_sharding_reduces_within_a_group_and_averages_its_shards() -> None:
    """Two replicas of two shards: half of each gradient is averaged across replicas."""
    result = plan(
        linears(1),
        world_size=4,
        shard_world_size=2,
        strategy=ShardingStrategy.HYBRID_SHARD,
    )

    assert result.traffic == Traffic(
        all_gather_calls=1,
        all_gather_bytes=MATRIX,
        reduce_scatter_calls=1,
        reduce_scatter_bytes=MATRIX,
        all_reduce_calls=1,
        all_reduce_bytes=MATRIX // 2,
    )


def test_alone_nothing_is_sent() -> None:
    """One rank holds everything already, in the parameters' own memory."""
    result = three_units(ShardingStrategy.FULL_SHARD, world_size=1)

    assert result.traffic == Traffic()
    assert [unit.full_bytes for unit in result.units] == [0, 0, 0]


def test_a_unit_without_parameters_sends_nothing() -> None:
    """A root that left everything to its units is no call."""
    result = plan(linears(2), world_size=2, policy=units({"0": {}, "1": {}}))

    assert result.units[0].regions == ()
    assert result.traffic.all_gather_calls == 2 + 2


@pytest.mark.req("D-09")
def test_frozen_weights_are_gathered_and_never_reduced() -> None:
    """A LoRA-like unit reduces what trains: 4 elements, not 20."""
    model = nn.Linear(4, 4)
    model.weight.requires_grad_(False)

    result = plan(model, world_size=2)

    assert result.traffic.all_gather_calls == 1
    assert result.traffic.all_gather_bytes == (16 + 8) * 4
    assert result.traffic.reduce_scatter_bytes == 8 * 4
    assert result.gradient_bytes == 4 * 4
    assert result.parameter_bytes == (8 + 4) * 4


def test_bytes_per_rank_count_shards_with_their_padding() -> None:
    """Nine rows over four ranks are three rows on each."""
    result = plan(nn.Linear(8, 9, bias=False), world_size=4)

    assert (result.numel, result.padded_numel) == (72, 96)
    assert result.parameter_bytes == result.gradient_bytes == 3 * 8 * 4
    assert result.units[0].full_bytes == 96 * 4


def test_the_peak_is_a_sum_that_can_be_worked_out_by_hand() -> None:
    """Four matrices, one of them the root's; most is alive in unit 2's backward.

    Full are the root, unit 2 and unit 1 ahead. Unit 3 is being reduced, into half a
    matrix, and unit 2's gradient is there. On CUDA it is the same, as unit 3 is freed.
    """
    result = plan(linears(4), world_size=2, policy=units({"1": {}, "2": {}, "3": {}}))
    kept = 4 * MATRIX // 2

    cpu, cuda = result.peak(device_type="cpu"), result.peak(optimizer_states=2)

    most = (3 * MATRIX, MATRIX, MATRIX)
    assert cpu == PeakMemory(kept, MATRIX // 2, *most, 0, "backward of 2")
    assert cuda == replace(cpu, optimizer=2 * kept)
    assert 2 * cuda.total == 6 * kept + 11 * MATRIX


def test_weights_kept_for_backward_are_all_full_at_the_peak() -> None:
    """SHARD_GRAD_OP begins backward with every unit full, and frees as it goes.

    Unit 2 is freed, and being reduced, when the gradient of unit 1 is there.
    """
    peak = three_units(ShardingStrategy.SHARD_GRAD_OP).peak(device_type="cpu")

    assert (peak.full, peak.reduce, peak.in_flight) == (2 * MATRIX, MATRIX, MATRIX)
    assert peak.when == "backward of 1"


def test_low_precision_halves_what_is_gathered_and_what_is_reduced() -> None:
    """Each buffer, and each call of the traffic, counts in its own dtype."""
    low = plan(
        linears(1),
        world_size=2,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float64),
    )

    (unit,) = low.units
    assert (unit.full_bytes, unit.reduce_bytes) == (MATRIX // 2, MATRIX * 2)
    assert (unit.parameter_bytes, unit.gradient_bytes) == (MATRIX // 2, MATRIX // 2)
    assert low.traffic.all_gather_bytes == MATRIX // 2
    assert low.traffic.reduce_scatter_bytes == MATRIX * 2


def test_gradients_that_stay_in_low_precision_count_in_it() -> None:
    """``keep_low_precision_grads`` halves them, and needs no second buffer."""
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    kept = plan(linears(1), world_size=2, mixed_precision=precision)

    assert kept.gradient_bytes == MATRIX // 4
    assert kept.peak().reduce == MATRIX // 2


def test_one_rank_that_casts_has_full_buffers() -> None:
    """Nothing is gathered, and the cast needs room."""
    precision = MixedPrecision(torch.bfloat16)
    alone = plan(linears(1), world_size=1, mixed_precision=precision)

    assert alone.units[0].full_bytes == MATRIX // 2
    assert alone.traffic == Traffic()


def test_what_is_offloaded_is_counted_on_the_host() -> None:
    """Shards and gradients leave the device; a reduction needs room to land in."""
    policy = units({"1": {"cpu_offload": CPUOffload(offload_params=True)}, "2": {}})
    result = plan(linears(3), world_size=2, policy=policy)

    peak = result.peak(optimizer_states=1)

    assert result.host_bytes == 2 * MATRIX // 2
    assert result.parameter_bytes == 3 * MATRIX // 2
    assert (peak.parameters, peak.optimizer) == (MATRIX, MATRIX)
    assert peak.gradients == MATRIX // 2, "those of unit 2; the root's come last"
    assert result.peak(device_type="cpu").parameters == 3 * MATRIX // 2


def test_an_offloaded_rank_alone_still_needs_full_buffers() -> None:
    """Its parameters are on the host and computed with on the device."""
    alone = plan(linears(1), world_size=1, cpu_offload=CPUOffload(True))

    assert alone.units[0].full_bytes == MATRIX
    assert alone.peak().full == MATRIX


def test_few_rows_are_noted_with_the_way_out() -> None:
    """Fewer rows than ranks pad a matrix; single elements, as the note says, do not."""
    model = nn.Sequential(nn.Linear(64, 2, bias=False))

    by_row = plan(model, world_size=16)
    by_element = plan(model, world_size=16, block=Block.ELEMENT)

    assert len(by_row.warnings) == 1
    assert "0.weight" in by_row.warnings[0]
    assert "padding is 700%" in by_row.warnings[0]
    assert "Block.ELEMENT" in by_row.warnings[0]
    assert by_element.warnings == ()
    assert by_element.padded_numel == by_element.numel


def test_a_plan_cannot_be_changed() -> None:
    """Plans, units and layouts are values: equal by content, and fixed."""
    result = three_units(ShardingStrategy.FULL_SHARD)

    with pytest.raises(FrozenInstanceError):
        result.world_size = 3  # type: ignore[misc]  # the mistake under test
    assert result == copy.deepcopy(result) == three_units(ShardingStrategy.FULL_SHARD)


def test_equal_models_have_equal_plans_on_meta_and_on_the_cpu() -> None:
    """A plan depends on shapes, never on values or devices."""
    with torch.device("meta"):
        twin = linears(3)

    assert plan(twin, world_size=7) == plan(linears(3), world_size=7)


def test_the_report_names_every_unit_and_the_totals() -> None:
    """One line per unit, then what a rank holds and sends."""
    model = linears(3, 64)
    model[0].weight.requires_grad_(False)
    model[2].to(torch.bfloat16)

    text = str(plan(model, world_size=4, policy=units({"1": {}, "2": {}})))
    lines = text.splitlines()

    assert [line.split()[:4] for line in lines[1:4]] == [
        ["(root)", "1", "x", "Sequential"],
        ["1", "1", "x", "Linear"],
        ["2", "1", "x", "Linear"],
    ]
    assert [line.split("%")[1].strip() for line in lines[1:4]] == [
        "1 parameter in float32 frozen",
        "1 parameter in float32",
        "1 parameter in bfloat16",
    ]
    assert "3 units, 12,288 parameters, world size 4" in text
    assert "5 all-gathers" in text
    assert "2 reduce-scatters" in text
    assert "at the peak" in text
    assert "without activations and optimizer" in text


def test_the_report_folds_equal_units_and_adds_up() -> None:
    """Twelve equal layers are a line with their sum; a single unit is no plural."""
    text = str(plan(linears(13), world_size=2, units=[str(i) for i in range(1, 13)]))
    lines = text.splitlines()

    assert [line.split()[:5] for line in lines[1:3]] == [
        ["(root)", "1", "x", "Sequential", "16"],
        ["1-12", "12", "x", "Linear", "192"],
    ]
    assert lines[3].startswith("13 units, 208 parameters")
    assert "\n1 unit, 16 parameters" in str(plan(linears(1), world_size=2))


def test_a_marked_subtree_is_not_in_the_totals() -> None:
    """What another API holds costs this plan nothing."""
    model = linears(2)
    set_state(model[1], "replicate", object())

    assert plan(model, world_size=2).numel == 16


def adapted(frozen: int = 2) -> nn.Module:
    """Two linear layers with biases, of which the first ``frozen`` parameters are."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    return model


@pytest.mark.req("S0-06")
def test_a_plan_lists_what_trains_and_what_is_frozen() -> None:
    """Names and elements per unit, without what is ignored; the report says it."""
    model = adapted(frozen=3)
    ignored = [model.get_parameter("1.bias")]

    found = plan(model, world_size=2, ignored_states=ignored)
    mixed = plan(adapted(), world_size=2)

    assert found.units[0].frozen == {"0.weight": 16, "0.bias": 4, "1.weight": 16}
    assert found.units[0].trainable == {}
    assert mixed.units[0].trainable == {"1.weight": 16, "1.bias": 4}
    assert (
        "unit (root) trains 2 of 4 parameters (20 elements; 20 are frozen): "
        "1.weight, 1.bias"
    ) in str(mixed)


@pytest.mark.req("S0-06")
def test_a_mixed_unit_is_planned_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    """It is legal, and no warning of Python or of the plan."""
    found = plan(adapted(), world_size=2)

    assert found.warnings == ()
    assert list(recwarn) == []
