"""Claims on checkpoints: what was saved is loaded, on any number of ranks."""

from __future__ import annotations

import os
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch
from torch import nn

from composable_fsdp import (
    Block,
    CPUOffload,
    Int8Wire,
    MixedPrecision,
    async_save,
    fully_shard,
    load,
    open_source,
    save,
    verify,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.storage import native
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.storage.training import State, everything, make, optimizer_of, same, step
from tests.support.memory import LiveBytes
from tests.support.on_ranks import on_ranks
from tests.support.reference import STRATEGIES, backward, gpt_input, loss_of
from tests.support.sharded import RankCount, both_paths, message_of
from tests.support.uncached import uncached
from tests.support.world import World

UNIT = "gpt.blocks.0"
EXTRA: dict[str, Any] = {
    "epoch": 3,
    "loss": float("inf"),
    "$odd": [None, True, {"order": torch.arange(5)}],
    "empty": torch.empty(0, 2),
}


def save_trained(
    world: World, folder: Path, path: str, options: State
) -> tuple[State, float]:
    model = make(path, **options)
    optimizer = optimizer_of(model)
    for at in range(2):
        step(model, optimizer, at)
    save(folder / "step-2", model, optimizer, EXTRA)
    saved = everything(model, optimizer)
    return saved, step(model, optimizer, 2)


def load_and_go_on(
    world: World, folder: Path, path: str, options: State
) -> tuple[State, float, bool]:
    model = make(path, seed=7, **options)
    optimizer = optimizer_of(model)
    leaves = list(model.parameters())
    extra = load(folder, model, optimizer)
    kept = all(a is b for a, b in zip(model.parameters(), leaves, strict=True))
    loaded = everything(model, optimizer)
    return loaded, step(model, optimizer, 2), kept and same(extra, EXTRA)


def plain_world(folder: Path) -> tuple[State, float, bool]:
    return load_and_go_on(None, folder, "plain", {})  # type: ignore[arg-type]  # unused


@pytest.mark.few(1)
@pytest.mark.req("X-24", "S3-06")
@both_paths
def test_a_checkpoint_of_two_ranks_resumes_on_any_number(
    ranks: RankCount, path: str, tmp_path: Path
) -> None:
    """Weights, optimizer state and ``extra`` bit by bit; the next loss is equal."""
    (saved, loss), _ = ranks(2).run(save_trained, tmp_path, path, {})
    other = {"composable": "wrapper", "wrapper": "composable"}[path]

    results = [plain_world(tmp_path)]
    for world_size in (1, 2, 3, 4):
        results += ranks(world_size).run(load_and_go_on, tmp_path, other, {})

    assert verify(tmp_path)
    for loaded, next_loss, rest in results:
        assert same(loaded, saved)
        assert next_loss == pytest.approx(loss, rel=1e-6)
        assert rest


@pytest.mark.req("M-05")
def test_parameters_of_a_single_rank_resume_in_shards_of_any_block(
    ranks: RankCount, tmp_path: Path
) -> None:
    """And back: whole parameters, blocks of rows, elements, a wire format."""
    whole: State = {"block": Block.TENSOR}
    (saved, loss), *_ = ranks(3).run(save_trained, tmp_path, "composable", whole)
    forms: list[State] = [
        whole,
        {"block": Block.rows(3)},
        {"block": Block.ELEMENT},
        {"wire": Int8Wire()},
    ]
    for options in forms:
        found = ranks(2).run(load_and_go_on, tmp_path, "composable", options)

        for loaded, next_loss, rest in found:
            assert same(loaded, saved)
            near = 0.05 if "wire" in options else 1e-6
            assert next_loss == pytest.approx(loss, rel=near)
            assert rest
    ranks(2).run(save_trained, tmp_path / "rows", "composable", forms[1])
    for loaded, _, _ in ranks(3).run(
        load_and_go_on, tmp_path / "rows", "composable", whole
    ):
        assert loaded.keys() == saved.keys()


OPTIONS: dict[str, State] = {
    **{strategy.name: {"strategy": strategy} for strategy in STRATEGIES},
    "offloaded": {"cpu_offload": CPUOffload(True)},
    "mixed": {
        "mixed_precision": MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    },
}


@pytest.mark.few
@pytest.mark.req("S3-06")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_strategy_saves_what_the_plain_model_loads(
    ranks: RankCount, name: str, tmp_path: Path
) -> None:
    """Shards in the parameters' own dtype; each rank writes about the same bytes."""
    saved, _ = ranks(2).run(save_trained, tmp_path, "composable", OPTIONS[name])[0]

    again = ranks(2).run(load_and_go_on, tmp_path, "wrapper", OPTIONS[name])

    for loaded, _, rest in [*again, plain_world(tmp_path)]:
        assert same(loaded, saved)
        assert rest
    sizes = [file.stat().st_size for file in tmp_path.glob("step-2/*.safetensors")]
    assert max(sizes) < 1.2 * min(sizes)


def save_on_two(world: World, folder: Path) -> bool:
    # Of three: rank 0 is in one group more than rank 1, rank 2 takes no part.
    torch.distributed.new_group([0])
    pair = torch.distributed.new_group([0, 1])
    if world.rank < 2:
        model = make("composable", process_group=pair)
        optimizer = optimizer_of(model)
        async_save(folder / "step-1", model, optimizer)
        save(folder / "step-2", model, optimizer)
    world.barrier()
    return bool(verify(folder / "step-1")) and bool(verify(folder))


@pytest.mark.req("S3-06")
def test_some_of_the_ranks_save_whatever_other_groups_they_are_in(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Nobody else comes to the call; a rank's other groups do not matter."""
    assert ranks(3).run(save_on_two, tmp_path) == [True] * 3


def save_hybrid(world: World, folder: Path) -> State:
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
    )
    return save_trained(world, folder, "composable", {"device_mesh": mesh})[0]


@pytest.mark.req("S3-06")
def test_replicas_write_regions_by_turns(ranks: RankCount, tmp_path: Path) -> None:
    """Of 2 x 2 ranks, all write some small regions, and their random state."""
    saved = ranks(4).run(save_hybrid, tmp_path)[0]

    source = NativeSource(tmp_path / "step-2")

    writers = {p.file for region in source.manifest.regions for p in region.shards}
    assert writers == {0, 1, 2, 3}
    assert len(source.manifest.rng) == 4
    assert verify(source.path)
    assert same(plain_world(tmp_path)[0], saved)


def check_few_elements(world: World, folder: Path) -> bool:
    def tiny(seed: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2))
        nn.init.constant_(model.get_parameter("0.weight"), seed)
        fully_shard(model[0])
        return fully_shard(model)

    model = tiny(3.0)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    save(folder / "tiny", model, optimizer)
    again = tiny(5.0)
    adam = torch.optim.Adam(again.parameters())
    load(folder / "tiny", again, adam)
    return same(everything(model, optimizer), everything(again, adam))


