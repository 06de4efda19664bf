"""One unit by hand at any moment; methods other than forward find full parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from composable_fsdp import (
    Placement,
    fully_shard,
    get_full_grad,
    is_sharded,
    register_forward_method,
    reshard,
    unshard,
    unshard_params,
)
from composable_fsdp.access import set_reshard_after_forward
from composable_fsdp.access.manual import UnshardHandle
from composable_fsdp.errors import CompositionError, PhaseError
from composable_fsdp.phases import Residency
from composable_fsdp.tree.traversal import _get_fsdp_handles
from property_tests.live import examples
from tests.runtime.events import units_of, watched
from tests.support.models import TinyGPT, module_at, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    apply_units,
    assert_same_training,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
    sgd,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]


def sharded_gpt(path: str, **options: Any) -> nn.Module:
    """A small GPT with a unit per block."""
    model = TinyGPT()
    return apply_units(model, gpt_units(model), path=path, **options)


def sizes(module: nn.Module) -> int:
    """Elements of the parameters that the module shows."""
    return sum(p.numel() for p in module.parameters())


@pytest.mark.req("B-09")
@on_ranks(2)
def test_a_unit_without_parameters_sends_nothing(world: World) -> None:
    """The verbs are not recursive, and do nothing where there is nothing."""
    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(2)))
    fully_shard(model)
    with record_steps() as calls:
        pending = unshard(model, async_op=True)
        assert pending is not None
        pending.wait()
        unshard(model)
        reshard(model)
    assert calls == []
    assert is_sharded(module_at(model, "0"))
    backward(loss_of(model, torch.ones(2, 4)))


@on_ranks(2)
def test_verbs_refuse_moments_that_would_break_a_step(world: World) -> None:
    """Each error says where it was called; the next forward works."""
    model = sharded_gpt("composable")
    block = module_at(model, "blocks.0")
    with unshard_params(model):
        for verb in (unshard, reshard):
            with pytest.raises(PhaseError, match="inside unshard_params of \\(root\\)"):
                verb(block)

    def call(module: nn.Module, *_: object) -> None:
        reshard(module)

    hook = block.register_forward_pre_hook(call)
    with pytest.raises(PhaseError, match="while its forward is running"):
        model(gpt_input(0, world.rank))
    hook.remove()
    model(gpt_input(0, world.rank))


@on_ranks(4)
def test_a_parameter_that_one_rank_keeps_changes_no_group(world: World) -> None:
    """Where backward gathers pieces of two ranks, all ranks gather the shards then."""
    torch.manual_seed(0)
    plain = tiny_mlp()
    halves = Placement(("shard",), ("shard:2",), ("shard",), ("shard",))
    model = apply_units(copy.deepcopy(plain), ["0"], placement=halves)
    x = torch.ones(2, next(plain.parameters()).shape[1])
    kept: list[Any] = []
    for forwards in (1, 2):
        loss = loss_of(model, x) if forwards == 2 else torch.zeros(())
        unshard(module_at(model, "0"))
        if world.rank == 0:
            kept.append(module_at(model, "0").weight)
        backward(loss + loss_of(model, x))
        for _ in range(forwards):
            backward(loss_of(plain, x))
        for name, parameter in plain.named_parameters():
            found = get_full_grad(model, name)
            assert found is not None
            assert parameter.grad is not None
            assert torch.allclose(found, parameter.grad), name
    del kept


@on_ranks(2)
def test_an_evaluation_before_backward_leaves_the_graph(world: World) -> None:
    """Also of a unit that was unsharded by hand meanwhile, before or behind another
    evaluation, and whose weight is kept."""
    for keeps, first in product((False, True), (False, True)):
        plain = tiny_mlp()
        model = apply_units(copy.deepcopy(plain), ["0"])
        x = torch.ones(2, next(plain.parameters()).shape[1])
        loss = loss_of(model, x)
        if first:
            with torch.no_grad():
                model(x)
        unshard(module_at(model, "0"))
        kept = [module_at(model, "0").weight] * keeps
        with torch.no_grad():
            model(2 * x)
        backward(loss)
        backward(loss_of(plain, x))
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(get_full_grad(model, name), parameter.grad)
        del kept


# ---- beside FSDP2 -------------------------------------------------------------

OPERATIONS = ("unshard", "async", "wait", "reshard", "evaluate", "forward", "backward")
Operation = str


def legal(operations: list[Operation]) -> list[Operation]:
    """Drop what has no partner, or what FSDP2 leaves half done.

    A ``reshard`` with a gather under way leaves it under way there; here it ends it.
    """
    kept: list[Operation] = []
    pending = forward = False
    for operation in operations:
        if operation == "reshard" and pending:
            continue
        if operation == "wait" and not pending:
            continue
        if operation == "backward" and not forward:
            continue
        if operation in ("forward", "evaluate") and forward:
            continue
        forward = {"forward": True, "backward": False}.get(operation, forward)
        pending = operation == "async"
        kept.append(operation)
    return kept


def trace(
    operations: list[Operation],
    model: nn.Module,
    block: nn.Module,
    verbs: Sequence[Callable[..., Any]],
    full: int,
    x: Tensor,
) -> list[bool]:
    """Whether the block shows full parameters after each operation."""
    shown, pending, loss = [], None, None
    for operation in operations:
        if operation == "unshard":
            verbs[0]()
        elif operation == "async":
            pending = verbs[0](async_op=True)
        elif operation == "wait":
            assert pending is not None
            pending.wait()
        elif operation == "reshard":
            verbs[1]()
        elif operation == "evaluate":
            with torch.no_grad():
                model(x)
        elif operation == "forward":
            loss = loss_of(model, x)
        else:
            assert loss is not None
            backward(loss)
        parameters: list[Any] = list(block.parameters())
        parameters = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
        shown.append(sum(p.numel() for p in parameters) == full)
    return shown


def ours_and_theirs(operations: list[Operation], x: Tensor) -> list[Any]:
    """What the block shows after each operation and its gathers; both libraries."""
    import torch.distributed.fsdp as fsdp2
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    full = sizes(tiny_mlp()[0])
    theirs = tiny_mlp()
    their_block: Any = fsdp2.fully_shard(theirs[0])
    fsdp2.fully_shard(theirs)
    ours = tiny_mlp()
    block = fully_shard(ours[0])
    fully_shard(ours)
    state = their_block._get_fsdp_state()
    # One group until torch 2.12, a list of them since.
    several = getattr(state, "_fsdp_param_groups", None)
    (group,) = [state._fsdp_param_group] if several is None else several
    internals: Any = _fsdp_param_group
    real, their_gathers = internals.foreach_all_gather, 0

    def spy(parameters: object, *args: Any) -> Any:
        nonlocal their_gathers
        their_gathers += parameters is group.fsdp_params
        return real(parameters, *args)

    verbs: Any = (partial(unshard, block), partial(reshard, block))
    with watched() as events:
        mine = trace(operations, ours, block, verbs, full, x)
    internals.foreach_all_gather = spy
    try:
        verbs = their_block.unshard, their_block.reshard
        expected = trace(operations, theirs, their_block, verbs, full, x)
    finally:
        internals.foreach_all_gather = real
    return [mine, units_of(events, "gather").count("0"), expected, their_gathers]


def beside_fsdp2(world: World, batch: list[list[Operation]]) -> None:
    """The same operations on ours and on FSDP2."""
    for operations in batch:
        x = torch.ones(2, 8) * (world.rank + 1)
        mine, gathers, expected, their_gathers = ours_and_theirs(operations, x)
        assert mine == expected, operations
        assert gathers == their_gathers, operations


@pytest.mark.req("B-09")
@examples(12)
@given(
    batch=st.lists(
        st.lists(st.sampled_from(OPERATIONS), min_size=2, max_size=9).map(legal),
        min_size=1,
        max_size=4,
    )
)
def test_verbs_do_what_those_of_fsdp2_do(
    ranks: RankCount, batch: list[list[Operation]]
) -> None:
    """After any operations a unit shows full parameters where FSDP2's does, and as
    many gathers were sent."""
    ranks(2).run(beside_fsdp2, batch)


# ---- when units free their parameters -----------------------------------------


@pytest.mark.parametrize(
    ("chosen", "value", "gathers"),
    [
        (None, None, ["blocks.1", "blocks.0"]),
        ("", False, []),
        ("", True, ["", "blocks.1", "blocks.0"]),
        ("blocks.0", False, ["blocks.1"]),
    ],
)
@on_ranks(2)
def test_what_forward_frees_can_be_chosen_per_unit(
    world: World, chosen: str | None, value: bool, gathers: list[str]
) -> None:
    """Backward gathers what was freed, the root included if that was asked for."""
    model = sharded_gpt("wrapper", backward_prefetch=None)
    if chosen is not None:
        module = module_at(model, chosen) if chosen else model
        set_reshard_after_forward(module, value, recurse=not chosen)
    for _ in range(2):
        loss = loss_of(model, gpt_input(0, world.rank))
        with watched() as events:
            backward(loss)
    assert units_of(events, "gather") == gathers


class Speaker(TinyGPT):
    """A GPT that also generates, scores and fails."""

    def generate(self, tokens: Tensor, *, count: int) -> Tensor:
        """Append ``count`` greedy tokens, a forward each."""
        assert self.head.weight.shape == (17, 8), "sharded inside the method"
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens

    def score(self, tokens: Tensor) -> dict[str, Tensor]:
        """A loss, without a call of ``forward``."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return {"loss": self.head(self.norm(x)).square().mean()}

    def fail(self, tokens: Tensor) -> Tensor:
        """Raise in the middle."""
        raise KeyboardInterrupt(self.tokens(tokens).shape)

    def stream(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield."""
        yield self(tokens)


def speaker(path: str) -> tuple[nn.Module, Speaker]:
    """A sharded speaker, and a plain one."""
    model = Speaker()
    plain = copy.deepcopy(model)
    return apply_units(model, gpt_units(model), path=path), plain


@pytest.mark.req("B-13")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_method_that_calls_forward_gathers_the_root_once(
    world: World, path: str
) -> None:
    """Two blocks per token, and one gather of the root around all of them."""
    model, plain = speaker(path)
    register_forward_method(model, "generate")
    prompt = gpt_input(0, world.rank)[:, :2]
    with torch.no_grad(), record_steps() as calls:
        tokens = model.generate(prompt, count=3)  # type: ignore[operator]
        expected = plain.generate(prompt, count=3)

    assert torch.equal(tokens, expected)
    require_sharded(model)
    assert_same_training(model, plain, [], [])
    assert [call.op for call in calls] == ["all_gather"] * (1 + 3 * 2)


def require_sharded(model: nn.Module) -> None:
    handles = _get_fsdp_handles(model)
    assert all(handle.residency is Residency.SHARDED for handle in handles)
    assert not any(handle.calls for handle in handles)


@on_ranks(2)
def test_a_method_that_raises_leaves_the_model_sharded(world: World) -> None:
    """Any exception, also one that passes no hook of a module."""
    model, plain = speaker("wrapper")
    register_forward_method(model, "fail")
    x = gpt_input(0, world.rank)
    with pytest.raises(KeyboardInterrupt, match=r"2, 5, 8"):
        model.fail(x)  # type: ignore[operator]

    require_sharded(model)
    assert torch.equal(model(x), plain(x))


@pytest.mark.req("B-13")
@pytest.mark.parametrize(
    ("at", "name", "text"),
    [
        ("", "generale", r"Speaker has no method 'generale'"),
        ("", "training", r"Speaker has no method 'training'"),
        ("", "stream", r"Speaker\.stream is a generator"),
        ("blocks.0.qkv", "reset_parameters", "fully sharded Speaker above it. Pass"),
    ],
)
def test_what_is_no_method_is_refused(
    one_rank: World, at: str, name: str, text: str
) -> None:
    """The class and the name are told, and the module stays as it was."""
    module = fully_shard(Speaker()).get_submodule(at)
    before = [*vars(module)]

    with pytest.raises(CompositionError, match=text):
        register_forward_method(module, name)

    assert [*vars(module)] == before


@pytest.mark.req("B-09")
@on_ranks(2)
def test_a_pending_unshard_may_be_waited_for_twice_or_too_late(world: World) -> None:
    """The handle shows the parameters; after the unit's forward it does nothing."""
    model = sharded_gpt("composable")
    block = module_at(model, "blocks.0")
    pending = unshard(block, async_op=True)
    assert isinstance(pending, UnshardHandle)
    pending.wait()
    pending.wait()
    assert not is_sharded(block)
    reshard(block)
    reshard(block)

    late = unshard(block, async_op=True)
    assert late is not None
    assert torch.equal(model(gpt_input(0, 0)), TinyGPT()(gpt_input(0, 0)))
    late.wait()
    assert is_sharded(block)


@pytest.mark.req("B-13")
@on_ranks(2)
def test_a_loss_that_a_method_returns_trains(world: World) -> None:
    """Its outputs are hooked as those of a forward; registering twice is once."""
    model, plain = speaker("wrapper")
    register_forward_method(model, "score")
    register_forward_method(model, "score")
    optimizers = sgd(model.parameters()), sgd(plain.parameters())
    for step in range(2):
        x = gpt_input(step, 0)
        backward(model.score(x)["loss"])  # type: ignore[operator]
        backward(model(x).square().mean())
        backward(plain.score(x)["loss"])
        backward(plain(x).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    assert_same_training(model, plain, [], [], tolerance=1e-6)


@pytest.mark.req("D-14")
@on_ranks(2)
def test_the_method_of_a_copy_is_that_of_the_copy(world: World) -> None:
    """The method of a deep copy computes with the copy's parameters."""
    model, plain = speaker("wrapper")
    register_forward_method(model, "score")
    made = copy.deepcopy(model)
    with torch.no_grad():
        for p in [*made.parameters(), *plain.parameters()]:
            p.mul_(1.5)
    x = gpt_input(0, world.rank)

    ours, theirs = made.score(x)["loss"], plain.score(x)["loss"]  # type: ignore[operator]
    assert torch.equal(ours, theirs)
    assert not torch.equal(model.score(x)["loss"], theirs)  # type: ignore[operator]
