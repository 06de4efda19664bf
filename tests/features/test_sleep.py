"""``sleep`` and ``wake``: no memory meanwhile, and training that does not notice."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_full_param,
    grad_norm,
    load,
    no_sync,
    optim_state_dict,
    param_norm,
    save,
    unshard_params,
)
from composable_fsdp.access import set_reshard_after_backward
from composable_fsdp.access.unshard_params import NO_STEPS
from composable_fsdp.comm import agreement
from composable_fsdp.errors import CompositionError, DesyncError, PhaseError
from composable_fsdp.features import (
    Arena,
    capture,
    captured_step,
    find_nonfinite,
    flat_parameters,
    released,
    sleep,
    wake,
)
from composable_fsdp.flat import memory
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.features.test_capture import Recorder, Trainee, inputs
from tests.parallel import experts
from tests.parallel import models as tp
from tests.parallel import test_experts as moe
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    adamw,
    backward,
    gpt_input,
    loss_of,
)
from tests.support.sharded import gpt
from tests.support.world import World

BF16 = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
Optimizer = torch.optim.Optimizer


def memory_of(model: nn.Module, *optims: Optimizer) -> int:
    """Bytes of what a user can reach, and of the shards."""
    reached = [*model.parameters(), *model.buffers()]
    reached += [p.grad for p in reached if p.grad is not None]
    for optim in optims:
        for values in optim.state.values():
            reached += [v for v in values.values() if isinstance(v, Tensor)]
    return sum(each.untyped_storage().nbytes() for each in reached)


def nap(model: nn.Module, *optims: Optimizer, keep: str = "gradients") -> None:
    """Sleep, look at the memory, and wake."""
    before = [*map(id, model.parameters())]
    with released(model, optims, keep=keep):
        assert memory_of(model, *optims) == 0
    assert [*map(id, model.parameters())] == before


def train(
    model: nn.Module, optimizer: Optimizer, rank: int, *, naps: bool
) -> list[float]:
    """Three steps, with a nap before the first, at each stage, and in the end."""
    losses = []
    doze: Callable[..., None] = nap if naps else lambda *_, **__: None
    doze(model, optimizer)
    for at in range(3):
        loss = loss_of(model, gpt_input(at, rank))
        losses.append(loss.item())
        backward(loss)
        doze(model, optimizer)
        optimizer.step()
        doze(model, optimizer)
        optimizer.zero_grad()
        doze(model, optimizer, keep="none")
    return losses


def fused(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


VARIANTS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], Optimizer]]] = {
    "bf16": ({"mixed_precision": BF16}, lambda m: adamw(m.parameters())),
    "fused": ({}, fused),
    "flat": ({}, lambda m: adamw(flat_parameters(m))),
    "offload": ({"cpu_offload": CPUOffload(True)}, lambda m: adamw(m.parameters())),
    "arena": (
        {"arena": Arena(poison=True), "mixed_precision": BF16},
        lambda m: adamw(m.parameters()),
    ),
}


@pytest.mark.req("W-03")
@pytest.mark.parametrize("name", VARIANTS)
@on_ranks(2)
def test_every_kind_of_training_can_sleep(world: World, name: str) -> None:
    """With naps and without, bit by bit: a tied weight, and a buffer."""
    options, optimize = VARIANTS[name]
    trained = []
    for naps in (True, False):
        model = gpt("composable", tied_head=True, **options)
        model.register_buffer("scale", torch.ones(3))
        losses = train(model, optimize(model), world.rank, naps=naps)
        trained.append((losses, model.state_dict()))

    (losses, state), (expected, wanted) = trained
    assert losses == expected
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.req("W-03")
@on_ranks(4)
def test_pieces_of_parameters_sleep_too(world: World) -> None:
    """With HFSDP; they are filled again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {
        "strategy": ShardingStrategy.HFSDP,
        "device_mesh": mesh,
    }
    losses = []
    for naps in (True, False):
        model = gpt("composable", **options)
        optimizer = adamw(model.parameters())
        losses.append(train(model, optimizer, world.rank, naps=naps))

    assert losses[0] == losses[1]
    sources = [state.handle.form.source for state in _get_fsdp_states(model)]
    held = [buffer for each in sources if each for buffer in each.kept]
    assert any(memory.is_allocated(each) for each in held)
    with released(model, optimizer):
        assert not any(memory.is_allocated(each) for each in held)


