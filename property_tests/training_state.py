"""The actions of the training-state machine, as a rank carries them out.

Three models take every action together: the plain one, the composable path and the
wrapper. The plain one stands for all ranks at once: it sees every rank's input and
averages, in the order in which the ranks would. After each action the three must agree,
and nothing may be left full, summoned or counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    is_sharded,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    reshard,
    unshard,
    unshard_params,
)
from composable_fsdp.errors import PhaseError
from composable_fsdp.phases import Phase
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests.casting import shown
from tests.support.models import build, legal_units
from tests.support.recipes import ModelRecipe
from tests.support.reference import (
    apply_units,
    backward,
    loss_of,
    sgd,
    wide_input,
)
from tests.support.sharded import own_parts
from tests.support.world import World

Action = tuple[Any, ...]
"""Name of a method of ``Trio``, and its arguments."""

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Broken(RuntimeError):
    """What a hook raises to break a forward."""


@dataclass
class Graph:
    """Losses of one forward: of this rank on both paths, of every rank on the plain."""

    sharded: list[Tensor]
    plain: list[Tensor]


@dataclass(frozen=True)
class Options:
    """How units are sharded. ``low``: they compute in bfloat16, reduce in float32."""

    strategy: ShardingStrategy
    low: bool = False
    offload: bool = False


class Trio:
    """One recipe as plain, composable and wrapped model, on this rank."""

    def __init__(self, world: World, recipe: ModelRecipe, options: Options) -> None:
        self.world, self.recipe, self.low = world, recipe, options.low
        # Sums of three have an order, and momentum that overshoots makes rounding grow
        # from step to step: so in float64 then.
        exact = world.world_size <= 2
        self.dtype = torch.float32 if exact else torch.float64
        self.tolerance = 0.0 if exact else 1e-6
        self.plain = build(recipe).to(self.dtype)
        units = legal_units(self.plain, recipe.sharded)
        self.sharded = [
            apply_units(
                copy.deepcopy(self.plain),
                units,
                path=path,
                style=style,
                strategy=options.strategy,
                mixed_precision=LOW if options.low else None,
                cpu_offload=CPUOffload(offload_params=options.offload),
            )
            for path, style in (("composable", "manual"), ("wrapper", "auto"))
        ]
        self.models = [self.plain, *self.sharded]
        self.optimizers = [sgd(model.parameters()) for model in self.models]
        self.graphs: list[Graph] = []
        # Per rank, the plain model's gradients that no reduction has averaged yet.
        self.unreduced: list[dict[str, Tensor]] = [{} for _ in range(world.world_size)]
        self.saved: list[dict[str, Any]] = []
        self.saved_optim: list[dict[str, Any]] = []
        self.phases: set[Phase] = set()
        self.hooks: list[RemovableHandle] = []
        self._note_phases()

    def _note_phases(self) -> None:
        for model in self.sharded:
            for state in _get_fsdp_states(model):
                hook = state.module.register_forward_pre_hook(
                    lambda *_, handle=state.handle: self.phases.add(handle.phase)
                )
                self.hooks.append(hook)

    def inputs(self, batch: int, rank: int) -> Tensor:
        return wide_input(self.recipe.width)(batch, rank).to(self.dtype)

    def compute(self, x: Tensor) -> Tensor:
        """What the plain model makes of ``x``, cast as the units cast."""
        low = torch.bfloat16 if self.low else self.dtype
        cast = {name: p.to(low) for name, p in self.plain.named_parameters()}
        with shown(self.plain, cast):
            y: Tensor = self.plain(x.to(low))
        return y

    # ---- the step -----------------------------------------------------------

    def forward(self, batch: int) -> None:
        world = self.world
        plain = [
            self.compute(self.inputs(batch, rank)).float().square().mean()
            for rank in range(world.world_size)
        ]
        mine = self.inputs(batch, world.rank)
        self.phases.clear()
        sharded = [loss_of(model, mine) for model in self.sharded]
        assert self.phases == {Phase.FORWARD}
        self.equal(sharded[0], sharded[1], 0.0)
        self.equal(sharded[0], plain[world.rank], self.tolerance)
        self.graphs.append(Graph(sharded, plain))

    def backward(self, which: int, sync: bool) -> None:
        graph = self.graphs.pop(which % len(self.graphs))
        if not graph.plain[0].requires_grad:
            return
        for rank, loss in enumerate(graph.plain):
            self._add_local(rank, loss)
        if sync:
            self._average()
        for model, loss in zip(self.sharded, graph.sharded, strict=True):
            if sync:
                backward(loss)
            else:
                with no_sync(model):
                    backward(loss)

    def _add_local(self, rank: int, loss: Tensor) -> None:
        named = {n: p for n, p in self.plain.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        mine = self.unreduced[rank]
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                mine[name] = mine[name] + gradient if name in mine else gradient

    def _average(self) -> None:
        world_size = self.world.world_size
        for name, p in self.plain.named_parameters():
            if name not in self.unreduced[0]:
                continue
            total = self.unreduced[0][name]
            for rank in range(1, world_size):
                total = total + self.unreduced[rank][name]
            mean = total / world_size
            p.grad = mean if p.grad is None else p.grad + mean
        self.unreduced = [{} for _ in range(world_size)]

    def step(self) -> None:
        self.graphs.clear()
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def clip(self, norm_type: float) -> None:
        filled = [p for p in self.plain.parameters() if p.numel()]
        if not any(p.grad is not None for p in filled):
            return
        expected = torch.nn.utils.clip_grad_norm_(filled, 0.5, norm_type)
        for model in self.sharded:
            norm = clip_grad_norm_(model, 0.5, norm_type)
            self.equal(norm, expected, 1e-3)
        # From here on the gradients differ by rounding, and so do the weights.
        self.tolerance = max(self.tolerance, 1e-3)

    def evaluate(self, inference: bool) -> None:
        x = self.inputs(9, self.world.rank)
        with torch.inference_mode() if inference else torch.no_grad():
            self.plain.eval()
            outs = [self.compute(x)]
            outs += [model.eval()(x).clone() for model in self.sharded]
        for model in self.models:
            model.train()
        self.equal(outs[1], outs[2], 0.0)
        self.equal(outs[1], outs[0], self.tolerance)

    def break_forward(self, unit: int) -> None:
        """A forward that raises in one of the units; earlier graphs stay good."""
        for model in self.sharded:
            states = _get_fsdp_states(model)
            module = states[unit % len(states)].module

            def fail(*_: object) -> None:
                raise Broken

            hook = module.register_forward_pre_hook(fail)
            with pytest.raises(Broken):
                model(self.inputs(0, self.world.rank))
            hook.remove()

    def freeze(self, which: int) -> None:
        """Flip ``requires_grad`` of one parameter, between steps."""
        self.zero_grad(True)
        for model in self.models:
            parameters = list(model.parameters())
            if parameters:
                p = parameters[which % len(parameters)]
                p.requires_grad_(not p.requires_grad)

    # ---- outside the step ---------------------------------------------------

    def look(self, rank0_only: bool) -> None:
        expected = dict(self.plain.named_parameters())
        for model in self.sharded:
            with unshard_params(model, writeback=False, rank0_only=rank0_only):
                states = _get_fsdp_states(model)
                assert {s.handle.phase for s in states} == {Phase.SUMMON}
                if self.world.rank and rank0_only:
                    continue
                for name, p in model.named_parameters():
                    self.equal(p, expected[name], self.tolerance)

    def write(self, unit: int, rank0_only: bool) -> None:
        """Halve the parameters of one unit and those below it."""
        self.graphs.clear()
        for model in self.sharded:
            states = _get_fsdp_states(model)
            module = states[unit % len(states)].module
            with unshard_params(module, writeback=True, rank0_only=rank0_only):
                for p in module.parameters():
                    p.data.mul_(0.5)
        path = ("", *legal_units(self.plain, self.recipe.sharded))
        ordered = [n for n, _ in self.plain.named_modules() if n in path]
        chosen = self.plain.get_submodule(ordered[unit % len(ordered)])
        with torch.no_grad():
            for p in chosen.parameters():
                p.data.mul_(0.5)

    def intrude(self) -> None:
        """What is illegal inside ``unshard_params`` raises and leaves nothing."""
        for model in self.sharded:
            with unshard_params(model, writeback=False):
                with pytest.raises(PhaseError):
                    model(self.inputs(0, self.world.rank))
                with pytest.raises(PhaseError), unshard_params(model):
                    pass

    def save(self) -> None:
        self.saved = [model.state_dict() for model in self.models]
        self.saved[0] = {n: v.clone() for n, v in self.saved[0].items()}
        plain, *others = self.saved
        for other in others:
            assert list(other) == list(plain)
            for name, value in other.items():
                self.equal(value, plain[name], self.tolerance)
        self._save_optimizers()

    def _save_optimizers(self) -> None:
        mine, *others = self.optimizers
        self.saved_optim = [copy.deepcopy(mine.state_dict())]
        for model, optimizer in zip(self.sharded, others, strict=True):
            saved = optim_state_dict(model, optimizer)
            self.saved_optim.append(saved)
            for name, p in self.plain.named_parameters():
                expected = mine.state.get(p, {}).get("momentum_buffer")
                found = saved["state"].get(name, {}).get("momentum_buffer")
                assert (found is None) is (expected is None), name
                if found is not None:
                    self.equal(found, expected, self.tolerance)

    def load(self) -> None:
        """What was saved last, crosswise: each path takes the other's."""
        self.graphs.clear()
        plain, composable, wrapper = self.saved
        for model, saved in zip(self.models, (plain, wrapper, composable), strict=True):
            model.load_state_dict(saved)
        plain, composable, wrapper = self.saved_optim
        self.optimizers[0].load_state_dict(copy.deepcopy(plain))
        for model, optimizer, saved in zip(
            self.sharded, self.optimizers[1:], (wrapper, composable), strict=True
        ):
            optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, saved))

    def copy(self) -> None:
        """Go on with deep copies, and the originals' optimizer state."""
        self.graphs.clear()
        while self.hooks:
            self.hooks.pop().remove()
        gradients = [[p.grad for p in m.parameters()] for m in self.models]
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self.models = [copy.deepcopy(model) for model in self.models]
        self.plain, *self.sharded = self.models
        self.optimizers = [sgd(model.parameters()) for model in self.models]
        for model, optimizer, state, grads in zip(
            self.models, self.optimizers, states, gradients, strict=True
        ):
            optimizer.load_state_dict(copy.deepcopy(state))
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = None if grad is None else grad.clone()
        self._note_phases()

    def unshard(self, unit: int) -> None:
        """By hand, then back; a forward in between uses what is there."""
        for model in self.sharded:
            states = _get_fsdp_states(model)
            module = states[unit % len(states)].module
            unshard(module)
            assert not is_sharded(module)
            with torch.no_grad():
                model(self.inputs(1, self.world.rank))
            reshard(module)
            assert is_sharded(module)

    # ---- what holds after each action ---------------------------------------

    def check(self) -> None:
        for model in self.sharded:
            states = _get_fsdp_states(model)
            context = ensure_root(states[0])
            assert context.outermost is None
            assert context.summoned is None
            assert not context.tasks
            # A unit awaits its backward also when the graph was dropped since.
            awaited = {Phase.IDLE, Phase.BACKWARD_PRE}
            assert {s.handle.phase for s in states} <= awaited
            assert not any(s.handle.is_full for s in states)
        if not any(self.unreduced):
            for model in self.sharded:
                self._check_gradients(model)

    def _check_gradients(self, model: nn.Module) -> None:
        plain = dict(self.plain.named_parameters())
        whole = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in plain.items()
        }
        for name, (leaf, part) in own_parts(model, whole).items():
            assert leaf.requires_grad is plain[name].requires_grad, name
            absent = plain[name].numel() > 0 == part.numel()
            assert (leaf.grad is None) is (plain[name].grad is None or absent), name
            if leaf.grad is not None:
                self.equal(leaf.grad, part, self.tolerance)

    def equal(self, value: Tensor, expected: Tensor, tolerance: float) -> None:
        if tolerance:
            assert torch.allclose(value, expected, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(value, expected)


def run_program(
    world: World,
    recipe: ModelRecipe,
    options: Options,
    program: list[Action],
) -> None:
    """Carry out a program on this rank, with every check after every action."""
    trio = Trio(world, recipe, options)
    for name, *arguments in program:
        action: Callable[..., None] = getattr(trio, name)
        action(*arguments)
        trio.check()
    assert world.all_equal([model.state_dict() for model in trio.sharded])
