"""Claims on parts of a model: adapters, patterns of names, and renamed checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    Block,
    CheckpointError,
    LoadReport,
    async_save,
    convert,
    export_safetensors,
    fully_shard,
    load,
    open_source,
    save,
    verify,
)
from composable_fsdp.storage.formats.safetensors_read import SafetensorsSource
from composable_fsdp.storage.rename import renaming
from tests.storage.training import everything
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

LORA = "*lora*"


class Adapted(nn.Module):
    """A linear layer with an adapter, a frozen weight, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(width, 3))
        self.lora_b = nn.Parameter(torch.randn(3, width))
        self.lora_scale = nn.Parameter(torch.randn(()))
        self.register_buffer("seen", torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        full = self.weight + self.lora_a @ self.lora_b * self.lora_scale
        return torch.tanh(x @ full)


def make(seed: int, *, sharded: bool = True, **options: Any) -> Any:
    """Two adapted layers, each a unit, and a head of the root, which is trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(Adapted(7), Adapted(7), nn.Linear(7, 5))
    if sharded:
        fully_shard(model[0], **options)
        fully_shard(model, **options)
    return model


def train(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for at in range(2):
        model(torch.ones(3, 7) * (at + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(seed: int, **options: Any) -> tuple[Any, optim.Optimizer]:
    model = make(seed, **options)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = optim.AdamW(params, lr=0.1 * (seed + 1))
    train(model, optimizer)
    return model, optimizer


def state(model: nn.Module, optimizer: optim.Optimizer, pattern: str) -> Any:
    """All of the names that ``pattern`` finds, with the optimizer state."""
    found = everything(model, optimizer)
    values = {k: v for k, v in found["model"].items() if re.search(pattern, k)}
    own = found["optim"]["state"]
    return values, {k: v for k, v in own.items() if re.search(pattern, k)}


# What is saved, the same for a load, and the names that it is about.
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "adapter": ({"include": LORA}, "lora"),
    "trainable": ({"trainable_only": True}, r"lora|^2\."),
    "a parameter": ({"include": ["0.lora_a", "1.lora_b"]}, r"0\.lora_a|1\.lora_b"),
    "a module": ({"include": "1"}, r"^1\."),
    "all but": ({"exclude": ["*lora_a", "2.bias"]}, r"^(?!.*lora_a|2\.bias)"),
    "both": ({"include": "[01]", "exclude": LORA}, r"^[01]\.(weight|seen)"),
    "function": ({"include": lambda name: name.endswith("weight")}, "weight$"),
    "scalar": ({"include": "*scale", "trainable_only": True}, "scale"),
}


def save_part(world: World, folder: Path, part: str, options: Any) -> tuple[Any, Any]:
    model, optimizer = trained(0, **options)
    given, names = PARTS[part]
    save(folder / "part", model, optimizer, **given)
    found: tuple[Any, Any] = state(model, optimizer, names)
    return found


def load_part(world: World, folder: Path, part: str, options: Any) -> tuple[Any, ...]:
    model, optimizer = trained(1, **options)
    given, names = PARTS[part]
    others = rf"^(?!.*({names}))"
    before = state(model, optimizer, others)
    load(folder / "part", model, optimizer, **given)
    kept = _same(state(model, optimizer, others), before)
    loaded = state(model, optimizer, names)
    train(model, optimizer)
    return *loaded, kept


@pytest.mark.few(4)
@pytest.mark.req("K-09", "U-07")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("options", [{}, {"block": Block.ELEMENT}], ids=["", "cut"])
def test_a_part_comes_back_on_any_number_of_ranks(
    ranks: RankCount, tmp_path: Path, part: str, options: Any
) -> None:
    """Its values and optimizer state, bit by bit; all others stay as they are."""
    saved, *_ = ranks(3).run(save_part, tmp_path, part, options)

    assert saved[0]
    with open_source(tmp_path / "part") as source:
        assert sorted(source.model) == sorted(saved[0])
    for size in (1, 2, 3):
        for values, own, kept in ranks(size).run(load_part, tmp_path, part, options):
            assert _same((values, own), saved)
            assert kept


@pytest.mark.req("K-09")
@on_ranks(2)
def test_an_adapter_is_merged_over_a_base(world: World, tmp_path: Path) -> None:
    """The base without adapter, then the adapter: both are compared name by name."""
    base, first = trained(0)
    save(tmp_path / "base", base, exclude=LORA)
    tuned, optimizer = trained(1)
    async_save(tmp_path / "tuned", tuned, optimizer, include=LORA).result()
    model, other = trained(2)

    load(tmp_path / "base", model, exclude=LORA)
    load(tmp_path / "tuned", model, other, include=LORA)

    assert _same(state(model, other, "lora"), state(tuned, optimizer, "lora"))
    weights = state(model, other, "weight$|seen")[0]
    assert _same(weights, state(base, first, "weight$|seen")[0])
    assert verify(tmp_path / "tuned")


@pytest.mark.req("K-09")
def test_a_part_takes_the_room_of_a_part(tmp_path: Path, ranks: RankCount) -> None:
    """An adapter in the region of other parameters: no more than its own elements."""
    ranks(2).run(save_part, tmp_path, "a parameter", {})

    with open_source(tmp_path / "part") as source:
        infos = [
            *source.model.values(),
            *(i for o in source.optim.values() for i in o.values()),
        ]
        payload = sum(f.stat().st_size for f in (tmp_path / "part").glob("rank*"))
        named = sum(info.nbytes for info in infos)
    # Three for values and moments of 2 x 21 elements; random states fill the rest.
    assert named == 3 * 2 * 21 * 4
    with_all = tmp_path / "all"
    ranks(2).run(save_all, with_all)
    whole = sum(f.stat().st_size for f in with_all.glob("rank*"))
    assert whole - payload > 2 * 7 * 7 * 4


def save_all(world: World, folder: Path) -> None:
    save(folder, *trained(0))


@pytest.mark.req("K-09")
def test_what_is_asked_for_is_compared_in_both_directions(tmp_path: Path) -> None:
    """Missing and unexpected names of the part; a pattern hides only its own names."""
    plain = make(0, sharded=False)
    save(tmp_path / "a", plain, include=["0.lora_a", "0.lora_b"])

    missing = message_of(lambda: load(tmp_path / "a", plain, include="0.lora*"))
    unexpected = message_of(
        lambda: load(tmp_path / "a", nn.Sequential(nn.Linear(1, 1)), include="0.lora_*")
    )
    whole = message_of(lambda: load(tmp_path / "a", plain))
    report = LoadReport()
    load(tmp_path / "a", plain, include="0.lora_a", report=report)

    assert "Missing in the checkpoint: '0.lora_scale'." in missing
    assert "Not in the model: '0.lora_a', '0.lora_b'." in unexpected
    assert "load(..., include=.., exclude=.. or rename=..) loads a part" in whole
    assert report.is_empty()


@pytest.mark.req("K-09")
def test_trainable_only_skips_frozen_tensors_of_a_whole_checkpoint(
    tmp_path: Path,
) -> None:
    """Names that the model lacks are still differences."""
    first, second = make(0, sharded=False), make(1, sharded=False)
    save(tmp_path / "a", first)
    save(tmp_path / "b", nn.Sequential(*first, nn.Linear(2, 2)))
    frozen = second[0].weight.clone()

    load(tmp_path / "a", second, trainable_only=True)
    text = message_of(lambda: load(tmp_path / "b", second, trainable_only=True))

    assert torch.equal(second[0].weight, frozen)
    assert torch.equal(second[0].lora_a, first[0].lora_a)
    assert "Not in the model: '3.weight', '3.bias'." in text


def own_part(world: World, folder: Path) -> str:
    model = make(0)
    if world.rank == 1:
        model[1].lora_a.requires_grad_(False)
    return message_of(lambda: save(folder / "a", model, trainable_only=True))


@pytest.mark.req("K-09", "K-01")
def test_ranks_that_choose_other_parts_are_told(
    ranks: RankCount, tmp_path: Path
) -> None:
    """On every rank, before a file is written."""
    texts = ranks(2).run(own_part, tmp_path)

    for text in texts:
        assert "'1.lora_a' is not chosen on all ranks: chosen on rank 0; absent" in text
    assert not list(tmp_path.iterdir())


def test_a_pattern_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """By the name of the argument."""
    for name in ("include", "exclude"):
        given: Any = {name: ["a", 3]}
        text = message_of(partial(save, tmp_path / "a", nn.Linear(1, 1), **given))
        assert text.startswith(f"TypeError: {name} expects patterns of names, such as")


RENAMES: dict[str, tuple[Any, Callable[[nn.Module], nn.Module]]] = {
    "stripped": ({"model.": ""}, lambda model: nn.ModuleDict({"model": model})),
    "added": ({"": "base."}, lambda model: model),
    "replaced": ({"old.0": "new.0", "old": "new"}, lambda m: nn.ModuleDict({"old": m})),
    "function": (
        lambda name: None if name.startswith("more") else name.removeprefix("a."),
        lambda model: nn.ModuleDict({"a": model, "more": nn.Linear(2, 2)}),
    ),
}
TARGETS = {"added": "base", "replaced": "new"}


@pytest.mark.req("K-09")
@pytest.mark.parametrize("how", RENAMES)
@on_ranks(2)
def test_a_checkpoint_is_loaded_under_other_names(
    world: World, tmp_path: Path, how: str
) -> None:
    """Weights, buffers and optimizer state; a name can also be left out."""
    rename, wrapped = RENAMES[how]
    model, optimizer = trained(0)
    outer = wrapped(model)
    save(tmp_path / "a", outer, optimizer)
    other, fresh = trained(1)
    target = nn.ModuleDict({TARGETS[how]: other}) if how in TARGETS else other

    load(tmp_path / "a", target, fresh, rename=rename)

    assert _same(state(other, fresh, ""), state(model, optimizer, ""))


@pytest.mark.req("K-09")
@pytest.mark.parametrize(
    ("rename", "text"),
    [
        ({"modle.": ""}, "rename has 'modle', and no name in the checkpoint begins wi"),
        ({"0": "1"}, "gives '1.weight' and '0.weight' of the checkpoint the same name"),
        ({"0.weight": ""}, "rename gives '0.weight' an empty name"),
        ({"0": 1}, "expects rename={old prefix: new prefix}, of texts, or a func"),
        (3, "expects rename={old prefix: new prefix}, of texts, or a function of a n"),
    ],
)
def test_a_rename_that_cannot_be_is_refused(
    tmp_path: Path, rename: Any, text: str
) -> None:
    """Misspelt, or two tensors under one name; nothing is loaded."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(tmp_path / "a", model)

    found = message_of(lambda: load(tmp_path / "a", model, rename=rename))

    assert text in found


def test_a_name_before_another_is_no_prefix(tmp_path: Path) -> None:
    """``head`` renames the module ``head``, and not ``header``."""
    model: Any = nn.ModuleDict({"head": nn.Linear(2, 2), "header": nn.Linear(2, 2)})
    save(tmp_path / "a", model)
    other: Any = nn.ModuleDict({"top": nn.Linear(2, 2), "header": nn.Linear(2, 2)})

    load(tmp_path / "a", other, rename={"head": "top"})

    assert torch.equal(other["top"].weight, model["head"].weight)
    assert torch.equal(other["header"].weight, model["header"].weight)


def test_tied_names_are_renamed_and_one_can_be_left_out(tmp_path: Path) -> None:
    """The other name then stands for the tensor."""
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    save(tmp_path / "a", model)
    both: Any = nn.ModuleDict({"x": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    both["b"].weight = both["x"].weight
    only: Any = nn.ModuleDict({"b": nn.Linear(2, 2)})

    load(tmp_path / "a", both, rename={"a": "x"})
    load(tmp_path / "a", only, rename=lambda n: None if n.startswith("a") else n)

    assert torch.equal(both["x"].weight, model["a"].weight)
    assert torch.equal(only["b"].weight, model["a"].weight)


WIDE, ROWS = 1024, 4096


def wide(seed: int) -> Any:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDE, ROWS), nn.Linear(ROWS, WIDE), nn.Linear(WIDE, WIDE)]
    return nn.ModuleDict({"net": nn.Sequential(*layers)})


def mapped(folder: Path) -> int:
    """Bytes of the weight files that this process has in memory: what it has read."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and not line.endswith("kB"):
            is_ours = str(folder) in line
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def load_measured(world: World, folder: Path, include: Any) -> tuple[int, int, bool]:
    """Bytes asked for and read, and whether the values are those that were saved."""
    model = wide(1)
    for layer in model["net"]:
        fully_shard(layer)
    asked, found = 0, 0
    read, close = SafetensorsSource.read_model, SafetensorsSource.close

    def counted(self: SafetensorsSource, name: str, start: int, stop: int) -> Tensor:
        nonlocal asked
        asked += (stop - start) * 4
        return read(self, name, start, stop)

    def measured(self: SafetensorsSource) -> None:
        nonlocal found
        found = mapped(folder)
        close(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "read_model", counted)
        patch.setattr(SafetensorsSource, "close", measured)
        load(folder, model, rename={"transformer": "net"}, include=include)
    wanted = wide(0).state_dict()
    loaded = model.state_dict()
    chosen = [n for n in wanted if include is None or n.startswith(include)]
    return asked, found, all(torch.equal(loaded[n], wanted[n]) for n in chosen)


@pytest.mark.req("K-09")
@pytest.mark.parametrize(("include", "whole"), [(None, 9 * 2**22), ("net.2", 2**22)])
def test_each_rank_reads_its_part_of_hugging_face_shards(
    ranks: RankCount, tmp_path: Path, include: Any, whole: int
) -> None:
    """In files with an index: half of the bytes on each of two ranks."""
    source = nn.ModuleDict({"transformer": wide(0)["net"]})
    export_safetensors(tmp_path / "hf", source, max_shard_bytes=2**24)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) == 4

    found = ranks(2).run(load_measured, tmp_path / "hf", include)

    for asked, in_memory, is_equal in found:
        assert is_equal
        # Each value is looked at in ``prepare`` and copied in ``finish``.
        assert asked <= 2 * (whole / 2 + 2**15)
        # The system reads pages of up to 2 MiB around each of the four slices.
        assert in_memory <= whole / 2 + 4 * 2**21
    assert sum(asked for asked, _, _ in found) >= whole


@pytest.mark.req("K-09")
@pytest.mark.parametrize("to", ["native", "dcp", "torch", "safetensors"])
def test_a_part_of_ranks_is_converted(
    ranks: RankCount, tmp_path: Path, to: str
) -> None:
    """Parameters that are stored alone, as all others."""
    saved, *_ = ranks(2).run(save_part, tmp_path, "a parameter", {})

    convert(tmp_path / "part", tmp_path / "out", to)

    with open_source(tmp_path / "out") as source:
        assert source.model.keys() == saved[0].keys()
        for name, value in saved[0].items():
            read = source.read_model(name, 0, value.numel())
            assert torch.equal(read.view(value.shape), value)
        names = sorted(source.optim) if to != "safetensors" else sorted(saved[1])
        assert names == sorted(saved[1])


@pytest.mark.req("K-09")
def test_damage_in_a_part_is_told_by_its_name(ranks: RankCount, tmp_path: Path) -> None:
    """``verify`` and ``load`` name the parameter."""
    ranks(2).run(save_part, tmp_path, "a parameter", {})
    file = tmp_path / "part" / "rank00000.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    data = bytearray(file.read_bytes())
    data[8 + header] ^= 1
    file.write_bytes(data)

    found = verify(tmp_path / "part")

    assert not found
    assert "of '0.lora_a'" in str(found)
    with pytest.raises(CheckpointError, match="another checksum"):
        load(
            tmp_path / "part", make(0, sharded=False), include=["0.lora_a", "1.lora_b"]
        )


class Labelled(nn.Linear):
    """A layer with an extra state."""

    def get_extra_state(self) -> Any:
        return {"label": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("the extra state was not asked for")


@pytest.mark.req("K-09")
def test_an_extra_state_that_is_not_asked_for_stays(tmp_path: Path) -> None:
    """By ``trainable_only`` and by a pattern; the checkpoint has it."""
    model = nn.Sequential(Labelled(2, 2))
    save(tmp_path / "a", model)

    load(tmp_path / "a", model, trainable_only=True)
    load(tmp_path / "a", model, exclude="*_extra_state")


@pytest.mark.req("K-09")
@on_ranks(2)
def test_an_optimizer_of_a_part_takes_its_state_from_a_whole_checkpoint(
    world: World, tmp_path: Path
) -> None:
    """State of parameters that are left alone is not missed."""
    model, optimizer = trained(0)
    save(tmp_path / "a", model, optimizer)
    other, _ = trained(1)
    adapter = optim.AdamW([other[0].lora_a, other[1].lora_b])

    load(tmp_path / "a", other, adapter, include=["0.lora_a", "1.lora_b"])

    saved = state(model, optimizer, r"0\.lora_a|1\.lora_b")
    assert _same(state(other, adapter, r"0\.lora_a|1\.lora_b"), saved)


@pytest.mark.req("K-09")
@on_ranks(2)
def test_state_that_is_no_tensor_of_a_parameter_stored_alone(
    world: World, tmp_path: Path
) -> None:
    """Once in the checkpoint, although both ranks hold parts of the parameter."""
    model, optimizer = trained(0, block=Block.ELEMENT)
    kept = [model[0].lora_a, model[0].lora_b]
    for param in kept:
        if optimizer.state[param]:
            optimizer.state[param]["history"] = (torch.arange(3.0),)
    save(tmp_path / "a", model, optimizer, include=["0.lora_a", "0.lora_b"])
    other, fresh = trained(1, block=Block.ELEMENT)

    load(tmp_path / "a", other, fresh, include=["0.lora_a", "0.lora_b"])

    held = [param for param in (other[0].lora_a, other[0].lora_b) if param.numel()]
    assert held or world.rank
    for param in held:
        assert _same(fresh.state[param]["history"], (torch.arange(3.0),))


def test_the_longest_prefix_renames() -> None:
    """A module inside a renamed module can go elsewhere."""
    new = renaming({"a": "x", "a.b": "y", "": "z"}, ["a.b.c", "a.d", "e"])

    assert [new(name) for name in ("a.b.c", "a.d", "e")] == ["y.c", "x.d", "z.e"]
