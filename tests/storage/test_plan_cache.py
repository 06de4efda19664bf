"""Claims on the plan that later saves reuse: the same manifest, byte for byte."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from composable_fsdp import async_save, fully_shard, load, save
from composable_fsdp.storage import plan_cache
from composable_fsdp.storage import save as saving
from composable_fsdp.storage.merge import merge as merging_of_parts
from composable_fsdp.storage.merged_plan import Brief
from composable_fsdp.storage.native import NativeSource
from composable_fsdp.storage.plan_cache import PlanCache
from composable_fsdp.storage.team import Team
from tests.storage.test_faults import full_disk
from tests.storage.test_spread import options_of, small_parts
from tests.storage.training import everything, make, optimizer_of, same, step
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.strategies import examples_of
from tests.support.world import World

ACTS = (
    "step",
    "rate",
    "extra",
    "tensor in extra",
    "per rank",
    "metric",
    "state",
    "part",
    "cut",
    "local",
    "freeze",
    "optimizer",
    "buffer",
    "asynchronous",
    "full disk",
)


def merging() -> AbstractContextManager[Any]:
    """Let no save reuse a plan."""
    return mock.patch.object(PlanCache, "token_for", return_value="")


def play(
    world: World, folder: Path, acts: list[str], mesh: tuple[int, int]
) -> list[tuple[bool, int]]:
    """After each act whether both manifests are equal, and the number of merges."""
    merge = mock.Mock(wraps=merging_of_parts)
    with small_parts(), mock.patch.object(plan_cache, "merge", merge):
        options = {} if mesh == (1, 2) else options_of(mesh)
        model = make("composable", **options)
        optimizer = optimizer_of(model)
        given: dict[str, Any] = {}
        found = []
        for at, act in enumerate(acts):
            call = change(act, at, world, model, optimizer, given)
            full = full_disk(act == "full disk" and world.rank == 0)
            before = merge.call_count
            with full:
                act_of = partial(call, f"{folder}/reused-{at}", model, **given)
                text = message_of(act_of)
            merges = merge.call_count - before
            if act == "full disk":
                assert "File too large" in text
                found.append((True, merges))
                continue
            assert text == "nothing was raised"
            # Without the cache of the model, which the next save is to use.
            with (
                merging(),
                mock.patch.object(PlanCache, "remember"),
                mock.patch.object(PlanCache, "keep"),
            ):
                save(f"{folder}/merged-{at}", model, **given)
            pair = [
                Path(folder, f"{kind}-{at}", "manifest.json").read_bytes()
                for kind in ("reused", "merged")
            ]
            found.append((pair[0] == pair[1], merges))
    return found


def change(
    act: str, at: int, world: World, model: Any, optimizer: Any, given: dict[str, Any]
) -> Any:
    """Do ``act``; return the function that saves."""
    given.setdefault("optim", optimizer)
    given.pop("include", None)
    given.pop("local", None)
    if act == "step":
        step(model, optimizer, at)
    elif act == "rate":
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
    elif act == "extra":
        given["extra"] = {"at": at, "names": ["a"] * at, "none": float("nan")}
    elif act == "tensor in extra":
        given["extra"] = [torch.arange(at + 1)] * (at % 2 + 1)
    elif act == "per rank":
        given["per_rank"] = {"position": world.rank * 100 + at}
    elif act == "metric":
        given["metric"] = at / 3
    elif act == "state":
        optimizer.state.clear()
    elif act == "part":
        given["include"] = ["gpt.blocks.0", "scale"]
    elif act in ("cut", "local"):
        # Parameters of a unit apart from the others, and values of each rank.
        given["include" if act == "cut" else "local"] = ["*.weight", "seen"]
        step(model, optimizer, at)
    elif act == "freeze":
        # Moves the parameter to another region at the next forward.
        moved = model.get_parameter("gpt.blocks.1.up.weight")
        moved.requires_grad_(not moved.requires_grad)
        step(model, given["optim"], at)
    elif act == "optimizer":
        params = model.parameters()
        given["optim"] = torch.optim.SGD(params, lr=0.1, momentum=0.5 * (at % 2))
        step(model, given["optim"], at)
    elif act == "buffer":
        model.register_buffer(
            "seen", torch.ones(3, dtype=(torch.int64, torch.int8)[at % 2])
        )
    if act == "asynchronous":
        return lambda *a, **k: async_save(*a, **k).result()
    return save


MESHES = [(1, 2), (2, 2), (2, 1)]


@pytest.mark.few(2)
@pytest.mark.req("K-05")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@settings(
    max_examples=examples_of(6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(acts=st.lists(st.sampled_from(ACTS), min_size=2, max_size=6))
@example(acts=["step", "step", "rate", "extra", "per rank", "metric", "step"])
@example(acts=["step", "full disk", "step", "state", "step", "part", "step"])
@example(acts=["cut", "cut", "local", "local", "state", "local", "cut"])
@example(acts=["step", "freeze", "step", "optimizer", "step", "buffer", "freeze"])
def test_a_plan_that_is_reused_gives_the_manifest_of_a_merge(
    ranks: RankCount,
    tmp_path_factory: pytest.TempPathFactory,
    mesh: tuple[int, int],
    acts: list[str],
) -> None:
    """Whatever changes between saves: values, options, states, names, a failure."""
    folder = tmp_path_factory.mktemp("saves")

    for found in ranks(mesh[0] * mesh[1]).run(play, folder, acts, mesh):
        assert all(equal for equal, _ in found)


@pytest.mark.few(2)
@pytest.mark.req("K-05")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_steady_run_merges_once(
    ranks: RankCount, tmp_path: Path, mesh: tuple[int, int]
) -> None:
    """Steps, rates, ``extra`` and metrics need no new plan; a new shape does."""
    acts = ["step", "step", "extra", "step", "metric", "asynchronous", "rate"]
    acts += ["tensor in extra", "step"]

    found = ranks(mesh[0] * mesh[1]).run(play, tmp_path, acts, mesh)

    merges = [count for _, count in found[0]]
    assert merges == [1, 0, 0, 0, 0, 0, 0, 1, 0]
    # Only rank 0 merges.
    assert all(count == 0 for rank in found[1:] for _, count in rank)


@pytest.mark.few(2)
@pytest.mark.req("K-05")
@pytest.mark.parametrize("act", ["cut", "local"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_steady_run_of_a_part_or_of_values_per_rank_merges_once(
    ranks: RankCount, tmp_path: Path, mesh: tuple[int, int], act: str
) -> None:
    """Scalars of cut parameters and of single ranks merged the plan at each save."""
    found = ranks(mesh[0] * mesh[1]).run(play, tmp_path, [act] * 3, mesh)

    assert found[0] == [(True, 1), (True, 0), (True, 0)]


def steps_of_experts(world: World, folder: Path) -> list[list[float]]:
    """The steps that come back after each save of a rank's own plain parameter."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "ab"})
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.fill_(world.rank if name.startswith("a") else 5)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for at in range(3):
        for value in model.parameters():
            value.grad = torch.ones_like(value)
        optimizer.step()
        save(folder / f"step-{at}", model, optimizer, local=["a"])
        load(folder / f"step-{at}", model, optimizer)
        found.append([s["step"].item() for s in optimizer.state.values()])
    return found


