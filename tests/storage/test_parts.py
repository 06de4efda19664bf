"""Parts of a model, renamed checkpoints, and loads into another model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    Block,
    LoadOptions,
    SaveOptions,
    async_save,
    fully_shard,
    load,
    save,
    verify,
)
from composable_fsdp.storage import LoadReport, export_safetensors, open_source
from composable_fsdp.storage.formats.files import SafetensorsSource
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
    "all but": ({"exclude": ["*lora_a", "2.bias"]}, r"^(?!.*lora_a|2\.bias)"),
    "both": ({"include": "[01]", "exclude": LORA}, r"^[01]\.(weight|seen)"),
    "scalar": ({"include": "*scale", "trainable_only": True}, "scale"),
}


def save_parts(world: World, folder: Path, options: Any) -> dict[str, Any]:
    found = {}
    for part, (given, names) in PARTS.items():
        model, optimizer = trained(0, **options)
        save(folder / part, model, optimizer, options=SaveOptions(**given))
        found[part] = state(model, optimizer, names)
    return found


def load_parts(world: World, folder: Path, options: Any) -> dict[str, Any]:
    found = {}
    for part, (given, names) in PARTS.items():
        model, optimizer = trained(1, **options)
        others = rf"^(?!.*({names}))"
        before = state(model, optimizer, others)
        load(folder / part, model, optimizer, options=LoadOptions(**given))
        assert _same(state(model, optimizer, others), before), part
        found[part] = state(model, optimizer, names)
        train(model, optimizer)
    return found


@pytest.mark.req("K-09", "U-07")
@pytest.mark.parametrize("options", [{}, {"block": Block.ELEMENT}], ids=str)
def test_a_part_comes_back_on_any_number_of_ranks(
    ranks: RankCount, tmp_path: Path, options: Any
) -> None:
    """Its values and optimizer state, bit by bit; all others stay as they are."""
    saved, *_ = ranks(3).run(save_parts, tmp_path, options)

    for part, (values, _) in saved.items():
        assert values
        with open_source(tmp_path / part) as source:
            assert sorted(source.model) == sorted(values)
    for size in (1, 2):
        for found in ranks(size).run(load_parts, tmp_path, options):
            assert _same(found, saved)


@pytest.mark.req("K-09")
@on_ranks(2)
def test_an_adapter_is_merged_over_a_base(world: World, tmp_path: Path) -> None:
    """The base without adapter, then the adapter: both are compared name by name."""
    base, first = trained(0)
    save(tmp_path / "base", base, options=SaveOptions(exclude=LORA))
    tuned, optimizer = trained(1)
    async_save(
        tmp_path / "tuned", tuned, optimizer, options=SaveOptions(include=LORA)
    ).result()
    model, other = trained(2)

    load(tmp_path / "base", model, options=LoadOptions(exclude=LORA))
    load(tmp_path / "tuned", model, other, options=LoadOptions(include=LORA))

    assert _same(state(model, other, "lora"), state(tuned, optimizer, "lora"))
    weights = state(model, other, "weight$|seen")[0]
    assert _same(weights, state(base, first, "weight$|seen")[0])
    assert verify(tmp_path / "tuned")


def own_part(world: World, folder: Path) -> str:
    model = make(0)
    if world.rank == 1:
        model[1].lora_a.requires_grad_(False)
    return message_of(
        lambda: save(folder / "a", model, options=SaveOptions(trainable_only=True))
    )


@pytest.mark.req("K-09", "K-01")
def test_ranks_that_choose_other_parts_are_told(
    ranks: RankCount, tmp_path: Path
) -> None:
    """On every rank, before a file is written."""
    texts = ranks(2).run(own_part, tmp_path)

    for text in texts:
        assert (
            "The choice of '1.lora_a' is not the same on all ranks: chosen on rank 0"
            in text
        )
    assert not list(tmp_path.iterdir())


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

    load(tmp_path / "a", target, fresh, options=LoadOptions(rename=rename))

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

    found = message_of(
        lambda: load(tmp_path / "a", model, options=LoadOptions(rename=rename))
    )

    assert text in found


WIDE, ROWS = 1024, 4096


def wide(seed: int) -> Any:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDE, ROWS), nn.Linear(ROWS, WIDE), nn.Linear(WIDE, WIDE)]
    return nn.ModuleDict({"net": nn.Sequential(*layers)})


def load_measured(world: World, folder: Path, include: Any) -> tuple[int, bool]:
    """Bytes asked for, and whether the values are those that were saved."""
    model = wide(1)
    for layer in model["net"]:
        fully_shard(layer)
    asked, read = 0, SafetensorsSource.read_model

    def counted(self: SafetensorsSource, name: str, start: int, stop: int) -> Tensor:
        nonlocal asked
        asked += (stop - start) * 4
        return read(self, name, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "read_model", counted)
        load(
            folder,
            model,
            options=LoadOptions(rename={"transformer": "net"}, include=include),
        )
    wanted = wide(0).state_dict()
    loaded = model.state_dict()
    chosen = [n for n in wanted if include is None or n.startswith(include)]
    return asked, all(torch.equal(loaded[n], wanted[n]) for n in chosen)


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

    for asked, is_equal in found:
        assert is_equal
        # Each value is looked at in ``prepare`` and copied in ``finish``.
        assert asked <= 2 * (whole / 2 + 2**15)
    assert sum(asked for asked, _ in found) >= whole


class Layers(nn.Module):
    """Some layers by name."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self) -> None: ...


