"""When, over which groups, by what and through which hooks gradients are reduced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel as TorchFSDP1,
)
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import fully_shard as torch_fsdp2
from torch.distributed.tensor import DTensor

from composable_fsdp import ShardingStrategy, features, fully_shard, no_sync
from composable_fsdp.access import (
    set_gradient_divide_factor,
    set_is_last_backward,
    set_reduce_scatter_unused_params,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
    set_separate_reduce_scatter_group,
)
from composable_fsdp.comm.collectives import CallRecord, record
from composable_fsdp.comm.groups import operation_logs
from composable_fsdp.features import DefaultState, recent_operations, register_comm_hook
from composable_fsdp.features.guard.watch import GroupWatch
from composable_fsdp.tree.traversal import _get_fsdp_handles, _get_fsdp_states
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    STRATEGIES,
    adamw,
    gpt_input,
    loss_of,
    train,
)
from tests.support.sharded import both_paths, gpt, message_of, own_gradient, own_parts
from tests.support.world import RankPool, World, fake_world


def backward(model: nn.Module, batch: int, rank: int) -> None:
    loss_of(model, gpt_input(batch, rank)).backward()  # type: ignore[no-untyped-call]


def sent(calls: Sequence[CallRecord], op: str) -> int:
    return sum(call.op == op for call in calls)


@pytest.mark.req("B-14")
@on_ranks(2, 3)
@both_paths
@pytest.mark.parametrize("who", ["no_sync", "all", "blocks", "root"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_units_that_do_not_sync_accumulate_without_communication(
    world: World, path: str, who: str, strategy: ShardingStrategy
) -> None:
    """Of all units, some or the root alone: the sum is that of the plain model."""
    model = gpt(path, strategy=strategy)
    target = model.get_submodule("blocks") if who == "blocks" else model

    if who != "no_sync":
        set_requires_gradient_sync(target, False, recurse=who != "root")
    with record() as quiet, no_sync(model) if who == "no_sync" else nullcontext():
        backward(model, 0, world.rank)
        backward(model, 1, world.rank)
    unreduced = [parameter.grad for parameter in model.parameters()]
    set_requires_gradient_sync(model, True)
    with record() as calls:
        backward(model, 2, world.rank)

    whole = strategy is ShardingStrategy.NO_SHARD
    op = "all_reduce" if whole else "reduce_scatter"
    # Whole gradients are reduced region by region, shards of a unit at once.
    root, *blocks = (
        len(state.handle.layout.trainable) if whole else 1
        for state in _get_fsdp_states(model)
    )
    synced = {"blocks": root, "root": sum(blocks)}.get(who, 0)
    assert sent(quiet, op) == 2 * synced
    assert who in ("blocks", "root") or unreduced == [None] * len(unreduced)
    assert sent(calls, op) == root + sum(blocks)
    assert_gradients(model, summed_then_averaged(world, [0, 1, 2]), 1e-5)


def hybrid(world: World, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return gpt(
        "composable",
        strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        **options,
    )


@pytest.mark.req("B-14")
@on_ranks(4)
def test_hybrid_units_all_reduce_at_the_last_micro_batch_only(world: World) -> None:
    """Each micro-batch reduce-scatters; the replicas' sums are taken once, at last."""
    model = hybrid(world)

    set_requires_all_reduce(model, False)
    with record() as partial_calls:
        backward(model, 0, world.rank)
        backward(model, 1, world.rank)
    between = [p.grad for p in model.parameters()]
    held = [
        r.reduce.partial
        for s in _get_fsdp_states(model)
        for r in s.handle.layout.trainable
    ]
    set_requires_gradient_sync(model, True)  # turns both on, as in FSDP2
    with record() as calls:
        backward(model, 2, world.rank)

    regions = len(held)
    assert between == [None] * len(between)
    assert all(part is not None for part in held)
    assert sent(partial_calls, "reduce_scatter") == 6
    assert sent(partial_calls, "all_reduce") == 0
    assert (sent(calls, "reduce_scatter"), sent(calls, "all_reduce")) == (3, regions)
    assert_gradients(model, summed_then_averaged(world, [0, 1, 2]), 1e-6)
    backward(model, 3, world.rank)
    assert_gradients(model, summed_then_averaged(world, [0, 1, 2, 3]), 1e-6)


