"""Right programs of many kinds train as the plain model, without a word.

Each takes three steps of SGD in its own way; beside those of
``test_right_programs.py``, which wait.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import (
    async_save,
    fully_shard,
    load,
    no_sync,
    optim_state_dict,
)
from tests.faults.test_right_programs import quiet
from tests.support.reference import backward
from tests.support.sharded import RankCount
from tests.support.world import World

WIDTH, STEPS = 8, 3
LATE = 0.1

Program = Callable[[World, Path], nn.Module]


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*layers)


def sharded(group: dist.ProcessGroup | None = None) -> nn.Sequential:
    model = plain()
    for layer in model:
        fully_shard(layer, process_group=group)
    return fully_shard(model, process_group=group)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum() / (4 * WIDTH)
    return loss


def fit(
    model: nn.Module,
    rank: int,
    steps: Iterable[int] = range(STEPS),
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.optim.Optimizer:
    optimizer = optimizer or sgd(model)
    for step in steps:
        backward(loss_of(model, batch(step, rank)))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def expected(size: int) -> dict[str, Tensor]:
    """The weights of the plain model after three steps on the batches of all ranks."""
    model = plain()
    optimizer = sgd(model)
    for step in range(STEPS):
        for rank in range(size):
            backward(loss_of(model, batch(step, rank)) / size)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def by_steps(take: Callable[[nn.Module, Tensor, int], object]) -> Program:
    """A program whose backward of each step is ``take(model, batch, step)``."""

    def run(world: World, folder: Path) -> nn.Module:
        model = sharded()
        optimizer = sgd(model)
        for step in range(STEPS):
            take(model, batch(step, world.rank), step)
            optimizer.step()
            optimizer.zero_grad()
        return model

    return run


def in_another_thread(model: nn.Module, x: Tensor, step: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backward, loss_of(model, x)).result()


def in_threads_by_turns(model: nn.Module, x: Tensor, step: int) -> None:
    def take() -> None:
        backward(loss_of(model, x))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(take).result() if step % 2 else take()


def in_two_parts(model: nn.Module, x: Tensor, step: int) -> None:
    backward(loss_of(model, x[:1]) + loss_of(model, x[1:]))


def in_unequal_parts(model: nn.Module, x: Tensor, step: int) -> None:
    first, second = torch.split(x, 3 - step % 2)[:2]
    with no_sync(model):
        backward(loss_of(model, first))
    backward(loss_of(model, second))


def in_a_handler(model: nn.Module, x: Tensor, step: int) -> None:
    try:
        raise MemoryError
    except MemoryError:
        backward(loss_of(model, x))


def with_state_dicts(model: nn.Module, x: Tensor, step: int) -> None:
    backward(loss_of(model, x))
    optimizer = torch.optim.Adam(model.parameters())
    model.state_dict()
    optim_state_dict(model, optimizer)


def in_contexts(model: nn.Module, x: Tensor, step: int) -> None:
    with ExitStack() as stack:
        for context in (
            torch.random.fork_rng(),
            torch.autograd.graph.save_on_cpu(),
            torch.autocast("cpu", enabled=False),
            torch.autograd.set_multithreading_enabled(False),
        ):
            stack.enter_context(context)
        backward(loss_of(model, x))


def recomputed(model: nn.Module, x: Tensor, step: int) -> None:
    found: Any = checkpoint(partial(loss_of, model), x, use_reentrant=False)
    found.backward()


def twice(model: nn.Module, x: Tensor, step: int) -> None:
    loss = loss_of(model, x) / 2
    torch.autograd.backward(loss, retain_graph=True)
    backward(loss)


def beside_functional(model: nn.Module, x: Tensor, step: int) -> None:
    other = plain()
    call = partial(torch.func.functional_call, other, dict(other.named_parameters()))
    torch.func.vmap(call)(x[:, None])
    backward(loss_of(model, x))


def with_hooks_that_leave(model: nn.Module, x: Tensor, step: int) -> None:
    handle: Any = None

    def hook(gradient: Tensor) -> None:
        handle.remove()

    handle = next(model.parameters()).register_hook(hook)  # type: ignore[no-untyped-call]  # ditto
    backward(loss_of(model, x))


def swapped_by_data(model: nn.Module, x: Tensor, step: int) -> None:
    with torch.no_grad():
        kept = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)
        assert not model(x).any()
        for parameter, old in zip(model.parameters(), kept, strict=True):
            parameter.data = old
    backward(loss_of(model, x))


def beside_a_late_barrier(model: nn.Module, x: Tensor, step: int) -> None:
    group = dist.new_group([0, 1])

    def wait() -> None:
        time.sleep(LATE * (dist.get_rank() == step % 2))
        dist.barrier(group)

    thread = threading.Thread(target=wait)
    thread.start()
    backward(loss_of(model, x))
    thread.join()


PROGRAMS.update(
    (take.__name__, by_steps(take))
    for take in (
        *(in_another_thread, in_threads_by_turns, in_two_parts, in_unequal_parts),
        *(in_a_handler, with_state_dicts, in_contexts, recomputed, twice),
        *(beside_functional, with_hooks_that_leave, swapped_by_data),
        beside_a_late_barrier,
    )
)


@program
def a_generator(world: World, folder: Path) -> nn.Module:
    model = sharded()
    optimizer = sgd(model)

    def losses() -> Iterator[Tensor]:
        for step in range(STEPS):
            yield loss_of(model, batch(step, world.rank))
            optimizer.step()
            optimizer.zero_grad()

    for loss in losses():
        backward(loss)
        time.sleep(LATE * world.rank)
    return model


@program
def models_that_go_in_the_middle(world: World, folder: Path) -> nn.Module:
    gc.disable()
    for _ in range(3):
        model = sharded()
        out = model(batch(0, world.rank)).sum()
        del model
        backward(out)
    gc.enable()
    model = sharded()
    fit(model, world.rank)
    return model


@program
def two_models_in_one_backward(world: World, folder: Path) -> nn.Module:
    one, two = sharded(), sharded()
    optimizers = [sgd(each) for each in (one, two)]
    for step in range(STEPS):
        x = batch(step, world.rank)
        backward(loss_of(one, x) + loss_of(two, x))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return two


@program
def stages_over_single_ranks(world: World, folder: Path) -> nn.Module:
    """A pipeline: each rank has a model of its own, beside one that both have."""
    stage = sharded([dist.new_group([rank]) for rank in range(2)][world.rank])
    optimizer = sgd(stage)
    for step in range(STEPS):
        if world.rank == 0:
            out = stage(batch(step, 0))
            gradient = torch.empty_like(out)
            dist.send(out.detach(), 1)
            dist.recv(gradient, 1)
            torch.autograd.backward(out, gradient)
        else:
            given = torch.empty(4, WIDTH)
            dist.recv(given, 0)
            backward(loss_of(stage, given.requires_grad_()))
            assert given.grad is not None
            dist.send(given.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
    model = sharded()
    fit(model, world.rank)
    return model


@program
def a_save_in_the_background(world: World, folder: Path) -> nn.Module:
    model = sharded()
    optimizer = fit(model, world.rank)
    time.sleep(LATE * world.rank)
    handle = async_save(folder / "later", model, optimizer)
    fit(model, world.rank, range(3, 5), optimizer)
    handle.result()
    model = sharded()
    load(folder / "later", model)
    return model


def run_program(world: World, name: str, folder: Path) -> None:
    """Run a program, and compare its model with the plain one."""
    with quiet():
        values = PROGRAMS[name](world, folder).state_dict()
    for key, value in expected(world.world_size).items():
        assert torch.allclose(values[key], value, atol=1e-6), key


@pytest.mark.req("X-12", "R-12")
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unusual_program_trains_as_the_plain_model(
    ranks: RankCount, name: str, tmp_path: Path
) -> None:
    """On both ranks, and quietly."""
    ranks(2).run(run_program, name, tmp_path)
