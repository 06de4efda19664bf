"""Claims on memory that NCCL allocates and registers, on a stand-in for its backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import ShardingStrategy, fully_shard, plan
from composable_fsdp.features import Arena
from composable_fsdp.features.arena import registered_memory
from tests.support.on_ranks import on_ranks
from tests.support.reference import apply_units, backward, gpt_input, gpt_units, loss_of
from tests.support.sharded import message_of
from tests.support.tiny import TinyGPT, tiny_mlp
from tests.support.world import World, fake_world

NCCL = Arena(comm_memory="nccl")


class Backend:
    """Notes what is asked of the backend of each group, and where memory is made."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.mem_allocator = "allocator"

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(("connect", device.type))

    def register_mem_pool(self, pool: object) -> None:
        self.calls.append(("register", pool))

    def make_pool(self, allocator: object) -> str:
        self.calls.append(("pool", allocator))
        return "pool"

    @contextmanager
    def use_pool(self, pool: object, device: object) -> Iterator[None]:
        """As ``torch.cuda.use_mem_pool``: what is allocated meanwhile is noted."""
        self.calls.append(("begin", pool))
        yield
        self.calls.append(("end",))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    return stand_in(monkeypatch)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Put a stand-in in the place of NCCL and of the pools of torch."""
    made = Backend()
    monkeypatch.setattr(registered_memory, "refuse_without_nccl", lambda *_: None)
    monkeypatch.setattr(registered_memory, "backend_of", lambda *_: made)
    monkeypatch.setattr(torch.cuda, "MemPool", made.make_pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", made.use_pool)
    plain = torch.empty

    def empty(*sizes: Any, **options: Any) -> torch.Tensor:
        if made.calls and made.calls[-1][0] in ("begin", "bytes"):
            made.calls.append(("bytes", *sizes))
        return plain(*sizes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    return made


@pytest.mark.req("M-07")
@on_ranks(2)
def test_slots_are_allocated_in_the_plans_order_and_registered_once(
    world: World,
) -> None:
    """Over three steps, and the same on all ranks."""
    with pytest.MonkeyPatch.context() as patch:
        found = stand_in(patch)
        plain = TinyGPT(layers=4)
        model = apply_units(plain, gpt_units(plain), arena=NCCL)
        for step in range(3):
            backward(loss_of(model, gpt_input(step, world.rank)))

    slots = plan(model).step_memory(device_type="cpu").slots
    assert found.calls == [
        ("pool", "allocator"),
        ("begin", "pool"),
        *[("bytes", slot.nbytes) for slot in slots],
        ("end",),
        ("connect", "cpu"),
        ("register", "pool"),
    ]
    everywhere: list[Any] = [None] * world.world_size
    dist.all_gather_object(everywhere, found.calls)
    assert everywhere.count(found.calls) == world.world_size


@pytest.mark.req("M-07")
def test_the_groups_of_pieces_know_the_memory(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    """HFSDP gathers into slots over another group than that of the shards."""
    asked: list[dist.ProcessGroup] = []

    def note(group: dist.ProcessGroup, device: torch.device) -> Backend:
        asked.append(group)
        return backend

    monkeypatch.setattr(registered_memory, "backend_of", note)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = tiny_mlp()
        hfsdp = ShardingStrategy.HFSDP
        fully_shard(model, arena=NCCL, strategy=hfsdp, device_mesh=mesh)
        model(torch.ones(2, 8)).sum().backward()

        assert mesh.get_group("shard") in asked


@pytest.mark.req("M-07")
def test_without_nccl_the_option_is_refused_by_name(world_of_two: None) -> None:
    """When sharding, with the way out; the module stays as it was."""
    model = tiny_mlp()
    before = [id(p) for p in model.parameters()]
    refused = message_of(lambda: fully_shard(model, arena=NCCL))

    assert refused.startswith("PlanError: Arena(comm_memory='nccl') needs GPUs and a")
    assert "the compute device is cpu" in refused
    assert "Leave comm_memory out" in refused
    assert [id(p) for p in model.parameters()] == before
    assert all(
        p.shape == q.shape
        for p, q in zip(model.parameters(), tiny_mlp().parameters(), strict=True)
    )


@pytest.fixture
def world_of_two() -> Iterator[None]:
    with fake_world(2):
        yield
