"""Claims on loading into another model: told in full, or loaded as far as asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from composable_fsdp import LoadOptions, SaveOptions, fully_shard, load, save
from composable_fsdp.storage import LoadReport
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


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
