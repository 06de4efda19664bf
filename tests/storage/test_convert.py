"""Claims on conversion: any format to any other, and nothing lost that it can hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp import fully_shard as torch_fsdp2
from torch.distributed.tensor import Shard, distribute_tensor

from composable_fsdp import convert, fully_shard, load, save
from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.opening import open_source
from tests.storage.samples import everything, sample, saved
from tests.support.place import _same
from tests.support.sharded import RankCount
from tests.support.world import World

WHOLE = ("native", "torch", "dcp")


def loaded(path: Path) -> dict[str, Any]:
    with open_source(path) as source:
        return everything(source)


@pytest.mark.req("U-06")
@pytest.mark.parametrize("to", WHOLE)
@pytest.mark.parametrize("through", WHOLE)
def test_a_checkpoint_is_the_same_after_going_through_two_formats(
    tmp_path: Path, through: Any, to: Any
) -> None:
    """Values, dtypes, shapes, ties, optimizer, groups, extra: bit by bit."""
    first = saved(tmp_path / "first.pt")

    left = convert(first, tmp_path / "second", through)
    left += convert(tmp_path / "second", tmp_path / "third", to)

    assert left == []
    assert _same(loaded(tmp_path / "third"), loaded(first))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first.pt", "second", "third"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_what_torch_saves_by_name_is_read(tmp_path: Path, flat: bool) -> None:
    """``get_state_dict`` in both its forms, through DCP and through ``torch.save``."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    groups: list[dict[str, Any]] = [{"params": list(m.parameters())} for m in model]
    groups[1]["lr"] = 1
    optim = torch.optim.AdamW(groups)
    model(torch.randn(5, 3)).sum().backward()
    optim.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optim, options=options)
    both = {"model": weights, "optim": state}
    dcp.save(  # type: ignore[attr-defined]  # torch lists it nowhere
        both, checkpoint_id=str(tmp_path / "dcp"), no_dist=True
    )
    torch.save(both, tmp_path / "file.pt")

    for got in (loaded(tmp_path / "dcp"), loaded(tmp_path / "file.pt")):
        assert _same(got["model"], dict(model.state_dict()))
        assert _same(got["optim"], dict(zip(names(model), states(optim), strict=True)))
        assert [group["params"] for group in got["param_groups"]] == [
            ["0.weight", "0.bias"],
            ["1.weight", "1.bias"],
        ]
        assert [group["lr"] for group in got["param_groups"]] == [0.001, 1]


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def states(optim: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return list(optim.state_dict()["state"].values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda tree: tree.update(state_dict=tree["model"]),
            "'model' and 'state_dict'; expected one",
            id="two-models",
        ),
        pytest.param(
            lambda tree: tree.update(net=tree.pop("model")),
            "holds no model.*got the keys 'extra', 'net', 'optim'",
            id="no-model",
        ),
        pytest.param(
            lambda tree: tree["optim"].update(more=1), "holds .*more", id="optimizer"
        ),
        pytest.param(
            lambda tree: tree["optim"]["state"].update(other={"x": torch.ones(1)}),
            "state of 'other', which is no parameter",
            id="unknown-parameter",
        ),
        pytest.param(
            lambda tree: next(iter(tree["optim"]["state"].values())).update({0: 1}),
            "state of .*, or has no names",
            id="unnamed-state",
        ),
    ],
)
def test_what_cannot_be_understood_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    """Each message names the file and what is wrong in it; nothing is written."""
    given = sample()
    change(given)
    torch.save(given, tmp_path / "file.pt")

    with pytest.raises(CheckpointError, match=f"file.pt.*{message}"):
        convert(tmp_path / "file.pt", tmp_path / "out", "dcp")

    assert [path.name for path in tmp_path.iterdir()] == ["file.pt"]


def test_a_member_of_a_group_without_state_is_kept(tmp_path: Path) -> None:
    """Also one that the model does not have: the optimizer had it."""
    given = sample()
    given["optim"]["param_groups"][0]["params"].append("loss.scale")
    torch.save(given, tmp_path / "file.pt")

    convert(tmp_path / "file.pt", tmp_path / "out.pt", "torch")

    assert _same(loaded(tmp_path / "out.pt"), loaded(tmp_path / "file.pt"))


@pytest.mark.parametrize("to", ["native", "torch", "dcp", "safetensors"])
def test_an_error_on_the_way_leaves_nothing(tmp_path: Path, to: Any) -> None:
    """The working directory is removed, and the destination does not exist."""

    def fail(read: int) -> None:
        raise CheckpointError("stop")

    with pytest.raises(CheckpointError, match="stop"):
        convert(saved(tmp_path / "first.pt"), tmp_path / "out", to, progress=fail)

    assert [path.name for path in tmp_path.iterdir()] == ["first.pt"]


