"""Every pair of ``unshard_params``'s options, and blocks that end badly."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import ShardingStrategy, fully_shard, unshard_params
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.memory import LiveBytes
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    STRATEGIES,
    apply_units,
    averaged_gradients,
    backward,
    differences,
    gpt_input,
    loss_of,
    tolerance_at,
)
from tests.support.sharded import RankCount, both_paths, gpt, is_full, message_of
from tests.support.world import World, fake_world

OPTIONS = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")


def in_root(name: str) -> bool:
    return not name.startswith("blocks.")


def check_combination(
    world: World,
    model: nn.Module,
    plain: dict[str, nn.Parameter],
    options: dict[str, bool],
) -> None:
    """What is shown, and what is there after the block, of values and gradients."""
    groups = _get_fsdp_states(model)[0].handle.groups
    rank0_only, writeback = options["rank0_only"], options["writeback"]
    sees = not rank0_only or groups.shard is None or groups.rank == 0
    # Others may write what they like, if one rank's values are taken.
    factor = 2.0 if not (rank0_only and writeback) or groups.is_first else 5.0
    tolerance = tolerance_at(world.world_size)
    shards = {n: tuple(p.shape) for n, p in model.named_parameters()}

    with unshard_params(model, **options):
        for name, parameter in model.named_parameters():
            shown = sees and (options["recurse"] or in_root(name))
            expected = plain[name]
            if not shown:
                assert tuple(parameter.shape) == shards[name], name
                continue
            assert torch.allclose(parameter, expected, rtol=0, atol=tolerance), name
            if options["with_grads"]:
                assert_close(parameter.grad, expected.grad, tolerance)
            else:
                assert parameter.grad is None, name
            with torch.no_grad():
                parameter.mul_(factor)
                if parameter.grad is not None:
                    parameter.grad.mul_(2 * factor)
    if writeback:
        for name, parameter in plain.items():
            if options["recurse"] or in_root(name):
                assert parameter.grad is not None
                parameter.data.mul_(2.0)
                parameter.grad.mul_(4.0 if options["with_grads"] else 1.0)

    assert not any(is_full(model))
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == shards
    # Read back another way: no combination is trusted to check itself.
    apart = differences(
        dict(model.state_dict()), {n: p.detach() for n, p in plain.items()}
    )
    assert max(apart.values(), default=0.0) <= 64 * tolerance
    with unshard_params(model, writeback=False, with_grads=True):
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, plain[name].grad, 64 * tolerance)


def assert_close(found: Tensor | None, expected: Tensor | None, within: float) -> None:
    assert found is not None
    assert expected is not None
    assert torch.allclose(found, expected, rtol=0, atol=within)


COMBINATIONS = [
    dict(zip(OPTIONS, (a, b, c, a ^ b, a ^ c), strict=True))
    for a, b, c in product((False, True), repeat=3)
]
"""Every pair of values of two options."""


def check_all(world: World, path: str, strategy: ShardingStrategy) -> None:
    mesh: dict[str, Any] = {}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh["device_mesh"] = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
        )
    inputs = [gpt_input(0, rank) for rank in range(world.world_size)]
    for options in COMBINATIONS:
        model, plain = gpt(path, strategy=strategy, **mesh), TinyGPT()
        averaged_gradients(plain, inputs)
        backward(loss_of(model, inputs[world.rank]))
        try:
            check_combination(world, model, dict(plain.named_parameters()), options)
        except AssertionError as error:
            raise AssertionError(f"with {options}") from error


def clone(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


@pytest.mark.req("D-12")
@pytest.mark.parametrize(
    ("path", "world_size", "strategy"),
    [
        ("composable", 2, ShardingStrategy.FULL_SHARD),
        ("wrapper", 2, ShardingStrategy.NO_SHARD),
        ("wrapper", 4, ShardingStrategy.HYBRID_SHARD),
    ],
)
def test_every_pair_of_options_shows_and_keeps_what_it_says(
    ranks: RankCount, path: str, world_size: int, strategy: ShardingStrategy
) -> None:
    """Values and gradients are compared to the plain model's."""
    ranks(world_size).run(check_all, path, strategy)


def peak(rank: int, **options: bool) -> tuple[int, int]:
    """Live bytes before a block and at its peak, on one rank of two."""
    with fake_world(2, rank=rank):
        model = apply_units(tiny_mlp(), ["0"])
        with unshard_params(model, writeback=False):
            pass  # what is made once
        with LiveBytes() as live:
            for parameter in model.parameters():
                parameter.detach()
            before = live.now
            live.reset()
            with unshard_params(model, rank0_only=True, **options):
                pass
            return before, live.peak


