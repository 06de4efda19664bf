"""What a user sees of units: ranges of a profiler, a line of the log, ``print``."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard, plan, replicate, unshard_params
from composable_fsdp.comm.ranges import OPEN
from composable_fsdp.config import MixedPrecision
from tests.support.on_ranks import on_ranks
from tests.support.world import World, fake_world


def two_blocks() -> nn.Sequential:
    """Two layers, which are units, in a root with a layer of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model[1])
    return fully_shard(model)


def events_of(prof: profile) -> list[Any]:
    found: list[Any] = list(prof.events() or ())  # type: ignore[no-untyped-call]  # untyped in torch
    return found


def names_in(prof: profile) -> Counter[str]:
    """How often each range of the package is in the trace."""
    head = "composable_fsdp::"
    return Counter(
        event.name.removeprefix(head)
        for event in events_of(prof)
        if event.name.startswith(head)
    )


@pytest.mark.req("N-07")
@on_ranks(2)
def test_a_profile_has_the_names_of_the_units(world: World) -> None:
    """Forward, backward and each collective of a step, and nothing stays open."""
    model = two_blocks()
    batch = torch.ones(2, 4, requires_grad=True)
    torch.autograd.backward(model(batch).sum())

    with profile() as prof:
        torch.autograd.backward(model(batch).sum())

    found = names_in(prof)
    for unit in ("(root)", "(0)", "(1)"):
        assert found[f"forward {unit}"] == 1
        assert found[f"backward {unit}"] == 1
        assert found[f"all_gather {unit}"] >= 1
        assert found[f"reduce_scatter {unit}"] == 1
        assert found[f"reduce_scatter_wait {unit}"] == 1
    assert OPEN == {}


@pytest.mark.req("N-07")
def test_ranges_are_nested_as_the_units_are() -> None:
    """A range ends inside the range in which it began, forward and backward apart."""
    with fake_world(4):
        model = two_blocks()
        with profile() as prof:
            torch.autograd.backward(model(torch.ones(2, 4)).sum())

    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events_of(prof)
        if event.name.startswith(("composable_fsdp::for", "composable_fsdp::back"))
    )
    ends: list[float] = []
    for start, end in spans:
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or end <= ends[-1]
        ends.append(end)
    assert len(spans) == 6


@pytest.mark.req("N-07")
def test_the_root_has_a_range_where_a_unit_makes_its_output() -> None:
    """The last unit's gradient is the root's, too; the root's range is around it."""
    with fake_world(4):
        block = nn.Sequential(nn.Linear(4, 4))
        model = nn.Sequential(nn.Linear(4, 4), block)
        fully_shard(block[0])
        fully_shard(block)
        fully_shard(model)
        with profile() as prof:
            torch.autograd.backward(model(torch.ones(2, 4)).sum())

    spans = {
        event.name: (event.time_range.start, event.time_range.end)
        for event in sorted(events_of(prof), key=lambda e: e.time_range.start)
        if event.name.startswith("composable_fsdp::backward")
    }
    root, outer, inner = (
        spans[f"composable_fsdp::backward {name}"]
        for name in ("(root)", "(1)", "(1.0)")
    )
    assert root[0] <= outer[0] <= inner[0] <= inner[1] <= outer[1] <= root[1]
    reduced = [
        event.time_range.start
        for event in events_of(prof)
        if event.name == "composable_fsdp::reduce_scatter (1.0)"
    ]
    assert all(root[0] <= start <= root[1] for start in reduced)
    assert OPEN == {}


def test_an_error_and_a_profiler_that_stops_leave_no_range_open() -> None:
    """In forward, in backward, and where the profiler ends between the two."""
    with fake_world(4):
        model = two_blocks()

        def fail(*_: object) -> None:
            raise ValueError("stop")

        with profile():
            handle = model[1].register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="stop"):
                model(torch.ones(2, 4))
            handle.remove()
            assert OPEN == {}
            out = model(torch.ones(2, 4))
            out.register_hook(fail)
            with pytest.raises(ValueError, match="stop"):
                torch.autograd.backward(out.sum())
            out = model(torch.ones(2, 4)).sum()
        torch.autograd.backward(out)
        model(torch.ones(2, 4))

    assert OPEN == {}