def test_a_flipped_bit_is_not_converted(tmp_path: Path) -> None:
    """A ``torch.save`` file and a DCP directory have checksums, and they are used."""
    first = saved(tmp_path / "first.pt")
    convert(first, tmp_path / "dcp", "dcp")
    pattern = sample()["model"]["half.weight"].view(torch.int16).flatten()
    for path in (first, tmp_path / "dcp" / "__0_0.distcp"):
        data = bytearray(path.read_bytes())
        data[data.index(bytes(pattern.view(torch.uint8).tolist()))] ^= 1
        path.write_bytes(data)

    with pytest.raises(CheckpointError, match=r"first.pt is damaged: its record"):
        convert(first, tmp_path / "out", "dcp")
    with pytest.raises(CheckpointError, match=r"damaged where 'model.half.weight'"):
        convert(tmp_path / "dcp", tmp_path / "out", "torch")


def cube() -> Tensor:
    return torch.arange(4.0 * 5 * 6).view(4, 5, 6)


def check_save(world: World, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    value = distribute_tensor(cube(), mesh, [Shard(2), Shard(0)])
    dcp_save({"model": {"cube": value}}, checkpoint_id=folder)


def test_any_slice_of_a_tensor_cut_along_any_dim_is_read(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Row-major slices go through boxes that do not lie in rows."""
    ranks(4).run(check_save, str(tmp_path / "dcp"))
    flat = cube().reshape(-1)

    with open_source(tmp_path / "dcp") as source:
        for start in range(0, 120, 7):
            for stop in (start, start + 1, min(start + 5, 120), 120):
                part = source.read_model("cube", start, stop)
                assert torch.equal(part, flat[start:stop])


def shard_by(apply: Callable[[nn.Module], Any], model: nn.Sequential) -> nn.Module:
    for layer in (*model, model):
        apply(layer)
    return model


def fsdp1(model: nn.Sequential) -> nn.Module:
    return TorchFSDP1(model, device_id=torch.device("cpu"), use_orig_params=True)


def training(
    shard: Callable[[nn.Sequential], nn.Module], seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).square().mean().backward()
    optim.step()
    optim.zero_grad()
    return model, optim


def losses(model: nn.Module, optim: torch.optim.Optimizer) -> list[float]:
    """Of three steps, which also tell the weights and moments of the first."""
    found = []
    for at in range(3):
        loss = model(torch.full((4, 3), 0.5 - at)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        found.append(loss.item())
    return found


def check_exchange(world: World, folder: Path) -> None:
    sharded: Any = partial(shard_by, fully_shard)
    theirs: Any = partial(shard_by, torch_fsdp2)
    # FSDP1 by a full state dict to ours; on CPU, torch gives it moments of one memory.
    first = training(fsdp1, 2)
    with TorchFSDP1.state_dict_type(first[0], StateDictType.FULL_STATE_DICT):
        weights = first[0].state_dict()
    if world.rank == 0:
        torch.save(weights, folder / "fsdp1.pt")
    world.barrier()
    ours = training(sharded, 3)
    load(folder / "fsdp1.pt", ours[0])
    assert losses(*ours)[0] == pytest.approx(losses(*first)[0], rel=1e-6)
    # FSDP2 by DCP to ours.
    model, optim = training(theirs, 1)
    weights, state = get_state_dict(model, optim)
    dcp_save({"model": weights, "optim": state}, checkpoint_id=folder / "fsdp2")
    load(folder / "fsdp2", *ours)
    save(folder / "native", *ours)
    expected = losses(model, optim)
    assert losses(*ours) == pytest.approx(expected, rel=1e-6)
    # Ours by DCP to FSDP2.
    if world.rank == 0:
        convert(folder / "native", folder / "dcp", "dcp")
    world.barrier()
    again, again_optim = training(theirs, 4)
    weights, state = get_state_dict(again, again_optim)
    dcp_load({"model": weights, "optim": state}, checkpoint_id=folder / "dcp")
    set_state_dict(again, again_optim, model_state_dict=weights, optim_state_dict=state)
    assert losses(again, again_optim) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_fsdp_and_ours_take_each_others_checkpoints(
    ranks: RankCount, tmp_path: Path
) -> None:
    """Weights of FSDP1, and weights and moments of FSDP2 both ways: the same losses."""
    ranks(2).run(check_exchange, tmp_path)
