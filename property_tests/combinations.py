"""Carrying out a combination on one rank, with every check after every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from composable_fsdp import no_sync
from composable_fsdp.access import set_requires_all_reduce, set_reshard_after_backward
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.flat.region import part_of
from composable_fsdp.phases import Phase, Residency
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests import combination_actions
from property_tests.casting import named, shown
from property_tests.combination_pair import Leaves, Pair, Switch, tops_of
from property_tests.combination_recipes import Combination, Micro, Step
from tests.support.world import World


def run_on_both_paths(world: World, combination: Combination) -> str:
    """Carry it out on both; they send the same. Returns why it was refused."""
    sent, refused = [], []
    for path in ("composable", "wrapper"):
        with record() as calls:
            refused.append(run_combination(world, replace(combination, path=path)))
        sent.append([str(call) for call in calls])
    # What one path alone has: several modules in a unit, and blocks.
    own = combination.pairs or any(u.block != "ROW" for u in combination.units)
    assert own or refused[0] or sent[0] == sent[1], sent
    return refused[0]


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


Choose = Callable[[Sequence[Tensor]], Tensor]
Result = tuple[list[Tensor], list[Tensor]]
"""Losses and inputs of the forwards of a rank."""


def joint(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(losses)).sum()


def only(index: int, losses: Sequence[Tensor]) -> Tensor:
    return losses[index]


def passes(micro: Micro) -> list[Choose]:
    """The losses that backward is called on, one after the other."""
    if micro.backward == "twice":
        return [joint, joint]
    if micro.backward == "joint" or micro.forwards == 1:
        return [joint]
    each: list[Choose] = [partial(only, index) for index in range(micro.forwards)]
    return each[::-1] if micro.backward == "reversed" else each


def switch(
    switches: tuple[list[Switch], list[Switch]], micro: Micro, rank: int
) -> None:
    """Bypass the module that the microbatch names, and no other."""
    inside, outside = switches
    for each in (*inside, *outside):
        each.on = False
    chosen = inside if micro.inside else outside
    if micro.bypass is not None and chosen and not (micro.by_rank and rank % 2 == 0):
        chosen[micro.bypass % len(chosen)].on = True


def expect(pair: Pair, micro: Micro) -> Result:
    """Run every rank's part on the plain model, and reduce; this rank's result."""
    world, count = pair.world, range(micro.forwards)
    inputs = [
        [pair.inputs(rank, at) for at in count] for rank in range(world.world_size)
    ]
    leaves = [pair.leaves() for _ in inputs]
    losses = []
    for rank, xs in enumerate(inputs):
        switch(pair.twin_switches, micro, rank)
        with shown(pair.plain, leaves[rank]):
            losses.append([pair.loss(pair.plain, x) for x in xs])
    several = micro.forwards > 1 and micro.backward in ("joint", "twice")
    for choose in passes(micro):
        if several:
            # Filled, the younger forward ends before the gradients of both arrive.
            reduce(pair, micro, filled_only=True)
        for rank in range(world.world_size):
            # Checkpoints compute again, so each rank's bypass stands while it runs.
            switch(pair.twin_switches, micro, rank)
            with shown(pair.plain, leaves[rank]):
                run(micro, choose(losses[rank]))
            arrive(pair, rank, leaves[rank])
        reduce(pair, micro)
    switch(pair.twin_switches, Micro(), 0)
    return losses[world.rank], inputs[world.rank]


def carry_out(pair: Pair, micro: Micro) -> Result:
    """Run this rank's part on the sharded model."""
    rank = pair.world.rank
    switch(pair.switches, micro, rank)
    inputs = [pair.inputs(rank, at) for at in range(micro.forwards)]
    with ExitStack() as stack:
        for top in tops_of(pair.model):
            if micro.mode == "no_sync":
                stack.enter_context(no_sync(top))
            set_requires_all_reduce(top, micro.mode != "local")
        losses = [pair.loss(pair.model, x) for x in inputs]
        for choose in passes(micro):
            run(micro, choose(losses))
    switch(pair.switches, Micro(), 0)
    return losses, inputs


def run(micro: Micro, loss: Tensor) -> None:
    """Backward, if anything is trained."""
    if loss.requires_grad:
        torch.autograd.backward(loss, retain_graph=micro.backward == "twice")


def arrive(pair: Pair, rank: int, leaves: Leaves) -> None:
    """Add what a backward left in the leaves to what the rank has to reduce."""
    sums = pair.sums[rank]
    for name, leaf in leaves.items():
        if leaf.grad is None:
            continue
        if name in sums:
            sums[name].add_(leaf.grad)
        else:
            sums[name] = leaf.grad.to(pair.dtype_of(name, "reduce"), copy=True)
        leaf.grad = None


def reduce(pair: Pair, micro: Micro, *, filled_only: bool = False) -> None:
    """Average over ranks what the mode reduces."""
    for name, p in named(pair.plain).items():
        handle = pair.owner[name].state.handle
        fill = handle.rule.fill and p.requires_grad
        if micro.mode == "no_sync" or (filled_only and not fill):
            continue
        terms = take(pair, name, fill=fill)
        if terms is None:
            continue
        if micro.mode == "local" and handle.groups.replicas > 1:
            for rank, term in enumerate(terms):
                pair.waiting[rank][name] = term
            continue
        factor = handle.rule.factor or pair.world.world_size
        if handle.rule.hook is not None and pair.combination.hook == "bf16":
            mean = (torch.stack(terms).bfloat16().sum(0) / factor).float()
        else:
            mean = torch.stack(terms).sum(0) / factor
        if p.grad is None:
            gradient = pair.dtype_of(name, "gradient")
            if gradient != p.dtype:
                p.grad_dtype = gradient
            p.grad = torch.zeros_like(p, dtype=gradient)
        p.grad.add_(mean)


def take(pair: Pair, name: str, *, fill: bool) -> list[Tensor] | None:
    """What each rank brings into a reduction, or None if there is nothing to reduce.

    What waited for the replicas was summed apart from what arrived since.
    """
    arrived = [sums.pop(name, None) for sums in pair.sums]
    waiting = [sums.pop(name, None) for sums in pair.waiting]
    if not fill and arrived[0] is None and waiting[0] is None:
        return None
    zero = torch.zeros_like(
        named(pair.plain)[name], dtype=pair.dtype_of(name, "reduce")
    )
    parts = zip(arrived, waiting, strict=True)
    return [sum((part for part in both if part is not None), zero) for both in parts]
