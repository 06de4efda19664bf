"""Exports and conversions: any format to any other, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
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

from composable_fsdp import Block, convert, fully_shard, load, save
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import CheckpointError
from composable_fsdp.planning.partition import interval_boxes
from composable_fsdp.storage import export_safetensors, open_source
from composable_fsdp.storage.export import export_module
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.storage.samples import everything, sample, saved
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    one_to_three_ranks,
)
from tests.support.world import World


class Parts(nn.Module):
    """Shapes that cut badly: many dims, scalars, nothing, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.cube = draw(3, 5, 7)
        self.tall = draw(7, 5)
        self.low = nn.Parameter(torch.randn(5, generator=generator).bfloat16())
        self.scalar = draw()
        self.none = draw(0, 4)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def check_layouts(world: World, folder: str, limit: int) -> int:
    plain, sharded = Parts(), Parts()
    fully_shard(sharded, block=Block.ELEMENT)
    boxes = _boxes_on_this_rank(sharded)
    path = Path(folder) / f"out-{world.world_size}"

    export_safetensors(path, sharded, max_shard_bytes=limit)

    found: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        found.update(load_file(file))
    assert _same(found, dict(plain.state_dict()))
    assert _same(dict(sharded.state_dict()), dict(plain.state_dict()))
    return boxes


def _boxes_on_this_rank(model: nn.Module) -> int:
    """The most boxes that this rank holds of one parameter."""
    return max(
        len(interval_boxes(slot.shape, *region.layout.interval(slot, region.rank)))
        for handle in _get_fsdp_handles(model)
        for region in handle.layout.regions
        for slot in region.layout.parameters
    )


@pytest.mark.few(2)
@pytest.mark.req("D-17", "U-06")
@pytest.mark.parametrize("limit", [10**9, 200], ids=["one-file", "many-files"])
@one_to_three_ranks
def test_a_parameter_in_several_boxes_on_a_rank_is_exported_whole(
    ranks: RankCount, tmp_path: Path, world_size: int, limit: int
) -> None:
    """Element blocks cut through rows, so a rank holds boxes: none is lost."""
    boxes = ranks(world_size).run(check_layouts, str(tmp_path), limit)

    assert world_size == 1 or max(boxes) > 1


@pytest.mark.req("U-06")
@on_ranks(2)
@both_paths
def test_a_tied_model_is_exported_with_the_plain_names(
    world: World, path: str, tmp_path: Path
) -> None:
    """safetensors' own loader takes it strictly; the tie is stored once, and told."""
    folder = str(tmp_path)
    model = gpt(path, tied_head=True)
    out = Path(folder) / "out.safetensors"

    with record() as calls:
        export_safetensors(out, model)

    other = TinyGPT(tied_head=True, seed=5)
    missing, unexpected = load_model(other, out)
    assert (list(missing), list(unexpected)) == ([], [])
    assert _same(dict(other.state_dict()), dict(model.state_dict()))
    kinds = {call.op for call in calls}
    assert kinds <= {"gather", "all_gather_object"}
    assert "head.weight" not in load_file(out)


@on_ranks(2)
def test_tensors_in_no_unit_are_rewritten_together(
    world: World, tmp_path: Path
) -> None:
    """As transformers does, which makes one tensor of those of several experts."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    for p in model[1].parameters():
        nn.init.constant_(p, 3.0)

    def joined(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: v for name, v in values.items() if name.startswith("0.")}
        if rows := [values[n] for n in ("1.weight", "1.bias") if n in values]:
            found["1"] = torch.cat([each.view(-1, 2) for each in rows])
        return found

    if export_module(tmp_path / "out", model, 1000, rewrite=joined):
        made = load_file(tmp_path / "out" / "model.safetensors")
        assert torch.equal(made["1"], torch.full((3, 2), 3.0))


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