@pytest.mark.req("W-03")
@on_ranks(4)
def test_parts_of_tensor_parallelism_and_experts_can_sleep(world: World) -> None:
    """Two steps with a nap after each backward and each step."""
    mesh = tp.mesh_of(world, 2)
    recipe, rows = tp.Recipe(tied=True), tp.data_rank(mesh)
    model, other = (tp.sharded(recipe.parallel(mesh), mesh) for _ in range(2))
    several: list[tuple[Callable[[int, nn.Module], Tensor], nn.Module, nn.Module]] = [
        (lambda step, each: tp.loss_of(each, tp.batch(step, rows)), model, other),
        (
            lambda step, each: experts.loss_of(each, experts.batch(step, world.rank)),
            moe.pair(moe.MIXTRAL, world)[0],
            moe.pair(moe.MIXTRAL, world)[0],
        ),
    ]
    for loss, one, two in several:
        optims = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, two)]
        for step in range(2):
            for each, optim in zip((one, two), optims, strict=True):
                optim.zero_grad()
                backward(loss(step, each))
                if each is one:
                    nap(one, optims[0])
                optim.step()
            nap(one, optims[0])
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(tp.whole(p), tp.whole(q))


@pytest.mark.req("W-03")
@on_ranks(2)
def test_a_sleeping_model_says_wake(world: World, tmp_path: Path) -> None:
    """Forward, backward, step, save, load, state dicts, copies, a second sleep."""
    model = gpt("composable")
    optimizer = adamw(model.parameters())
    x = gpt_input(0, world.rank)
    backward(loss_of(model, x))
    optimizer.step()
    state = optimizer.state_dict()
    late = loss_of(model, x)
    save(tmp_path / "a", model, optimizer)
    sleep(model, [optimizer])
    calls: list[Callable[[], object]] = [
        lambda: model(x),
        lambda: backward(late),
        lambda: optimizer.step(),
        lambda: adamw(model.parameters()).step(),
        lambda: save(tmp_path / "b", model, optimizer),
        lambda: load(tmp_path / "a", model, optimizer),
        lambda: model.state_dict(),
        lambda: model.load_state_dict({}, strict=False),
        lambda: optimizer.state_dict(),
        lambda: optimizer.load_state_dict(state),
        lambda: optim_state_dict(model, optimizer),
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer),
        lambda: unshard_params(model).__enter__(),
        lambda: clip_grad_norm_(model, 1.0),
        lambda: grad_norm(model),
        lambda: param_norm(model),
        lambda: find_nonfinite(model),
        lambda: get_full_param(model, "tokens.weight"),
        lambda: sleep(model),
    ]
    for call in calls:
        with pytest.raises(PhaseError, match=r"sleeps in host memory.*wake\(model\)"):
            call()
    wake(model, optimizer)
    assert copy.deepcopy(optimizer).state_dict().keys() == state.keys()
    with pytest.raises(PhaseError, match="a model that is awake"):
        wake(model)


@on_ranks(1)
def test_misuse_is_told_before_anything_moves(world: World) -> None:
    """Inside a step, under ``no_sync``, a wrong argument, a model without units."""
    model = gpt("composable")

    def inside(module: nn.Module, args: object) -> None:
        sleep(model)

    hook = model.register_forward_pre_hook(inside)
    with pytest.raises(PhaseError, match=r"sleep was called on .* inside the forward"):
        model(gpt_input(0, 0))
    hook.remove()
    with pytest.raises(ValueError, match="got 'all of it'"):
        sleep(model, keep="all of it")
    with pytest.raises(CompositionError, match="sleep was called on a Linear"):
        sleep(nn.Linear(2, 2))
    assert memory_of(model) > 0


