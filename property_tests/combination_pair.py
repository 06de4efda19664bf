"""The sharded model of this rank, and the plain one that stands for all ranks.

Where units cast, the plain one computes what they should: it is shown its parameters in
the dtype of their unit, and casts inputs and outputs at the places of the units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from composable_fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    set_reduce_scatter_unused_params,
)
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from property_tests.casting import named
from property_tests.combination_models import Layout, add_hook, add_switches, shard
from property_tests.combination_recipes import Combination
from tests.support.models import build
from tests.support.reference import sgd, wide_input
from tests.support.world import World

Leaves = dict[str, Tensor]


class Owned(NamedTuple):
    """Where a parameter is in the sharded model."""

    state: _FSDPState
    region: FlatParameter
    slot: ParameterSlot
    leaf: nn.Parameter


def states_of(model: nn.Module) -> list[_FSDPState]:
    """Every unit, those of replicated subtrees included, in ``.modules()`` order."""
    found = (_get_module_fsdp_state(module) for module in model.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


def tops_of(model: nn.Module) -> list[nn.Module]:
    """The root, and the tops of replicated subtrees."""
    tops = [s.module for s in states_of(model) if s.parent is None]
    return [model, *tops[1:]]


class Pair:
    """Both models, their optimizers, and what no reduction has averaged yet."""

    def __init__(self, world: World, combination: Combination) -> None:
        self.world, self.combination = world, combination
        exact = combination.is_exact(world.world_size)
        self.dtype = torch.float32 if exact else torch.float64
        self.tolerance = 0.0 if exact else 1e-6
        layout, twin = (
            Layout(model if exact else model.double(), combination)
            for model in (build(combination.model), build(combination.model))
        )
        twin.checkpoint()
        if not combination.late:
            layout.checkpoint()
        self.model, self.plain = shard(layout, world), twin.model
        add_hook(self.model, combination, world)
        if combination.late:
            layout.checkpoint()
        self.meet_names()
        self._cast_as(layout, twin)
        # After the hooks of the units: what they drop, the unit has computed.
        self.switches = layout.inside, add_switches(layout.model)
        self.twin_switches = twin.inside, add_switches(twin.model)
        self.optimizers = [sgd(m.parameters()) for m in (self.model, self.plain)]
        self.sums: list[Leaves] = [{} for _ in range(world.world_size)]
        """Per rank, gradients of the plain model in the dtype of their reduction."""
        self.waiting: list[Leaves] = [{} for _ in range(world.world_size)]
        """The same, of those that were reduced without the replicas."""
        self.batch = 0
        self.fill(on=combination.by_rank)

    def meet_names(self) -> None:
        """Find where each parameter is, by name."""
        names = {id(p): name for name, p in named(self.model).items()}
        self.owner = {
            names[id(leaf)]: Owned(state, region, slot, leaf)
            for state in states_of(self.model)
            for region in state.handle.layout.regions
            for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
        }
        assert self.owner.keys() == named(self.plain).keys()

    def _cast_as(self, layout: Layout, twin: Layout) -> None:
        """Have the plain model cast where the units do."""
        for top in tops_of(self.model):
            ensure_root(states_of(top)[0])
        wrapped = [
            each.module
            for each in self.model.modules()
            if isinstance(each, FullyShardedDataParallel)
        ]
        pairs = [(layout.units[path], twin.units[path]) for path in layout.units]
        for module, plain in [*pairs, (layout.model, twin.model)]:
            state = _get_module_fsdp_state(module)
            assert state is not None
            mixed = state.options.mixed_precision
            if mixed is not None and any(module is m for m in state.modules):
                auto = layout.combination.style == "auto"
                own_call = not auto or module is layout.model
                # Without a wrapper the root of each call casts, too.
                is_local = own_call and all(module is not each for each in wrapped)
                cast_like(plain, mixed, is_root=state._is_root is True or is_local)

    def fill(self, *, on: bool) -> None:
        """Have units without a gradient take part, or not."""
        for top in tops_of(self.model):
            set_reduce_scatter_unused_params(top, on)

    def unit(self, index: int) -> _FSDPState:
        """One of the units, counted round."""
        states = states_of(self.model)
        return states[index % len(states)]

    def inputs(self, rank: int, at: int) -> Tensor:
        """The input of a rank in the next forward but ``at``."""
        x = wide_input(self.combination.model.width)(self.batch + at, rank)
        return x.to(self.dtype).requires_grad_(self.combination.needs_input_grad)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        """A scalar that depends on every output."""
        loss: Tensor = model(x).to(self.dtype).square().mean()
        return loss

    def dtype_of(self, name: str, use: str) -> torch.dtype:
        """In which ``compute``, ``reduce`` and ``gradient`` are for a parameter."""
        dtypes = self.owner[name].state.options.dtypes(named(self.plain)[name].dtype)
        found: torch.dtype = getattr(dtypes, use)
        return found

    def leaves(self) -> Leaves:
        """Each parameter of the plain model as its unit computes with it."""
        return {
            name: p.detach()
            .to(self.dtype_of(name, "compute"))
            .requires_grad_(p.requires_grad)
            for name, p in named(self.plain).items()
        }

    def equal(self, value: Tensor, expected: Tensor, what: str) -> None:
        """Compare, bit by bit unless sums have another order."""
        value, expected = value.detach(), expected.detach()
        assert value.dtype is expected.dtype, (what, value.dtype, expected.dtype)
        if self.tolerance:
            t = self.tolerance
            near = torch.allclose(value, expected, rtol=t, atol=t)
        else:
            near = torch.equal(value, expected)
        assert near, (what, value, expected)


def cast_like(module: nn.Module, mixed: MixedPrecision, *, is_root: bool) -> None:
    """Have a plain module cast as a unit with ``mixed`` does."""
    inputs = mixed.cast_forward_inputs or (is_root and mixed.cast_root_forward_inputs)
    if inputs and mixed.param_dtype is not None:
        module.register_forward_pre_hook(
            lambda _, args: tuple(a.to(mixed.param_dtype) for a in args), prepend=True
        )
    if mixed.output_dtype is not None:
        module.register_forward_hook(lambda *given: given[-1].to(mixed.output_dtype))
