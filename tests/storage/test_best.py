"""Claims on metrics of checkpoints: the best is listed, kept, found and loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import (
    CheckpointError,
    async_save,
    best_checkpoint,
    checkpoints,
    fully_shard,
    load,
    save,
    verify,
)
from composable_fsdp.storage import listing
from composable_fsdp.storage.metric import Metric, best_of
from tests.storage.test_restart import killed_save
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_dir())


LOSSES: list[Any] = [0.5, 0.2, float("nan"), 0.9, None, 0.2, 0.4]


@pytest.mark.few(4)
@pytest.mark.req("K-04")
@pytest.mark.parametrize(
    ("best", "keep", "keep_best", "left"),
    [
        ("min", 2, 0, [5, 6]),
        ("min", 2, 1, [5, 6]),
        ("min", 1, 2, [1, 5, 6]),
        ("min", 1, 3, [1, 5, 6]),
        ("max", 1, 1, [3, 6]),
        ("max", 2, 2, [0, 3, 5, 6]),
        ("min", 9, 1, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_best_of_a_series_stay(
    tmp_path: Path, best: str, keep: int, keep_best: int, left: list[int]
) -> None:
    """Beside the newest; of equals the newer, and never a NaN or one without metric."""
    for step, metric in enumerate(LOSSES):
        save(
            tmp_path / f"step-{step}",
            model_of(step),
            metric=metric,
            best=best,
            keep=keep,
            keep_best=keep_best,
        )

    assert names(tmp_path) == [f"step-{step}" for step in left]
    listed = [LOSSES[step] for step in left]
    assert repr([each.metric for each in checkpoints(tmp_path)]) == repr(listed)


@pytest.mark.req("K-04")
@pytest.mark.parametrize(("best", "step"), [("min", 5), ("max", 3)])
def test_the_best_is_found_and_loaded(tmp_path: Path, best: str, step: int) -> None:
    """By ``which``; without, the newest."""
    for at, metric in enumerate(LOSSES):
        save(tmp_path / f"step-{at}", model_of(at), metric=metric, best=best)
    model, newest = model_of(-1), model_of(-1)

    load(tmp_path, model, which="best")
    load(tmp_path, newest)

    assert best_checkpoint(tmp_path).step == step
    assert model.weight[0, 0] == step
    assert newest.weight[0, 0] == 6


@on_ranks(2)
@pytest.mark.req("K-04")
def test_ranks_agree_on_the_best(world: World, tmp_path: Path) -> None:
    """The metric of the ranks that have one; rank 0 looks for the best."""
    model = fully_shard(model_of(1.0))
    metric = torch.tensor([0.1]) if world.rank else None
    async_save(tmp_path / "step-1", model, metric=metric).result()
    save(tmp_path / "step-2", fully_shard(model_of(2.0)), metric=0.3)

    load(tmp_path, model, which="best")

    assert best_checkpoint(tmp_path).metric == pytest.approx(0.1)
    assert model.weight.flatten().tolist() in ([1.0] * 2, [1.0] * 4, [])


def differing(world: World, folder: Path) -> str:
    metric = 0.5 + world.rank
    return message_of(lambda: save(folder / "a", model_of(0), metric=metric))


@pytest.mark.req("K-01")
def test_another_metric_on_another_rank_is_refused(
    ranks: RankCount, tmp_path: Path
) -> None:
    """It was not reduced; nothing is written."""
    for text in ranks(2).run(differing, tmp_path):
        assert "0.5 (best='min') on rank 0, 1.5 (best='min') on rank 1" in text
        assert "All-reduce the metric before the save" in text
    assert not names(tmp_path)


@pytest.mark.req("K-04")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"metric": "0.5"}, "TypeError: save expects metric=None or a number, or a te"),
        ({"metric": True}, "or a tensor with one, got a bool"),
        ({"metric": torch.ones(2)}, "or a tensor with one, got a Tensor"),
        ({"best": "mean"}, "ValueError: save expects best='min' or best='max', got 'm"),
        ({"keep_best": 1}, "ValueError: save got keep_best=1 without keep, which says"),
        ({"keep": 1, "keep_best": -1}, "expects keep_best= a number from 0, got -1"),
    ],
)
def test_a_wrong_metric_is_refused(tmp_path: Path, options: Any, text: str) -> None:
    """Before a file is written."""
    found = message_of(partial(save, tmp_path / "a", model_of(0), **options))

    assert text in found
    assert not names(tmp_path)


@pytest.mark.req("K-04", "K-03")
@pytest.mark.filterwarnings("ignore:.*interrupted")
def test_a_crash_at_any_system_call_leaves_the_best(tmp_path: Path) -> None:
    """Also while an older one is removed; the next save finishes that."""
    for number in range(20, 200):
        runs = tmp_path / str(number)
        save(runs / "step-1", model_of(1), metric=0.1)
        save(runs / "step-2", model_of(2), metric=0.9)
        options: dict[str, Any] = {"metric": 0.5, "keep": 1, "keep_best": 1}

        died = killed_save(runs / "step-3", number, **options)

        assert best_checkpoint(runs).step == 1
        assert verify(runs / "step-1")
        save(runs / "step-4", model_of(4), **options)
        listed = [(each.step, each.metric) for each in checkpoints(runs)]
        assert listed == [(1, 0.1), (4, 0.5)]
        assert not [n for n in os.listdir(runs) if ".commit-" in n or ".old-" in n]
        if not died:
            break
    assert number > 30


@pytest.mark.req("K-04")
def test_what_cannot_be_compared_is_not_removed(tmp_path: Path) -> None:
    """Another ``best``, or a damaged manifest: a warning names it, and it stays."""
    save(tmp_path / "step-1", model_of(1), metric=0.9, best="max")
    save(tmp_path / "step-2", model_of(2), metric=0.5)
    save(tmp_path / "step-3", model_of(3), metric=0.8)
    (tmp_path / "step-2" / "manifest.json").write_text("{}")

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        save(tmp_path / "step-4", model_of(4), metric=0.1, keep=1, keep_best=1)

    assert names(tmp_path) == ["step-1", "step-2", "step-4"]
    (text,) = [str(each.message) for each in found]
    assert "step-1 (saved with best='max', and the newest with other)" in text
    assert "step-2 (its metric cannot be read: " in text


@pytest.mark.req("K-04")
def test_without_a_best_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    """No metric, two kinds of metric, another word."""
    save(tmp_path / "step-1", model_of(1))
    none = message_of(lambda: load(tmp_path, model_of(0), which="best"))
    save(tmp_path / "step-2", model_of(1), metric=1)
    save(tmp_path / "step-3", model_of(1), metric=1, best="max")

    with pytest.raises(CheckpointError, match="best at the minimum and some"):
        best_checkpoint(tmp_path)
    word = message_of(lambda: load(tmp_path, model_of(0), which="oldest"))

    assert "holds no whole checkpoint with a metric (1 without). Pass save(" in none
    assert "load expects which='newest' or which='best', got 'oldest'" in word


def test_a_better_metric_comes_first_and_a_nan_never() -> None:
    """The order that ``keep_best`` and ``best_checkpoint`` share."""
    values = [3.0, float("nan"), 1.0, float("-inf"), 1.0]
    metrics = {i: Metric(value, "min") for i, value in enumerate(values)}

    assert best_of(metrics, 9) == [3, 4, 2, 0]
    assert best_of({i: m._replace(best="max") for i, m in metrics.items()}, 2) == [0, 4]
    assert best_of({}, 1) == []


def manifests_opened(save_one: Callable[[], object]) -> list[str]:
    """The checkpoints whose manifests are opened, in order."""
    opened: list[str] = []
    plain = os.open

    def noted(path: Any, *args: Any, **options: Any) -> int:
        if os.path.basename(path) == "manifest.json":
            opened.append(os.path.basename(os.path.dirname(path)))
        return plain(path, *args, **options)

    with mock.patch.object(os, "open", noted):
        save_one()
    return [name for name in opened if not name.startswith(".")]


@pytest.mark.req("K-04")
def test_a_save_reads_the_manifest_of_no_older_checkpoint_again(tmp_path: Path) -> None:
    """However long the series is; another process of the run reads each once."""
    model = model_of(0.0)
    opened = []
    for at in range(8):
        path = tmp_path / f"step-{at}"
        options: Any = {"metric": 10 - at, "keep": 20, "keep_best": 2}
        opened.append(manifests_opened(partial(save, path, model, **options)))

    # The first save has nothing to compare with, and the second reads both.
    assert [set(each) for each in opened[2:]] == [{f"step-{at}"} for at in range(2, 8)]
    assert len({len(each) for each in opened[2:]}) == 1
    listing._known.clear()
    again = manifests_opened(partial(save, tmp_path / "step-8", model, **options))
    assert set(again) == {f"step-{at}" for at in range(9)}


@pytest.mark.req("K-04")
def test_a_replaced_checkpoint_is_ranked_by_its_new_metric(tmp_path: Path) -> None:
    """Also by a process that has read the old one; removed ones are forgotten."""
    model = model_of(0.0)
    options: Any = {"keep": 1, "keep_best": 1}
    for at, metric in enumerate([0.1, 0.5, 0.4]):
        save(tmp_path / f"step-{at}", model, metric=metric, keep=9, keep_best=1)
    save(tmp_path / "step-0", model, metric=0.9, overwrite=True)

    save(tmp_path / "step-3", model, metric=0.6, **options)

    assert names(tmp_path) == ["step-2", "step-3"]
    # Read for this save, and removed by it: the next save forgets them.
    save(tmp_path / "step-4", model, metric=0.7, **options)
    known = {Path(each).name for each in listing._known if str(tmp_path) in each}
    assert known == {"step-2", "step-3", "step-4"}
