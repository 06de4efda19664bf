"""What a script may do between steps, to the sharded and to the plain model.

A recipe names one of these functions, and the arguments after the pair.
"""

from __future__ import annotations

import copy

import pytest
import torch

from composable_fsdp import reshard, unshard, unshard_params
from composable_fsdp.access import (
    set_gradient_divide_factor,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_reshard_after_forward,
)
from composable_fsdp.errors import PhaseError
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _get_module_fsdp_state
from property_tests.casting import named, shown
from property_tests.combination_pair import Pair, states_of
from tests.support.reference import sgd


class Broken(RuntimeError):
    """What a hook raises to break a forward."""


def fill(pair: Pair, on: bool) -> None:
    """Unless ranks train different parts: then it has to stay on."""
    pair.fill(on=on or pair.combination.by_rank)


def divide(pair: Pair, index: int, factor: float) -> None:
    """A hook divides as it likes."""
    if pair.combination.hook == "none":
        set_gradient_divide_factor(pair.unit(index).module, factor)


def reshard_after_forward(pair: Pair, index: int, on: bool) -> None:
    set_reshard_after_forward(pair.unit(index).module, on, recurse=False)


def prefetch(pair: Pair, when: str, index: int, targets: tuple[int, ...]) -> None:
    """Units of the same tree."""
    state = pair.unit(index)
    chosen = [pair.unit(target) for target in targets]
    modules = [s.module for s in chosen if ensure_root(s) is ensure_root(state)]
    if when == "forward":
        set_modules_to_forward_prefetch(state.module, modules)
    else:
        set_modules_to_backward_prefetch(state.module, modules)


def evaluate(pair: Pair, how: str) -> None:
    """A forward in evaluation mode, without gradients."""
    x = pair.inputs(pair.world.rank, 0).detach()
    with torch.inference_mode() if how == "inference" else torch.no_grad():
        ours = pair.model.eval()(x).clone()
        with shown(pair.plain, pair.leaves()):
            expected = pair.plain.eval()(x).clone()
    pair.model.train()
    pair.plain.train()
    pair.equal(ours, expected, "evaluated")


def drop(pair: Pair) -> None:
    """A forward whose output nobody wants."""
    pair.model(pair.inputs(pair.world.rank, 0))


def break_forward(pair: Pair, index: int) -> None:
    """A forward that raises before one of the units."""

    def fail(*_: object) -> None:
        raise Broken

    hook = pair.unit(index).module.register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        pair.model(pair.inputs(pair.world.rank, 0))
    hook.remove()


def unshard_unit(pair: Pair, index: int, async_op: bool) -> None:
    """And leave it so."""
    unshard(pair.unit(index).module, async_op=async_op)


def reshard_unit(pair: Pair, index: int) -> None:
    reshard(pair.unit(index).module)


def look(pair: Pair, index: int) -> None:
    """At the full parameters of a unit and of those below it."""
    expected = named(pair.plain)
    top = pair.unit(index)
    below = map(_get_module_fsdp_state, top.module.modules())
    states = {s for s in below if s is not None and s.context is top.context}
    with unshard_params(top.module, writeback=False):
        with pytest.raises(PhaseError), unshard_params(top.module):
            pass
        names = {id(p): name for name, p in named(pair.model).items()}
        for inner in top.module.modules():
            for p in inner._parameters.values():
                name = names.get(id(p))
                # A tied parameter may belong to a unit above.
                if name is not None and pair.owner[name].state in states:
                    assert p is not None
                    pair.equal(p, expected[name], f"shown {name}")


def write(pair: Pair, index: int, rank0_only: bool) -> None:
    """Halve the parameters of one unit, on each rank or on the first for all."""
    state = pair.unit(index)
    chosen = [name for name, owned in pair.owner.items() if owned.state is state]
    before = [(name, p, p.shape) for name, p in pair.model.named_parameters()]
    with unshard_params(state.module, recurse=False, rank0_only=rank0_only):
        shown = not rank0_only or pair.world.rank == 0
        full = {id(leaf): table[name] for table, name, leaf, _ in state.handle.swaps}
        for p in full.values() if shown else ():
            assert p is not None
            p.data.mul_(0.5)
    after = [(name, p, p.shape) for name, p in pair.model.named_parameters()]
    assert [(n, id(p), s) for n, p, s in after] == [(n, id(p), s) for n, p, s in before]
    for name in chosen:
        named(pair.plain)[name].data.mul_(0.5)


def freeze(pair: Pair, which: int) -> None:
    """Flip ``requires_grad`` of one parameter: of the sharded one, not of its stand-in.

    A unit that is full by hand shows the latter, which is not asked.
    """
    for state in states_of(pair.model):
        reshard(state.module)
    for model, optimizer in zip((pair.model, pair.plain), pair.optimizers, strict=True):
        optimizer.zero_grad()
        chosen = sorted(named(model).items())
        if chosen:
            _, p = chosen[which % len(chosen)]
            p.requires_grad_(not p.requires_grad)


def copy_models(pair: Pair) -> None:
    """Go on with a deep copy, and new optimizers."""
    pair.model, pair.switches = copy.deepcopy((pair.model, pair.switches))
    pair.meet_names()
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.optimizers = [sgd(m.parameters()) for m in (pair.model, pair.plain)]


def save_and_load(pair: Pair) -> None:
    """A full state dict, compared and loaded again."""
    saved = pair.model.state_dict()
    expected = pair.plain.state_dict()
    assert list(saved) == [strip_wrapper(name) for name in expected]
    for name, value in expected.items():
        pair.equal(saved[strip_wrapper(name)], value, f"saved {name}")
    # On one rank a state dict holds the parameters themselves.
    kept = {name: value.clone() for name, value in saved.items()}
    other = {name: value * -2 + 1 for name, value in kept.items()}
    for values in (other, kept):
        pair.model.load_state_dict(values)
        for name, value in pair.model.state_dict().items():
            assert torch.equal(value, values[name]), f"loaded {name}"
