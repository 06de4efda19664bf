"""Both sides of every size at which the package changes its way."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import composable_fsdp as cf
from composable_fsdp.features.passages import weight_writes
from composable_fsdp.flat import value_hash
from composable_fsdp.storage import (
    blocks,
    manifest,
    part,
    save_parts,
    source,
    writer,
)
from tests.real_sizes.operations import TOKENS, WIDTH, same
from tests.support.on_ranks import on_ranks
from tests.support.reference import apply_units
from tests.support.world import World


def around(size: int) -> tuple[int, int, int]:
    return size - 1, size, size + 1


def test_hashes_are_exact_at_every_size() -> None:
    """Alone, beside another tensor, at another address, in one row and in several."""
    row, small = value_hash._ROW, value_hash._SMALL
    generator = torch.Generator().manual_seed(0)
    for numel in (*around(2 * small), *around(2 * row), 1_000_003):
        value = torch.randn(numel, generator=generator)
        (number,) = value_hash.hash_values([value]).tolist()
        moved = torch.cat([value[:1], value])[1:]
        strided = value.repeat_interleave(3)[::3].contiguous()
        changed = value.clone()
        changed[-1] += 1
        found = value_hash.hash_values([moved, strided, changed, value[:8]]).tolist()
        assert found[:2] == [number, number]
        assert found[2] != number


def snapshot_of(full: Tensor) -> list[Tensor]:
    """What a unit with this full buffer would remember of it."""
    region = SimpleNamespace(full=SimpleNamespace(buffer=full))
    handle: Any = SimpleNamespace(layout=SimpleNamespace(regions=[region]))
    found = weight_writes.snapshot(handle)
    assert found is not None
    return found


def test_writes_are_seen_at_every_size() -> None:
    """A changed element, and two exchanged ones, in a copy and in a hash."""
    dtypes = (torch.float32, torch.bfloat16, torch.complex64)
    sizes = (*around(1 << 10), *around(weight_writes._SMALL // 4), 1_000_003)
    for numel, dtype in product(sizes, dtypes):
        full = (torch.arange(numel) % 7 + 1).to(dtype)
        full[3] = float("nan")
        before = snapshot_of(full)
        assert all(map(torch.equal, before, snapshot_of(full)))
        for at in (1, numel // 2, numel - 1):
            changed, exchanged = full.clone(), full.clone()
            changed[at] = 0
            exchanged[[at - 1, at]] = full[[at, at - 1]]
            for other in (changed, exchanged):
                assert not all(map(torch.equal, before, snapshot_of(other)))


@on_ranks(2)
def test_integers_carry_weights(world: World) -> None:
    """``Int8Wire`` over weights that fill no block of elements."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, TOKENS), nn.Linear(TOKENS, WIDTH))
    model = apply_units(copy.deepcopy(plain), ("0",), wire=cf.features.Int8Wire())
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)

    with torch.no_grad():
        want, got = plain(x), model(x)

    assert 0 < (want - got).norm() < 0.05 * want.norm()
    # What is kept and what is read are the weights themselves.
    same(model.state_dict(), plain.state_dict())


@on_ranks(2)
def test_a_region_is_split(world: World) -> None:
    """Where two matrices in one region cost more padding than a launch, or less."""
    counts = set()
    for width in (16, 90, 91, 1021):
        plain = nn.Sequential(nn.Linear(width, 3), nn.Linear(width + 1, 3))
        want = {name: value.clone() for name, value in plain.state_dict().items()}
        model = cf.fully_shard(plain, check_weights="off", sync_module_states=True)
        counts.add(len(cf.plan(model).units[0].regions))
        if world.rank == 0:
            assert all(map(torch.equal, want.values(), model.state_dict().values()))
        else:
            model.state_dict()
    assert len(counts) > 1


class Sizes(nn.Module):
    """A parameter of each size in bytes, less and more an element."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        bounds = (
            manifest.SMALLEST_BLOCK,
            1 << 16,
            2 * save_parts.SMALLEST_PART,
        )
        for nbytes in (*bounds, part.SMALL, manifest.BLOCK):
            for numel in around(nbytes // 4):
                value = torch.randn(numel, generator=generator)
                self.register_parameter(f"p{numel}", nn.Parameter(value))


SMALLER: tuple[tuple[Any, str, int], ...] = (
    (blocks, "_FILL_BYTES", 1 << 16),
    (manifest, "_MOST_BLOCKS", 4),
    (writer, "_BEHIND", 1 << 16),
    (source, "CHUNK_BYTES", 1 << 16),
)
"""Thresholds above 4 MiB, and those between tensors: the sizes are on both sides."""


@pytest.mark.req("R-01")
@pytest.mark.parametrize("smaller", [False, True])
@on_ranks(2)
def test_files_hold_tensors_of_every_size(
    world: World, smaller: bool, tmp_path: Path
) -> None:
    """Saved from shards and from replicas, loaded into both, read in slices."""
    want = Sizes().state_dict()
    with ExitStack() as patches:
        for module, name, value in SMALLER if smaller else ():
            patches.enter_context(mock.patch.object(module, name, value))
        both = (cf.ShardingStrategy.FULL_SHARD, cf.ShardingStrategy.NO_SHARD)
        for strategy, other in (both, both[::-1]):
            path = tmp_path / strategy.name
            cf.save(path, cf.fully_shard(Sizes(), strategy=strategy))
            fresh = cf.fully_shard(Sizes(), strategy=other)
            with torch.no_grad():
                for p in fresh.parameters():
                    p.zero_()
            cf.load(path, fresh)
            found = fresh.state_dict()
            assert all(torch.equal(found[name], want[name]) for name in want)
        if world.rank == 0:
            _read_in_slices(path, want)
        world.barrier()


def _read_in_slices(path: Path, want: dict[str, Tensor]) -> None:
    assert cf.verify(path).ok
    for to in ("torch", "dcp", "safetensors"):
        cf.convert(path, path.with_name(f"{path.name}.{to}"), to)
    for file in (path, *(path.with_name(f"{path.name}.{t}") for t in ("torch", "dcp"))):
        with cf.storage.open_source(file) as opened:
            for name, value in want.items():
                end = value.numel()
                for start, stop in ((0, end), (1, end // 2), (end // 2 - 1, end)):
                    part = opened.read_model(name, start, stop)
                    assert torch.equal(part, value[start:stop])
