"""On CUDA whatever two streams share is ordered: the CUDA path, watched on the CPU.

The watcher (``tests.support.streams``) knows which bytes each op of each
stream reads and writes. The model is built on a stream of its own, so hooks of leaves
run there and not where forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    unshard,
)
from composable_fsdp.access import (
    set_is_last_backward,
)
from composable_fsdp.comm import collectives
from composable_fsdp.config import HYBRID as GRIDS
from composable_fsdp.errors import PhaseError
from composable_fsdp.features import Arena, register_comm_hook
from composable_fsdp.features.comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
)
from composable_fsdp.runtime import recover
from composable_fsdp.tree.traversal import _get_fsdp_handles
from property_tests import program_actions
from property_tests.program_examples import programs
from property_tests.program_side import Side, forget_meshes
from property_tests.programs import expanded
from tests.support.models import TinyGPT
from tests.support.place import World
from tests.support.reference import backward
from tests.support.streams import Clock, FakeStream, StreamOrder, stream_order
from tests.support.world import fake_world

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOWER = MixedPrecision(param_dtype=torch.bfloat16)
ON_HOST = CPUOffload(offload_params=True)
SLOTS = Arena(poison=True)
TOKENS = torch.arange(12).view(2, 6)
MORE: dict[str, Any] = {}
"""Options of ``fully_shard`` for all cases."""
Case = Callable[[StreamOrder], None]


@contextmanager
def elsewhere(order: StreamOrder) -> Iterator[None]:
    """Be on a stream of another, and have compute wait for it at the end."""
    build = FakeStream(order, "build")
    build.wait_stream(order.compute)
    with order.on(build):
        yield
    order.compute.wait_stream(build)


def units(order: StreamOrder, model: Any, *below: nn.Module, **options: Any) -> Any:
    """Shard ``model`` and the modules ``below``."""
    with elsewhere(order):
        for module in (*below, model):
            fully_shard(module, **{**MORE, **options})
    return model


def gpt(order: StreamOrder, **options: Any) -> Any:
    model = TinyGPT(layers=3)
    return units(order, model, *model.blocks, **options)


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(TOKENS).float().square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, steps: int = 2) -> None:
    """With clipping, which reads every gradient."""
    optimizer = sgd(model)
    for step in range(steps):
        backward(loss_of(model))
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


@contextmanager
def watched(world_size: int = 4) -> Iterator[StreamOrder]:
    """A rank whose streams are watched; fails at the end if they were not ordered."""
    with fake_world(world_size), stream_order() as order:
        yield order
    assert order.problems == []


def mesh_for(strategy: ShardingStrategy) -> DeviceMesh | None:
    """Two groups of two ranks, if replicas are asked for."""
    if strategy not in GRIDS:
        return None
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


@pytest.mark.few(3)
@pytest.mark.parametrize("offload", [None, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("precision", [None, LOW, LOWER], ids=["own", "low", "lower"])
@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda s: s.name)
def test_every_strategy_is_ordered(
    strategy: ShardingStrategy,
    precision: MixedPrecision | None,
    offload: CPUOffload | None,
) -> None:
    """Steps, and accumulation with and without communication."""
    with watched() as order:
        model = gpt(
            order,
            device_mesh=mesh_for(strategy),
            strategy=strategy,
            mixed_precision=precision,
            cpu_offload=offload,
        )
        train(model)
        with no_sync(model):
            backward(loss_of(model))
        backward(loss_of(model))
        train(model)


@pytest.mark.few(3)
@pytest.mark.req("M-07")
@pytest.mark.parametrize("arena", [None, SLOTS], ids=["own", "slots"])
@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mode", [*BackwardPrefetch, None])
def test_every_prefetch_mode_is_ordered(
    mode: BackwardPrefetch | None, ahead: bool, limited: bool, arena: Arena | None
) -> None:
    """Through training, evaluation and training again."""
    with watched() as order:
        model = gpt(
            order,
            backward_prefetch=mode,
            forward_prefetch=ahead,
            limit_all_gathers=limited,
            arena=arena,
        )
        train(model)
        with torch.no_grad():
            loss_of(model.eval())
        train(model.train())


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda s: s.name)
def test_a_captured_step_waits_for_nothing_from_before(
    strategy: ShardingStrategy,
) -> None:
    """Neither a stream nor the host, for the warm-up or for the step of another model;
    and later steps wait for nothing from inside."""
    with watched() as order:
        host = gpt(order, cpu_offload=ON_HOST)
        train(host)
        model = gpt(order, device_mesh=mesh_for(strategy), strategy=strategy)
        side, graph = FakeStream(order, "side"), FakeStream(order, "graph")
        side.wait_stream(order.compute)
        with order.on(side):
            train(model)
        order.compute.wait_stream(side)
        graph.wait_stream(order.compute)
        with order.on(graph):
            order.captured = {graph}
            train(model, steps=1)
            order.captured = set()
        order.compute.wait_stream(graph)
        # Eager again, as for a batch of another shape.
        train(model)
        train(host)


def not_the_last(order: StreamOrder) -> None:
    """The end of a backward does not wait; two evaluations come, whose all-gathers
    take the memory of the reduction, and the model is changed before it does."""
    model = gpt(order)
    set_is_last_backward(model, False)
    backward(loss_of(model))
    with torch.no_grad():
        model(TOKENS), model(TOKENS)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    backward(loss_of(model))
    set_is_last_backward(model, True)
    train(model)


def penalty_last(order: StreamOrder) -> None:
    """Autograd adds to ``.grad`` of the shards before their unit is reduced."""
    model = gpt(order)
    for _ in range(2):
        loss = loss_of(model)
        backward(loss + sum(p.square().sum() for p in model.parameters()))


def step(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def steps_in_backward(order: StreamOrder) -> None:
    """Optimizers run in hooks of the leaves, also where nothing is cut."""
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = gpt(order, strategy=strategy)
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(partial(step, optimizer))
        for _ in range(3):
            backward(loss_of(model))


def tensor_hooks(order: StreamOrder) -> None:
    """Hooks keep copies, which are read and dropped after backward."""
    model, kept, mask = gpt(order), [], torch.ones(())

    def hook(gradient: Tensor) -> Tensor:
        kept.append(gradient.clone())
        return gradient * mask

    for parameter in model.parameters():
        parameter.register_hook(hook)
    for last in (True, False, True):
        set_is_last_backward(model, last)
        backward(loss_of(model))
    for copy_ in kept:
        copy_.square()
    kept.clear()
    train(model)


def comm_hooks(order: StreamOrder) -> None:
    """Hooks that reduce; one rank's result is the reduce buffer itself."""
    world = dist.group.WORLD
    assert world is not None
    model = gpt(order, cpu_offload=ON_HOST)
    register_comm_hook(model, LowPrecisionState(world), bf16_compress_hook)
    train(model)
    model = gpt(order, strategy=ShardingStrategy.NO_SHARD)
    register_comm_hook(model, DefaultState(world), allreduce_hook)
    train(model)


