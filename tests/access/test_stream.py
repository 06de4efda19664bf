"""``stream_full``, ``boxes`` and ``transfer_plan``: weights for other programs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    set_state_dict_type,
    unshard_params,
)
from composable_fsdp.access import boxes, stream_full, stream_plan, transfer_plan
from composable_fsdp.errors import CompositionError, DesyncError, PhaseError
from composable_fsdp.features import flat_parameters
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.parallel.models import Recipe, batch, mesh_of, sharded
from tests.parallel.models import loss_of as parallel_loss
from tests.support.memory import LiveBytes
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, gpt_input, loss_of
from tests.support.sharded import RankCount, both_paths, gpt, message_of
from tests.support.world import World

KINDS: list[dict[str, Any]] = [
    {},
    {"strategy": ShardingStrategy.NO_SHARD},
    {"cpu_offload": CPUOffload(offload_params=True)},
    {"mixed_precision": MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)},
]


def require_state_dict(model: nn.Module, **how: Any) -> dict[str, Tensor]:
    """What comes is what the full state dict holds, bit by bit; returns it."""
    found = dict(stream_full(model, **how))
    expected = model.state_dict()
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value.to(found[name].device)), name
    return found


@pytest.mark.req("W-01")
@both_paths
@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 30])
@pytest.mark.parametrize("options", KINDS)
@on_ranks(1, 2, 3)
def test_all_tensors_come_as_the_last_step_left_them(
    world: World, path: str, options: dict[str, Any], max_bytes: int
) -> None:
    """As in the state dict, at any size of a bucket; tied ones under each name."""
    model = gpt(path, tied_head=True, **options)
    plain = TinyGPT(tied_head=True).state_dict()
    found = dict(stream_full(model, max_bytes=max_bytes))
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    optimizer = torch.optim.Adam(model.parameters())
    backward(loss_of(model, gpt_input(0, world.rank)))
    optimizer.step()

    found = require_state_dict(model, max_bytes=max_bytes)

    assert not torch.equal(found["head.weight"], plain["head.weight"])
    assert found["head.weight"] is found["tokens.weight"]
    backward(loss_of(model, gpt_input(1, world.rank)))


class WithBuffers(nn.Module):
    """Running averages, a table that is not saved, a scalar, images, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.images = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Linear(8, 5).requires_grad_(False)
        self.adapter = nn.Linear(5, 2, bias=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.norm(self.images(x)).mean((2, 3)) * self.scale
        out: Tensor = self.adapter(self.frozen(pooled)) + self.empty.sum()
        return out


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("max_bytes", [200, 1 << 20])
@on_ranks(2, 3)
def test_persistent_buffers_and_ignored_parameters_come_behind_the_units(
    world: World, max_bytes: int, low: bool
) -> None:
    """And are copies; a buffer that mixed precision has cast has its own dtype."""
    model = WithBuffers()
    half = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    fully_shard(model.norm, mixed_precision=half if low else None)
    fully_shard(
        model,
        ignored_states=[*model.adapter.parameters()],
        mixed_precision=half if low else None,
    )
    model.adapter.bfloat16() if low else None
    model(torch.ones(2, 3, 4, 4))

    found = require_state_dict(model, max_bytes=max_bytes)

    assert list(found)[-4:] == [
        "adapter.weight",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert "table" not in found
    for name in ("adapter.weight", "norm.running_mean"):
        found[name].fill_(9)  # a copy
    assert not torch.equal(
        model.state_dict()["adapter.weight"], found["adapter.weight"]
    )


@pytest.mark.parametrize("max_bytes", [1, 700, 1 << 30])
@on_ranks(4)
def test_replicas_and_flat_parameters_give_the_same(
    world: World, max_bytes: int
) -> None:
    """A pair of replicas of a pair of shards; optimizers that step flat buffers."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    hybrid: dict[str, Any] = {
        "strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": mesh,
    }
    for options in (hybrid, {}):
        model = gpt("composable", **options)
        optimizer = torch.optim.SGD(flat_parameters(model), lr=0.1)
        backward(loss_of(model, gpt_input(0, world.rank)))
        optimizer.step()
        require_state_dict(model, max_bytes=max_bytes)
        for ranks in ([0], [3, 1], [2]):
            found = dict(stream_full(model, max_bytes=max_bytes, ranks=ranks))
            expected = model.state_dict() if world.rank in ranks else {}
            if not expected:
                model.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)


@on_ranks(2)
def test_names_and_a_dtype_choose_what_is_sent(world: World) -> None:
    """In the order of the model; also of a part of a unit."""
    model = gpt("composable", tied_head=True)
    names = ["head.weight", "blocks.1.norm_1.bias", "positions.weight"]

    found = dict(stream_full(model, names=names, dtype=torch.bfloat16))
    block = model.get_submodule("blocks.0.norm_1")
    part = dict(stream_full(block, names=["weight"]))

    expected = model.state_dict()
    assert [*found] == [names[2], names[0], names[1]]
    for name in names:
        assert torch.equal(found[name], expected[name].bfloat16())
    assert torch.equal(part["weight"], expected["blocks.0.norm_1.weight"])
    with pytest.raises(CompositionError, match=r"no persistent buffer 'blocks.7.w'"):
        next(stream_full(model, names=["blocks.7.w"]))
    with pytest.raises(ValueError, match="dtype is 'bf16'"):
        stream_full(model, dtype="bf16")  # type: ignore[arg-type]  # misuse
    with pytest.raises(
        ValueError, match=r"ranks is \(2,\); expected some of range\(0, 2\)"
    ):
        stream_full(model, ranks=[2])
    with pytest.raises(ValueError, match="tensor_parallel is 'all'"):
        stream_full(model, tensor_parallel="all")  # type: ignore[arg-type]  # misuse


@pytest.mark.req("W-01")
@pytest.mark.parametrize("how", ["whole", "local"])
@pytest.mark.parametrize("hidden", [32, 11])
@pytest.mark.parametrize("max_bytes", [1, 700, 1 << 30])
@on_ranks(4)
def test_tensor_parallel_parts_come_whole_or_as_they_are(
    world: World, max_bytes: int, hidden: int, how: Any
) -> None:
    """Also parts that differ in size, whose ranks have other regions."""
    mesh = mesh_of(world, 2)
    model = sharded(Recipe(hidden=hidden, tied=True).parallel(mesh), mesh)
    backward(parallel_loss(model, batch(0, mesh["dp"].get_local_rank())))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = model.state_dict()
    if how == "local":
        with unshard_params(model):
            local: Any = dict(model.named_parameters(remove_duplicate=False))
            expected = {
                name: getattr(value, "_local_tensor", value).detach().clone()
                for name, value in local.items()
            }

    for ranks in (None, [0], [3, 2]):
        given = stream_full(
            model, max_bytes=max_bytes, ranks=ranks, tensor_parallel=how
        )
        found = dict(given)
        if ranks is None or world.rank in ranks:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[n], v) for n, v in expected.items())
        else:
            assert not found


class Ended(Exception):
    """What a caller raises."""


def leave(way: str, given: Iterator[tuple[str, Tensor]], after: int) -> None:
    """Take some tensors and no more."""
    for _ in range(after):
        next(given)
    if way == "raise":
        for _ in given:
            raise Ended
    if way == "close":
        given.close()  # type: ignore[attr-defined]  # a generator
    del given
    gc.collect()


@pytest.mark.req("W-01")
@pytest.mark.parametrize("way", ["raise", "close", "collect"])
@pytest.mark.parametrize("after", [1, 4, 27])
@on_ranks(2, 3)
def test_a_rank_that_leaves_ends_the_iteration_of_all(
    world: World, after: int, way: str
) -> None:
    """By name and without a hang, also in the last bucket; then training goes on."""
    model = gpt("composable")
    given = stream_full(model, max_bytes=2000)
    if world.rank == 1:
        names = [next(given)[0] for _ in range(1)]
        assert names
        del names
        with suppress(Ended):
            leave(way, given, after - 1)
        del given
        gc.collect()
    else:
        with pytest.raises(DesyncError, match="Rank 1 left stream_full of TinyGPT"):
            dict(given)
    backward(loss_of(model, gpt_input(0, world.rank)))
    require_state_dict(model)


@on_ranks(2)
def test_ranks_may_leave_together(world: World) -> None:
    """At the same tensor; nothing waits, and nothing is raised."""
    model = gpt("composable")
    for _, _ in stream_full(model, max_bytes=1):
        break
    next(stream_full(model))
    require_state_dict(model)
    backward(loss_of(model, gpt_input(0, world.rank)))


@pytest.mark.req("W-01")
@on_ranks(2)
def test_a_stream_is_refused_in_a_step_and_a_step_in_a_stream(world: World) -> None:
    """Errors by name, with the way out."""
    model = gpt("composable")
    said: list[str] = []

    def inside(*_: object) -> None:
        said.append(message_of(partial(stream_full, model)))

    hook = model.get_submodule("blocks.0").register_forward_pre_hook(inside)
    loss = loss_of(model, gpt_input(0, world.rank))
    hook.remove()
    assert "stream_full was called on" in said[0]
    assert "Call it between steps" in said[0]
    with unshard_params(model):
        assert "Call it after the block" in message_of(partial(stream_full, model))
    backward(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = stream_full(model, max_bytes=1)
    next(given)
    with pytest.raises(PhaseError, match=r"inside stream_full of \(root\)"):
        loss_of(model, gpt_input(0, world.rank))
    with pytest.raises(PhaseError, match=r"inside stream_full of \(root\)"):
        model.state_dict()
    optimizer.step()
    with pytest.raises(PhaseError, match="Step the optimizer behind the loop"):
        dict(given)
    require_state_dict(model)


def peak_of(model: nn.Module, **how: Any) -> int:
    """The most bytes that are alive beside the shards while the tensors come."""
    with LiveBytes() as live:
        for parameter in model.parameters():
            parameter.detach()
        before = live.now
        live.reset()
        for _ in stream_full(model, **how):
            pass
    return live.peak - before


SIZES = [{"max_bytes": n} for n in (1, 900, 5000, 1 << 30)]


@pytest.mark.req("W-01")
@pytest.mark.parametrize("how", [*SIZES, {"dtype": torch.bfloat16, "max_bytes": 900}])
@pytest.mark.parametrize("to", [None, [0]])
@pytest.mark.parametrize("strategy", [*ShardingStrategy][:3])
@on_ranks(1, 2, 3)
def test_device_memory_is_that_of_the_plan_to_the_byte(
    world: World, strategy: ShardingStrategy, to: list[int] | None, how: dict[str, Any]
) -> None:
    """Shards and two buckets; ranks that do not receive hold none."""
    model = gpt("composable", tied_head=True, strategy=strategy)
    dict(stream_full(model))
    planned = stream_plan(model, ranks=to, **how)

    # Gloo's threads may hold what was sent for a moment longer, but not each time.
    peaks = [peak_of(model, ranks=to, **how) for _ in range(5)]

    sizes = [bucket.nbytes for bucket in planned.buckets]
    flag, found = torch.int32.itemsize, min(peaks)
    if planned.peak_nbytes == flag and found == 2 * flag:
        found -= flag  # of a rank that holds nothing else, that of the agreement before
    assert found == planned.peak_nbytes
    if to is not None and world.rank not in to:
        assert sizes == [0] * len(sizes)
    assert all(
        size <= how["max_bytes"] + 64 or len(bucket.names) <= 2  # with padding
        for size, bucket in zip(sizes, planned.buckets, strict=True)
    )


@pytest.mark.req("W-01")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_weights_of_millions_of_elements_come_in_buckets(
    world: World, dtype: torch.dtype | None
) -> None:
    """Above each size threshold: units that fit a bucket, and one that does not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(3001, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 3001)
    )
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    how: dict[str, Any] = {"max_bytes": 10 << 20, "dtype": dtype}
    planned = stream_plan(model, **how)

    for name, value in stream_full(model, **how):
        assert torch.equal(value, expected.pop(name).to(value.dtype)), name

    assert not expected
    assert peak_of(model, **how) == planned.peak_nbytes


Held = dict[str, list[Any]]
"""By name, offsets and sizes of the boxes that a rank holds: from its state dict."""


def tensor_parallel(world: World, hidden: int = 32) -> nn.Module:
    mesh = mesh_of(world, world.world_size // 2)
    return sharded(Recipe(hidden=hidden).parallel(mesh), mesh)


def replicated(world: World, strategy: ShardingStrategy) -> nn.Module:
    sizes = (2, world.world_size // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = Recipe(hidden=11).plain()
    return sharded(model, mesh, strategy=strategy)


def plain_mesh(world: World, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (world.world_size, 1), mesh_dim_names=("dp", "tp"))
    return sharded(Recipe(hidden=11).plain(), mesh, **options)


def build(world: World, kind: str) -> nn.Module:
    if kind == "FULL":
        return plain_mesh(world)
    if kind == "NO_SHARD":
        return plain_mesh(world, strategy=ShardingStrategy.NO_SHARD)
    if kind == "HYBRID":
        return replicated(world, ShardingStrategy.HYBRID_SHARD)
    return tensor_parallel(world)


def held(world: World, kind: str) -> tuple[Any, Any, Held]:
    """The boxes that a rank computes, without and with replicas, and what it holds."""
    model = build(world, kind)
    model.register_buffer("seen", torch.arange(3))
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    found: Held = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedValue):
            found[name] = [tuple(shard.metadata)[:2] for shard in value.local_shards()]
        else:
            found[name] = [((0,) * value.ndim, tuple(value.shape))]
    return boxes(model), boxes(model, replicas=True), found


@pytest.mark.req("W-02")
@pytest.mark.parametrize(
    ("size", "kind"),
    [(1, "FULL"), (3, "FULL"), (4, "NO_SHARD"), *product((2, 4), ("HYBRID", "TP"))],
)
def test_each_rank_knows_what_all_hold(ranks: RankCount, size: int, kind: str) -> None:
    """As their state dicts have it; the laws of transfers between such boxes are in
    `property_tests/test_hand_over_laws.py`."""
    answers = ranks(size).run(held, kind)

    once, copies, _ = answers[0]
    assert all(answer[:2] == (once, copies) for answer in answers)
    for rank, (_, _, found) in enumerate(answers):
        for name, shards in found.items():
            mine = [box[1:] for box in copies[name] if box[0] == rank]
            assert sorted(mine) == sorted(shards), (rank, name)
            assert {box[1:] for box in once[name]} == {b[1:] for b in copies[name]}
            assert len({box[1:] for box in once[name]}) == len(once[name])


@pytest.mark.req("W-02")
def test_boxes_are_regular_or_refused_and_the_target_asks_for_what_there_is(
    one_rank: World,
) -> None:
    """Errors name the tensor and the way out; scalars and empty tensors have boxes."""
    model = nn.Linear(4, 3)
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.zeros(0, 2))
    found = boxes(fully_shard(model))

    assert found["scale"] == ((0, (), ()),)
    assert found["empty"] == ()
    assert transfer_plan(found, found)[0].box == ((0, 0), (3, 4))
    with pytest.raises(CompositionError, match=r"no tensor 'head'\. It has weight"):
        transfer_plan(found, {"head": ((0, (0,), (1,)),)})
    with pytest.raises(
        CompositionError, match=r"of 'bias' the source lacks 2 elements"
    ):
        transfer_plan({"bias": ((0, (0,), (1,)),)}, {"bias": found["bias"]})
    with pytest.raises(CompositionError, match=r"lacks 3 .* holds \(\(0, \(0, 0\)"):
        transfer_plan(found, {"weight": ((0, (0,), (3,)),)})
    twice = {"bias": (*found["bias"], (1, (0,), (3,)))}
    with pytest.raises(CompositionError, match=r"'bias' the source holds twice 3"):
        transfer_plan(twice, {"bias": found["bias"]})


@on_ranks(2)
def test_parts_of_other_sizes_are_refused_by_name(world: World) -> None:
    """On all ranks: the layouts of the others are not known here."""
    text = message_of(partial(boxes, tensor_parallel(world, 11)))

    assert "CompositionError: boxes: parts of " in text
    assert "differ in size over the ranks of tensor parallelism" in text