def whole(gradient: torch.Tensor | None) -> torch.Tensor:
    """The full gradient of a DTensor; of a plain model divided by the factor."""
    assert gradient is not None
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    return gradient / 8.0


@on_ranks(2)
def test_the_last_reduction_is_awaited_by_the_last_backward(world: World) -> None:
    """Before, the end of backward leaves it on its way, and no sum is lost. A forward
    does not await it: hooks of the user would run in the mode of that forward."""
    model = gpt("composable")
    modes: set[bool] = set()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch
            lambda _: modes.add(torch.is_inference_mode_enabled())
        )

    set_is_last_backward(model, False)
    backward(model, 0, world.rank)
    in_flight = _get_fsdp_states(model)[0].context
    assert in_flight is not None
    with torch.inference_mode():
        model(gpt_input(2, world.rank))
    pending = in_flight.reducing is not None
    set_is_last_backward(model, True)
    backward(model, 1, world.rank)

    assert pending
    assert in_flight.reducing is None
    assert modes == {False}
    assert_gradients(model, summed_then_averaged(world, [0, 1]), 1e-6)


@pytest.mark.parametrize(
    "switch",
    [
        set_is_last_backward,
        set_reduce_scatter_unused_params,
        set_requires_all_reduce,
        set_requires_gradient_sync,
        set_reshard_after_backward,
        set_reshard_after_forward,
        no_sync,
    ],
)
def test_wrong_values_and_models_without_units_are_refused(
    one_rank: World, switch: Callable[..., Any]
) -> None:
    """A text would count as true; the message names the function."""
    if switch is no_sync:
        act: Any = no_sync(nn.Linear(2, 2)).__enter__
    else:
        act = partial(switch, nn.Linear(2, 2), False)
        for value in ("no", 1, None):
            text = message_of(partial(switch, fully_shard(nn.Linear(2, 2)), value))
            assert text.startswith(
                f"TypeError: {switch.__name__} expects True or False, got {value!r}."
            )
    assert message_of(act) == (
        f"CompositionError: {switch.__name__} was called on a Linear that holds no "
        "fully sharded module; nor is it in one. Apply fully_shard first."
    )
    text = message_of(lambda: set_gradient_divide_factor(nn.Linear(2, 2), 0.0))
    assert text.startswith("ValueError: set_gradient_divide_factor expects a positive")


def summed_then_averaged(world: World, batches: Sequence[int]) -> dict[str, Tensor]:
    """Each rank's gradients on the plain model, summed over batches, then averaged."""
    total: dict[str, Tensor] = {}
    for rank in range(world.world_size):
        plain = TinyGPT()
        for batch in batches:
            backward(plain, batch, rank)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            grad = parameter.grad
            total[name] = total[name] + grad if name in total else grad
    return {name: value / world.world_size for name, value in total.items()}


def assert_gradients(
    model: nn.Module, expected: dict[str, Tensor], tolerance: float
) -> None:
    for name, (leaf, part) in own_parts(model, expected).items():
        gradient = own_gradient(leaf)
        if tolerance:
            assert torch.allclose(gradient, part, atol=tolerance), name
        else:
            assert torch.equal(gradient, part), name


OF_GROUPS = [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD]


def in_blocks(world: World, strategy: ShardingStrategy) -> Any:
    """Two blocks and a root, over a grid if replicas are asked for."""
    torch.manual_seed(0)
    model = TinyGPT()
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        grid = (2, world.world_size // 2)
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("outer", "inner"))
    for module in (*model.blocks, model):
        fully_shard(module, strategy=strategy, device_mesh=mesh)
    return model


def train_on_two_groups(world: World, strategy: ShardingStrategy) -> None:
    """Three steps with and without, and the groups of the collectives."""
    plain, model = in_blocks(world, strategy), in_blocks(world, strategy)
    expected = train(plain, world.rank, gpt_input, adamw)
    known = {each.name for each in operation_logs()}
    # Twice: the second call creates nothing.
    for _ in range(2):
        set_separate_reduce_scatter_group(model)
    before = seen_operations()

    losses = train(model, world.rank, gpt_input, adamw)

    assert losses == expected
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    groups: dict[str, set[str]] = {}
    for each in recent_operations():
        if (each.group, each.number) not in before:
            groups.setdefault(each.op, set()).add(each.group)
    (gathers,), (reductions,) = groups["all_gather"], groups["reduce_scatter"]
    assert gathers != reductions
    assert {each.name for each in operation_logs()} - known == {reductions}
    # A rank that leaves the order is found over either group.
    (made,) = [each for each in operation_logs() if each.name == reductions]
    assert type(made.recorder) is GroupWatch

    # A copy reduces over the same group; False goes back to that of the gathers.
    twin = copy.deepcopy(model)
    assert all(
        one.rule.group is other.rule.group is not None
        for one, other in zip(
            _get_fsdp_handles(twin), _get_fsdp_handles(model), strict=True
        )
    )
    set_separate_reduce_scatter_group(model, False)
    before = seen_operations()
    train(model, world.rank, gpt_input, adamw)
    assert {
        each.group
        for each in recent_operations()
        if each.op == "reduce_scatter" and (each.group, each.number) not in before
    } == {gathers}


