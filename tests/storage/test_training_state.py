"""Claims on ``extra`` and ``per_rank``: what a training script holds comes back."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from composable_fsdp import (
    LoadOptions,
    SaveOptions,
    async_save,
    fully_shard,
    load,
    save,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage import LoadReport, open_source
from composable_fsdp.storage.values import decode
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

VALUES: dict[str, Any] = {
    "tuple": (1, (2.5, "a"), []),
    "bytes": b"\x00\xff" * 40,
    "int keys": {1: "a", -3: {None: 2}, 2.5: 4, True + 9: 6},
    "float32": numpy.float32(0.1),
    "date": numpy.datetime64("2020-02-03T04:05"),
    "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3).T,
    "big end": numpy.array([1.5, 2.5], dtype=">f8"),
    "texts": numpy.array(["a", "bcd"]),
    "empty array": numpy.zeros((0, 3)),
    "python": random.Random(3).getstate(),
    "numpy": numpy.random.RandomState(3).get_state(),
    "torch": torch.Generator().manual_seed(3).get_state(),
    "marks": {"$set": [1], "$map": (2,)},
}


def equal(left: Any, right: Any) -> bool:
    """Of the same type and value, all the way down."""
    if isinstance(left, torch.Tensor | numpy.ndarray | numpy.generic):
        if type(left) is not type(right) or left.dtype != right.dtype:
            return False
        alike: Any = left == right
        return left.shape == right.shape and bool(alike.all())
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and left.keys() == right.keys()
            and (all(equal(left[key], right[key]) for key in left))
        )
    if isinstance(left, list | tuple):
        same = type(left) is type(right) and len(left) == len(right)
        return same and all(map(equal, left, right))
    return type(left) is type(right) and left == right and repr(left) == repr(right)


@pytest.mark.req("K-08")
@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_equal_and_of_its_type(tmp_path: Path, name: str) -> None:
    """Through the files, as a value of ``extra`` and as a value of a rank."""
    value, mine = VALUES[name], dict[str, Any]()

    save(
        tmp_path / "a",
        nn.Linear(2, 2),
        extra=[value],
        options=SaveOptions(per_rank={"mine": value}),
    )
    (found,) = load(tmp_path / "a", nn.Linear(2, 2), options=LoadOptions(per_rank=mine))

    for each in (found, mine["mine"]):
        assert type(each) is type(value)
        assert equal(each, value)


REFUSED: dict[str, Any] = {
    "set": {1},
    "frozenset": frozenset({1}),
    "deque": deque([1]),
    "complex": 1j,
    "counter": Counter({10: 1, 30: 2}),
    "bytearray": bytearray(b"a"),
    "tuple as a key": {(1, 2): 3},
    "record": numpy.zeros(1, dtype=[("a", "i4")]),
}


@pytest.mark.req("K-08")
@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    """By the path, before a file is written."""
    value = {"mine": [REFUSED[name]]}

    text = message_of(lambda: save(tmp_path / "a", nn.Linear(2, 2), extra=value))

    assert text.startswith("TypeError: extra['mine'][0]")
    assert "Convert it" in text or "or as a list of pairs" in text
    assert not (tmp_path / "a").exists()


Made = Callable[[optim.Optimizer], lr_scheduler.LRScheduler]


def _warm(optimizer: optim.Optimizer) -> list[lr_scheduler.LRScheduler]:
    return [
        lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2),
        lr_scheduler.MultiStepLR(optimizer, [3, 3, 5], 0.5),
    ]


SCHEDULERS: dict[str, Made] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda at: 0.9**at),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, _warm(o), [2]),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(_warm(o)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.05, anneal_epochs=6),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
}


def rates(scheduler: Any, optimizer: optim.Optimizer, count: int) -> list[float]:
    """Take steps; the learning rates after each."""
    found = []
    for at in range(count):
        optimizer.step()
        takes = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([float(at)] if takes else []))
        found += [float(group["lr"]) for group in optimizer.param_groups]
    return found


@pytest.mark.req("K-08")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    """Given to ``save`` and ``load`` as it is; state and learning rates are equal."""

    def made() -> tuple[nn.Module, optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        rate = torch.tensor(0.1) if name == "OneCycleLR" else 0.1
        optimizer = optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = made()
    rates(scheduler, optimizer, 4)
    save(tmp_path / "a", model, optimizer, {"scheduler": scheduler, "epoch": 3})
    state = pickle.loads(pickle.dumps(scheduler.state_dict()))
    wanted = rates(scheduler, optimizer, 5)

    model, optimizer, scheduler = made()
    extra = load(tmp_path / "a", model, optimizer, {"scheduler": scheduler})

    assert extra == {"scheduler": scheduler, "epoch": 3}
    assert equal(json_like(scheduler.state_dict()), json_like(state))
    assert rates(scheduler, optimizer, 5) == wanted


def json_like(value: Any) -> Any:
    """The values of a scheduler's state without functions, which torch leaves out."""
    if isinstance(value, dict):
        return type(value)({key: json_like(each) for key, each in value.items()})
    if isinstance(value, list):
        return [json_like(each) for each in value]
    return None if callable(value) and not isinstance(value, torch.Tensor) else value