@pytest.mark.req("X-24")
def test_more_ranks_than_elements_save_and_load(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Ranks without an element of a parameter take part all the same."""
    assert ranks(4).run(check_few_elements, tmp_path) == [True] * 4


def test_a_plain_model_saves_without_a_process_group(tmp_path: Path) -> None:
    """One file, and any model of the same names loads it."""
    model = make("plain")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save(tmp_path / "deep" / "run", model, optimizer, EXTRA)

    loaded, _, rest = plain_world(tmp_path / "deep")

    assert same(loaded, everything(model, optimizer))
    assert rest
    assert sorted(os.listdir(tmp_path / "deep" / "run")) == [
        "manifest.json",
        "rank00000.safetensors",
    ]


def load_sharded(world: World, folder: Path, path: str) -> tuple[State, float, bool]:
    return load_and_go_on(world, folder, path, {})


@pytest.mark.req("S3-06")
@both_paths
def test_a_sharded_model_loads_what_a_plain_one_saved(
    ranks: RankCount, path: str, tmp_path: Path
) -> None:
    """The fourth of plain and sharded into plain and sharded."""
    model = make("plain")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer, EXTRA)

    for loaded, _, rest in ranks(2).run(load_sharded, tmp_path, path):
        assert same(loaded, everything(model, optimizer))
        assert rest


def test_the_files_open_with_the_safetensors_library(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Each rank's shard of each region is a tensor there."""
    ranks(2).run(save_trained, tmp_path, "composable", {})
    shards = []
    for rank in range(2):
        file = tmp_path / "step-2" / f"rank{rank:05d}.safetensors"
        with safetensors.safe_open(file, "pt") as found:
            shards.append(found.get_tensor(f"region.{UNIT}.0.exp_avg"))

    with NativeSource(tmp_path / "step-2") as source:
        (region,) = (r for r in source.manifest.regions if r.unit == UNIT)
        for slot in region.slots:
            part = source.read_optim(slot.fqns[0], "exp_avg", 0, slot.numel)

            stop = slot.offset + slot.numel
            assert torch.equal(torch.cat(shards)[slot.offset : stop], part)


@on_ranks(2)
def test_saving_and_loading_send_no_tensor(world: World, tmp_path: Path) -> None:
    """Six exchanges of small objects, none in the path of a shard."""
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    with record() as calls:
        save(tmp_path / "run", model, optimizer)
        load(tmp_path / "run", model, optimizer)

    assert [call.op for call in calls] == [
        "all_gather_object",
        "gather_object",
        "broadcast_object",
        "all_gather_object",
        "all_gather_object",
        "all_gather_object",
    ]
    assert sum(call.nbytes for call in calls) == 0


def check_untrained(world: World, folder: Path) -> bool:
    model = make("wrapper")
    optimizer = optimizer_of(model)
    save(folder / "fresh", model, optimizer)
    trained = make("wrapper", seed=2)
    other = optimizer_of(trained)
    step(trained, other, 0)
    load(folder / "fresh", trained, other)
    return same(everything(trained, other), everything(model, optimizer))


def test_an_optimizer_that_never_stepped_is_saved_and_loaded_so(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Loading takes away what the optimizer had gathered."""
    assert ranks(2).run(check_untrained, tmp_path) == [True, True]


def check_memory_is_reused(world: World, folder: Path) -> bool:
    model = make("composable")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save(folder / "run", model, optimizer)
    where = [s["exp_avg"].data_ptr() for s in optimizer.state.values()]
    load(folder / "run", model, optimizer)
    return where == [s["exp_avg"].data_ptr() for s in optimizer.state.values()]


def test_an_optimizer_with_state_is_written_over_in_place(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Its memory does not double while it is loaded."""
    assert ranks(2).run(check_memory_is_reused, tmp_path) == [True, True]


def check_random(world: World, folder: Path, fresh: bool) -> list[float]:
    import random

    model = make("composable")
    if fresh:
        torch.manual_seed(10 + world.rank)
        random.seed(20 + world.rank)
        save(folder / "run", model)
    else:
        load(folder / "run", model)
    return [torch.rand(()).item(), random.random()]


def test_each_rank_goes_on_with_its_own_random_numbers(
    ranks: RankCount, tmp_path: Path
) -> None:
    """At another world size those of the rank of the same number."""
    expected = ranks(2).run(check_random, tmp_path, True)

    assert expected[0] != expected[1]
    assert ranks(2).run(check_random, tmp_path, False) == expected
    assert ranks(3).run(check_random, tmp_path, False)[:2] == expected


def test_what_extra_may_not_hold_is_named_by_its_path(tmp_path: Path) -> None:
    """TypeError with the path to it; nothing is written."""
    bad: list[tuple[Any, str]] = [
        ({"a": [1, 2, object()]}, r"extra['a'][2] is a builtins.object;"),
        ({"a": {"b": slice(2)}}, r"extra['a']['b'] is a builtins.slice;"),
        ({1: {UNIT: {object(): 2}}}, f"extra[1]['{UNIT}'] has the key <object object"),
        ({"a": torch.eye(2).to_sparse()}, "extra['a'] is a tensor of layout torch.s"),
        ({"a": torch.ones(2, device="meta")}, "extra['a'] is a tensor on meta;"),
    ]
    for extra, text in bad:
        act = partial(save, tmp_path / "x", make("plain"), extra=extra)
        found = message_of(act)

        assert found.startswith("TypeError: ")
        assert text in found
    assert os.listdir(tmp_path) == []


def test_a_compiled_model_has_the_plain_names(tmp_path: Path) -> None:
    """As torch's own DCP helpers have it: whole or in parts, in either direction."""
    plain, other = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled: Any = torch.compile(nn.Sequential(plain), backend="eager")
    optimizer = torch.optim.AdamW(plain.parameters())
    save(tmp_path / "whole", compiled, optimizer)
    inner: Any = torch.compile(other, backend="eager")
    parts = nn.Sequential(inner)

    load(tmp_path / "whole", parts, torch.optim.AdamW(other.parameters()))
    save(tmp_path / "parts", parts)
    load(tmp_path / "parts", compiled)

    assert torch.equal(other.weight, plain.weight)
    with open_source(tmp_path / "parts") as source:
        assert list(source.model) == ["0.weight", "0.bias"]


class Stage(str, Enum):
    """What ``str()`` says of its members is not what they are equal to."""

    WARM = "warm"


def check_kinds_of_text(world: World, folder: Path) -> Any:
    class Label(str):
        """Other ranks cannot unpickle it."""

    model = make("composable")
    save(folder / "run", model, extra={Stage.WARM: [Stage.WARM, Label("a")]})
    return load(folder, model)


def test_kinds_of_strings_in_extra_are_saved_as_their_characters(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Enum members and classes of the script's own; no rank waits for another."""
    assert ranks(2).run(check_kinds_of_text, tmp_path) == [{"warm": ["warm", "a"]}] * 2


def test_state_loaded_in_inference_mode_can_be_trained_with(tmp_path: Path) -> None:
    """The optimizer's, which load makes before the first step."""
    model = make("plain")
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer, {"mean": torch.ones(2)})
    other = optimizer_of(model)
    with torch.inference_mode():
        extra = load(tmp_path, model, other)

    step(model, other, 1)

    assert not extra["mean"].is_inference()


class Counting(nn.Module):
    """Keeps something beside its parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.history = (count, {"scale": torch.tensor(float(count))})

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state

    def forward(self) -> None: ...


def check_own_state(world: World, folder: Path) -> Any:
    model = fully_shard(Counting(3))
    save(folder / "run", model)
    other = Counting(4)
    load(folder / "run", other)
    plain = nn.Linear(2, 2)
    text = message_of(lambda: load(folder / "run", plain))
    assert "Not in the model: 'linear.weight', 'linear.bias', '_extra_state'" in text
    return other.history


def test_what_modules_keep_beside_tensors_is_saved_with_them(
    ranks: RankCount, tmp_path: Path
) -> None:
    """``get_extra_state`` and ``set_extra_state``, as in a state dict."""
    for history in ranks(2).run(check_own_state, tmp_path):
        assert same(history, (3, {"scale": torch.tensor(3.0)}))


def check_memory(
    world: World, folder: Path, is_free: bool, is_kept: bool
) -> list[float]:
    """Bytes above model and optimizer at their peak, as shares of one region."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    shards = [handle.layout.regions[0].shard for handle in _get_fsdp_handles(model)[1:]]
    region = shards[0].numel() * 4
    peaks = []
    for act in (save, load):
        place = mock.patch.object(native, "fits_in_memory", return_value=is_free)
        with LiveBytes() as live, place, uncached(is_free and not is_kept):
            act(folder / "run", model, optimizer)
        peaks.append(live.peak / region - 3 * len(shards))
    return peaks


def test_above_the_shards_there_is_at_most_one_region_in_memory(
    ranks: RankCount, tmp_path: Path
) -> None:
    """At save and load, counted op by op; random states take some kilobytes. A load
    with memory to spare holds a copy of the shards where the page cache holds none."""
    for name, is_free in (("little", False), ("cached", True)):
        for peaks in ranks(2).run(check_memory, tmp_path / name, is_free, True):
            assert max(peaks) < 1.1
    for _, peak in ranks(2).run(check_memory, tmp_path / "much", True, False):
        assert 1.1 < peak < 12.5


def test_a_load_shows_autograd_that_values_have_changed(tmp_path: Path) -> None:
    """It writes past torch, and a graph made before must not use the new values."""
    model = make("plain")
    save(tmp_path / "step-1", model)
    loss = loss_of(model, gpt_input(0, 0))

    load(tmp_path / "step-1", model)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(loss)
