"""SHARDED_STATE_DICT of a model, and torch.distributed.checkpoint on it."""

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
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    ShardingStrategy,
    StateDictType,
    set_state_dict_type,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.state_dict.dcp_tools import (
    SHARDED,
    Payload,
    load_sending_nothing,
    save_sending_nothing,
    sharded,
)
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, STRATEGIES, apply_units, differences
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    message_of,
)
from tests.support.world import World

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


@pytest.mark.req("S1-32")
@on_ranks(2, 3)
@both_paths
def test_sharded_values_are_this_ranks_rows_under_the_plain_names(
    world: World, path: str
) -> None:
    """Shape and dtype of the whole, memory of the part, one box each, nothing sent."""
    model = gpt(path, tied_head=True)
    full = model.state_dict()
    with record() as calls:
        saved = sharded(model)

    assert calls == []
    assert list(saved) == list(full)
    tied = saved["tokens.weight"].local, saved["head.weight"].local
    assert tied[0].data_ptr() == tied[1].data_ptr()
    for name, value in saved.items():
        assert isinstance(value, ShardedValue)
        assert (value.shape, value.dtype) == (full[name].shape, full[name].dtype)
        assert len(value.boxes) <= 1  # rows are not cut
        part = full[name].reshape(-1)[value.start : value.stop]
        assert torch.equal(value.local.reshape(-1), part)


def save(world: World, path: str, folder: Path, strategy: ShardingStrategy) -> None:
    saved = sharded(gpt(path, seed=3, strategy=strategy))
    save_sending_nothing({"model": saved}, folder)


def load(world: World, folder: Path, strategy: ShardingStrategy) -> None:
    expected = TinyGPT(seed=3).state_dict()
    for path in PATHS:
        model = gpt(path, seed=5, strategy=strategy)
        state = {"model": sharded(model)}
        load_sending_nothing(state, folder)
        with record() as calls:
            model.load_state_dict(state["model"])
        assert calls == []
        assert differences(model.state_dict(), expected) == {}


@pytest.mark.req("S1-32", "S1-34")
@pytest.mark.parametrize("before", [2, 3])
@every_strategy
@both_paths
def test_what_dcp_saved_on_one_path_both_load_at_any_world_size(
    ranks: RankCount, path: str, strategy: ShardingStrategy, before: int, tmp_path: Path
) -> None:
    """Bit by bit, and no tensor is sent between ranks on the way out or in."""
    ranks(before).run(save, path, tmp_path, strategy)

    for after in (1, 2, 4):
        ranks(after).run(load, tmp_path, strategy)


def test_the_payload_counter_sees_a_tensor_that_is_sent(one_rank: World) -> None:
    """Else the claims above would hold of anything."""
    with Payload() as mode:
        dist.all_reduce(torch.ones(1))

    assert mode.sent == ["c10d.allreduce_.default"]


@pytest.mark.req("S1-32")
@on_ranks(2, 3)
@both_paths
def test_full_and_sharded_values_are_loaded_whichever_is_set(
    world: World, path: str
) -> None:
    """What a value is can be seen from the value. Nothing is sent."""
    model = gpt(path, seed=3)
    full, mine = model.state_dict(), sharded(model)
    for kind in (StateDictType.FULL_STATE_DICT, SHARDED):
        for state in (full, mine):
            other = gpt(path, seed=5)
            set_state_dict_type(other, kind)
            with record() as calls:
                other.load_state_dict(state)
            assert calls == []
            set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
            assert differences(other.state_dict(), full) == {}


def misfits(world: World, path: str) -> list[str]:
    model = gpt(path)
    mine = sharded(model)
    other = apply_units(TinyGPT(seed=5), ["blocks.0"], path=path)
    plain = TinyGPT()
    set_state_dict_type(other, SHARDED)
    return [
        message_of(lambda: other.load_state_dict(mine)),
        message_of(lambda: plain.load_state_dict(mine)),
    ]


@pytest.mark.req("U-02")
@both_paths
def test_sharded_values_of_another_plan_are_refused(
    ranks: RankCount, path: str
) -> None:
    """The parameter, both parts, and the way out; on every rank."""
    for other, plain in ranks(2).run(misfits, path):
        assert "'blocks.1.norm_1.weight': expected elements [" in other
        assert "of shape (8,) on rank " in other
        assert "load that into this model's own state_dict()" in other
        assert "Use value.local for this rank's elements" in plain