class Loader:
    """Draws batches in an order of its own, as a stateful data loader does."""

    def __init__(self, seed: int) -> None:
        self.at, self.random = 0, random.Random(seed)
        self.buffer: list[int] = []

    def draw(self) -> int:
        self.at += 1
        self.buffer = [*self.buffer[-3:], self.random.randrange(10**6)]
        return sum(self.buffer) + self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": self.random.getstate(), "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], state["buffer"]
        self.random.setstate(state["random"])


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


@pytest.mark.req("K-08", "K-01")
@pytest.mark.parametrize("how", ["save", "async_save"])
@on_ranks(1, 3)
def test_each_rank_gets_its_own_values_back(
    world: World, tmp_path: Path, how: str
) -> None:
    """A data loader of every rank goes on where it was, in nested containers, too."""
    loader, own = Loader(world.rank), {"order": torch.arange(world.rank + 1)}
    drawn = [loader.draw() for _ in range(6 + world.rank)]
    mine = {"loaders": [loader], "own": own, "rank": world.rank}

    if how == "save":
        save(tmp_path / "a", sharded(), options=SaveOptions(per_rank=mine))
    else:
        future = async_save(
            tmp_path / "a", sharded(), options=SaveOptions(per_rank=mine)
        )
    drawn = [loader.draw() for _ in range(3)]
    if how == "async_save":
        own["order"].zero_()
        future.result()
    fresh = Loader(99)
    found: dict[str, Any] = {"loaders": [fresh], "kept": 1}
    load(tmp_path / "a", sharded(), options=LoadOptions(per_rank=found))

    assert [fresh.draw() for _ in range(3)] == drawn
    assert found["loaders"] == [fresh]
    assert found["own"]["order"].tolist() == list(range(world.rank + 1))
    assert (found["rank"], found["kept"]) == (world.rank, 1)
    with open_source(tmp_path / "a") as source:
        assert source.saved_ranks == world.world_size
        assert source.rank_values(world.world_size - 1)["rank"] == world.world_size - 1


def save_positions(world: World, folder: Path) -> None:
    save(
        folder / "a",
        sharded(),
        options=SaveOptions(per_rank={"at": world.rank, "loader": Loader(1)}),
    )


def load_positions(world: World, folder: Path, told: bool) -> Any:
    def redeal(saved: list[Any], rank: int, world_size: int) -> dict[str, Any]:
        at = [each["at"] for each in saved][rank::world_size]
        return {"at": at, "loader": saved[0]["loader"]}

    found: dict[str, Any] = {"at": "mine", "loader": Loader(5)}
    options: Any = {"redeal": redeal} if told else {}
    text = message_of(
        lambda: load(
            folder / "a", sharded(), options=LoadOptions(per_rank=found, **options)
        )
    )
    first = found["loader"].draw() == Loader(1).draw()
    return text, found["at"], first