def seen_operations() -> set[tuple[str, int]]:
    """The operations so far. A full ring has the same length after others."""
    return {(each.group, each.number) for each in recent_operations()}


@pytest.mark.req("M-07")
@pytest.mark.parametrize(
    ("strategy", "size"), [(OF_GROUPS[0], 2), (OF_GROUPS[1], 4)], ids=str
)
def test_training_is_the_same_over_a_second_group(
    ranks: Callable[[int], RankPool], strategy: ShardingStrategy, size: int
) -> None:
    """Bit by bit; records name the group that a collective was sent over."""
    ranks(size).run(train_on_two_groups, strategy)


@pytest.mark.req("M-07")
def test_one_unit_alone_and_refusals() -> None:
    """Without ``recurse`` the units below stay; a unit of one rank has no group."""
    with fake_world(4) as world:
        model = in_blocks(world, ShardingStrategy.FULL_SHARD)
        set_separate_reduce_scatter_group(model, recurse=False)
        root, *others = _get_fsdp_handles(model)
        assert root.rule.group is not None
        assert [each.rule.group for each in others] == [None, None]
        with pytest.raises(TypeError, match="expects True or False"):
            set_separate_reduce_scatter_group(model, 1)  # type: ignore[arg-type]
        copied = in_blocks(world, ShardingStrategy.NO_SHARD)
        set_separate_reduce_scatter_group(copied)
        assert {each.rule.group for each in _get_fsdp_handles(copied)} == {None}


@pytest.mark.req("B-15")
@on_ranks(1, 2)
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]
)
def test_a_divide_factor_replaces_the_number_of_ranks_as_in_fsdp2(
    world: World, strategy: ShardingStrategy
) -> None:
    """Gradients are the sum over ranks divided by the factor."""
    model, theirs = gpt("composable", strategy=strategy), TinyGPT()
    if world.world_size > 1:  # of one rank, torch 2.13 divides twice
        reference: Any = torch_fsdp2(theirs)
        reference.set_gradient_divide_factor(8.0)
        # Its own scaling sum is one of NCCL's.
        reference.set_force_sum_reduction_for_comms(True)

    for state in _get_fsdp_states(model):
        set_gradient_divide_factor(state.module, 8.0)
    backward(model, 0, world.rank)
    backward(theirs, 0, world.rank)

    full = {n: whole(p.grad) for n, p in theirs.named_parameters()}
    for name, (leaf, part) in own_parts(model, full).items():
        torch.testing.assert_close(own_gradient(leaf), part, msg=name)


@pytest.mark.req("B-14")
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (ShardingStrategy.SHARD_GRAD_OP, [3, 0, 0, 3]),
        (ShardingStrategy.FULL_SHARD, [5, 5, 5, 5]),
    ],
)
@on_ranks(2)
def test_what_stays_full_for_backward_stays_for_the_next_forward(
    world: World, strategy: ShardingStrategy, expected: list[int]
) -> None:
    """With SHARD_GRAD_OP three gathers serve three batches; FULL_SHARD gathers anew."""
    model = gpt("wrapper", strategy=strategy)
    gathers = []
    for batch in range(4):
        waits = no_sync(model) if batch < 2 else nullcontext()
        with waits, record() as calls:
            backward(model, batch, world.rank)
        gathers.append(sum(call.op == "all_gather" for call in calls))

    assert gathers == expected
    assert_gradients(model, summed_then_averaged(world, [0, 1, 2, 3]), 1e-6)


by_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def group() -> Any:
    return torch.distributed.group.WORLD