def stepped_between(order: StreamOrder) -> None:
    """An optimizer steps after a forward that may still be reading what it writes."""
    for offload in (None, ON_HOST):
        model = gpt(order, cpu_offload=offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        backward(loss_of(model))
        with torch.no_grad():
            loss_of(model)
        optimizer.step()
        loss = loss_of(model)
        optimizer.step()
        with pytest.raises(PhaseError, match="written to since"):
            backward(loss)
        train(model)


def handed_out(order: StreamOrder) -> None:
    """Backward gathers into the memory of parameters that the program has kept."""
    if getattr(MORE.get("arena"), "shared", False):
        return  # units of one slot are not full together
    model = gpt(order)
    train(model)
    for block in model.blocks:
        unshard(block)
    kept = [*model.blocks.parameters()]
    backward(loss_of(model))
    del kept
    train(model)


def scripted(name: str) -> Case:
    """Programs of ``property_tests`` on one rank, whose numbers nobody looks at."""

    def case(order: StreamOrder) -> None:
        group = dist.group.WORLD
        assert group is not None
        world = World(0, group.size(), torch.device("cpu"), "fake", group)
        for program in programs(SCRIPTS[name]):
            forget_meshes()
            if "arena" in MORE:
                shared = MORE["arena"].shared
                options = replace(
                    program.options, arena="shared" if shared else "apart"
                )
                program = replace(program, options=options)
            with elsewhere(order):
                side = Side(program, 0, world)
            for action, *arguments in expanded(program.actions):
                vars(program_actions)[action](side, *arguments)

    case.__name__ = name
    return case


SCRIPTS = {
    "listed": """
        linear + linear + linear | prefetch forward 1 (2,3); prefetch backward 3 (2,1);
            train 0 clip; train 1 clip
    """,
    "by_hand": """
        linear + linear + linear | unshard_unit 1 True; unshard_unit 2 False; forward 0;
            backward; step; unshard_unit 3 True; reshard_unit 3; step;
            unshard_unit 1 True; unshard_unit 2 False; forward 0; backward; step
    """,
    # From backward to forward.
    "kept_for_forward": """
        linear + linear | forward 0; backward; forward 0; backward;
            setting after_backward 0 True; setting after_backward 1 True;
            setting after_backward 2 True; train 0 clip; train 1 clip | keep_full
    """,
    # Sums over the shard group wait for the replicas.
    "late_replicas": """
        linear + linear | forward 0; backward 0 replica; forward 0; backward 0 replica;
            train 0 clip; train 1 clip | strategy=HYBRID_SHARD replicas=2
    """,
    # Regions are laid out anew, under gradients that are there.
    "freezing": """
        linear + linear | forward 0; backward; freeze 0; freeze 3; forward 0; backward;
            forward 0; backward; freeze 0; freeze 3; forward 0; backward; train 0 clip
    """,
    # A reentrant one brings gradients unannounced.
    "checkpointed": """
        linear + linear | train 0 clip; train 1 clip | wrapped={reentered/recomputed}
    """,
    "again": """
        linear + linear | forward 0; forward 1; backward 0; backward 0; forward 0;
            backward 0 retain; backward 0; train 0 clip; train 1 clip
    """,
    "unused": """
        linear + linear call=skip + linear | train 0; train 1 accumulate; train 2;
            train 0 accumulate | fill
    """,
    # Before a unit was reduced, or half way; also with no_sync.
    "broken": """
        linear + linear + linear | raise_in_backward {0/2} 0 model; train 0 clip;
            forward 0; backward 0 no_sync
        linear + linear + linear | raise_in_backward 2 0 model; train 0 clip;
            forward 0; backward 0 no_sync | offload
    """,
    # Written between optimizer and forward, by blocks and by a state dict.
    "shown": """
        linear + linear | train 0 clip; forward 0; backward; summon 0 True True; step;
            save; load; train 1 clip | low
        linear + linear | train 0 clip; forward 0; backward; summon 0 True True; step;
            save; load; train 1 clip | offload
    """,
}
CASES = [
    *map(scripted, SCRIPTS),
    not_the_last,
    penalty_last,
    steps_in_backward,
    tensor_hooks,
    comm_hooks,
    stepped_between,
    handed_out,
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@by_case
def test_streams_are_ordered(case: Case) -> None:
    """What the case's docstring says, on four ranks."""
    with watched() as order:
        case(order)


@pytest.mark.few(4)
@pytest.mark.req("M-07")
@by_case
@pytest.mark.parametrize("way", ["build", "shared slots", "own slots", "one rank"])
def test_streams_are_ordered_elsewhere(
    case: Case, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of leaves on the stream of the build, as if a graph held them; in slots of
    an arena, where gathers and poison come behind the last reader; without peers."""
    if way == "build":
        monkeypatch.setattr(recover, "make_nodes_on_current_stream", lambda context: 0)
    elif "slots" in way:
        arena = SLOTS if way == "shared slots" else Arena(shared=False, poison=True)
        monkeypatch.setitem(MORE, "arena", arena)
    with watched(1 if way == "one rank" else 4) as order:
        case(order)


def test_the_result_of_a_hook_stays_in_a_reduce_buffer() -> None:
    """A rank alone reduces in place; a cast fills the full buffers of the next unit."""
    with watched(1) as order:
        model = gpt(order, mixed_precision=LOWER)
        world = dist.group.WORLD
        assert world is not None
        register_comm_hook(model, DefaultState(world), allreduce_hook)
        train(model)


def streams_of(model: Any) -> set[tuple[Any, ...]]:
    return {handle.events.leaf_streams for handle in _get_fsdp_handles(model)}


def test_nodes_of_leaves_are_on_the_stream_of_the_forward() -> None:
    """A model that was built on another stream has no event per gradient, and a later
    forward on a third stream (of a capture) moves the nodes again."""
    with watched() as order:
        model = gpt(order)
        (build,) = streams_of(model)
        train(model)
        assert streams_of(model) == {(order.compute,)} != {build}

        third = FakeStream(order, "third")
        third.wait_stream(order.compute)
        with order.on(third):
            with torch.no_grad():
                loss_of(model)
            assert streams_of(model) == {(order.compute,)}
            train(model)
        assert streams_of(model) == {(third,)}


def test_a_unit_on_a_stream_of_its_own_ends_there() -> None:
    """By a node of its own: the one of its input is on the stream of the unit before,
    which waits for the gradient of the input, and not for a later reader of weights."""
    with watched() as order:
        model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        side, took = FakeStream(order, "side"), list[bool]()
        last: list[Tensor] = []

        def forward(x: Tensor) -> Tensor:
            x = model[1](model[0](x))
            side.wait_stream(order.compute)
            with order.on(side):
                x = model[2](x)
            order.compute.wait_stream(side)
            return x

        model.forward = forward
        units(order, model, *model)
        for layer in model:
            layer.register_forward_pre_hook(
                lambda _, args: took.append(any(args[0] is each for each in last))
            )
            layer.register_forward_hook(lambda *call: last.append(call[-1]))
        backward(model(torch.ones(2, 4)).sum())
        # As it is, and an alias with a node.
        assert took[1:] == [True, False]


@pytest.mark.req("M-07")
def test_gradients_belong_to_the_stream_of_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if hooks of leaves run on another stream: program code that allocates there
    does not wait for readers of ``.grad``."""
    monkeypatch.setattr(recover, "make_nodes_on_current_stream", lambda context: 0)
    with watched() as order:
        model = gpt(order)
        backward(loss_of(model))
        assert streams_of(model) != {(order.compute,)}
        for parameter in model.parameters():
            if parameter.grad is not None:
                owner = order.block(parameter.grad.untyped_storage()).owner
                assert owner is order.compute


# ---- the all-reduce over replicas ----

HYBRID = ShardingStrategy.HYBRID_SHARD


class Sent(NamedTuple):
    """A reduction as it was issued."""

    unit: str
    stream: FakeStream
    time: int
    seen: Clock
    """What the stream waits for first."""
    compute: Clock
    """What compute has waited for by then."""


def sent(
    order: StreamOrder, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[Sent]]:
    """The reductions of a backward in the steady state, by kind, in order."""
    found: dict[str, list[Sent]] = {}

    def note(op: str, plain: Any) -> Any:
        def noting(*args: Any, operation: Any = None, **kwargs: Any) -> Any:
            stream, seen = order.current, dict(order.current.clock)
            result = plain(*args, operation=operation, **kwargs)
            clock = dict(order.compute.clock)
            made = Sent(operation.unit, stream, stream.clock[stream], seen, clock)
            found.setdefault(op, []).append(made)
            return result

        return noting

    backward(loss_of(model))
    for name in ("reduce_scatter_flat", "all_reduce"):
        monkeypatch.setattr(collectives, name, note(name, getattr(collectives, name)))
    backward(loss_of(model))
    return found


@contextmanager
def hybrid(**options: Any) -> Iterator[tuple[StreamOrder, Any]]:
    """Three blocks on a rank of two shards and two replicas."""
    with watched() as order:
        yield (
            order,
            gpt(order, strategy=HYBRID, device_mesh=mesh_for(HYBRID), **options),
        )


@pytest.mark.req("M-07")
@pytest.mark.parametrize("low", [None, LOWER], ids=["own", "low"])
def test_the_next_reduce_scatter_does_not_wait_for_the_all_reduce(
    low: MixedPrecision | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does compute, until the reduction after next; each all-reduce is behind
    its own reduce-scatter."""
    with hybrid(mixed_precision=low) as (order, model):
        found = sent(order, model, monkeypatch)
        end = dict(order.compute.clock)
    scattered, summed = found["reduce_scatter_flat"], found["all_reduce"]

    assert [each.unit for each in scattered] == [each.unit for each in summed]
    assert len(scattered) == 4
    assert len({scattered[0].stream, summed[0].stream, order.compute}) == 3
    for own, result in zip(scattered, summed, strict=True):
        assert result.seen[own.stream] >= own.time
    for before, following in zip(summed, scattered[1:], strict=False):
        assert following.seen.get(before.stream, 0) < before.time
        assert following.compute.get(before.stream, 0) < before.time
    for before, following in zip(summed, scattered[2:], strict=False):
        assert following.seen[before.stream] >= before.time
    assert end[summed[-1].stream] >= summed[-1].time