@pytest.mark.req("K-08")
def test_values_of_ranks_are_dealt_anew_or_refused(
    ranks: RankCount, tmp_path: Path
) -> None:
    """At another world size: ``redeal`` gives each rank its values, or nothing does."""
    ranks(3).run(save_positions, tmp_path)

    dealt = ranks(2).run(load_positions, tmp_path, True)
    refused = ranks(2).run(load_positions, tmp_path, False)

    assert [at for _, at, _ in dealt] == [[0, 2], [1]]
    assert all(is_filled for _, _, is_filled in dealt)
    for text, at, is_filled in refused:
        assert "per_rank was saved by 3 ranks, and 2 load: LoadOptions(redeal=f" in text
        assert (at, is_filled) == ("mine", False)


@pytest.mark.req("K-08")
def test_an_object_without_a_saved_state_is_named(tmp_path: Path) -> None:
    """Nothing is loaded; a lenient load reports the object and leaves it alone."""
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model, extra={"epoch": 1, "list": [1]})
    asked = {"loader": Loader(0), "list": [0, Loader(1)]}
    other, report = nn.Linear(2, 2), LoadReport()

    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "a", other, extra=asked, options=LoadOptions(per_rank={}))
    extra = load(
        tmp_path / "a",
        other,
        extra=asked,
        options=LoadOptions(per_rank={}, strict=False, report=report),
    )

    text = str(error.value)
    assert "extra['loader'] was not saved (extra has 'epoch', 'list')" in text
    assert "extra['list'][1] was not saved" in text
    assert "the checkpoint was saved without per_rank" in text
    assert "the objects of extra as the saved ones were" in text
    assert len(report.values) == 3
    assert extra == {"epoch": 1, "list": [1]}


@pytest.mark.req("K-08")
@on_ranks(2)
def test_an_object_whose_state_lies_on_all_ranks_is_refused(
    world: World, tmp_path: Path
) -> None:
    """An optimizer or a sharded module in ``extra`` would lose the others' parts."""
    model = sharded()
    optimizer = optim.SGD(model.parameters())

    for extra, text in (
        ({"optim": [optimizer]}, "extra['optim'][0] is an optimizer (SGD); its state"),
        ({"ema": sharded()}, "extra['ema'] is a sharded module (Sequential); its"),
    ):
        found = message_of(lambda extra=extra: save(tmp_path / "a", model, extra=extra))  # type: ignore[misc]  # bound at once
        assert text in found
    wrong: Any = [1]
    options = SaveOptions(per_rank=wrong)
    found = message_of(lambda: save(tmp_path / "a", model, options=options))
    assert "a dict of this rank's values by name, got a list" in found


DAMAGED: list[Any] = [
    {"$set": [1]},
    {"$dict": [["$a", 1]]},
    {"$map": [[1, 1], [1, 2]]},
    {"$map": [[[1], 1]]},
    {"$map": 5},
    {"$map": [["a", 1]]},
    {"$map": [[1, 1], [1, 1]]},
    {"$number": [["float32"], 1.0]},
    {"$number": ["int8", 300]},
    {"$bytes": "aGk="},
    {"$bytes": {"$tensor": 1}},
    {"$array": ["|O", [3], {"$tensor": 0}]},
    {"$array": ["V3", [1], {"$tensor": 0}]},
    {"$array": ["<i4", [2], {"$tensor": 0}]},
    {"$array": ["<f4", [1], {"$tensor": 1}]},
    {"$array": ["|u1", [-3, -1], {"$tensor": 0}]},
    {"$array": ["<i999999", [0], {"$tensor": 0}]},
    {"$scalar": ["<f4", "00"]},
    {"$scalar": ["<f4", "zzzzzzzz"]},
    {"$scalar": ["<U1000000", "00"]},
    {"$scalar": ["i4,i4", "00" * 8]},
    {"$eval": "1"},
]


@pytest.mark.req("K-10")
@pytest.mark.parametrize("value", DAMAGED, ids=str)
def test_a_value_that_no_save_writes_is_refused(value: Any) -> None:
    """By name, before anything of the claimed size is allocated."""
    loose = [torch.zeros(3, dtype=torch.uint8), torch.zeros(1)]

    with pytest.raises(CheckpointError, match="nothing that a checkpoint writes"):
        decode(value, "m.json: extra", lambda index: loose[index])