@pytest.mark.req("S1-12")
def test_writing_rank_0s_values_back_needs_no_memory_on_any_rank() -> None:
    """Rank 0 holds the full parameters and no more; the other rank its shards."""
    before, read = peak(0, writeback=False)
    _, written = peak(0, writeback=True)
    others, at_most = peak(1, writeback=True)

    full = sum(p.numel() * 4 for p in tiny_mlp().parameters())
    assert read - before >= full
    # The number by which ranks tell that none raised, and its copy to the host.
    assert written - read <= 16
    assert at_most - others <= 16


@pytest.mark.req("X-07")
@pytest.mark.parametrize("rank0_only", [False, True], ids=["", "rank0_only"])
@pytest.mark.parametrize("with_grads", [False, True], ids=["", "with_grads"])
@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=lambda s: s.name)
@pytest.mark.parametrize("rank", [0, 1])
@both_paths
@on_ranks(2)
def test_a_raise_on_one_rank_is_its_own_and_nothing_is_written_on_any(
    world: World,
    path: str,
    rank: int,
    strategy: ShardingStrategy,
    with_grads: bool,
    rank0_only: bool,
) -> None:
    """That rank has the original error, the other hears of it, and nobody hangs."""
    model = gpt(path, strategy=strategy)
    backward(loss_of(model, gpt_input(0, world.rank)))
    before = [(p.detach().clone(), clone(p.grad)) for p in model.parameters()]

    def act() -> None:
        with unshard_params(model, with_grads=with_grads, rank0_only=rank0_only):
            for parameter in model.parameters():
                parameter.data.mul_(3.0)
            if world.rank == rank:
                raise KeyError("in the block")

    text = message_of(act)
    assert not any(is_full(model))
    assert _same([p.grad for p in model.parameters()], [grad for _, grad in before])
    if not (rank0_only and world.rank):
        # Else this rank kept its shards in sight and wrote them itself.
        assert _same([p.detach() for p in model.parameters()], [p for p, _ in before])
    if world.rank == rank:
        assert text == "KeyError: 'in the block'"
    else:
        assert text.startswith(
            f"DesyncError: Rank {rank} raised inside unshard_params(writeback=True), "
            "so nothing was written here either"
        )
    # The ranks are still in step.
    backward(loss_of(model, gpt_input(1, world.rank)))


@pytest.mark.req("X-07")
@on_ranks(2)
def test_a_parameter_that_does_not_fit_on_one_rank_is_written_on_none(
    world: World,
) -> None:
    """What is found at the end of the block counts as a raise inside it."""
    model = fully_shard(tiny_mlp())
    before = dict(model.state_dict())

    def act() -> None:
        with unshard_params(model):
            model.get_parameter("0.bias").data.zero_()
            if world.rank == 1:
                model.get_submodule("2").bias = nn.Parameter(torch.ones(99))

    text = message_of(act)
    assert _same(dict(model.state_dict()), before)
    if world.rank == 1:
        assert "parameter '2.bias' was replaced by (99,)" in text
    else:
        assert text.startswith("DesyncError: Rank 1 raised inside unshard_params")


@pytest.mark.req("X-08")
@pytest.mark.parametrize(
    ("checked", "offload"), [(False, False), (True, False), (True, True)]
)
@on_ranks(2)
def test_ranks_that_write_differently_keep_their_parts_or_are_told_on_request(
    world: World, checked: bool, offload: bool
) -> None:
    """An element is as its owner wrote it; if checked, nothing is written on any."""
    model = gpt("wrapper")
    before = dict(model.state_dict())

    def act(value: float) -> None:
        options = {"check_same": checked, "offload_to_cpu": offload}
        with unshard_params(model, **options), torch.no_grad():
            model.get_parameter("norm.weight").fill_(value)
            model.get_parameter("positions.weight").add_(1.0)

    text = message_of(lambda: act(float(world.rank)))
    after = dict(model.state_dict())
    if checked:
        assert _same(after, before)
        assert text.startswith("DesyncError: Parameter 'norm.weight' was written diff")
        act(2.5)
        assert model.state_dict()["norm.weight"].tolist() == [2.5] * 8
    else:
        assert text == "nothing was raised"
        values = after["norm.weight"].tolist()
        # Two ranks: the first elements are rank 0's.
        assert values == sorted(values)
        assert set(values) <= {0.0, 1.0}