@on_ranks(2)
def test_gradients_that_wait_for_a_reduction_keep_a_model_awake(world: World) -> None:
    """After the backward that reduces it sleeps."""
    model = gpt("composable")
    with no_sync(model):
        backward(loss_of(model, gpt_input(0, world.rank)))
    with pytest.raises(PhaseError, match=r"wait for a reduction \(no_sync\)"):
        sleep(model)
    backward(loss_of(model, gpt_input(0, world.rank)))
    nap(model)


@pytest.mark.req("W-03")
@on_ranks(2)
def test_a_rank_does_not_sleep_alone(world: World) -> None:
    """It would alone gather again what all hold; it stays awake, and trains on."""
    model = gpt("composable")
    set_reshard_after_backward(model, False)
    loss = loss_of(model, gpt_input(0, world.rank))
    backward(loss)
    if world.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(agreement.TIMEOUT_VARIABLE, "0.2")
            with pytest.raises(DesyncError, match=r"sleep\(\) of .*Rank 1"):
                sleep(model)
    world.barrier()
    assert torch.equal(loss_of(model, gpt_input(0, world.rank)), loss)
    nap(model)
    assert torch.equal(loss_of(model, gpt_input(0, world.rank)), loss)


@pytest.mark.req("W-03")
@on_ranks(1)
def test_a_write_to_a_sleeping_model_is_told(world: World) -> None:
    """The model is awake then, with the values from before."""
    model = gpt("composable")
    backward(loss_of(model, gpt_input(0, 0)))
    weight = next(model.parameters())
    before = weight.detach().clone()
    sleep(model)
    model.zero_grad(set_to_none=False)
    weight.data = torch.zeros(3)
    with pytest.raises(
        PhaseError, match=r"slept 'tokens.weight', the gradient of 'tok"
    ):
        wake(model)
    assert torch.equal(weight, before)
    model(gpt_input(0, 0))


@pytest.mark.req("W-03")
@on_ranks(1)
def test_a_model_that_is_dropped_asleep_is_freed(world: World) -> None:
    """With its host memory, and without a refusal that a later unit would inherit."""
    model = fully_shard(nn.Linear(4, 4))
    sleep(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert not NO_STEPS


@pytest.mark.req("W-03")
@on_ranks(1)
def test_a_sleep_without_host_memory_leaves_the_model_awake(world: World) -> None:
    """The error is torch's, and training goes on."""
    model = gpt("composable")
    optimizer = adamw(model.parameters())
    backward(loss_of(model, gpt_input(0, 0)))
    before = [p.detach().clone() for p in model.parameters()]
    new, calls = memory.new_buffer, []

    def full(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        if len(calls) > 2:
            raise RuntimeError("no memory")
        return new(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "new_buffer", full)
        with pytest.raises(RuntimeError, match="no memory"):
            sleep(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    nap(model, optimizer)


@on_ranks(1)
def test_a_captured_step_is_captured_again_at_the_new_addresses(world: World) -> None:
    """A graph would replay on memory of others; the stand-in counts captures."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder()
        patch.setattr(captured_step, "_on_gpu", lambda tensors: True)
        patch.setattr(captured_step, "_side_stream", nullcontext)
        patch.setattr(captured_step, "_record", recorder.record)
        ours, eager = Trainee(), Trainee()
        run = capture(ours.step, max_graphs=1)
        xs = inputs(12)
        losses = []
        for at, x in enumerate(xs):
            if at in (5, 8):
                nap(ours.model, ours.optimizer)
            losses.append(run(x))
        assert losses == [eager.step(x) for x in xs]
        assert (recorder.captures, run.captures, run.reason) == (3, 1, None)
