"""Optimizer states and activations on the host: bits, order of the copies, memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    async_save,
    forecast,
    fully_shard,
    load,
    optim_state_dict,
    plan,
)
from composable_fsdp.doors.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.features import flat_parameters, offload_states, released
from composable_fsdp.features.host_memory import copies
from composable_fsdp.features.host_memory.copies import _Block
from composable_fsdp.flat import memory
from composable_fsdp.tools.activations import measure_activations
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    assert_same_training,
    backward,
    gpt_input,
    loss_of,
    train,
    train_reference,
)
from tests.support.sharded import gpt
from tests.support.world import World

Optimizer = torch.optim.Optimizer
Params = Iterable[nn.Parameter]


class Lion(Optimizer):
    """A user's: new tensors in the state at each step, and a counter in the group."""

    works_on_shards = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].get("momentum", torch.zeros_like(p))
                    update = (0.9 * momentum + 0.1 * p.grad).sign_()
                    p.add_(update, alpha=-group["lr"] / group["steps"])
                    self.state[p]["momentum"] = momentum * 0.99 + p.grad * 0.01
        return loss


def groups(params: Params) -> list[dict[str, Any]]:
    every = list(params)
    return [{"params": every[::2], "lr": 0.03}, {"params": every[1::2]}]


OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(groups(p), amsgrad=True, eps=1e-3),
    "fused": lambda p: torch.optim.AdamW(groups(p), lr=0.05, eps=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(groups(p), lr=0.1, momentum=0.9),
    "lion": lambda p: Lion(groups(p)),
}


@pytest.mark.req("W-04")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(1, 2)
def test_training_is_that_of_the_plain_optimizer(
    world: World, name: str, path: str, strategy: ShardingStrategy
) -> None:
    """Bit by bit, beside the plain model."""
    plain = TinyGPT()
    made = OPTIMIZERS[name]
    expected = train_reference(plain, world.world_size, gpt_input, made)
    model = gpt(path, strategy=strategy)

    def optimize(params: Params) -> Optimizer:
        optimizer = made(params)
        offload_states(optimizer, model)
        return optimizer

    losses = train(model, world.rank, gpt_input, optimize)

    mine = [step[world.rank] for step in expected]
    assert_same_training(model, plain, losses, mine)


def states_of(optimizer: Optimizer, p: Tensor) -> list[Tensor]:
    return [v for v in optimizer.state[p].values() if v.dim()]


def trained(world: World, *, offloads: bool, steps: int = 3, **options: Any) -> Any:
    """A model with its optimizer after some steps with a schedule and a closure."""
    flat = options.pop("flat", False)
    model = gpt("composable", **options)
    params = flat_parameters(model) if flat else list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.05, eps=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if offloads:
        offload_states(optimizer, model)
    for at in range(steps):
        x = gpt_input(at, world.rank)

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            backward(loss)
            return loss.item()

        assert isinstance(optimizer.step(closure), float)
        schedule.step()
    return model, optimizer


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flat": {"flat": True},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    "params, too": {"cpu_offload": CPUOffload(offload_params=True)},
}


