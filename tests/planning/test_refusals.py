"""What planning refuses: by name, with the way out, and leaving the tree as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.testing._internal.two_tensor import TwoTensor

from composable_fsdp import fully_shard
from composable_fsdp.compose.registry import set_state
from composable_fsdp.entries.plan import plan
from composable_fsdp.errors import CompositionError, FSDPError, PlanError
from composable_fsdp.planning.assign import PlanRequest
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.plan import plan_modules
from tests.planning.trees import linears, names_of, snapshot, units
from tests.support.models import TinyGPT
from tests.support.world import fake_world

Build = Callable[[], nn.Module]


def refused(
    model: nn.Module, match: str, kind: type[Exception] = PlanError, **options: Any
) -> str:
    """Plan ``model``, expect a refusal that leaves it as it was, return the text."""
    before = snapshot(model)

    with pytest.raises(kind, match=match) as caught:
        plan(model, world_size=2, **options)

    assert snapshot(model) == before
    return str(caught.value)


def inner(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))


def overlapping() -> nn.Module:
    base = torch.zeros(6)
    model = nn.Sequential(nn.Module(), nn.Module())
    model[0].weight = nn.Parameter(base[:4])
    model[1].weight = nn.Parameter(base[3:])
    return model


def sparse_parameter() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.eye(3).to_sparse())
    return inner(module)


@pytest.mark.req("X-27", "X-30")
@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            lambda: inner(nn.Embedding(4, 2, max_norm=1.0)),
            "Embedding '1.0' has max_norm=1",
        ),
        (
            lambda: inner(nn.EmbeddingBag(4, 2, max_norm=2.0)),
            "EmbeddingBag '1.0' has max_",
        ),
        (
            lambda: inner(nn.Embedding(4, 2, sparse=True)),
            "Embedding '1.0' has sparse=True",
        ),
        (lambda: inner(nn.LazyLinear(3)), "Parameter '1.0.weight' is not initialised"),
        (sparse_parameter, "'1.0.weight' has layout torch.sparse_coo; expected"),
        (
            overlapping,
            "'0.weight' and '1.weight' are different objects that share memory",
        ),
    ],
)
def test_what_a_flat_buffer_cannot_hold_is_refused_by_name(
    build: Build, match: str
) -> None:
    """The message names module or parameter, and the tree is as it was."""
    refused(build(), match)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    "build",
    [
        lambda: inner(nn.Embedding(4, 2, max_norm=1.0)),
        lambda: inner(nn.Embedding(4, 2, sparse=True)),
        lambda: inner(nn.LazyLinear(3)),
        sparse_parameter,
    ],
)
def test_ignoring_the_module_is_a_way_out(build: Build) -> None:
    """What a message proposes works: without that module the rest is planned."""
    model = build()

    result = plan(model, world_size=2, ignored_modules=[model.get_submodule("1.0")])

    assert names_of(result) == {"": ["0.bias", "0.weight"]}


@pytest.mark.req("X-30")
def test_neighbours_in_one_storage_are_not_taken_for_overlapping() -> None:
    """Views that touch and do not overlap are ordinary parameters."""
    base = torch.zeros(8)
    model = nn.Module()
    model.a, model.b = nn.Parameter(base[:4]), nn.Parameter(base[4:])

    assert plan(model, world_size=2).numel == 8


def test_an_empty_parameter_between_two_that_overlap_hides_nothing() -> None:
    """A parameter without elements in the same storage does not end the search."""
    base = torch.zeros(10)
    model = nn.Module()
    model.long = nn.Parameter(base)
    model.short = nn.Parameter(base[:0])
    model.last = nn.Parameter(base[8:])

    refused(model, "'long' and 'last' are different objects")


@pytest.mark.req("X-30")
@pytest.mark.parametrize(
    ("placements", "shape", "match"),
    [
        ((Partial(),), (2,), "placed as .*; expected Shard or Replicate"),
        ((Shard(0), Shard(0)), (1, 2), ".*which cuts one dim twice"),
    ],
    ids=["sum", "twice"],
)
def test_a_dtensor_that_is_no_rectangle_is_refused_by_name(
    placements: tuple[Placement, ...], shape: tuple[int, ...], match: str
) -> None:
    """A sum is no value yet, and two cuts of a dim leave no rows in order."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", shape)
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(
            DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)
        )

        refused(model, f"Parameter 'weight' is a DTensor {match}")


