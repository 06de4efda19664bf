"""Carrying out a combination on one rank, with every check after every step."""

from __future__ import annotations

import warnings

from composable_fsdp import (
    CompositionError,
    PlanError,
    set_reshard_after_backward,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.flat.region import part_of
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests import combination_actions
from property_tests.casting import named
from property_tests.combination_pair import Pair, tops_of
from property_tests.combination_recipes import Combination, Micro, Step
from property_tests.combination_steps import carry_out, expect
from tests.support.world import World


def run_combination(world: World, combination: Combination) -> str:
    """Carry it out; returns why it was refused, or nothing."""
    # Said of an evaluation, too, where no gradient is wanted.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    # Said of the plain model's empty gradients.
    warnings.filterwarnings("ignore", "grad and param do not obey")
    try:
        pair = Pair(world, combination)
    except (PlanError, CompositionError) as error:
        return f"{type(error).__name__}: {error}"
    for step in combination.steps:
        run_step(pair, step)
    combination_actions.save_and_load(pair)
    return ""


def run_step(pair: Pair, step: Step) -> None:
    """Actions, microbatches, checks, optimizers."""
    for name, *arguments in step.actions:
        getattr(combination_actions, name)(pair, *arguments)
    came_back = True
    with record() as calls:
        for index, micro in enumerate(step.micro):
            keep = micro.keep and index < len(step.micro) - 1
            for top in tops_of(pair.model):
                set_reshard_after_backward(top, not keep)
            came_back = run_micro(pair, micro)
            pair.batch += micro.forwards
    check_parameters(pair)
    # A backward that does not come by leaves what the forward left: none here
    # (nothing trainable was used), or none in a replicated tree.
    for state in _get_fsdp_states(pair.model) if came_back else []:
        check_idle(state)
    for optimizer in pair.optimizers:
        optimizer.step()
        if step.zero != "keep":
            optimizer.zero_grad(set_to_none=step.zero == "none")
    assert pair.world.all_equal(list(map(str, calls))), calls


def run_micro(pair: Pair, micro: Micro) -> bool:
    """Both models' losses and inputs are equal; whether there was a backward."""
    plain_losses, plain_inputs = expect(pair, micro)
    losses, inputs = carry_out(pair, micro)
    for loss, plain in zip(losses, plain_losses, strict=True):
        pair.equal(loss, plain, "loss")
    for x, plain in zip(inputs, plain_inputs, strict=True):
        assert (x.grad is None) is (plain.grad is None), "input"
        if x.grad is not None and plain.grad is not None:
            pair.equal(x.grad, plain.grad, "input's gradient")
    return losses[-1].requires_grad


def check_parameters(pair: Pair) -> None:
    """Weights and gradients are those of the plain model."""
    plain = named(pair.plain)
    for name, (_, region, slot, leaf) in pair.owner.items():
        grad = plain[name].grad
        assert leaf.requires_grad is plain[name].requires_grad, name
        absent = plain[name].numel() > 0 == leaf.numel()
        assert (leaf.grad is None) is (grad is None or absent), (name, leaf.grad, grad)
        pair.equal(leaf, part_of(region, slot, plain[name], like=leaf), name)
        if leaf.grad is not None and grad is not None:
            part = part_of(region, slot, grad, like=leaf)
            pair.equal(leaf.grad, part, f"gradient of {name}")


def check_idle(state: _FSDPState) -> None:
    """Nothing of the step is full, summoned or counted."""
    handle, context = state.handle, ensure_root(state)
    assert context.outermost is None
    assert context.reducing is None
    assert not context.tasks
    assert not context.filling
    assert not context.prefetched
    assert not any(unit.remaining for unit in context.marked.lists)
    # A unit awaits its backward also when the loss did not use what it computed.
    assert handle.phase in (Phase.IDLE, Phase.BACKWARD_PRE), handle
    assert not handle.is_full, state.name
    assert handle.residency is Residency.SHARDED, state.name
    assert not handle.reduction.due, state.name
    assert handle.reduction.held is None
    for region in handle.layout.regions:
        if region.full.is_cut:
            assert region.full.buffer.untyped_storage().nbytes() == 0, state.name
    for region in handle.layout.trainable:
        assert region.reduce.temporary is None
        assert region.reduce.partial is None
        assert region.reduce.buffer.untyped_storage().nbytes() == 0
    for table, name, leaf, _ in handle.swaps:
        assert table[name] is leaf