@pytest.mark.req("K-01", "K-05")
def test_scalar_state_of_single_ranks_is_that_of_its_own_save(
    ranks: RankCount, tmp_path: Path
) -> None:
    """A plan that was reused stored the steps of the save that had made the plan."""
    found = ranks(2).run(steps_of_experts, tmp_path)

    assert found == [[[n] * 4 for n in (1.0, 2.0, 3.0)]] * 2


def check_values(world: World, folder: Path) -> bool:
    model = make("composable")
    optimizer = optimizer_of(model)
    for at in range(3):
        step(model, optimizer, at)
        save(folder / f"step-{at}", model, optimizer, {"at": at}, keep=2)
    expected = everything(model, optimizer)
    again = make("wrapper", seed=3)
    other = optimizer_of(again)
    extra = load(folder, again, other)
    return extra == {"at": 2} and same(everything(again, other), expected)


@pytest.mark.req("K-05")
def test_a_checkpoint_of_a_reused_plan_holds_the_values_of_its_save(
    ranks: RankCount, tmp_path: Path
) -> None:
    """The plan says where values lie, and each file has those of its own save."""
    assert ranks(2).run(check_values, tmp_path) == [True, True]


def check_scalars(world: World, folder: Path, reuse: bool) -> str:
    # A layout in which both ranks hold a part of a parameter.
    model = make("composable")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    with nullcontext() if reuse else merging():
        save(folder / f"first-{reuse}", model, optimizer)
        if world.rank == 1:
            for state in optimizer.state.values():
                state["step"] += 1
        return message_of(lambda: save(folder / f"{reuse}", model, optimizer))


