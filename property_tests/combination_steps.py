"""Microbatches of a combination: what the plain model expects, what ours does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from composable_fsdp import no_sync, set_requires_all_reduce
from property_tests.casting import named, shown
from property_tests.combination_models import Switch
from property_tests.combination_pair import Leaves, Pair, tops_of
from property_tests.combination_recipes import Micro

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