def test_a_tensor_with_tensors_inside_is_refused_by_name() -> None:
    """A flat buffer would hold one of them, and compute read another."""
    model = nn.Linear(4, 4)
    inside = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))  # type: ignore[no-untyped-call]  # torch
    model.weight = nn.Parameter(inside, requires_grad=False)

    refused(model, "Parameter 'weight' is a TwoTensor, a tensor class with tensors")


def test_a_dtensor_with_hooks_is_refused_by_name() -> None:
    """Sharding would leave it without the hooks."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(4, 4)
        rows = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
        model.weight = nn.Parameter(rows)
        weight: Any = model.weight
        handle = weight.register_hook(lambda gradient: gradient)
        refused(model, "Parameter 'weight' is a DTensor with hooks of yours")
        handle.remove()


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict, nn.ParameterList])
@pytest.mark.req("B-02")
def test_containers_without_forward_are_refused(container: type[nn.Module]) -> None:
    """Nothing would ever unshard them; the message offers a list."""
    text = refused(container(), f"got a {container.__name__}", CompositionError)

    assert "pass them as a list" in text


def test_a_container_with_a_forward_is_a_module_like_others() -> None:
    """A subclass that defines forward can be called, so it can be sharded."""

    class Stack(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert plan(Stack([nn.Linear(2, 2)]), world_size=2).numel == 6


def test_what_is_no_module_is_refused() -> None:
    """A tensor cannot be planned."""
    with pytest.raises(TypeError, match="plan expects a module, got a str"):
        plan("model", world_size=2)  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "2"])
def test_a_world_size_that_is_no_number_of_ranks_is_refused(world_size: Any) -> None:
    """Zero, negative and non-integer counts are told back."""
    with pytest.raises(PlanError, match=f"number of ranks, got {world_size!r}"):
        plan(nn.Linear(2, 2), world_size=world_size)


def test_a_replicated_module_cannot_be_sharded() -> None:
    """The same module cannot carry both APIs."""
    model = nn.Linear(2, 2)
    set_state(model, "replicate", object())

    refused(model, "a Linear that replicate already manages", CompositionError)


def test_ignored_things_have_to_be_modules_or_parameters() -> None:
    """A name or a tensor in either list is told by its type."""
    model = nn.Linear(2, 2)

    refused(model, "ignored_states expects parameters", TypeError, ignored_states=["w"])
    refused(model, "ignored_modules expects modules", TypeError, ignored_modules=[1])


def test_modules_of_a_list_may_use_one_name_twice() -> None:
    """A list names parameters from each module; its two weights stay apart."""
    request = PlanRequest(options=UnitOptions(), world_size=2)

    result, (target,) = plan_modules(list(linears(2)), request)

    slots = result.units[0].regions[0].parameters
    assert [slot.fqn for slot in slots] == ["weight", "weight"]
    assert len({id(parameter) for parameter in target.parameters[0]}) == 2


@pytest.mark.req("B-03")
def test_a_module_named_twice_in_a_list_counts_once() -> None:
    """Giving the same module twice is giving it once."""
    layer = nn.Linear(4, 4, bias=False)
    request = PlanRequest(options=UnitOptions(), world_size=2)

    result, _ = plan_modules([layer, layer], request)

    assert result.numel == 16


def test_a_policy_and_a_list_do_not_go_together() -> None:
    """A policy needs one root to look below."""
    request = PlanRequest(options=UnitOptions(), world_size=2, policy=units({}))

    with pytest.raises(PlanError, match="A policy looks for units below one module"):
        plan_modules(list(linears(2)), request)


# ---- parameters tied across units ---------------------------------------------------


def tie(layers: nn.Sequential) -> nn.Sequential:
    """Make the last layer's weight the first one's."""
    layers[-1].weight = layers[0].weight
    return layers


@pytest.mark.req("S0-07", "D-10", "X-29")
def test_a_weight_tied_across_units_is_refused_with_both_names() -> None:
    """The message tells both names, their units, and which module to shard instead."""
    model = nn.Sequential(nn.Linear(2, 2), tie(linears(3, 2)))

    text = refused(model, "same object", policy=units({"1.0": {}, "1.2": {}}))

    assert "Parameter '1.0.weight' of unit '1.0' is the same object as" in text
    assert "'1.2.weight' of unit '1.2'" in text
    assert "Their lowest common ancestor is '1': shard that module" in text
    assert "tied_params='promote'" in text


@pytest.mark.req("S0-07", "D-10")
def test_the_module_that_a_message_names_can_be_sharded() -> None:
    """Doing what the message says is legal, and the weight is in that unit."""
    model = nn.Sequential(nn.Linear(2, 2), tie(linears(3, 2)))

    result = plan(model, world_size=2, policy=units({"1": {}}))

    assert names_of(result)["1"] == ["0.weight", "1.weight"]


@pytest.mark.req("S0-07", "D-10")
def test_promotion_keeps_a_tied_weight_in_the_lowest_unit_above_both() -> None:
    """On request the two units stay, and the weight moves up."""
    model = nn.Sequential(nn.Linear(2, 2), tie(linears(3, 2)))
    choice = units({"1": {}, "1.0": {}, "1.2": {}})

    result = plan(model, world_size=2, policy=choice, tied_params="promote")

    assert names_of(result) == {
        "": ["0.bias", "0.weight"],
        "1": ["0.weight", "1.weight"],
        "1.0": [],
        "1.2": [],
    }
    (slot, *_) = result.units[1].regions[0].parameters
    assert slot.fqns == ("0.weight", "2.weight")


@pytest.mark.req("S0-07", "X-29")
def test_a_tied_head_in_one_unit_is_ordinary() -> None:
    """Token embedding and head are held once, under both names."""
    result = plan(TinyGPT(tied_head=True), world_size=2)

    slots = [slot for region in result.units[0].regions for slot in region.parameters]
    assert ("tokens.weight", "head.weight") in [slot.fqns for slot in slots]


def test_another_word_for_tied_params_is_refused() -> None:
    """Only the two words that mean something are taken."""
    with pytest.raises(PlanError, match="expects 'error' or 'promote', got 'ignore'"):
        plan(nn.Linear(2, 2), world_size=2, tied_params="ignore")


def test_a_parameter_of_an_earlier_unit_is_refused_by_both_names() -> None:
    """What a unit of another call holds cannot be held again."""
    model = nn.Linear(2, 2)
    request = PlanRequest(
        options=UnitOptions(),
        world_size=2,
        owner_of=lambda p: "'emb.weight' of an earlier unit" if p.ndim == 2 else None,
    )

    with pytest.raises(FSDPError, match=r"'weight' is tied to 'emb\.weight' of"):
        plan_modules([model], request)


class TwoPlaces(nn.Module):
    """A weight that ``first`` and ``second`` share, and a third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.second.weight = self.first.weight