def saved_model() -> nn.Module:
    torch.manual_seed(0)
    return Layers(same=nn.Linear(4, 3), old=nn.Linear(2, 2), wide=nn.Linear(4, 5))


def other_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return Layers(
        same=nn.Linear(4, 3, dtype=dtype), new=nn.Linear(2, 2), wide=nn.Linear(4, 6)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def check_strict(world: World, folder: Path) -> str:
    model = fully_shard(other_model(torch.bfloat16))
    before = shards(model)
    text = message_of(lambda: load(folder, model, adam(fully_shard(other_model()))))
    assert "Pass the model that the optimizer trains" in text
    optimizer = torch.optim.Adam(model.parameters())
    text = message_of(lambda: load(folder, model, optimizer))
    assert all(map(torch.equal, shards(model), before))
    assert optimizer.state_dict()["state"] == {}
    return text


@pytest.mark.req("X-25")
def test_a_strict_load_lists_everything_that_does_not_fit(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Renamed, missing, extra, misshaped, another dtype: one error, nothing loaded."""
    model = saved_model()
    save(tmp_path / "run", model, adam(model))

    texts = ranks(2).run(check_strict, tmp_path)

    assert texts[0] == texts[1]
    for part in (
        "Missing in the checkpoint: 'new.weight', 'new.bias'",
        "Not in the model: 'old.weight', 'old.bias'",
        "Of another shape: 'wide.weight' (expected (6, 4), the checkpoint has (5, 4))",
        "Of another dtype: 'same.weight' (expected torch.bfloat16, the checkpoint has "
        "torch.float32)",
        "Of the optimizer: 'new.weight' is missing",
        " more.",
        "cast=True converts dtypes",
    ):
        assert part in texts[0]


def check_lenient(world: World, folder: Path, cast: bool) -> LoadReport:
    model = fully_shard(other_model(torch.bfloat16 if cast else torch.float32))
    report = LoadReport()
    load(folder, model, options=LoadOptions(strict=False, cast=cast, report=report))
    expected = saved_model().state_dict()
    full = model.state_dict()
    for name in ("same.weight", "same.bias"):
        assert torch.equal(full[name], expected[name].to(full[name].dtype))
    untouched = other_model().state_dict()
    assert torch.equal(full["new.weight"], untouched["new.weight"]) or cast
    return report


@pytest.mark.req("X-25")
@pytest.mark.parametrize("cast", [False, True])
def test_a_lenient_load_takes_what_fits_and_reports_the_rest(
    ranks: RankCount, cast: bool, tmp_path: Path
) -> None:
    """Casts only where they were asked for."""
    save(tmp_path / "run", saved_model())

    for report in ranks(2).run(check_lenient, tmp_path, cast):
        assert report.missing == ["new.weight", "new.bias"]
        assert report.unexpected == ["old.weight", "old.bias"]
        assert [text.split()[0] for text in report.misshaped] == [
            "'wide.weight'",
            "'wide.bias'",
        ]
        assert report.dtypes == []


def test_the_warning_of_a_lenient_load_is_at_the_line_of_the_caller(
    tmp_path: Path,
) -> None:
    """By which programs filter, and by which Python tells it once."""
    save(tmp_path, saved_model(), options=SaveOptions(overwrite=True))

    with pytest.warns(UserWarning, match="left out what does not fit") as found:
        load(tmp_path, other_model(), options=LoadOptions(strict=False))

    assert [each.filename for each in found] == [__file__]


class Tied(nn.Module):
    """Two layers, which may share their weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.last.weight = self.first.weight


def test_different_values_for_a_tied_parameter_are_not_lost_in_silence(
    tmp_path: Path,
) -> None:
    """Equal ones load: other formats keep a tied tensor under each of its names."""
    save(tmp_path / "apart", Tied(tied=False))
    torch.save(
        {k: v.clone() for k, v in Tied(tied=True).state_dict().items()},
        tmp_path / "copies.pt",
    )

    model = Tied(tied=True)
    load(tmp_path / "copies.pt", model)
    text = message_of(lambda: load(tmp_path / "apart", model))

    assert "different in the checkpoint: 'last.weight' (tied to 'first.weight')" in text


def test_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    """It would take the options' place; options of the same kind may come and go."""
    model = saved_model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["initial_lr"] = 0.5
    save(tmp_path / "adamw", model, optimizer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text = message_of(lambda: load(tmp_path, model, sgd))
    del optimizer.param_groups[0]["amsgrad"]
    save(tmp_path / "older", model, optimizer)
    newer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    newer.param_groups[0]["initial_lr"] = 0.1
    load(tmp_path, model, newer)

    assert "group 0 of this SGD expects 'dampening', 'momentum'" in text
    assert "the checkpoint has 'amsgrad', 'betas'" in text
    assert sgd.param_groups[0]["momentum"] == 0.9
    assert newer.param_groups[0]["amsgrad"] is True
    assert newer.param_groups[0]["initial_lr"] == 0.5
