"""Claims on checkpoints: what was saved is loaded, bit by bit, on any ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp import (
    async_save,
    fully_shard,
    load,
    save,
    verify,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.features import flat_parameters
from composable_fsdp.storage.manifest import CODES
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.storage.training import State, everything, make, optimizer_of, same, step
from tests.support.memory import LiveBytes
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, both_paths
from tests.support.world import World

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
    for world_size in (1, 3, 4):
        results += ranks(world_size).run(load_and_go_on, tmp_path, other, {})

    assert verify(tmp_path)
    for loaded, next_loss, rest in results:
        assert same(loaded, saved)
        assert next_loss == pytest.approx(loss, rel=1e-6)
        assert rest


def test_the_files_open_with_the_safetensors_library(
    ranks: RankCount, tmp_path: Path
) -> None:
    """The parts of a parameter are tensors there."""
    ranks(2).run(save_trained, tmp_path, "composable", {})
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(2):
        file = tmp_path / "step-2" / f"rank{rank:05d}.safetensors"
        with safetensors.safe_open(file, "pt") as found:
            for name in found.keys():  # noqa: SIM118  # no dict
                parts.setdefault(name, []).append(found.get_tensor(name).flatten())

    with NativeSource(tmp_path / "step-2") as source:
        for name, states in source.optim.items():
            numel = source.model[name].numel
            stored = torch.cat(parts[f"tensor.{name}"])
            assert torch.equal(stored, source.read_model(name, 0, numel))
            for key, info in states.items():
                stored = torch.cat(parts[f"tensor.{name}.{key}"])
                assert torch.equal(stored, source.read_optim(name, key, 0, info.numel))


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


@on_ranks(2)
def test_above_the_shards_there_is_at_most_one_region_in_memory(
    world: World, tmp_path: Path
) -> None:
    """At save and load, counted op by op; random states take some kilobytes."""
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
        with LiveBytes() as live:
            act(tmp_path / "run", model, optimizer)
        peaks.append(live.peak / region - 3 * len(shards))
    peaks = peaks

    assert max(peaks) < 1.1


class Holder(nn.Module):
    """A parameter and buffers."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name, value in buffers.items():
            self.register_buffer(name, value)


@pytest.mark.parametrize("dtype", [d for d in CODES if d != torch.bool], ids=str)
def test_every_bit_of_every_dtype_comes_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Also of what is no number, in 0-d, strided, empty and lazily conjugate buffers,
    which training overwrites after the call."""
    numbers = torch.arange(256 * dtype.itemsize) * 37 % 256
    bits = numbers.to(torch.uint8).view(dtype)
    blank = torch.zeros(256 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    saved = Holder(
        all=bits, one=bits[255], some=bits[::5], none=bits[:0], lazy=bits.conj()
    )
    into = Holder(
        all=blank,
        one=blank[0].clone(),
        some=blank[::5].clone(),
        none=bits[:0],
        lazy=blank.clone(),
    )
    before = {name: value.clone() for name, value in saved.named_buffers()}

    future = async_save(tmp_path / "run", saved)
    blank.view(torch.uint8).copy_(~bits.view(torch.uint8))
    bits.copy_(blank)
    future.result()
    load(tmp_path / "run", into)

    for name, value in before.items():
        there = into.get_buffer(name).reshape(-1).contiguous()
        expected = value.resolve_conj().reshape(-1).contiguous()
        assert torch.equal(there.view(torch.uint8), expected.view(torch.uint8)), name


NESTED = {
    "precise": torch.tensor(1 / 3, dtype=torch.float64),
    "list": [torch.tensor([1 / 3]), (torch.tensor(0.1), 2)],
    "dict": {"deep": {"a": torch.tensor([0.3], dtype=torch.float64)}, "step": 3},
    "text": "warming up",
}


@on_ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_wide_state_and_containers_come_back_as_they_were_saved(
    world: World, tmp_path: Path, flat: bool
) -> None:
    """``Optimizer.load_state_dict`` casts to bfloat16 what an optimizer keeps wide."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        # Without padding, which has no values to come back.
        model = fully_shard(nn.Linear(8, 8, bias=False).bfloat16())
        given = flat_parameters(model) if flat else model.parameters()
        return model, torch.optim.NAdam(given, foreach=False)

    model, optimizer = made()
    for _ in range(3):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for state in optimizer.state.values():
        state["nested"] = copy.deepcopy(NESTED)
        # Wider than the parameter, in all elements.
        state["exp_avg"] = torch.rand(state["exp_avg"].shape)
    expected = told(optimizer)
    save(tmp_path / "run", model, optimizer)
    for into, other in ((model, optimizer), made()):
        load(tmp_path / "run", into, other)
        assert told(other) == expected


def told(optimizer: torch.optim.Optimizer) -> list[str]:
    """State with dtypes, of parameters with elements here."""
    names = ("step", "mu_product", "nested", "exp_avg")
    return [
        str({name: (state[name], getattr(state[name], "dtype", 0)) for name in names})
        for parameter, state in optimizer.state.items()
        if parameter.numel()
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what compile imports
@pytest.mark.parametrize("wrap", [DistributedDataParallel, torch.compile])
def test_a_checkpoint_has_the_names_inside_of_ddp_and_compile(
    one_rank: World, tmp_path: Path, wrap: Callable[[nn.Module], Any]
) -> None:
    """What is saved of a wrapped model is loaded into the plain one, and back."""
    saved, plain, again = (nn.Linear(4, 4) for _ in range(3))

    save(tmp_path / "wrapped", wrap(saved))
    load(tmp_path / "wrapped", plain)
    save(tmp_path / "plain", plain)
    load(tmp_path / "plain", wrap(again))

    assert torch.equal(plain.weight, saved.weight)
    assert torch.equal(again.weight, saved.weight)