def ignored_now(model: TwoPlaces) -> None:
    fully_shard(model, ignored_modules=[model.second])


def ignored_by_the_outer_call(model: TwoPlaces) -> None:
    fully_shard(model.first)
    fully_shard(model, ignored_modules=[model.second])


def ignored_beside(model: TwoPlaces) -> None:
    fully_shard(model.first, ignored_modules=[model.second])


@pytest.mark.req("S0-07", "X-29")
@pytest.mark.parametrize(
    "apply", [ignored_now, ignored_by_the_outer_call, ignored_beside]
)
def test_a_tie_to_an_ignored_module_is_refused_by_name(
    apply: Callable[[TwoPlaces], None],
) -> None:
    """It would compute with this rank's rows, whichever call ignores it."""
    with fake_world(2), pytest.raises(PlanError, match="which is ignored") as caught:
        apply(TwoPlaces())

    assert "weight' is tied to" in str(caught.value) or "earlier" in str(caught.value)
    assert "Ignore both places, or neither" in str(caught.value)


def test_an_ignored_module_may_hold_units_of_its_own() -> None:
    """Their parameters are theirs."""
    with fake_world(2):
        model = TwoPlaces()
        model.second = nn.Linear(4, 4)
        fully_shard(model.second)
        fully_shard(model, ignored_modules=[model.second])


@pytest.mark.req("X-27")
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"])
def test_floats_that_torch_cannot_add_are_refused_by_name(name: str) -> None:
    """A trainable one failed in backward, without a name."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8).view(dtype))

    text = refused(inner(module), "'1.0.weight' is of torch.float")

    assert name in text


def test_frozen_floats_of_eight_bits_are_sharded() -> None:
    """They are gathered as bytes, and no gradient is added."""
    module = nn.Linear(4, 4)
    values = torch.zeros(4, 4).to(torch.float8_e5m2)
    module.weight = nn.Parameter(values, requires_grad=False)

    plan(module, world_size=2)
