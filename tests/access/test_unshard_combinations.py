"""Every combination of ``unshard_params``'s options, and blocks that end badly."""

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
HYBRIDS = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def in_root(name: str) -> bool:
    return not name.startswith("blocks.")


def check_combination(
    world: World,
    model: nn.Module,
    plain: dict[str, nn.Parameter],
    options: dict[str, bool],
) -> None:
    """What is shown, and what is there after the block, of values and gradients.

    ``plain`` has the values and gradients that ``model`` should have, and is kept so.
    """
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


def check_all(world: World, path: str, strategy: ShardingStrategy) -> int:
    mesh: dict[str, Any] = {}
    if strategy in HYBRIDS:
        mesh["device_mesh"] = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
        )
    model, plain = gpt(path, strategy=strategy, **mesh), TinyGPT()
    inputs = [gpt_input(0, rank) for rank in range(world.world_size)]
    averaged_gradients(plain, inputs)
    backward(loss_of(model, inputs[world.rank]))
    expected = dict(plain.named_parameters())
    start = {n: (p.detach().clone(), clone(p.grad)) for n, p in expected.items()}
    shards = [(p.detach().clone(), clone(p.grad)) for p in model.parameters()]
    done = 0
    for chosen in product((False, True), repeat=len(OPTIONS)):
        options = dict(zip(OPTIONS, chosen, strict=True))
        try:
            check_combination(world, model, expected, options)
        except AssertionError as error:
            raise AssertionError(f"with {options}") from error
        # From the same values again, or they would grow without end.
        for name, (value, gradient) in start.items():
            expected[name].data.copy_(value)
            expected[name].grad = clone(gradient)
        for parameter, (value, gradient) in zip(
            model.parameters(), shards, strict=True
        ):
            parameter.data.copy_(value)
            assert (parameter.grad is None) == (gradient is None)
            if parameter.grad is not None and gradient is not None:
                parameter.grad.copy_(gradient)
        done += 1
    return done


def clone(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


@pytest.mark.few(2)
@pytest.mark.req("D-12")
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, s) for s in STRATEGIES] + [(1, STRATEGIES[0])] + [(4, s) for s in HYBRIDS],
    ids=lambda v: v.name if isinstance(v, ShardingStrategy) else str(v),
)
@both_paths
def test_every_combination_of_options_shows_and_keeps_what_it_says(
    ranks: RankCount, path: str, world_size: int, strategy: ShardingStrategy
) -> None:
    """All 32, with values and gradients compared to the plain model's.

    With replicas and ``rank0_only`` the values of one rank of all are taken.
    """
    assert set(ranks(world_size).run(check_all, path, strategy)) == {32}


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


@pytest.mark.req("S1-12")
@on_ranks(2, 3)
@both_paths
def test_rank_0s_values_are_on_all_ranks_bit_by_bit(world: World, path: str) -> None:
    """Whatever the others wrote into the shards that they still see."""
    model, plain = gpt(path), TinyGPT()
    with unshard_params(model, rank0_only=True, writeback=True), torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(index + 0.1 if world.rank == 0 else -5.0)
    with torch.no_grad():
        for index, parameter in enumerate(plain.parameters()):
            parameter.fill_(index + 0.1)

    assert _same(dict(model.state_dict()), dict(plain.state_dict()))


def raise_on(world: World, rank: int, model: nn.Module, **options: bool) -> str:
    with unshard_params(model, **options):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        if world.rank == rank:
            raise KeyError("in the block")
    return "no error"


