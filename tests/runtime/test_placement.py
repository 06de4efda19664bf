"""Which device computes, what is moved there, and what happens to parameters later.

Other devices than the CPU are played by fake tensors; the GPU tests have real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from composable_fsdp import (
    CPUOffload,
    PlanError,
    clip_grad_norm_,
    fully_shard,
    no_sync,
)
from composable_fsdp.comm.compute_device import resolve_device
from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.flat.external_changes import _device
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.runtime.nested_tensors import to_device
from composable_fsdp.tree.state import _get_module_fsdp_state
from composable_fsdp.tree.traversal import _get_fsdp_handles, _get_fsdp_states
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    Optimize,
    adamw,
    apply_units,
    assert_same_training,
    backward,
    gpt_input,
    gpt_units,
    gradients_of,
    loss_of,
    sgd,
    tolerance_at,
    train,
    train_reference,
    wide_input,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
META = torch.device("meta")
CUDA = torch.device("cuda", 0)


def on_cuda(*shape: int) -> nn.Parameter:
    """A parameter that says it is on a GPU."""
    with FakeTensorMode():
        return nn.Parameter(torch.empty(shape, device=CUDA))


# ---- the compute device -----------------------------------------------------

CASES: list[tuple[Any, str | None, str, torch.device, torch.device]] = [
    # device_id, the mesh's type, backend, where parameters are, where compute is
    (None, None, "gloo", torch.device("cpu"), torch.device("cpu")),
    (None, None, "gloo", CUDA, CUDA),
    (None, None, "gloo", META, torch.device("cpu")),
    (None, None, "nccl", torch.device("cpu"), torch.device("cuda", 3)),
    (None, None, "nccl", META, torch.device("cuda", 3)),
    # What init_process_group() makes without a backend, where there is a GPU.
    (None, None, "cpu:gloo,cuda:nccl", torch.device("cpu"), torch.device("cuda", 3)),
    (None, None, "cpu:gloo", torch.device("cpu"), torch.device("cpu")),
    # The current device is another.
    (None, None, "nccl", CUDA, CUDA),
    (None, "cuda", "nccl", CUDA, CUDA),
    (None, "cpu", "nccl", CUDA, torch.device("cpu")),
    (None, "cuda", "gloo", torch.device("cpu"), torch.device("cuda", 3)),
    (1, "cuda", "nccl", CUDA, torch.device("cuda", 1)),
    (torch.device("cuda"), None, "gloo", CUDA, torch.device("cuda", 3)),
    (torch.device("cpu"), "cuda", "nccl", CUDA, torch.device("cpu")),
]


@pytest.mark.req("S2-09")
@pytest.mark.parametrize(("device_id", "mesh", "backend", "where", "expected"), CASES)
def test_the_compute_device_is_the_first_that_somebody_names(
    monkeypatch: pytest.MonkeyPatch,
    one_rank: World,
    device_id: Any,
    mesh: str | None,
    backend: str,
    where: torch.device,
    expected: torch.device,
) -> None:
    """``device_id``, the mesh's, cuda under NCCL, else where the parameters are."""
    served = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}.get(backend, backend)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: served)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    layout = RankLayout(one_rank.group, None, mesh)
    with FakeTensorMode():
        parameter = torch.empty(2, device=where)

    assert resolve_device(device_id, layout, [parameter]) == expected


@pytest.mark.req("S2-09")
@pytest.mark.parametrize(
    ("local_rank", "used", "bound", "expected"),
    [
        ("2", False, None, 2),
        ("2", True, None, 0),
        ("9", False, None, 0),
        ("", False, None, 0),
        ("2", False, 1, 1),
    ],
)
def test_ranks_of_a_node_do_not_meet_on_its_first_gpu(
    monkeypatch: pytest.MonkeyPatch,
    one_rank: World,
    local_rank: str,
    used: bool,
    bound: int | None,
    expected: int,
) -> None:
    """Nobody chose a GPU: that of torchrun's rank is, and it is made the current one,
    unless the process has used one or the group was bound to one."""
    current = [0]
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda at: current.append(at))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    if bound is not None:
        one_rank.group.bound_device_id = torch.device("cuda", bound)

    device = resolve_device(None, RankLayout(one_rank.group, None, None), [])

    assert device == torch.device("cuda", expected)
    assert current[-1] == (expected if bound is None else 0)


@pytest.mark.req("S2-09")
def test_a_root_without_parameters_computes_where_its_units_do(one_rank: World) -> None:
    """It has the streams of all, so it must not be taken for a module on the host."""
    model = nn.Sequential(nn.Linear(4, 4))
    below = _get_module_fsdp_state(fully_shard(model[0]))
    assert below is not None
    # Unlike what any parameter says.
    cpu = torch.device("cpu", 0)
    below.handle.layout = replace(below.handle.layout, device=cpu)

    fully_shard(model)

    (root, _) = _get_fsdp_states(model)
    assert root.device == below.device


