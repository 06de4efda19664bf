"""What a plan says: units, layouts, bytes worked out by hand, and the report."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.compose.registry import set_state
from composable_fsdp.planning.assign import PlanRequest
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.partition import interval_boxes
from composable_fsdp.planning.planner import plan_targets
from composable_fsdp.tools.plan import plan
from tests.planning.trees import linears, names_of, snapshot, units


def test_the_report_names_every_unit_and_the_totals() -> None:
    """One line per unit, then what a rank holds and sends."""
    model = linears(3, 64)
    model[0].weight.requires_grad_(False)
    model[2].to(torch.bfloat16)

    text = str(plan(model, world_size=4, policy=units({"1": {}, "2": {}})))
    rows = text.splitlines()[4:7]

    assert [line.split()[:5] for line in rows] == [
        ["(root)", "1", "x", "4.00", "KiB"],
        ["1", "1", "x", "4.00", "KiB"],
        ["2", "1", "x", "2.00", "KiB"],
    ]
    assert "Sequential, 12,288 parameters (4,096 frozen), on 4 ranks" in text
    assert "5 all-gathers" in text
    assert "2 reduce-scatters" in text
    assert "at the peak" in text
    assert "Activations are left out" in text


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


def test_a_meta_model_is_planned_without_a_process_group_and_stays_as_it_was() -> None:
    """Planning needs neither values nor ranks, and leaves no trace on the tree."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = snapshot(model)

    result = plan(model, world_size=512, policy=units({"1": {}}))

    assert not dist.is_initialized()
    assert names_of(result) == {"": ["0.bias", "0.weight"], "1": ["bias", "weight"]}
    assert snapshot(model) == before


@pytest.mark.req("B-03")
def test_earlier_units_and_replicated_subtrees_are_left_out() -> None:
    """A state of an earlier call or a mark ends the walk, and the state is noted."""
    model, earlier = linears(3), object()
    set_state(model[0], "fully_shard", earlier)
    set_state(model[1], "replicate", object())

    request = PlanRequest(options=UnitOptions(), world_size=2)
    targets = plan_targets([model], request)

    (unit,) = [target.plan for target in targets]
    assert [s.fqn for r in unit.regions for s in r.parameters] == ["2.weight"]
    assert targets[0].units_below == (earlier,)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 21)])
def test_an_interval_outside_of_the_elements_is_refused(start: int, stop: int) -> None:
    """With the number of elements, the shape and what came."""
    with pytest.raises(ValueError, match=r"stop <= 20 for shape \(4, 5\), got start="):
        interval_boxes((4, 5), start, stop)
