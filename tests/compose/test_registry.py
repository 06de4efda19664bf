"""Reading the registry writes nothing, the owner map keeps nothing alive, and torch's
own data-parallel APIs are recognized without importing them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate as torch_replicate
from torch.distributed._composable.replicate_with_fsdp import (
    replicate as torch_replicate_with_fsdp,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from composable_fsdp.compose.registry import (
    OwnerMap,
    foreign_fsdp,
    get_registry,
    get_state,
    has_api,
    incompatible_api,
    remove_state,
)


class State:
    """A state as APIs make them: slots, and a slot for weak references."""

    __slots__ = ("__weakref__",)


# ---- the registry of one module ----------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        get_registry,
        lambda module: get_state(module, "mark"),
        lambda module: has_api(module, "mark"),
        lambda module: remove_state(module, "mark"),
        incompatible_api,
        foreign_fsdp,
        OwnerMap[State]().get,
    ],
)
@pytest.mark.req("S1-35")
def test_asking_an_untouched_module_writes_nothing(
    read: Callable[[nn.Module], object],
) -> None:
    """Reads, and taking out what is not there, insert nothing into the module."""
    module = nn.Linear(2, 2)
    before = dict(module.__dict__)

    assert not read(module)
    assert module.__dict__ == before


# ---- the nearest owner of every submodule ------------------------------------


@pytest.mark.req("S1-30")
def test_an_owner_entry_vanishes_with_its_module() -> None:
    """The map keeps no module alive, not even one in a cycle with its state."""
    owners: OwnerMap[State] = OwnerMap()
    state = State()
    module, cyclic = nn.Linear(2, 2), nn.Linear(2, 2)
    cyclic.itself = [cyclic]  # type: ignore[assignment]  # any attribute will do
    owners.set(state, module)
    owners.set(state, cyclic)

    del module, cyclic
    gc.collect()

    assert len(owners) == 0


@pytest.mark.req("S1-30")
def test_an_owner_entry_vanishes_with_its_state() -> None:
    """The map keeps no state alive; modules that outlive their owner have none."""
    owners: OwnerMap[State] = OwnerMap()
    modules, kept_state, state = nn.ModuleList([nn.ReLU(), nn.ReLU()]), State(), State()
    owners.set(kept_state, modules)
    for child in modules:
        owners.set(state, child)

    del state
    gc.collect()

    assert [owners.get(child) for child in modules] == [None, None]
    assert owners.get(modules) is kept_state
    assert len(owners) == 1


# ---- torch's own APIs ----------------------------------------------------------


@pytest.mark.req("S1-16")
@pytest.mark.usefixtures("one_rank")
def test_torch_replicates_are_named_and_are_not_foreign_fsdp() -> None:
    """DDP and both of torch's ``replicate``, one of them on FSDP2, are skipped."""
    mesh = init_device_mesh("cpu", (1,))
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    composable = torch_replicate(nn.Linear(2, 2))
    on_fsdp2 = nn.Linear(2, 2)
    torch_replicate_with_fsdp(on_fsdp2, mesh=mesh)

    assert incompatible_api(ddp) == "torch's DistributedDataParallel"
    assert incompatible_api(composable) == "torch's replicate"
    assert incompatible_api(on_fsdp2) == "torch's replicate"
    assert [foreign_fsdp(m) for m in (ddp, composable, on_fsdp2)] == [None] * 3


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")  # FSDP1 on CPU warns of its own deprecations
def test_torch_fsdp_is_named_and_only_on_the_module_itself() -> None:
    """FSDP1 and FSDP2 are told apart; their children and parents are not marked."""
    cpu = torch.device("cpu")
    fsdp1 = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2)), device_id=cpu)
    fsdp2 = nn.Sequential(nn.Linear(2, 2))
    fully_shard(fsdp2, mesh=init_device_mesh("cpu", (1,)))

    assert foreign_fsdp(fsdp1) == "torch's FullyShardedDataParallel (FSDP1)"
    assert foreign_fsdp(fsdp2) == "torch's fully_shard (FSDP2)"
    assert foreign_fsdp(fsdp1.module) is None
    assert foreign_fsdp(fsdp2[0]) is None
    assert foreign_fsdp(nn.Sequential(fsdp1, fsdp2)) is None
    assert incompatible_api(fsdp1) is None
    assert incompatible_api(fsdp2) is None
