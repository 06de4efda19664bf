"""The wrapper's attributes: those of FSDP1, those of the module, and no others."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_fsdp
from composable_fsdp import FullyShardedDataParallel
from tests.support.on_ranks import on_ranks
from tests.support.tiny import tiny_mlp
from tests.support.world import World

NAMES = (
    "sharding_strategy",
    "cpu_offload",
    "mixed_precision",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "compute_device",
    "process_group",
    "rank",
    "world_size",
)


def plain(value: object) -> object:
    """An attribute as both packages can be compared by."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dist.ProcessGroup):
        return dist.get_process_group_ranks(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = dataclasses.asdict(value)
        return {k: v for k, v in found.items() if k not in ONLY_OURS}
    return value


ONLY_OURS = ("output_dtype", "_module_classes_to_ignore", "offload_states")


def options(package: Any, number: int, world: World) -> dict[str, Any]:
    strategy, mixed = package.ShardingStrategy, package.MixedPrecision
    if number == 0:
        return {}
    if number == 1:
        return {
            "sharding_strategy": strategy.SHARD_GRAD_OP,
            "cpu_offload": package.CPUOffload(offload_params=False),
            "mixed_precision": mixed(param_dtype=torch.bfloat16),
            "backward_prefetch": package.BackwardPrefetch.BACKWARD_POST,
            "forward_prefetch": True,
            "limit_all_gathers": False,
        }
    if number == 2:
        return {"sharding_strategy": strategy.NO_SHARD, "backward_prefetch": None}
    names = ("replicate", "shard")
    size = world.world_size
    shape = (2, size // 2) if size % 2 == 0 else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return {"sharding_strategy": strategy.HYBRID_SHARD, "device_mesh": mesh}


@pytest.mark.req("N-06")
@on_ranks(1, 4)
def test_attributes_have_the_values_of_fsdp1(world: World) -> None:
    """Options that were given and those that were not, ranks in every strategy."""
    for number in range(4):
        found = []
        for package in (theirs, composable_fsdp):
            # torch's looks for a GPU if it is not told.
            given = {"device_id": world.device, **options(package, number, world)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own of what it deprecates
                model = package.FullyShardedDataParallel(tiny_mlp(), **given)
            found.append({name: plain(getattr(model, name)) for name in NAMES})
        assert found[1] == found[0], number


@pytest.mark.req("N-06")
@pytest.mark.parametrize("name", NAMES)
def test_attributes_are_read_only(one_rank: World, name: str) -> None:
    """To set one would change nothing, and so it is refused."""
    model = FullyShardedDataParallel(tiny_mlp())

    with pytest.raises(AttributeError, match=name):
        setattr(model, name, None)


class Odd(nn.Linear):
    @property
    def broken(self) -> object:
        return self.nothing_there


def test_an_unknown_attribute_names_the_wrapper(one_rank: World) -> None:
    """And what it holds; an error inside a property of the module stays as it is."""
    model = FullyShardedDataParallel(Odd(2, 2))

    with pytest.raises(AttributeError) as unknown:
        _ = model.lenght
    with pytest.raises(AttributeError, match="'Odd' object has no attribute"):
        _ = model.broken  # what torch makes of it
    assert str(unknown.value) == (
        "FullyShardedDataParallel has no attribute 'lenght', and neither has the Odd "
        "that it wraps."
    )
    assert model.weight is model.module.weight
    assert not hasattr(model, "lenght")


@pytest.mark.req("S0-06")
def test_use_orig_params_false_warns_once_and_is_taken_as_true(
    one_rank: World,
) -> None:
    """Parameters are the original ones whatever is asked."""
    plain = tiny_mlp()
    before = list(plain.parameters())

    with pytest.warns(UserWarning, match="use_orig_params=False is taken as True"):
        model = FullyShardedDataParallel(plain, use_orig_params=False)

    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
