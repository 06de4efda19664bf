"""SHARDED_STATE_DICT, its values, and torch.distributed.checkpoint on them."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp import (
    Block,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    optim_state_dict,
    set_state_dict_type,
    state_dict_type,
    unshard,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.fsdp2 import fully_shard as fsdp2_fully_shard
from composable_fsdp.optim.save import local_state_dict
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    differences,
    gpt_input,
)
from tests.support.sharded import RankCount, both_paths, gpt, message_of
from tests.support.world import World

SHARDED = StateDictType.SHARDED_STATE_DICT


def sharded(model: nn.Module, **options: Any) -> dict[str, Any]:
    """The model's state dict of sharded values."""
    with state_dict_type(model, SHARDED, ShardedStateDictConfig(**options)):
        return model.state_dict()


class Payload(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base
    """Notes collectives that carry numbers, while it is entered.

    Objects are pickled into tensors of bytes, which do not count: plans are objects.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's base
        self.sent: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            flat = _pytree.tree_leaves((args, kwargs))
            tensors = [t for t in flat if isinstance(t, Tensor)]
            if any(t.is_floating_point() and t.numel() for t in tensors):
                self.sent.append(str(func))
        return func(*args, **(kwargs or {}))


def save_sending_nothing(state: dict[str, Any], folder: Path) -> Any:
    """``dcp.save``, whose metadata it returns; no rank may send a number."""
    with Payload() as mode:
        metadata = dcp_save(state, checkpoint_id=folder)
    assert mode.sent == []
    return metadata


def load_sending_nothing(state: dict[str, Any], folder: Path) -> None:
    """``dcp.load`` into ``state``, the same."""
    with Payload() as mode:
        dcp_load(state, checkpoint_id=folder)
    assert mode.sent == []


class Corners(nn.Module):
    """What boxes have trouble with: no dimension, no element, one element."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {
            "scale": (),
            "one": (1,),
            "empty": (0, 4),
            "flat": (3, 0),
            "cube": (3, 2, 2),
            "bias": (5,),
        }.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(value))
        self.register_buffer("seen", torch.tensor(float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + torch.stack([p.sum() for p in self.parameters()]).sum()
        return total


def corners(
    path: str,
    block: Block,
    seed: int,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
) -> tuple[nn.Module, Any]:
    model: nn.Module = Corners(seed)
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if path == "composable":
        fully_shard(model, block=block, strategy=strategy, device_mesh=mesh)
    elif path == "wrapper":
        model = FullyShardedDataParallel(
            model, sharding_strategy=strategy, device_mesh=mesh
        )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.req("S1-32")
@on_ranks(3)
def test_full_and_sharded_values_are_loaded_whichever_is_set(world: World) -> None:
    """What a value is can be seen from the value. Nothing is sent."""
    model = gpt("wrapper", seed=3)
    full, mine = model.state_dict(), sharded(model)
    for kind in (StateDictType.FULL_STATE_DICT, SHARDED):
        for state in (full, mine):
            other = gpt("wrapper", seed=5)
            set_state_dict_type(other, kind)
            with record() as calls:
                other.load_state_dict(state)
            assert calls == []
            set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
            assert differences(other.state_dict(), full) == {}


@pytest.mark.req("U-02")
@on_ranks(2)
def test_sharded_values_of_another_plan_are_refused(world: World) -> None:
    """The parameter, both parts, and the way out; on every rank."""
    mine = sharded(gpt("wrapper"))
    other = apply_units(TinyGPT(seed=5), ["blocks.0"])
    set_state_dict_type(other, SHARDED)
    text = message_of(lambda: other.load_state_dict(mine))
    assert 'copying the parameter named "blocks.1.norm_1.weight"' in text
    assert "expects another ShardedValue with elements [" in text
    assert "Use torch.distributed.checkpoint to go from one" in text
    text = message_of(lambda: TinyGPT().load_state_dict(mine))
    assert "Use value.local for this rank's elements" in text


@pytest.mark.req("S1-32", "S1-14")
@on_ranks(2)
def test_the_type_is_that_of_the_tree_the_call_is_made_on(world: World) -> None:
    """A unit may have its own; one state dict of two types is refused."""
    model = gpt("wrapper")
    rest, inner = model.get_submodule("blocks").children()
    set_state_dict_type(inner, SHARDED)
    for module, expected in ((inner, True), (rest, False)):
        values = module.state_dict().values()
        assert all(isinstance(value, ShardedValue) == expected for value in values)
    text = message_of(model.state_dict)
    assert "state_dict expects one type for all units; 'blocks.1' is set to " in text
    assert "SHARDED_STATE_DICT, the unit it is in to FULL_STATE_DICT" in text


@pytest.mark.req("U-02")
@on_ranks(2)
def test_a_sharded_value_is_no_tensor_to_compute_with(world: World) -> None:
    """It can be printed, copied, moved and pickled; the rest says what to use."""
    model = gpt("composable")
    value = sharded(model)[CUT]
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    copies: list[Any] = [torch.load(file), copy.deepcopy(value), value.clone()]
    for copied in copies:
        assert copied.is_part_like(value)
        assert torch.equal(copied.local, value.local)
        assert copied.local.data_ptr() != value.local.data_ptr()
    text = message_of(copies[0].full_tensor)
    assert "CheckpointError: full_tensor expects a value whose process gr" in text
    assert "that was pickled, with elements [" in text
    assert value.detach().local.data_ptr() == value.local.data_ptr()
    wide: Any = value.to(torch.float64)
    zeros: Any = torch.zeros_like(value)
    assert wide.local.dtype == torch.float64
    assert torch.equal(zeros.local, torch.zeros(zeros.local.shape))
    assert (value.size(), value.numel(), value.ndim) == (torch.Size([6, 8]), 48, 2)
    mean = value.clone().mul_(0.5).add_(value / 2) + 0 * value
    assert torch.equal(mean.local, value.local)
    part = "[32, 48)" if world.rank else "[0, 32)"
    assert repr(value).startswith(
        "ShardedValue(shape=(6, 8), dtype=torch.float32, device='cpu', elements "
        f"{part} of 48 on rank {world.rank} of 2, local=tensor("
    )
    whole = torch.zeros(6, 8)
    this_rank = "Use value.local for this rank's elements"
    acts: list[tuple[Callable[[], object], str]] = [
        (lambda: torch.add(value, whole), "same cut, got a plain tensor of"),
        (lambda: value + whole, "unsupported operand type(s) for +"),
        (lambda: value[0], this_rank),
        (lambda: torch.cat([value, value]), this_rank),
        (lambda: whole.copy_(value), this_rank),
        (lambda: value.copy_(whole), this_rank),
        (
            lambda: sharded(model)["head.weight"].copy_(value),
            "expects another ShardedValue with elements [",
        ),
        (value.sum, ""),
    ]
    for act, words in acts:
        text = message_of(act)
        assert text.startswith("TypeError: "), text
        assert words in text


CUT = "positions.weight"


def refusal_of(act: Callable[[], object]) -> str:
    # Torch says that it saves alone, and its exception is no Exception.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointException) as caught:
            act()
    (error,) = {str(each[0]) for each in caught.value.failures.values()}
    return error


def save_alone(world: World, folder: Path) -> str:
    value: Any = sharded(gpt("composable"))[CUT]
    if world.rank:
        return ""
    save = partial(dcp_save, {CUT: value}, checkpoint_id=folder, no_dist=True)
    text = refusal_of(save)
    value.world_size = 1  # as if that part were all there is
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save()
    return text


def load_holes(world: World, folder: Path) -> str:
    state = {CUT: sharded(gpt("composable", seed=5))[CUT]}
    return refusal_of(lambda: dcp_load(state, checkpoint_id=folder))


def test_a_checkpoint_with_holes_is_neither_saved_nor_loaded(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Torch itself would load what is there and leave the rest as it was."""
    text = ranks(2).run(save_alone, tmp_path)[0]

    assert "'positions.weight' is in 2 parts, got 1 ranks to save it" in text
    for after, box in (1, "(0, 0) of size (6, 8)"), (2, "(4, 0) of size (2, 8)"):
        found = ranks(after).run(load_holes, tmp_path)
        assert all(
            f"not whole in the checkpoint: of the box at {box}" in t for t in found
        )


@pytest.mark.req("B-08")
@on_ranks(3)
def test_a_model_on_meta_is_filled_from_a_checkpoint(
    world: World, tmp_path: Path
) -> None:
    """No rank ever has more than its part in memory."""
    source = gpt("composable", seed=3)
    save_sending_nothing(sharded(source), tmp_path)
    with torch.device("meta"):
        plain = TinyGPT()
    model = apply_units(plain, ["blocks.0", "blocks.1"])
    state = sharded(model)
    assert all(value.is_meta for value in state.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls a function that it deprecates
        dcp_load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state, assign=True)
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()

    assert differences(model.state_dict(), source.state_dict()) == {}


def save_corners(
    world: World, path: str, block: Block, strategy: ShardingStrategy, folder: Path
) -> Any:
    model, optimizer = corners(path, block, 3, strategy)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with state_dict_type(model, SHARDED):
        saved = {
            "model": model.state_dict(),
            "optim": optim_state_dict(model, optimizer),
        }
    metadata = save_sending_nothing(saved, folder).state_dict_metadata
    chunks = {n: each.chunks for n, each in metadata.items() if n.startswith("model.")}
    # Each element is saved once.
    for name, value in Corners().state_dict().items():
        found = chunks[f"model.{name}"]
        assert sum(chunk.sizes.numel() for chunk in found) == value.numel(), name
    return dict(model.state_dict()), optim_state_dict(model, optimizer)["state"]


def load_corners(world: World, block: Block, folder: Path, expected: Any) -> None:
    cut, copies = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
    for path, strategy in zip(("plain", *PATHS), (cut, cut, copies), strict=True):
        model, optimizer = corners(path, block, 5, strategy)
        weights, state = get_state_dict(model, optimizer)
        found: dict[str, Any] = {"model": weights, "optim": state}
        load_sending_nothing(found, folder)
        with record() as calls:
            model.load_state_dict(found["model"])
        assert calls == []
        set_optimizer_state_dict(model, optimizer, found["optim"])

        assert _same(dict(model.state_dict()), expected[0])
        state = optim_state_dict(model, optimizer)["state"]
        assert _same(state, expected[1])
        whole = StateDictOptions(full_state_dict=True)
        full = get_optimizer_state_dict(model, optimizer, options=whole)
        new = torch.optim.AdamW(model.parameters(), lr=0.1)
        set_optimizer_state_dict(model, new, full, options=whole)
        assert _same(
            local_state_dict(new)["state"], local_state_dict(optimizer)["state"]
        )


@pytest.mark.req("X-28", "S1-14", "S1-32", "S1-34")
@pytest.mark.parametrize(
    ("path", "block", "strategy", "size"),
    [
        ("wrapper", Block.ROW, ShardingStrategy.FULL_SHARD, 3),
        ("composable", Block.ELEMENT, ShardingStrategy.SHARD_GRAD_OP, 3),
        ("composable", Block.ROW, ShardingStrategy.NO_SHARD, 3),
        ("wrapper", Block.ROW, ShardingStrategy.HYBRID_SHARD, 4),
    ],
)
def test_parameters_of_any_shape_go_through_a_checkpoint(
    ranks: RankCount,
    path: str,
    block: Block,
    strategy: ShardingStrategy,
    size: int,
    tmp_path: Path,
) -> None:
    """Without dimensions, without elements, cut inside rows; from either path to both,
    at another world size, and no tensor is sent."""
    expected = ranks(size).run(save_corners, path, block, strategy, tmp_path)[0]

    for after in (1, 2):
        ranks(after).run(load_corners, block, tmp_path, expected)


def models(path: str) -> list[tuple[nn.Module, Any]]:
    """A GPT, and parameters of every odd shape; with elements cut on one door."""
    found: list[tuple[nn.Module, Any]] = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = gpt(path, strategy=strategy)
        found.append((model, adamw(model.parameters())))
    for block in Block if path == "composable" else (Block.ROW,):
        found.append(corners(path, block, seed=1))
    return found


@on_ranks(2, 3)
@both_paths
def test_parts_boxes_and_the_whole_are_those_of_the_parameter(
    world: World, path: str
) -> None:
    """Also of copies and casts; ``full_tensor`` alone sends something."""
    for model, _ in models(path):
        full = model.state_dict()
        for name, value in sharded(model).items():
            if not isinstance(value, ShardedValue):
                continue
            assert value.to_local() is value.local
            with record() as calls:
                pieces = value.local_shards()
            assert calls == []
            for piece, box in zip(pieces, value.boxes, strict=True):
                offsets, sizes = (
                    piece.metadata.shard_offsets,
                    piece.metadata.shard_sizes,
                )
                assert (offsets, sizes) == (box.offsets, box.sizes)
                cut = tuple(
                    slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)
                )
                assert torch.equal(piece.tensor, full[name][cut]), name
            forms: tuple[Any, ...] = (value, copy.deepcopy(value), value.double())
            for each in forms:
                whole = each.full_tensor()
                assert type(whole) is torch.Tensor
                assert torch.equal(whole, full[name].to(each.dtype)), name


@pytest.mark.parametrize("door", ["torch", "fsdp2", "composable"])
@on_ranks(2)
def test_a_state_dict_for_dcp_follows_the_model(world: World, door: str) -> None:
    """A checkpointer may keep it, as torchtitan's does, and load into it alone."""
    entry = {"torch": torch_fully_shard, "fsdp2": fsdp2_fully_shard}.get(door)
    model = TinyGPT()
    shard: Any = entry or fully_shard
    for part in (*model.blocks, model):
        if door == "composable":
            shard(part, strategy=ShardingStrategy.SHARD_GRAD_OP)
        else:
            shard(part, reshard_after_forward=False)
    kept: dict[str, Any] = get_model_state_dict(model)
    named = model.state_dict() if entry else {}

    optimizer = adamw(model.parameters())
    model(gpt_input(0, world.rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    now: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    )
    for name, value in now.items():
        assert torch.equal(kept[name].full_tensor(), value), name
        assert not entry or torch.equal(named[name].full_tensor(), value), name

    # Into a unit that is full, because an evaluation has left it so.
    with torch.no_grad():
        before = model(gpt_input(1, 0))
        for value in kept.values():
            value.to_local().mul_(0.5)
        for part in (*model.blocks, model) if door == "torch" else ():
            part.reshard()  # it would go on with the values before
        halved = model(gpt_input(1, 0))
    plain = TinyGPT()
    plain.load_state_dict({name: value / 2 for name, value in now.items()})
    assert not torch.equal(before, halved)
    assert torch.allclose(halved, plain(gpt_input(1, 0)), atol=1e-6)


@pytest.mark.parametrize("by", ["dcp", "operator", "local"])
@on_ranks(3)
def test_a_write_to_the_values_of_a_unit_that_is_kept_full_is_no_silent_loss(
    world: World, tmp_path: Path, by: str
) -> None:
    """Rank 2 holds no element of the layer, and refuses with the others."""
    model = fully_shard(nn.Linear(2, 2, bias=False))
    values: dict[str, Any] = get_model_state_dict(model)
    dcp_save(values, checkpoint_id=tmp_path)
    unshard(model)
    if by == "dcp":
        dcp_load(values, checkpoint_id=tmp_path)
    for value in values.values() if by != "dcp" else ():
        (value if by == "operator" else value.local).mul_(2)
    if by != "local" or values["weight"].local.numel():
        assert "were written to" in message_of(lambda: model(torch.ones(1, 2)))
    model.load_state_dict(values)
    full = model.state_dict()["weight"]
    torch.testing.assert_close(model(torch.ones(1, 2)), full.sum(1)[None])
