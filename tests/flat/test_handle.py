"""A handle: names from one module, leaves made once, and what remembers it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp.comm.groups import Groups
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat import residency
from composable_fsdp.flat.build import build_handle
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.phases import Residency
from composable_fsdp.planning.assign import PlanRequest
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.planner import plan_targets
from composable_fsdp.planning.policies import evaluate_policy
from tests.planning.trees import linears, units
from tests.support.models import tiny_mlp


def handles_of(
    model: nn.Module, *names: str, world_size: int = 2, rank: int = 0
) -> list[FlatParamHandle]:
    """Handles of ``model`` and of the modules named, on one rank, without a group."""
    request = PlanRequest(
        options=UnitOptions(),
        world_size=world_size,
        policy=partial(evaluate_policy, units({name: {} for name in names})),
    )
    targets = plan_targets([model], request)
    groups = Groups(None, None)
    groups.rank, groups.shard_world_size = rank, world_size
    device = torch.device("cpu")
    return [build_handle(t, groups=groups, device=device) for t in targets]


def tied_model() -> tuple[nn.Sequential, nn.Sequential]:
    """A layer beside two that have one weight, and these two alone."""
    inner = linears(2)
    inner[1].weight = inner[0].weight
    return nn.Sequential(linears(1), inner), inner


@pytest.mark.req("S1-26")
def test_all_names_of_a_handle_start_at_its_own_module() -> None:
    """Names, first owners and further places lead to the parameters from the unit."""
    model, inner = tied_model()
    plain = dict(inner.named_parameters(remove_duplicate=False))
    handle = handles_of(model, "1")[1]

    assert handle._fqns == ("0.weight",)
    places = handle.layout.places
    assert [(p.fqn, p.slot_index) for p in places] == [("0.weight", 0), ("1.weight", 0)]
    for place, owner in zip(places, handle.layout.owners, strict=True):
        assert owner._parameters[place.name] is plain[place.fqn]
        assert inner.get_parameter(place.fqn) is plain[place.fqn]


@pytest.mark.req("S1-42")
@pytest.mark.parametrize("now", Residency)
def test_moves_that_the_table_does_not_list_raise(now: Residency) -> None:
    """From every state, by every function that moves; the state stays."""
    (handle,) = handles_of(tiny_mlp())
    moves: dict[Callable[[FlatParamHandle], None], Residency] = {
        residency.allocate_full: Residency.GATHERING,
        residency.use_full: Residency.UNSHARDED,
        residency.free_full: Residency.SHARDED,
        residency.defer_free: Residency.FREE_PENDING,
        **{partial(residency.move, then=then): then for then in Residency},
    }
    for move, then in moves.items():
        handle.residency = now
        if then in now.followers:
            move(handle)
            assert handle.residency is then
            continue
        with pytest.raises(PhaseError, match=f"is {now.name} .* become {then.name}"):
            move(handle)
        assert handle.residency is now


def test_leaves_can_be_swapped_by_torch() -> None:
    """A weak reference to a leaf in the table would forbid ``swap_tensors``."""
    (handle,) = handles_of(tiny_mlp())
    leaf = handle.leaves[0]

    swap: Any = torch.utils.swap_tensors
    swap(leaf, nn.Parameter(torch.ones(3)))

    assert leaf.shape == (3,)


@pytest.mark.req("S1-01")
def test_the_table_of_held_parameters_has_its_name() -> None:
    """``_shard_param_indices`` are the parameters of which a rank holds elements."""
    for rank in range(8):
        handle = handles_of(tiny_mlp(), world_size=8, rank=rank)[0]
        held = [i for i, leaf in enumerate(handle.leaves) if leaf.numel()]
        assert list(handle._shard_param_indices) == held