@pytest.mark.req("S2-09")
def test_moving_an_offloaded_model_to_a_gpu_is_an_error(one_rank: World) -> None:
    """It would take the shards from the host; the message says when to move."""
    model = fully_shard(tiny_mlp(), cpu_offload=CPUOffload(offload_params=True))
    for name in ("0", "2"):
        layer = model.get_submodule(name)
        layer.weight = on_cuda(*model.get_parameter(f"{name}.weight").shape)

    with pytest.raises(PlanError) as caught:
        model(torch.ones(1, 8))

    assert str(caught.value) == (
        "Parameter '0.weight' was moved to cuda:0 after fully_shard with cpu_offload, "
        "which keeps it on the host. Move the model before fully_shard, or not at all: "
        "the compute device is cpu. [rank 0]"
    )


@pytest.mark.req("S2-09")
def test_a_model_moved_to_a_gpu_after_sharding_computes_there(one_rank: World) -> None:
    """All of a unit on another device than the CPU: that is the device from now on."""
    (handle,) = _get_fsdp_handles(fully_shard(tiny_mlp()))
    moved = {i: on_cuda(*leaf.shape) for i, leaf in enumerate(handle.leaves)}

    assert _device(handle, moved) == CUDA
    assert _device(handle, {**moved, 0: handle.leaves[0]}) == torch.device("cpu")


# ---- inputs -----------------------------------------------------------------


class Pair(NamedTuple):
    """A named tuple."""

    left: Tensor
    right: list[Tensor]


@dataclass
class Record:
    """A dataclass that pytree does not know."""

    value: Tensor
    name: str


@pytest.mark.req("B-05")
def test_inputs_are_moved_at_any_depth(one_rank: World) -> None:
    """Tuples, lists, dicts, named tuples and dataclasses; everything else is kept."""
    x = torch.ones(2)
    kept = object()
    args = (x, Pair(x, [x]), {"a": (x, 3)}, Record(x, "r"), kept)

    moved = to_device(args, {"k": x, "n": None}, META)

    assert moved is not None
    (first, pair, table, record, last), kwargs = moved
    assert type(pair) is Pair
    assert table["a"][1] == 3
    assert record.name == "r"
    assert last is kept
    assert kwargs["n"] is None
    for tensor in (
        first,
        *pair[1],
        pair.left,
        table["a"][0],
        record.value,
        kwargs["k"],
    ):
        assert tensor.is_meta
    assert not x.is_meta


@pytest.mark.req("B-05")
def test_inputs_that_are_in_place_are_not_touched(one_rank: World) -> None:
    """Nothing is built anew, and a gradient flows back through a move."""
    x = torch.ones(2, requires_grad=True)

    assert to_device((x, [x], {"a": x}), {"k": x}, x.device) is None
    moved = to_device((x,), {}, META)
    assert moved is not None
    assert moved[0][0].grad_fn is not None


# ---- parameters changed before the first forward ----------------------------


@pytest.mark.req("B-07")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(1, 2)
def test_a_model_cast_after_sharding_trains_in_that_dtype(
    world: World, path: str, dtype: torch.dtype
) -> None:
    """Wider and narrower, equal to the plain model cast alike.

    ``.to(dtype)`` after sharding, before the optimizer and the first forward.
    """
    model = TinyGPT()
    plain = copy.deepcopy(model).to(dtype)
    sharded = apply_units(model, gpt_units(model), path=path).to(dtype)
    tolerance = tolerance_at(world.world_size)

    expected = train_reference(plain, world.world_size, gpt_input, adamw)
    losses = train(sharded, world.rank, gpt_input, adamw)

    mine = [step[world.rank] for step in expected]
    assert all(p.dtype == dtype for p in sharded.parameters())
    assert all(v.dtype == dtype for v in sharded.state_dict().values())
    assert_same_training(sharded, plain, losses, mine, tolerance=tolerance)


@pytest.mark.req("B-07")
@pytest.mark.parametrize("optimize", [sgd, adamw])
@on_ranks(1, 2)
def test_a_parameter_that_was_replaced_is_the_one_that_trains(
    world: World, optimize: Optimize
) -> None:
    """An optimizer made after holds the new object, as with a plain module.

    Give a sharded layer a new parameter, then make the optimizer.
    """
    model = tiny_mlp(6, hidden=7)
    plain = copy.deepcopy(model)
    fully_shard(model.get_submodule("0"))
    fully_shard(model)
    plain.get_parameter("0.weight").data.fill_(0.1)
    shard = model.get_parameter("0.weight")
    new = nn.Parameter(torch.full_like(shard, 0.1))
    model.get_submodule("0").weight = new

    expected = train_reference(plain, world.world_size, wide_input(6), optimize)
    losses = train(model, world.rank, wide_input(6), optimize)

    mine = [step[world.rank] for step in expected]
    assert model.get_parameter("0.weight") is new
    assert find_leaf(new) is not None
    assert find_leaf(shard) is None
    assert_same_training(model, plain, losses, mine)