def check_per_tree(world: World, path: str) -> str:
    model = gpt(path)
    inner = model.get_submodule("blocks")[1]  # type: ignore[index]
    set_state_dict_type(inner, SHARDED)
    values = inner.state_dict().values()
    assert all(isinstance(value, ShardedValue) for value in values)
    rest = model.get_submodule("blocks")[0].state_dict().values()  # type: ignore[index]
    assert not any(isinstance(value, ShardedValue) for value in rest)
    return message_of(model.state_dict)


@pytest.mark.req("S1-32", "S1-14")
@both_paths
def test_the_type_is_that_of_the_tree_the_call_is_made_on(
    ranks: RankCount, path: str
) -> None:
    """A unit may have its own; one state dict of two types is refused."""
    for text in ranks(2).run(check_per_tree, path):
        assert (
            "state_dict expects one type for all units; 'blocks.1' is set to " in text
        )
        assert "SHARDED_STATE_DICT, the unit it is in to FULL_STATE_DICT" in text


def check_as_tensor(world: World) -> tuple[str, list[str]]:
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
    assert value.detach().local.data_ptr() == value.local.data_ptr()
    wide: Any = value.to(torch.float64)
    zeros: Any = torch.zeros_like(value)
    assert wide.local.dtype == torch.float64
    assert torch.equal(zeros.local, torch.zeros(zeros.local.shape))
    assert (value.size(), value.numel(), value.ndim) == (torch.Size([6, 8]), 48, 2)
    mean = value.clone().mul_(0.9).add_(value, alpha=0.1) - 2 * (value / 2)
    torch._foreach_lerp_([mean], [value], 1.0)
    assert torch.equal(mean.local, value.local)
    assert torch.equal(value, value)
    whole = torch.zeros(6, 8)
    acts: list[Callable[[], object]] = [
        lambda: value + whole,
        lambda: value[0],
        lambda: torch.cat([value, value]),
        lambda: whole.copy_(value),
        lambda: value.copy_(whole),
        lambda: sharded(model)["head.weight"].copy_(value),
        value.sum,
    ]
    return repr(value), [message_of(act) for act in acts]


@pytest.mark.req("U-02")
def test_a_sharded_value_is_no_tensor_to_compute_with(ranks: RankCount) -> None:
    """It can be printed, copied, moved and pickled; the rest says what to use."""
    text, errors = ranks(2).run(check_as_tensor)[1]

    assert text.startswith(
        "ShardedValue(shape=(6, 8), dtype=torch.float32, device='cpu', elements "
        "[32, 48) of 48 on rank 1 of 2, local=tensor("
    )
    for error in errors:
        assert error.startswith("TypeError: "), error
    assert "numbers and values of the same cut, got a plain tensor of" in errors[0]
    for error in errors[:5]:
        assert "Use value.local for this rank's elements" in error
    assert "expects another ShardedValue with elements [" in errors[5]


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
@on_ranks(2, 3)
def test_a_model_on_meta_is_filled_from_a_checkpoint(
    world: World, tmp_path: Path
) -> None:
    """No rank ever has more than its part in memory."""
    path = "composable"
    source = gpt(path, seed=3)
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


def save_hybrid(world: World, path: str, folder: Path) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = gpt(path, seed=3, strategy=strategy, device_mesh=mesh)
    metadata = dcp_save({"model": sharded(model)}, checkpoint_id=folder)
    saved: Any = metadata.state_dict_metadata.values()
    return sum(chunk.sizes.numel() for each in saved for chunk in each.chunks)


@pytest.mark.req("S1-32")
@both_paths
def test_of_several_replicas_each_part_is_saved_once(
    ranks: RankCount, path: str, tmp_path: Path
) -> None:
    """Four ranks in two replicas write every element once, and others load it."""
    written = ranks(4).run(save_hybrid, path, tmp_path)[0]

    assert written == sum(p.numel() for p in TinyGPT().parameters())
    for after in (1, 2):
        ranks(after).run(load, tmp_path, ShardingStrategy.FULL_SHARD)
