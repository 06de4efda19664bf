"""Full parameters outside the step: pairs of options, and blocks that end badly."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    ShardingStrategy,
    fully_shard,
    optim_state_dict,
    unshard_params,
)
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.memory import LiveBytes
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.recording import record_steps
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


@pytest.mark.req("S1-10")
@on_ranks(1, 2, 3)
def test_each_level_unshards_the_units_it_names_and_no_other(world: World) -> None:
    """``recurse=False`` touches one unit; each unit costs one all-gather."""
    model = gpt("wrapper")
    levels: dict[str, tuple[Any, list[bool]]] = {
        "root alone": (unshard_params(model, recurse=False), [True, False, False]),
        "block alone": (
            unshard_params(model.get_submodule("blocks")[1], recurse=False),  # type: ignore[index]
            [False, False, True],
        ),
        "root and below": (unshard_params(model), [True] * 3),
    }
    for name, (block, expected) in levels.items():
        with record_steps() as calls, block:
            shown = is_full(model)

        assert shown == expected, name
        assert is_full(model) == [False] * 3, name
        gathers = sum(expected) if world.world_size > 1 else 0
        # Ranks say on exit that none raised.
        end = ["all_reduce"] if gathers else []
        assert [call.op for call in calls] == ["all_gather"] * gathers + end, name


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(3)
def test_a_parameter_assigned_in_the_block_is_taken_up(
    world: World, rank0_only: bool
) -> None:
    """Its values are kept; the object in the module is the original one again."""
    model: Any = apply_units(tiny_mlp(), [], path="wrapper")
    leaf = model[0].weight

    with unshard_params(model, rank0_only=rank0_only):
        if world.rank == 0 or not rank0_only:
            model[0].weight = nn.Parameter(torch.full((12, 8), 7.0))
            if not rank0_only:
                assert torch.equal(model.state_dict()["0.weight"], model[0].weight)

    assert model[0].weight is leaf
    assert torch.equal(model.state_dict()["0.weight"], torch.full((12, 8), 7.0))


@on_ranks(2)
def test_a_parameter_of_another_shape_is_refused_by_name(world: World) -> None:
    """The message has name, both shapes and the way out; the model is as it was."""
    model = gpt("wrapper")
    before = model.state_dict()
    norm: Any = model.get_submodule("blocks")[1].norm_2  # type: ignore[index]

    def act(attribute: str, wrong: Tensor | None) -> None:
        with unshard_params(model):
            setattr(norm if attribute == "weight" else norm.weight, attribute, wrong)

    for attribute, wrong, found in (
        ("weight", nn.Parameter(torch.ones(3)), r"(3,) torch.float32"),
        ("data", torch.ones(3), r"(3,) torch.float32"),
        ("weight", None, "NoneType"),
    ):
        text = message_of(partial(act, attribute, wrong))
        assert text.startswith(
            "PhaseError: Inside unshard_params parameter 'blocks.1.norm_2.weight' was "
            f"replaced by {found}; expected (8,) torch.float32. Write into it in place"
        )
    assert differences(model.state_dict(), before) == {}
    assert is_full(model) == [False] * 3
    loss_of(model, gpt_input(0, world.rank)).backward()  # type: ignore[no-untyped-call]


@on_ranks(3)
def test_state_dicts_are_given_and_taken_inside_the_block(world: World) -> None:
    """Saving copies the full parameters; what is loaded reaches the shards."""
    model, plain = gpt("wrapper"), TinyGPT()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unshard_params(model):
        saved = model.state_dict()
        model.load_state_dict(TinyGPT(seed=5).state_dict())
        text = message_of(partial(optim_state_dict, model, optimizer))
    assert "optim_state_dict was called on (root) inside unshard_params" in text

    assert differences(saved, plain.state_dict()) == {}
    assert differences(model.state_dict(), TinyGPT(seed=5).state_dict()) == {}


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Values that depend on the whole parameter's shape."""
    for parameter in module.parameters(recurse=False):
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))


@pytest.mark.req("X-07")
@on_ranks(2)
def test_an_error_in_apply_reaches_every_rank(world: World) -> None:
    """The others do not wait at the next unit, and the values stay."""
    model = gpt("wrapper")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def note(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            if world.rank == 1:
                raise ValueError("not here")
            fill(module)

    text = message_of(lambda: model.apply(note))
    assert differences(model.state_dict(), before) == {}
    told = "Rank 1 raised inside apply, so nothing was written here either"
    assert ("ValueError: not here" if world.rank == 1 else told) in text


def values(model: nn.Module) -> dict[str, Tensor]:
    """The parameters as they are now, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def write(model: nn.Module, *, add: float) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.add_(add + index)


@pytest.mark.req("S1-10")
@on_ranks(3)
def test_a_plain_module_unshards_every_tree_below_it(world: World) -> None:
    """Two trees under a module that is no unit are full together."""

    def parts() -> tuple[nn.Module, nn.Module, nn.Module]:
        return tiny_mlp(), tiny_mlp(seed=1), tiny_mlp(seed=2)

    first, middle, last = parts()
    holder = nn.Sequential(
        apply_units(first, [], path="wrapper"),
        middle,
        apply_units(last, [], path="wrapper"),
    )
    plain = nn.Sequential(*parts())

    with unshard_params(holder, writeback=True):
        inside = list(values(holder).values())
        write(holder, add=0.5)
    same = [torch.equal(a, b) for a, b in zip(inside, plain.parameters(), strict=True)]
    write(plain, add=0.5)

    assert all(same)
    assert is_full(holder) == [False, False]
    assert differences(holder.state_dict(), plain.state_dict()) == {}


@on_ranks(2)
def test_a_kept_parameter_keeps_the_gradient_of_the_block(world: World) -> None:
    """Of a backward through a part of the unit; the model's own gradients stay."""
    model = fully_shard(tiny_mlp())
    with unshard_params(model):
        kept = model[0].get_parameter("weight")
        model[0](torch.ones(2, 8)).sum().backward()

    assert kept.grad is not None
    assert torch.equal(kept.grad, torch.full((12, 8), 2.0))
    assert all(parameter.grad is None for parameter in model.parameters())


everywhere = pytest.mark.parametrize("rank0_only", [False, True], ids=["all", "first"])


def gradients(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is not None]


@pytest.mark.req("D-12")
@everywhere
@on_ranks(2)
def test_a_block_may_write_back_where_no_parameter_has_a_gradient(
    world: World, rank0_only: bool
) -> None:
    """In one unit or in all: none appears but what the block sets."""
    model: Any = apply_units(tiny_mlp(), ["0", "2"])
    for sets in (False, True):
        with unshard_params(model, rank0_only=rank0_only, with_grads=True):
            assert gradients(model) == []
            if sets and (world.rank == 0 or not rank0_only):
                model[2].bias.grad = torch.ones_like(model[2].bias)
    with unshard_params(model, writeback=False, with_grads=True):
        assert gradients(model) == ["2.bias"]


@on_ranks(2)
def test_weights_that_are_all_written_in_a_block_are_not_compared(
    world: World,
) -> None:
    """The first call that meets is the block that overwrites what ranks have made of
    seeds of their own."""
    torch.manual_seed(world.rank)
    model = fully_shard(nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unshard_params(model), torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        backward(model(torch.ones(1, 8)).sum())


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