@pytest.mark.req("B-07")
def test_values_written_through_data_reach_the_shard(one_rank: World) -> None:
    """The object stays; its memory is the shard's again."""
    model = fully_shard(tiny_mlp())
    weight = model.get_parameter("0.weight")
    weight.data = torch.full_like(weight, 0.5)

    model(torch.ones(1, 8))

    (handle,) = _get_fsdp_handles(model)
    assert model.get_parameter("0.weight") is weight
    assert weight.data_ptr() == handle.layout.regions[0].shard.data_ptr()
    assert torch.equal(model.state_dict()["0.weight"], torch.full((12, 8), 0.5))


@pytest.mark.req("B-07")
def test_to_empty_after_sharding_makes_room_for_new_values(one_rank: World) -> None:
    """On a model that has values already, too."""
    model = fully_shard(tiny_mlp(seed=1)).to_empty(device="cpu")
    values = tiny_mlp(seed=2).state_dict()

    model.load_state_dict(values)
    model(torch.ones(1, 8))

    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])


def test_a_cast_between_steps_keeps_gradients(one_rank: World) -> None:
    """As a plain module does."""
    model = fully_shard(tiny_mlp())
    plain = tiny_mlp()
    x = torch.ones(1, 8)
    for each in (model, plain):
        backward(loss_of(each, x))
        each.to(torch.float64)
        backward(loss_of(each, x.double()))

    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.float64
        torch.testing.assert_close(ours.grad.view_as(theirs), theirs.grad)


def test_a_leaf_that_was_taken_over_is_clipped_and_found(one_rank: World) -> None:
    """The table of leaves follows: the norm counts the flat gradient once."""
    model = fully_shard(tiny_mlp()).to(torch.float64)
    plain = tiny_mlp().to(torch.float64)
    x = torch.ones(1, 8, dtype=torch.float64)
    expected = gradients_of(plain, [x])
    backward(loss_of(model, x))

    norm = clip_grad_norm_(model, 1e9)

    squares = [value.square().sum() for value in expected.values()]
    torch.testing.assert_close(norm, torch.stack(squares).sum().sqrt())


# ---- refusals ---------------------------------------------------------------


def test_a_cast_while_gradients_wait_is_refused(one_rank: World) -> None:
    """Those of ``no_sync`` are in the old dtype, and would be lost."""
    model = fully_shard(tiny_mlp())
    with no_sync(model):
        backward(loss_of(model, torch.ones(1, 8)))
    model.to(torch.float64)

    with pytest.raises(PlanError, match=r"gradients of no_sync wait"):
        model(torch.ones(1, 8, dtype=torch.float64))


def test_one_parameter_of_another_dtype_is_refused(one_rank: World) -> None:
    """A region has one dtype; the parameter is named."""
    model = fully_shard(tiny_mlp())
    model[2].bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    with pytest.raises(PlanError, match=r"'2.bias' was changed after fully_shard"):
        model(torch.ones(1, 8))


def test_untying_after_sharding_is_refused(one_rank: World) -> None:
    """The plan holds one parameter for both places."""
    model = fully_shard(TinyGPT(tied_head=True))
    model.head.weight = nn.Parameter(torch.zeros(17, 8))

    with pytest.raises(PlanError, match=r"places of tied parameter 'tokens.weight'"):
        model(gpt_input(0, 0))


def test_a_question_before_the_first_forward_takes_up_as_well(one_rank: World) -> None:
    """And does not decide who is the root."""
    model = fully_shard(tiny_mlp()).to(torch.float64)

    assert model.state_dict()["0.weight"].dtype == torch.float64
    state = fully_shard.state(model)
    assert state is not None
    assert state._is_root is None


def test_a_frozen_parameter_may_take_the_place_of_a_trainable_one(
    one_rank: World,
) -> None:
    """It is taken up and moves to a frozen region; a cast keeps it there."""
    model = fully_shard(tiny_mlp())
    first = model.get_submodule("0")
    first.weight = nn.Parameter(torch.ones(12, 8), requires_grad=False)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)

        backward(loss_of(model, torch.ones(1, 8, dtype=dtype)))

        (handle,) = _get_fsdp_handles(model)
        kinds = {(r.layout.trainable, r.layout.dtype) for r in handle.layout.regions}
        assert kinds == {(True, dtype), (False, dtype)}
        assert model.get_parameter("0.weight").grad is None
        assert model.get_parameter("0.bias").grad is not None
        assert all(v.dtype == dtype for v in model.state_dict().values())
    model.get_parameter("0.weight").requires_grad_(True)
    backward(loss_of(model, torch.ones(1, 8, dtype=torch.float64)))
    assert model.get_parameter("0.weight").grad is not None
