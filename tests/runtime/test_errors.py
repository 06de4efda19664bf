"""What bad input gets: an error that names the place and the way out, and no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torch_fsdp2

from composable_fsdp import FullyShardedDataParallel, fully_shard, unshard_params
from composable_fsdp.errors import CompositionError, PhaseError, PlanError
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.reference import backward
from tests.support.world import World

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    """Everything an application could have changed, module by module."""
    return [
        (
            name,
            type(module),
            sorted(vars(module)),
            [len(getattr(module, hooks)) for hooks in _HOOKS],
            [
                (key, id(p), p.shape, p.data_ptr(), p.requires_grad)
                for key, p in module.named_parameters(recurse=False)
            ],
        )
        for name, module in model.named_modules()
    ]


Door = Callable[..., nn.Module]
Case = Callable[[Door], tuple[nn.Module, Callable[[], object]]]
"""A model, and the call that is refused, by a door."""


def by_policy(door: Door, model: nn.Module, policy: object) -> nn.Module:
    key = "policy" if door is fully_shard else "auto_wrap_policy"
    return door(model, **{key: policy})


def twice(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    model = fully_shard(tiny_mlp())
    return model, lambda: door(model)


def child_of_a_unit(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    model = fully_shard(TinyGPT())
    return model, lambda: door(model.blocks[0])


def tied_across_units(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    """Both places, their ancestor and the way out are named."""
    model = nn.Module()
    encoder = TinyGPT()
    model.add_module("encoder", encoder)
    encoder.head.weight = encoder.tokens.weight

    def by_class(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or type(module) in {nn.Embedding, nn.Linear}

    return model, lambda: by_policy(door, model, by_class)


def tied_to_a_unit(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    """The second call sees that the first one took the parameter."""
    model = TinyGPT(tied_head=True)
    fully_shard(model.tokens)
    return model, lambda: door(model)


def on_mesh(*shape: int, names: tuple[str, ...] | None = None) -> Case:
    def case(door: Door) -> tuple[nn.Module, Callable[[], object]]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = tiny_mlp()
        return model, lambda: door(model, device_mesh=mesh)

    return case


def fsdp1_below(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    """Torch's own is named with its place, and the model stays its."""
    inner = TorchFSDP1(tiny_mlp(), use_orig_params=True, device_id=torch.device("cpu"))
    model = nn.Sequential(nn.ReLU(), inner)
    return model, lambda: door(model)


def fsdp2_itself(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    model: Any = torch_fsdp2(tiny_mlp())
    return model, lambda: door(model)


def unlike_settings(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    """The first forward names both units and both values."""
    model = TinyGPT()
    fully_shard(model.blocks[1], limit_all_gathers=False)
    whole = door(model)
    return whole, lambda: whole(torch.zeros(1, 2, dtype=torch.long))


def on_meta(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    """No kernel ever runs on meta: the first forward says which and what to do."""
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    return model, lambda: model(torch.ones(1, 2))


def child_that_ran(door: Door) -> tuple[nn.Module, Callable[[], object]]:
    """The child has begun as a root of its own; it is named."""
    model = TinyGPT()
    fully_shard(model.blocks[1])
    model.blocks[1](torch.ones(1, 2, 8))
    return model, lambda: door(model)


TIED = ("'encoder.tokens.weight'", "'encoder.head.weight'", "ancestor is 'encoder'")
OPPOSITE = ("dimension 0 to replicate", "'dp_shard' and 'dp_replicate'")
REFUSED: dict[Case, tuple[type[Exception], tuple[str, ...]]] = {
    twice: (CompositionError, ("Sequential", "once", "Leave")),
    child_of_a_unit: (CompositionError, ("TinyBlock", "TinyGPT", "children first")),
    tied_across_units: (ValueError, (*TIED, "tied_params='promote'")),
    tied_to_a_unit: (
        ValueError,
        ("'head.weight'", "Embedding", "lowest module that holds both"),
    ),
    on_mesh(1, 1, 1): (ValueError, ("1-D", "3-D", "mesh_dim_names")),
    # (shard, replicate) would replicate where the user means to shard.
    on_mesh(1, 1, names=("dp_shard", "dp_replicate")): (
        ValueError,
        (*OPPOSITE, "mesh_dim_names=('replicate', 'shard')"),
    ),
    # Given whole, it would average gradients of different rows.
    on_mesh(1, 1, names=("dp", "tp")): (
        ValueError,
        ("dims named 'dp', 'tp'", "pass mesh['dp']", "_flatten('dp_cp')"),
    ),
    fsdp1_below: (CompositionError, ("'1'", "FSDP1", "one of the two")),
    fsdp2_itself: (CompositionError, ("(root)", "FSDP2", "one of the two")),
    unlike_settings: (
        ValueError,
        ("limit_all_gathers", "(root) has True", "'blocks.1' has False"),
    ),
    on_meta: (PlanError, ("'0.weight'", "meta", "to_empty")),
    child_that_ran: (
        CompositionError,
        ("'blocks.1'", "TinyBlock", "before its first forward"),
    ),
}


@pytest.mark.req("B-01", "S1-25", "S1-35", "B-02", "D-10", "S0-07", "X-29", "B-04")
@pytest.mark.req("S1-24", "B-08", "B-06")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", [fully_shard, FullyShardedDataParallel])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name_and_changes_nothing(
    one_rank: World, door: Door, case: Case
) -> None:
    """By both doors."""
    error, parts = REFUSED[case]
    model, call = case(door)
    before = snapshot(model)

    with pytest.raises(error) as caught:
        call()

    text = str(caught.value)
    assert snapshot(model) == before
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.req("X-34")
@pytest.mark.parametrize("door", [fully_shard, FullyShardedDataParallel])
def test_without_a_process_group_the_way_to_one_is_named(door: Door) -> None:
    """What to call, and what needs none."""
    with pytest.raises(CompositionError) as caught:
        door(tiny_mlp())
    for part in ("init_process_group", "torchrun", "plan("):
        assert part in str(caught.value)


class Summons(nn.Module):
    """Asks for full parameters of ``target`` in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.target: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        for target in self.target:
            with unshard_params(target):
                pass
        return x @ self.weight


@pytest.mark.parametrize("door", [fully_shard, FullyShardedDataParallel])
def test_unshard_params_inside_a_step_or_itself_is_refused(
    one_rank: World, door: Door
) -> None:
    """Units are full by turns; afterwards the same call works."""
    inner = Summons()
    model = door(nn.Sequential(inner))
    y = model(torch.ones(1, 2))

    def summon(gradient: Tensor) -> None:
        with unshard_params(model):
            pass

    y.register_hook(summon)
    with pytest.raises(PhaseError, match=r"inside backward.*after loss.backward\(\)"):
        backward(y.sum())
    inner.target.append(model)
    with pytest.raises(PhaseError, match=r"unshard_params .* inside the forward of"):
        model(torch.ones(1, 2))
    inner.target.clear()
    with unshard_params(model):
        assert inner.weight.shape == (2, 2)
        with pytest.raises(PhaseError, match="after the block"), unshard_params(model):
            pass  # never entered
        with pytest.raises(PhaseError, match="after the block"):
            model(torch.ones(1, 2))
    backward(model(torch.ones(1, 2)).sum())
