"""What a plan says, and what planning refuses: by name, with the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.testing._internal.two_tensor import TwoTensor

from composable_fsdp import CustomPolicy, fully_shard
from composable_fsdp.compose.registry import set_state
from composable_fsdp.errors import FSDPError, PlanError
from composable_fsdp.planning.assign import PlanRequest
from composable_fsdp.planning.options import UnitOptions
from composable_fsdp.planning.partition import interval_boxes
from composable_fsdp.planning.planner import plan_targets
from composable_fsdp.tools.plan import plan
from tests.planning.trees import linears, names_of, snapshot, units
from tests.support.sharded import message_of
from tests.support.world import fake_world


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


Build = Callable[[], nn.Module]


def refused(model: nn.Module, match: str, **options: Any) -> str:
    """Plan ``model``, expect a refusal that leaves it as it was, return the text."""
    before = snapshot(model)

    text = message_of(lambda: plan(model, **{"world_size": 2, **options}))

    assert re.search(match, text, re.DOTALL), text
    assert snapshot(model) == before
    return text


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


def two_tensors() -> nn.Module:
    model = nn.Linear(4, 4)
    inside = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))  # type: ignore[no-untyped-call]  # torch
    model.weight = nn.Parameter(inside, requires_grad=False)
    return model


class Encodes(TwoTensor):
    """Encodes itself in FSDP2's all-gather, as torchao's Float8 weights may."""

    def fsdp_pre_all_gather(self, mesh: object) -> None:
        raise AssertionError(mesh)


def encoding() -> nn.Module:
    model = nn.Linear(4, 4)
    inside = Encodes(torch.ones(4, 4), torch.ones(4, 4))  # type: ignore[no-untyped-call]  # torch
    model.weight = nn.Parameter(inside)
    return model


def replicated() -> nn.Module:
    model = nn.Linear(2, 2)
    set_state(model, "replicate", object())
    return model


def foreign(root: nn.Module, ignored: object, root_kwargs: object) -> object:
    return {nn.Conv1d(1, 1, 1): {}}


def parts(root: nn.Module, ignored: object, root_kwargs: object) -> object:
    return {("a", "b"): {}}


def sure_of_the_root(module: nn.Module) -> bool:
    return True if isinstance(module, nn.Sequential) else None  # type: ignore[return-value]  # the mistake


PARAMETERS: dict[str, Build] = {
    "Embedding '1.0' has max_norm=1": lambda: inner(nn.Embedding(4, 2, max_norm=1.0)),
    "EmbeddingBag '1.0' has max_": lambda: inner(nn.EmbeddingBag(4, 2, max_norm=2.0)),
    "Embedding '1.0' has sparse=": lambda: inner(nn.Embedding(4, 2, sparse=True)),
    "'1.0.weight' is not initialised": lambda: inner(nn.LazyLinear(3)),
    "'1.0.weight' has layout torch.sparse_coo; expected": sparse_parameter,
    "'0.weight' and '1.weight' are different objects that share memory": overlapping,
    "'weight' is a TwoTensor, a tensor class with": two_tensors,
    r"enable_fsdp_float8_all_gather=False.*wire=Float8Wire\(\)": encoding,
    "Composition.* got a ModuleList.* pass them as a list": nn.ModuleList,
    "Composition.* got a ModuleDict.* pass them as a list": nn.ModuleDict,
    "Composition.* got a ParameterList": nn.ParameterList,
    "Composition.* a Linear that replicate already manages": replicated,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "PlanError.* number of ranks, got 0": {"world_size": 0},
    r"PlanError.* number of ranks, got 2\.0": {"world_size": 2.0},
    "TypeError.*ignored_states expects parameters": {"ignored_states": ["w"]},
    "TypeError.*ignored_modules expects modules": {"ignored_modules": [1]},
    "PlanError.*'error' or 'promote', got 'ignore'": {"tied_params": "ignore"},
    "'colour' for module '0'": {"policy": units({"0": {"colour": 1}})},
    "limit_all_gathers must be equal": {
        "policy": units({"0": {"limit_all_gathers": False}})
    },
    "TypeError.*expects one of the forms": {"policy": 3},
    "TypeError.*ModuleWrapPolicy": {"policy": {nn.Linear}},
    "TypeError.*return a dict": {"policy": lambda m, recurse, numel: True},
    "TypeError.*options per module, got 1": {
        "policy": lambda root, ignored, root_kwargs: {root: 1}
    },
    "foreign module: a Conv1d that is not below": {"policy": foreign},
    "TypeError.*make the part a module of its own": {"policy": parts},
    "got None for module '0'": {"policy": CustomPolicy(sure_of_the_root)},
}


@pytest.mark.req("X-27", "X-30", "B-02", "S0-10", "M-06")
@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("text", [*PARAMETERS, *ARGUMENTS])
def test_what_cannot_be_planned_is_refused_by_name(text: str) -> None:
    """With what was expected and what came, and the tree is as it was."""
    build = PARAMETERS.get(text, partial(linears, 2))

    refused(build(), text, **ARGUMENTS.get(text, {}))


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


def test_a_parameter_of_an_earlier_unit_is_refused_by_both_names() -> None:
    """What a unit of another call holds cannot be held again."""
    model = nn.Linear(2, 2)
    request = PlanRequest(
        options=UnitOptions(),
        world_size=2,
        held={id(p) for p in model.parameters()},
        owner_of=lambda p: "'emb.weight' of an earlier unit" if p.ndim == 2 else None,
    )

    with pytest.raises(FSDPError, match=r"'weight' is tied to 'emb\.weight' of"):
        plan_targets([model], request)


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