def test_a_recomputed_forward_is_a_range_of_its_own() -> None:
    """Activation checkpointing runs the forward of a unit twice."""
    with fake_world(4):
        model = two_blocks()
        with profile() as prof:
            out = checkpoint(model, torch.ones(2, 4), use_reentrant=False)
            torch.autograd.backward(out.sum())

    assert names_in(prof)["forward (0)"] == 2
    assert OPEN == {}


@pytest.mark.req("N-07")
def test_the_first_step_logs_one_line_with_the_numbers_of_the_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the first forward only; the numbers are those of ``plan``."""
    caplog.set_level(logging.INFO, "composable_fsdp")
    with fake_world(4):
        model = two_blocks()
        for _ in range(2):
            torch.autograd.backward(model(torch.ones(2, 4)).sum())
        expected = plan(model)

    (record,) = caplog.records
    assert record.name == "composable_fsdp"
    assert record.getMessage() == (
        "3 units, 60 parameters over 4 ranks (FULL_SHARD), per rank: parameters "
        f"{expected.parameter_bytes} B, gradients {expected.gradient_bytes} B, peak of "
        f"a training step {expected.peak(device_type='cpu').total} B in "
        f"{expected.peak(device_type='cpu').when}, without activations and optimizer "
        "states"
    )


@pytest.mark.parametrize(("level", "lines"), [(logging.INFO, 0), (logging.DEBUG, 1)])
def test_the_other_ranks_log_at_debug(
    caplog: pytest.LogCaptureFixture, level: int, lines: int
) -> None:
    """A job logs a line once, unless every rank is asked."""
    caplog.set_level(level, "composable_fsdp")
    with fake_world(4, rank=3):
        two_blocks()(torch.ones(2, 4))

    assert len(caplog.records) == lines


@pytest.mark.req("N-07")
def test_print_shows_the_units_and_the_classes_stay() -> None:
    """A line per unit, whole for a module without children."""
    with fake_world(4):
        inner = nn.Linear(4, 4)
        inner.bias.requires_grad_(False)
        model = nn.Sequential(nn.Sequential(inner), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model[1])

        assert str(model) == (
            "Sequential(\n"
            "  (0): Sequential(\n"
            "    unit sharded over 4 ranks: 20 parameters, 4 frozen, 32 B per rank\n"
            "    (0): Linear(in_features=4, out_features=4, bias=True)\n"
            "  )\n"
            "  (1): Linear(in_features=4, out_features=4, bias=True, unit sharded over "
            "4 ranks: 20 parameters, 32 B per rank)\n"
            ")"
        )
        assert type(model[1]) is nn.Linear
        fully_shard(model)
        with unshard_params(model):
            assert str(model[1]).endswith("32 B per rank, full now)")


def test_print_shows_lists_and_replicas() -> None:
    """A unit of several modules names the first; ``replicate`` shards nothing."""
    with fake_world(4):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard([model[0], model[1]])
        replicate(model[2])

        assert "with the Linear named" in str(model[1])
        assert "unit replicated over 4 ranks: 20 parameters" in str(model[2])


def test_a_copy_shows_its_own_unit_and_a_state_dict_has_nothing_of_it() -> None:
    """A deep copy refers to the copied unit, and an own ``extra_repr`` is kept."""
    with fake_world(4):
        model = nn.Linear(4, 4)
        model.extra_repr = lambda: "mine"  # type: ignore[method-assign]  # on purpose
        keys = list(model.state_dict())
        fully_shard(model, mixed_precision=MixedPrecision())
        made = copy.deepcopy(model)

        assert str(made).startswith("Linear(mine, unit sharded over 4 ranks")
        shown = vars(made)["extra_repr"]
        assert shown.args[0].module is made
        assert list(model.state_dict()) == keys
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dump(made, io.BytesIO())
