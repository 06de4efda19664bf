"""Nothing that a rank holds is dropped, mixed, or replaced by rank 0's, in silence."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    ShardingStrategy,
    async_save,
    fully_shard,
    save,
    verify,
)
from composable_fsdp.comm import collectives
from tests.storage.test_async import hybrid, options_of
from tests.storage.test_wrappers import Half
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount, message_of
from tests.support.world import World

_LOG = logging.getLogger("composable_fsdp.storage.same_on_ranks")

Pair = tuple[nn.Module, optim.Optimizer | None]


def pair() -> Any:
    """Two equal layers on every rank; the first is a unit, the second is in none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    return model


def stages(rank: int) -> Pair:
    return nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)}), None


def late_parameter(rank: int) -> Pair:
    model = pair()
    if rank:
        model.register_parameter("late", nn.Parameter(torch.ones(2)))
    return model, None


def other_dtype(rank: int) -> Pair:
    model = pair()
    model[1].to(torch.float64 if rank else torch.float32)
    return model, None


def local_expert(rank: int) -> Pair:
    model = pair()
    with torch.no_grad():
        model[1].weight.fill_(rank)
    return model, None


def stepped(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def equal_options(rank: int) -> Pair:
    """A checkpoint has the one or the other."""
    model = pair()
    return model, optim.SGD(model.parameters(), lr=1 if rank else 1.0)


def own_scalars(rank: int) -> Pair:
    # A single layer: the weight lies on both ranks.
    model = fully_shard(nn.Linear(4, 16))
    optimizer = stepped(model)
    optimizer.state[next(model.parameters())]["norm"] = torch.tensor(float(rank))
    return model, optimizer


def own_momentum(rank: int) -> Pair:
    model = pair()
    optimizer = stepped(model)
    optimizer.state[list(model.parameters())[3]]["exp_avg"].fill_(rank)
    return model, optimizer


def own_extra_state(rank: int) -> Pair:
    model = nn.Sequential(nn.Identity(), counting := Counting(2, 2))
    for each in model.parameters():
        nn.init.ones_(each)
    counting.calls = rank
    return model, None


def torch_fsdp1(rank: int) -> Pair:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    model = nn.Sequential(nn.Linear(4, 4))
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu), None


def deepspeed(rank: int) -> Pair:
    model: Any = nn.Linear(2, 2)
    # ZeRO 3 marks its parameters so.
    model.weight.ds_id = 0
    return model, None


def wrapper_subclass(rank: int) -> Pair:
    model = nn.Linear(2, 2)
    # On one rank only: all must learn of it before a byte is written.
    if rank:
        model.register_buffer("scales", Half(torch.ones(2)))
    return model, None


class Opaque(Tensor):
    """A wrapper subclass that names no inner tensors."""

    @staticmethod
    def __new__(cls) -> Opaque:
        made: Opaque = Tensor._make_wrapper_subclass(cls, (3,))
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as bound
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(func)


def opaque_subclass(rank: int) -> Pair:
    model = nn.Linear(2, 2)
    model.register_buffer("scales", Opaque())
    return model, None


CASES: dict[Callable[[int], Pair], str] = {
    stages: "'stage0.weight' (and 3 more: ",
    late_parameter: "absent on rank 0, a parameter (2,) of torch.float32 on rank 1",
    other_dtype: "'1.weight' (and 1 more: '1.bias'), in no unit, is not the same",
    local_expert: "Parameter '1.weight', in no unit, is not the same on all ranks: ",
    equal_options: "option 'lr' of '0.weight' is not the same on all ranks: 1.0 ",
    own_scalars: "Optimizer state 'norm' of 'weight' is",
    own_momentum: "(state 'exp_avg')\", in no unit, is not the same on all ranks",
    own_extra_state: "The extra state '1._extra_state' is not the same on all ranks: ",
    torch_fsdp1: "(root) was sharded by torch's FullyShardedDataParallel (FSDP1)",
    deepspeed: "'weight' was sharded by DeepSpeed (ZeRO)",
    wrapper_subclass: "not the same on all ranks: absent on rank 0, ",
    opaque_subclass: "Opaque, which wraps other tensors",
}


def refused(world: World, folder: Path) -> dict[str, str]:
    found = {}
    for case in CASES:
        model, optimizer = case(world.rank)
        path = folder / case.__name__
        found[case.__name__] = message_of(lambda: save(path, model, optimizer))  # noqa: B023  # called at once
    return found


@pytest.mark.req("K-01", "K-02")
def test_a_save_that_would_lose_a_value_of_a_rank_is_refused_on_all_ranks(
    ranks: RankCount, tmp_path: Path
) -> None:
    """By name, with what each rank has; nothing is left in the directory."""
    answers = ranks(2).run(refused, tmp_path)

    for case, text in CASES.items():
        for answer in answers:
            said = answer[case.__name__]
            assert said.startswith("CheckpointError: "), case
            assert text in said
    assert list(tmp_path.iterdir()) == []


def replicas_that_differ(world: World, folder: Path) -> tuple[str, str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, **options_of((2, 2)))
    optimizer = optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with collectives.record() as calls:
        save(folder / "same", model, optimizer)
    # What is equal needs no exchange of texts.
    assert sum("gather_object" in call.op for call in calls) == 2, calls
    for state in optimizer.state.values():
        state["step"] += world.rank
    text = message_of(lambda: save(folder / "own", model, optimizer))
    for state in optimizer.state.values():
        state["step"].zero_()
    leaf = next(leaf for leaf in model.parameters() if leaf.numel())
    if world.rank > 1:
        del optimizer.state[leaf]
    one = message_of(lambda: save(folder / "one", model, optimizer))
    optimizer.state.pop(leaf, None)
    lacks = message_of(
        lambda: save(folder / "lacks", model, optimizer if world.rank else other(model))
    )
    return text, one, lacks