@pytest.mark.req("K-01", "K-05")
def test_scalars_that_differ_over_ranks_are_refused_as_in_a_merge(
    ranks: RankCount, tmp_path: Path
) -> None:
    """With the same message, on all ranks; nothing is committed."""
    texts = [
        text
        for reuse in (True, False)
        for text in ranks(2).run(check_scalars, tmp_path, reuse)
    ]

    assert len(set(texts)) == 1
    assert "Optimizer state 'step' of" in texts[0]
    assert not (tmp_path / "True").exists()


def test_a_file_of_another_size_is_not_committed(tmp_path: Path) -> None:
    """The places of the plan would point at other bytes."""
    model = torch.nn.Linear(3, 3)
    save(tmp_path / "step-1", model)
    brief_of = Brief.of

    def wrong(part: Any, file: Any) -> Brief:
        longer = dataclasses.replace(file, header_nbytes=file.header_nbytes + 64)
        return brief_of(part, longer)

    with mock.patch.object(Brief, "of", wrong):
        text = message_of(lambda: save(tmp_path / "step-2", model))

    assert "The file of rank 0 has (" in text
    assert "whose plan was reused. Nothing was committed; save again" in text
    assert not (tmp_path / "step-2").exists()
    save(tmp_path / "step-3", model)


def test_the_plan_is_freed_with_the_module(tmp_path: Path) -> None:
    """Nothing of the package keeps the module alive."""
    model = torch.nn.Linear(3, 3)
    save(tmp_path / "step-1", model)
    kept = len(plan_cache._caches)

    del model

    assert len(plan_cache._caches) == kept - 1


@pytest.mark.req("N-09")
def test_the_plan_of_other_ranks_is_not_reused(
    ranks: RankCount, tmp_path: Path
) -> None:
    """A save after ``destroy_process_group`` says so; it raised an error of zip."""
    texts = ranks(2).run(save_alone, str(tmp_path))

    assert all("The process group was destroyed" in text for text in texts), texts


def save_alone(world: World, folder: str) -> str:
    """Save on both ranks, then as a process whose group is gone."""
    model = fully_shard(torch.nn.Linear(4, 4))
    save(f"{folder}/together", model)
    gone = mock.patch.object(torch.distributed, "is_initialized", return_value=False)
    with gone:
        return message_of(lambda: save(f"{folder}/alone-{world.rank}", model))


@on_ranks(2)
@pytest.mark.req("K-05")
def test_a_save_by_other_ranks_makes_a_plan_of_its_own(
    world: World, tmp_path: Path
) -> None:
    """As after a new process group of fewer ranks, in the same process."""
    model = torch.nn.Linear(3, 3)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    save(tmp_path / "both", model)
    if world.rank == 0:
        with (
            mock.patch.object(saving, "team_of", return_value=Team(None)),
            mock.patch.object(saving, "meet_team"),
        ):
            save(tmp_path / "alone", model)
        with NativeSource(tmp_path / "alone") as source:
            assert len(source.manifest.files) == len(source.manifest.rng) == 1
    save(tmp_path / "again", model)
    with NativeSource(tmp_path / "again") as source:
        assert len(source.manifest.files) == len(source.manifest.rng) == 2
