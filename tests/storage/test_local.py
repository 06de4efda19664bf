"""Claims on ``local``: what differs over ranks by design comes back to each rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from composable_fsdp import (
    LoadOptions,
    SaveOptions,
    async_save,
    convert,
    fully_shard,
    load,
    save,
    verify,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage import open_source
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


class Expert(nn.Module):
    """A layer of a rank, with a buffer and an extra state of its own."""

    def __init__(self, rank: int, rows: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(4, rows)
        self.down = nn.Linear(rows, 4)
        self.register_buffer("seen", torch.tensor([rank]))
        self.label: Any = (rank, torch.tensor([rank]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y

    def get_extra_state(self) -> Any:
        return self.label

    def set_extra_state(self, state: Any) -> None:
        self.label = state


class Mixture(nn.Module):
    """A sharded trunk, a norm that all ranks have alike, and an expert of the rank."""

    def __init__(self, rank: int, seed: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        torch.manual_seed(100 * seed + rank)
        self.experts = nn.ModuleDict({"own": Expert(rank, rows)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts["own"](self.norm(self.trunk(x)))
        return y


Pair = tuple[Any, optim.Optimizer]


def trained(world: World, seed: int, *, shape: bool = False) -> Pair:
    """A mixture after two steps; the options and scalars of the expert are its own."""
    model = Mixture(world.rank, seed, 4 + world.rank * shape)
    experts, norm = list(model.experts.parameters()), list(model.norm.parameters())
    fully_shard(model, ignored_states=[*experts, *norm])
    rate = torch.tensor(0.1 * (world.rank + 1 + seed))
    own: dict[str, Any] = {"params": experts, "lr": rate, "eps": 1e-3 + seed}
    # An option of the user, which is stored as a tensor in the rank's file.
    own["order"] = torch.arange(world.rank + 2 + seed)
    groups = [{"params": [*model.trunk.parameters(), *norm]}, own]
    optimizer = optim.AdamW(groups, lr=0.01)
    for at in range(2):
        model(torch.ones(2, 4) * at).sum().backward()
        # As data parallel training gives all ranks the gradients of the norm.
        for param in norm:
            param.grad = torch.ones(4)
        optimizer.step()
        optimizer.zero_grad()
    for param in experts:
        # The expert of a rank may have taken more steps.
        optimizer.state[param]["step"] += world.rank
    return model, optimizer


def all_of(pair: Pair) -> Any:
    model, optimizer = pair
    own = [dict(optimizer.state[p]) for p in model.parameters()]
    options = [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    expert = model.experts["own"]
    return (
        [param.detach().clone() for param in model.parameters()],
        [{k: v.clone() for k, v in state.items()} for state in own],
        options,
        expert.seen.clone(),
        expert.label,
    )


@pytest.mark.req("K-01", "U-07")
@pytest.mark.parametrize("how", ["save", "async", "shapes"])
@on_ranks(1, 3)
def test_the_values_of_a_rank_come_back_to_it(
    world: World, tmp_path: Path, how: str
) -> None:
    """Weights, buffers, extra states, optimizer state, scalars and options."""
    pair = trained(world, 0, shape=how == "shapes")
    saved = all_of(pair)
    if how == "async":
        future = async_save(tmp_path / "a", *pair, options=SaveOptions(local="experts"))
        with torch.no_grad():
            pair[0].experts["own"].up.weight.zero_()
        future.result()
    else:
        save(tmp_path / "a", *pair, options=SaveOptions(local=["experts.*"]))
    other = trained(world, 1, shape=how == "shapes")
    assert not _same(all_of(other), saved)

    load(tmp_path / "a", *other)

    assert _same(all_of(other), saved)
    assert verify(tmp_path / "a")


@on_ranks(2)
@pytest.mark.req("K-01")
def test_options_of_a_unit_are_no_ranks_own(world: World, tmp_path: Path) -> None:
    """They are the same on all ranks, also where ``local`` has the name."""
    model = fully_shard(nn.Linear(4, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1 + world.rank)

    text = message_of(
        lambda: save(tmp_path / "a", model, optimizer, options=SaveOptions(local="*"))
    )

    assert "The optimizer's option 'lr' of 'weight' is not the same on all" in text


def otherwise(world: World, folder: Path) -> list[str]:
    """What a save says if ranks pass other patterns."""
    pair, texts = trained(world, 0), []
    for own in (["experts.own.up", "experts.own.down.bias"], []):
        local = ["experts"] if world.rank else own
        call = partial(save, folder / "a", *pair, options=SaveOptions(local=local))
        texts.append(message_of(call))
    save(
        folder / "b",
        *pair,
        options=SaveOptions(local=["experts.*", "head"] if world.rank else "experts"),
    )
    return texts


@pytest.mark.req("K-01")
def test_another_local_on_a_rank_is_told_as_such(
    ranks: RankCount, tmp_path: Path
) -> None:
    """And not as a tensor that a rank lacks; other patterns of the same are none."""
    first, second = ranks(2).run(otherwise, tmp_path)

    for text in first:
        assert "by local=[..], is not the same on all ranks: once on rank 0" in text
        assert "pass the same local on every rank" in text
    assert second == first
    assert not (tmp_path / "a").exists()


def save_mixture(world: World, folder: Path) -> Any:
    pair = trained(world, 0)
    save(folder / "a", *pair, options=SaveOptions(local="experts"))
    return all_of(pair)


def load_elsewhere(world: World, folder: Path) -> list[tuple[str, Any, Any]]:
    """Untold, and told so: the error, and what there was before and after."""
    pair, found = trained(world, 1), []
    for local in (None, "experts.*"):
        options, before = LoadOptions(local=local), all_of(pair)
        text = message_of(partial(load, folder / "a", *pair, options=options))
        found.append((text, before, all_of(pair)))
    return found


@pytest.mark.req("K-01", "U-07")
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2)])
def test_at_another_world_size_ranks_get_theirs_or_keep_their_own(
    ranks: RankCount, tmp_path: Path, saving: int, loading: int
) -> None:
    """Only if told so; otherwise the error names them, and nothing is loaded."""
    saved = ranks(saving).run(save_mixture, tmp_path)

    untold, told = zip(*ranks(loading).run(load_elsewhere, tmp_path), strict=True)

    for text, before, after in untold:
        assert "'experts.own._extra_state', 'experts.own.down.bias'" in text
        assert f"were saved per rank (SaveOptions.local) by {saving} ranks" in text
        assert "pass LoadOptions(local=[..]) with their names" in text
        assert "Missing" not in text
        assert _same(after, before)
    for rank, (text, before, after) in enumerate(told):
        assert text == "nothing was raised"
        # The trunk and the norm are everyone's; the expert has four parameters.
        expert = saved[rank] if rank < saving else before
        assert _same(after[0][-4:], expert[0][-4:])
        assert _same(after[1][-4:], expert[1][-4:])
        assert _same(after[2][1], expert[2][1])
        assert _same(after[3:], expert[3:])
        assert _same(after[0][2:4], saved[0][0][2:4])


@pytest.mark.req("K-01")
def test_a_conversion_drops_no_rank_in_silence(
    ranks: RankCount, tmp_path: Path
) -> None:
    """It is refused, or the caller chooses a rank."""
    ranks(2).run(save_mixture, tmp_path / "mixture")

    with pytest.raises(CheckpointError, match=r"has values of 'experts.*on_rank"):
        convert(tmp_path / "mixture" / "a", tmp_path / "b", "torch")
    with open_source(tmp_path / "mixture" / "a") as source:
        source.on_rank(1)
        convert(source, tmp_path / "c", "native")

    with open_source(tmp_path / "c") as source:
        assert source.own_states["experts.own._extra_state"][0] == 1
        assert source.read_model("experts.own.seen", 0, 1).item() == 1
        assert len(source.param_groups or ()) == 2