def other(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters())


@pytest.mark.req("K-01")
def test_scalar_state_that_replicas_have_differently_is_refused(
    ranks: RankCount, tmp_path: Path
) -> None:
    """A replica's steps were lost, or stood beside those of another replica."""
    found = ranks(4).run(replicas_that_differ, tmp_path)

    texts, one, lacks = map(set, zip(*found, strict=True))
    assert len(texts) == 1
    assert "(state 'step')" in (text := texts.pop())
    assert "of which several ranks hold copies, is not the same on all ranks" in text
    assert not (tmp_path / "own").exists()
    assert "(states), of which several ranks hold copies" in one.pop()
    assert not (tmp_path / "one").exists()
    assert not (tmp_path / "lacks").exists()
    assert len(lacks) == 1


class Counting(nn.Linear):
    """A module with an extra state."""

    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def save_with_own_buffers(world: World, folder: Path) -> list[str]:
    model: Any = nn.Sequential(nn.BatchNorm1d(4), Counting(4, 4))
    for each in model.parameters():
        nn.init.ones_(each)
    with (
        warnings.catch_warnings(),
        mock.patch.object(_LOG, "info") as told,
    ):
        warnings.simplefilter("error")
        save(folder / "same", model)
        model[0].running_mean.fill_(world.rank)
        save(folder / "own", model)
    return [str(call.args[0]) for call in told.call_args_list]


@pytest.mark.req("K-01")
def test_buffers_of_other_ranks_are_named_in_the_log(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Running means differ in ordinary training: the save goes on without a warning."""
    (text,), second = ranks(2).run(save_with_own_buffers, tmp_path)

    assert second == []
    assert "Buffers differ over ranks: '0.running_mean'. The checkpoint has" in text
    assert verify(tmp_path / "own")


@on_ranks(2)
def test_a_rank_with_another_path_is_named_in_the_log(
    world: World, tmp_path: Path
) -> None:
    """Rank 0's path is written to."""
    lines = mock.Mock()
    with mock.patch.object(logging.Logger, "warning", lines):
        save(tmp_path / f"of {world.rank}", fully_shard(nn.Linear(4, 4)))

    texts = [each.args[0] % each.args[1:] for each in lines.call_args_list]
    said = f"/of 1' on rank 1 and writes to rank 0's '{tmp_path}/of 0'"
    assert [said in text for text in texts] == [True] * world.rank
    assert (tmp_path / "of 0").exists()
    assert not (tmp_path / "of 1").exists()


@on_ranks(2)
@pytest.mark.req("N-09")
def test_a_save_after_the_process_group_is_gone_says_so(
    world: World, tmp_path: Path
) -> None:
    """As the way out of shards that no rank has written."""
    model = fully_shard(torch.nn.Linear(4, 4))
    with mock.patch.object(torch.distributed, "is_initialized", return_value=False):
        text = message_of(lambda: save(tmp_path / f"alone-{world.rank}", model))
    assert "before destroy_process_group" in text


def saved(
    world: World, strategy: str, check_weights: Any, how: str, path: Path
) -> tuple[str, list[str]]:
    """The error and the warnings of a save where the last replica has other values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for each in (model[0], model):
        fully_shard(
            each,
            strategy=ShardingStrategy[strategy],
            check_weights=check_weights,
            device_mesh=hybrid(2, 2) if strategy == "HYBRID_SHARD" else None,
        )
    model(torch.ones(2, 8) * (world.rank + 1)).sum().backward()
    last = world.rank >= world.world_size // 2
    if how == "step":
        torch.optim.SGD(model.parameters(), lr=0.1 + last).step()
    elif last:
        model.get_parameter("2.weight").data.add_(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = message_of(
            lambda: (
                async_save(path, model).result() if how == "step" else save(path, model)
            )
        )
    assert {each.filename for each in caught} <= {__file__}  # the line of the caller
    told = [str(each.message) for each in caught]
    return error, [text for text in told if text.startswith("Replicas differ")]


@pytest.mark.req("X-13")
@pytest.mark.parametrize(
    ("strategy", "size", "who", "how"),
    [
        ("NO_SHARD", 2, "on rank 1 than on rank 0,", "step"),
        ("HYBRID_SHARD", 4, "on rank 2 than on rank 0,", "data"),
    ],
)
def test_replicas_that_differ_are_warned_of(
    ranks: RankCount, tmp_path: Path, strategy: str, size: int, who: str, how: str
) -> None:
    """Once, on rank 0, with the first parameter and the ranks."""
    found = ranks(size).run(saved, strategy, "warn", how, tmp_path / "saved")

    assert {error for error, _ in found} == {"nothing was raised"}
    (first,), *others = [texts for _, texts in found]
    name = "'2.weight'" if how == "data" else "'2.weight' (and 3 more parameters)"
    assert f"parameter {name} has other values {who}" in first
    assert not any(others)


@pytest.mark.req("X-13")
def test_replicas_that_differ_are_refused_or_ignored_as_told(
    ranks: RankCount, tmp_path: Path
) -> None:
    """All ranks raise alike, and nothing is written."""
    path = tmp_path / "saved"
    words = "CheckpointError: Replicas differ: parameter '2.weight' has other"
    for error, texts in ranks(2).run(saved, "NO_SHARD", "error", "data", path):
        assert error.startswith(words)
        assert "nothing was written" in error
        assert not texts
    assert not (path / "manifest.json").exists()
    unchecked = ranks(2).run(saved, "NO_SHARD", "off", "data", path)
    assert unchecked == [("nothing was raised", [])] * 2
    assert path.exists()