@pytest.mark.req("W-04")
@pytest.mark.parametrize("name", VARIANTS)
@on_ranks(2)
def test_state_dicts_and_checkpoints_are_as_ever(
    world: World, name: str, tmp_path: Path
) -> None:
    """Saved from the host, loaded to the host, and trained on: the same bits."""
    options = VARIANTS[name]
    pairs = [trained(world, offloads=offloads, **options) for offloads in (True, False)]
    (model, optimizer), (other, expected) = pairs
    mine = optim_state_dict(model, optimizer)["state"]
    for key, value in optim_state_dict(other, expected)["state"].items():
        assert all(torch.equal(mine[key][k], value[k]) for k in value)
    async_save(tmp_path / "a", model, optimizer).result()
    again = [trained(world, offloads=True, steps=1, **options) for _ in range(2)]
    load(tmp_path / "a", *again[0])
    again[1][0].load_state_dict(model.state_dict())
    # Torch lets the two share what has the right dtype and device.
    again[1][1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, optim in [*pairs, *again]:
        optim.zero_grad()
        backward(loss_of(each, gpt_input(7, world.rank)))
        optim.step()
        for p, q in zip(each.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.req("W-04")
@on_ranks(1)
def test_a_state_with_gaps_in_memory_trains_as_any(world: World) -> None:
    """A view of every other element, which a program has put into the state."""
    found = []
    for offloads in (True, False):
        model = gpt("composable")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for p in model.parameters():
            gaps = torch.zeros(*p.shape, 2, dtype=p.dtype, device="cpu")[..., 0]
            optimizer.state[p]["momentum_buffer"] = gaps
        if offloads:
            offload_states(optimizer, model)
        for at in range(3):
            optimizer.zero_grad()
            backward(loss_of(model, gpt_input(at, 0)))
            optimizer.step()
        found.append(model)
    for p, q in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.req("W-04")
@on_ranks(1)
def test_states_pass_through_two_buffers_ahead_of_their_step(world: World) -> None:
    """The states of the next region come before the step of this one, and return to
    the same host memory."""
    model, optimizer = trained(world, offloads=True)
    homes = [v for p in model.parameters() for v in states_of(optimizer, p)]
    log: list[str] = []
    made: list[Tensor] = []
    send, new = copies.Lane.copy, memory.new_buffer
    begin: Any = torch.optim.AdamW._init_group

    def in_buffers(tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return any(storage is each.untyped_storage() for each in made)

    def note_copy(self: copies.Lane, *pairs: Any) -> Any:
        log.append("in" if in_buffers(pairs[0][0]) else "out")
        return send(self, *pairs)

    def note_buffer(*args: Any, **kwargs: Any) -> Tensor:
        made.append(new(*args, **kwargs))
        return made[-1]

    def note_step(self: Any, group: Any, *args: Any) -> Any:
        log.append("step")
        shown = [v for p in group["params"] for v in states_of(self, p)]
        assert all(map(in_buffers, shown))
        return begin(self, group, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "_init_group", note_step)
        patch.setattr(copies.Lane, "copy", note_copy)
        patch.setattr(memory, "new_buffer", note_buffer)
        optimizer.step()
    assert log == ["in", "in", "step", "out", "in", "step", "out", "step", "out"]
    assert [each.nbytes for each in made] == [made[0].nbytes] * 2
    after = [v for p in model.parameters() for v in states_of(optimizer, p)]
    assert all(a is b for a, b in zip(homes, after, strict=True))


@pytest.mark.req("W-04")
@on_ranks(1)
def test_the_option_offloads_at_the_first_step(world: World) -> None:
    """Of a weight of a million elements; a sleep between steps takes nothing away.

    The unit is not the layer that owns the weight.
    """
    plain = nn.Sequential(nn.Linear(1000, 1000))
    offload = CPUOffload(offload_states=True)
    model = fully_shard(copy.deepcopy(plain), cpu_offload=offload)
    optims = [torch.optim.Adam(m.parameters()) for m in (model, plain)]
    x = torch.randn(2, 1000)
    for _ in range(3):
        for each, optim in zip((model, plain), optims, strict=True):
            backward(loss_of(each, x))
            optim.step()
            optim.zero_grad()
        with released(model, optims[0]):
            pass
    (region,) = vars(optims[0])[copies._INSTALLED].regions.values()
    assert region.host.nbytes >= 8_000_000
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.req("W-04")
def test_the_plan_counts_two_buffers() -> None:
    """States are on the host; a step has two buffers of the largest region."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    planned = plan(
        model,
        world_size=2,
        policy=ModuleWrapPolicy({nn.Linear}),
        cpu_offload=CPUOffload(offload_states=True),
    )
    found = forecast(planned)
    *step, end = found.moments
    assert {moment.memory.optimizer for moment in step} == {0}
    largest = max(unit.parameter_bytes for unit in planned.units)
    assert end.memory.optimizer == 2 * 2 * largest
    assert found.host_bytes == 2 * planned.parameter_bytes
    assert "on the device two buffers of" in str(found.plan)


@pytest.mark.req("W-04")
@on_ranks(1)
def test_hooks_of_a_user_come_before_the_step(world: World) -> None:
    """What a later hook writes counts; after an error nothing is done."""
    model = gpt("composable")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    offload_states(optimizer, model)
    groups = optimizer.param_groups
    before = [p.detach().clone() for p in model.parameters()]

    def zero(*_: object) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()

    def fail(*_: object) -> None:
        raise RuntimeError("not now")

    optimizer.register_step_pre_hook(zero)
    failing = optimizer.register_step_pre_hook(fail)
    for at in range(3):
        backward(loss_of(model, gpt_input(at, 0)))
        with pytest.raises(RuntimeError, match="not now") if at < 2 else nullcontext():
            optimizer.step()
        assert optimizer.param_groups is groups
        assert not at or bool(optimizer.state) is (at == 2)
        if at == 1:
            failing.remove()
    assert all(map(torch.equal, before, model.parameters()))


class Unknown(Lion):
    """Its step needs whole parameters, as far as anyone knows."""

    works_on_shards = False


@on_ranks(1)
def test_misuse_is_told(world: World) -> None:
    """An optimizer of unknown kind, of whole matrices, of others; a model without."""
    model = gpt("composable")
    own, other = list(model.parameters()), nn.Linear(2, 2)
    cases = [
        (Unknown(own), model, "not known to work element by element"),
        (torch.optim.LBFGS(own), model, "takes inner products"),
        (torch.optim.SGD(other.parameters()), model, "holds no parameter of a unit"),
        (torch.optim.SGD(own), other, "offload_states was called on a Linear"),
    ]
    for optimizer, module, text in cases:
        with pytest.raises(CompositionError, match=text):
            offload_states(optimizer, module)


WIDTH = 16
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": lambda m: checkpoint_wrapper(m, offload=True),
    "reentrant": lambda m: checkpoint_wrapper(
        m, CheckpointImpl.REENTRANT, offload=True
    ),
    "saved": offload_wrapper,
    "recomputed": checkpoint_wrapper,
    "again": lambda m: checkpoint_wrapper(m, CheckpointImpl.REENTRANT),
    "plain": lambda m: m,
}


def blocks_of(wrap: Callable[[nn.Module], nn.Module], count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*map(wrap, blocks))


def gradients(model: nn.Module, x: Tensor, *, twice: bool) -> list[Tensor]:
    """Of two forwards before one backward, or of a second backward."""
    x = x.clone().requires_grad_()
    loss = model(x).sum() + model(2 * x).square().sum()
    if twice:
        torch.autograd.backward(loss, retain_graph=True)
        model.zero_grad()
        x.grad = None
    backward(loss)
    assert x.grad is not None
    return [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.req("W-05")
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("name", "other"),
    [("checkpoint", "recomputed"), ("reentrant", "again"), ("saved", "plain")],
)
@on_ranks(2)
def test_gradients_are_those_without_offload(
    world: World, name: str, other: str, twice: bool
) -> None:
    """Bit by bit, of sharded blocks; two forwards, two backwards."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(world.rank))
    found = []
    for each in (name, other):
        model = blocks_of(WRAPS[each])
        for block in model:
            fully_shard(block)
        found.append(gradients(fully_shard(model), x, twice=twice))
    assert all(map(torch.equal, *found))


@pytest.mark.req("W-05")
def test_copies_come_back_a_block_ahead_in_the_recorded_order() -> None:
    """Two blocks are on the device at a time; the last two have never left it."""
    model = blocks_of(WRAPS["checkpoint"])
    made: list[_Block] = []
    most: list[int] = []
    fetched: list[int] = []
    end, fetch = _Block.end, _Block.fetch

    def note_end(block: _Block) -> None:
        end(block)
        made.append(block)
        most.append(on_device())

    def note_fetch(block: _Block) -> None:
        fetch(block)
        if block in made:
            fetched.append(made.index(block))
            most.append(on_device())

    def on_device() -> int:
        return sum(bool(block.here) for block in made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Block, "end", note_end)
        patch.setattr(_Block, "fetch", note_fetch)
        backward(model(torch.randn(2, WIDTH, requires_grad=True)).sum())
    assert fetched == [3, 2, 1, 0]
    assert max(most) == 2


@pytest.mark.req("W-05")
@on_ranks(1)
def test_parameters_of_units_are_not_copied(world: World) -> None:
    """A unit frees and fills them itself, without regard to the copies."""
    torch.manual_seed(0)
    inner = [fully_shard(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    model = fully_shard(nn.Sequential(*map(offload_wrapper, inner)))
    kept: list[torch.Size] = []
    save = _Block.save

    def note(block: _Block, tensor: Tensor) -> Any:
        kept.append(tensor.shape)
        return save(block, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Block, "save", note)
        loss = model(torch.randn(3, WIDTH)).sum()
    assert kept
    assert set(kept) == {torch.Size((3, WIDTH))}
    backward(loss)


@pytest.mark.req("W-05")
@pytest.mark.parametrize("more", [0, 3], ids=["here", "left"])
def test_a_write_over_what_a_block_saved_is_told(more: int) -> None:
    """As without offload; no gradient of other values."""
    block = offload_wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()))
    x = torch.randn(2, WIDTH)

    def run() -> None:
        y = block(x)
        y.add_(1)
        # Blocks that have it leave the device.
        for _ in range(more):
            block(x)
        torch.autograd.backward(y.sum())

    with pytest.raises(RuntimeError, match="written in place"):
        run()


@pytest.mark.req("W-05")
def test_the_forecast_counts_two_blocks() -> None:
    """Without offload each block more has an input more on the device."""
    x = torch.zeros(64, WIDTH, requires_grad=True)
    peaks: dict[str, list[int]] = {}
    for name in ("checkpoint", "recomputed"):
        for count in (6, 12):
            model = blocks_of(WRAPS[name], count)
            units = CustomPolicy(lambda m, root=model: m in list(root))  # type: ignore[misc]  # lambda
            planned = plan(model, world_size=2, policy=units)
            found = measure_activations(model, planned, [x])
            moments = forecast(planned, activations=found).moments
            most = max(moment.memory.activations for moment in moments)
            peaks.setdefault(name, []).append(most)
    few, many = peaks["recomputed"]
    assert many - few == 6 * x.nbytes
    few, many = peaks["checkpoint"]
    assert many == few