def check_raise(
    world: World, path: str, strategy: ShardingStrategy, rank: int, how: str
) -> str:
    model = gpt(path, strategy=strategy)
    backward(loss_of(model, gpt_input(0, world.rank)))
    parameters = [p.detach().clone() for p in model.parameters()]
    gradients = [clone(p.grad) for p in model.parameters()]
    options = {name: name in how for name in ("rank0_only", "with_grads")}

    text = message_of(lambda: raise_on(world, rank, model, writeback=True, **options))
    last = [p.detach().clone() for p in model.parameters()]
    shown = is_full(model)

    if not ("rank0_only" in how and world.rank):
        # Else this rank kept its shards in sight and wrote them itself.
        assert _same(last, parameters)
    assert _same([p.grad for p in model.parameters()], gradients)
    assert not any(shown)
    # The ranks are still in step.
    backward(loss_of(model, gpt_input(1, world.rank)))
    return text


@pytest.mark.req("X-07")
@pytest.mark.parametrize(
    "how", ["", "rank0_only", "with_grads", "rank0_only with_grads"]
)
@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=lambda s: s.name)
@pytest.mark.parametrize("rank", [0, 1])
@both_paths
def test_a_raise_on_one_rank_is_its_own_and_nothing_is_written_on_any(
    ranks: RankCount, path: str, rank: int, strategy: ShardingStrategy, how: str
) -> None:
    """That rank has the original error, the other hears of it, and nobody hangs."""
    texts = ranks(2).run(check_raise, path, strategy, rank, how)

    assert texts[rank] == "KeyError: 'in the block'"
    assert texts[1 - rank].startswith(
        f"DesyncError: Rank {rank} raised inside unshard_params(writeback=True), so "
        "nothing was written here either"
    )


def check_bad_shape(world: World) -> str:
    model = fully_shard(tiny_mlp())
    before = dict(model.state_dict())

    def act() -> None:
        with unshard_params(model):
            model.get_parameter("0.bias").data.zero_()
            if world.rank == 1:
                model.get_submodule("2").bias = nn.Parameter(torch.ones(99))

    text = message_of(act)
    assert _same(dict(model.state_dict()), before)
    return text


@pytest.mark.req("X-07")
def test_a_parameter_that_does_not_fit_on_one_rank_is_written_on_none(
    ranks: RankCount,
) -> None:
    """What is found at the end of the block counts as a raise inside it."""
    first, second = ranks(2).run(check_bad_shape)

    assert "parameter '2.bias' was replaced by (99,)" in second
    assert first.startswith("DesyncError: Rank 1 raised inside unshard_params")


def check_unlike(world: World, path: str, checked: bool, offload: bool) -> Any:
    model = gpt(path)
    before = dict(model.state_dict())

    def act() -> None:
        with (
            unshard_params(model, check_same=checked, offload_to_cpu=offload),
            torch.no_grad(),
        ):
            model.get_parameter("norm.weight").fill_(float(world.rank))
            model.get_parameter("positions.weight").add_(1.0)

    text = message_of(act)
    after = dict(model.state_dict())
    if checked:
        assert _same(after, before)
    return text, after["norm.weight"]


@pytest.mark.req("X-08")
@both_paths
def test_ranks_that_write_differently_keep_the_parts_that_they_hold(
    ranks: RankCount, path: str
) -> None:
    """The rule of the documentation: an element is as its owner wrote it."""
    for text, values in ranks(2).run(check_unlike, path, False, False):
        assert text == "nothing was raised"
        # Two ranks: the first elements are rank 0's.
        assert values.tolist() == sorted(values.tolist())
        assert set(values.tolist()) <= {0.0, 1.0}


@pytest.mark.req("X-08")
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@both_paths
def test_ranks_that_write_differently_are_told_on_request(
    ranks: RankCount, path: str, offload: bool
) -> None:
    """The one parameter that differs, by name, on both ranks; nothing is written."""
    texts = [t for t, _ in ranks(2).run(check_unlike, path, True, offload)]

    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "DesyncError: Parameter 'norm.weight' was written differently on the ranks"
    )


@on_ranks(2)
def test_ranks_that_write_the_same_pass_the_check(world: World) -> None:
    """And what they wrote is kept."""
    model = fully_shard(tiny_mlp())
    with unshard_params(model, check_same=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.5)
    assert all(bool((v == 2.5).all()) for v in model.state_dict().values())