@by_strategy
@on_ranks(2)
def test_a_hook_is_called_once_per_region_and_its_result_is_the_gradient(
    world: World, strategy: ShardingStrategy
) -> None:
    """It gets the state, the whole gradient, and the shard to fill where there is one;
    what it leaves is not divided again."""
    model: Any = gpt("wrapper", strategy=strategy)
    seen: list[tuple[int, ...]] = []

    def hook(state: list[int], gradient: Tensor, output: Tensor | None = None) -> None:
        state.append(len(seen))
        seen.append(tuple(t.numel() for t in (gradient, output) if t is not None))
        (gradient if output is None else output).fill_(world.rank + 7.0)

    mine: list[int] = []
    model.register_comm_hook(mine, hook)
    backward(model, 0, world.rank)

    regions = [r for s in _get_fsdp_states(model) for r in s.handle.layout.trainable]
    sizes = [
        (r.layout.padded_numel, r.layout.shard_numel)[: r.layout.world_size]
        for r in regions
    ]
    assert sorted(seen) == sorted(sizes)
    assert len(mine) == len(regions)
    for name, gradient in gradients(model).items():
        expected = torch.full_like(gradient, world.rank + 7.0)
        assert torch.equal(gradient, expected), name


def decompress(state: Any, gradient: Tensor) -> None:
    """Torch's, without the note for CUDA's allocator, which fails on CPU (2.13)."""
    gradient.data = gradient.data.to(state.parameter_type)


@pytest.mark.parametrize("no_shard", [False, True])
@pytest.mark.parametrize("origin", ["torch", "ours"])
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
@on_ranks(2)
def test_low_precision_hooks_give_the_bits_of_fsdp1(
    world: World, name: str, origin: str, no_shard: bool
) -> None:
    """Ours, and torch's own given to our function."""
    strategy = STRATEGIES[2 if no_shard else 0]
    model = gpt("composable", strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD
        theirs = TorchFSDP1(
            TinyGPT(),
            use_orig_params=True,
            sharding_strategy=TorchStrategy[strategy.name],
            device_id=torch.device("cpu"),
        )
    source: Any = torchs if origin == "torch" else features
    state = source.LowPrecisionState(group())

    register_comm_hook(model, state, getattr(source, name))
    theirs_state: Any = torchs.LowPrecisionState
    theirs.register_comm_hook(theirs_state(group()), getattr(torchs, name))
    with patch.object(torchs, "_decompress", decompress):
        with record() as calls:
            backward(model, 0, world.rank)
        backward(theirs, 0, world.rank)
    # Float32 gradients travel in two bytes an element.
    plan = [r for s in _get_fsdp_states(model) for r in s.handle.layout.plan.regions]
    op = "all_reduce" if no_shard else "reduce_scatter"
    sent = sum(call.nbytes for call in calls if call.op == op)
    # What torch's own hook sends is not recorded.
    assert sent == (origin == "ours") * sum(2 * each.padded_numel for each in plan)

    with TorchFSDP1.summon_full_params(theirs, with_grads=True):
        full = {
            n: p.grad.clone()
            for n, p in theirs.module.named_parameters()
            if p.grad is not None
        }
    for fqn, (leaf, part) in own_parts(model, full).items():
        gradient = own_gradient(leaf)
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, part), fqn


def shrink(_: object, gradient: Tensor, output: Tensor) -> None:
    output.data = output.data[:1]


@on_ranks(4)
def test_what_cannot_have_a_hook_is_refused_by_name(world: World) -> None:
    """Hybrid units, a second hook, no function, a result of another size, no group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = gpt("composable", strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    model, short = gpt("composable"), gpt("composable")
    register_comm_hook(model, None, print)
    register_comm_hook(short, None, shrink)
    wrong: Any = None
    for act, words in (
        (
            partial(register_comm_hook, hybrid, None, print),
            "CompositionError: register_comm_hook was called with unit (TinyGPT) of "
            "strategy HYBRID_SHARD: a hook reduces over one group",
        ),
        (partial(register_comm_hook, model, None, print), "a unit takes one hook."),
        (partial(register_comm_hook, model, None, wrong), "TypeError: register_comm_h"),
        (partial(DefaultState, wrong), "ValueError: DefaultState expects a process"),
        (
            partial(backward, short, 0, world.rank),
            "FSDPError: A communication hook left 1 elements; expected",
        ),
    ):
        assert words in message_of(act)
