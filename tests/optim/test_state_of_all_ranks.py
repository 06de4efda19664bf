"""Optimizer state is the same for all ranks, and what is saved can be loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import composable_fsdp as cf
from composable_fsdp import StateDictType
from tests.support.on_ranks import on_ranks
from tests.support.reference import PATHS, apply_units
from tests.support.sharded import gpt, own_parts, step
from tests.support.world import World


@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_results_have_one_order_on_all_ranks(world: World, path: str) -> None:
    """Where the optimizers hold their parameters in another order on each rank."""
    model = gpt(path)
    parameters = list(model.parameters())[:: -1 if world.rank else 1]
    optim = torch.optim.AdamW(parameters)
    step(model, optim, world.rank, 0)
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
        with cf.state_dict_type(model, kind):
            state = cf.optim_state_dict(model, optim)["state"]
            assert list(state) == [n for n, _ in model.named_parameters()]
            # A loop that gathers would wait without end otherwise.
            whole = {
                fqn: {
                    name: getattr(value, "full_tensor", lambda v=value: v)()
                    for name, value in values.items()
                }
                for fqn, values in state.items()
            }
        assert world.all_equal(whole)


class OwnBranch(nn.Module):
    """A unit that all ranks train, and a layer that only this rank has."""

    def __init__(self, rank: int, path: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = apply_units(nn.Linear(4, 4), (), path=path)
        self.add_module(f"sparse{rank}", nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        """Map ``(batch, 4)`` to the same."""
        _, own = list(self.named_children())[-1]
        return self.dense(own(x))


@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_state_of_parameters_that_one_rank_has_is_saved_and_loaded(
    world: World, path: str
) -> None:
    """They are outside of units; save and load have one set of demands."""
    model = OwnBranch(world.rank, path)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    saved = cf.optim_state_dict(model, optim)
    before = copy.deepcopy(optim.state_dict()["state"])

    optim.load_state_dict(cf.optim_state_dict_to_load(model, optim, saved))

    assert f"sparse{world.rank}.weight" in saved["state"]
    own = [model.get_parameter(f"sparse{world.rank}.{n}") for n in ("weight", "bias")]
    for each in own:
        place = next(i for i, p in enumerate(model.parameters()) if p is each)
        torch.testing.assert_close(optim.state[each], before[place])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_state_from_torchs_older_reader_is_loaded(
    world: World, path: str, tmp_path: Path
) -> None:
    """``load_sharded_optimizer_state_dict`` gives torch's ``ShardedTensor``."""
    model = gpt(path)
    optim = torch.optim.AdamW(model.parameters())
    step(model, optim, world.rank, 0)
    cf.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    dcp_save({"optim": cf.optim_state_dict(model, optim)}, checkpoint_id=tmp_path)
    read = load_sharded_optimizer_state_dict(
        model_state_dict=model.state_dict(),
        optimizer_key="optim",
        storage_reader=FileSystemReader(tmp_path),
    )
    with cf.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        want = cf.optim_state_dict(model, optim)["state"]
    for state in optim.state.values():
        state["exp_avg"].zero_()

    optim.load_state_dict(cf.optim_state_dict_to_load(model, optim, read["optim"]))

    averages = {name: values["exp_avg"] for name, values in want.items()}
    for leaf, part in own_parts(model, averages).values():
        if leaf.numel():
            assert torch.equal(optim.state[leaf]["exp_avg"], part)


@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_sharded_values_are_compared_as_whole_values(world: World, path: str) -> None:
    """The result is that of all ranks, though each holds a part."""
    model = gpt(path)
    cf.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    value: Any = model.state_dict()["head.weight"]
    other = value.clone()

    assert torch.equal(value, other)
    assert torch.allclose(value, other)
    assert (value == other).full_tensor().all()
    assert not (value != other).full_tensor().any()
    assert torch.equal(value, value.full_tensor())
    # The difference is on the last rank alone.
    if world.rank:
        other.local.view(-1)[-1] += 1
    assert not torch.equal(value, other)
    assert not torch.allclose(value, other)
    assert int((value != other).full_tensor().sum()) == 1
    with pytest.raises(TypeError, match="expects a whole tensor"):
        _ = value == value.full_tensor()
