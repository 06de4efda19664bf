"""Carrying out a combination on one rank, with every check after every step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CompositionError,
    MixedPrecision,
    PlanError,
    no_sync,
    reshard,
    set_gradient_divide_factor,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_reduce_scatter_unused_params,
    set_requires_all_reduce,
    set_reshard_after_backward,
    set_reshard_after_forward,
    unshard,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.phases import Phase
from composable_fsdp.state_dict.full import part_of
from composable_fsdp.testing.models import build
from composable_fsdp.testing.world import World
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests.combination_models import (
    Layout,
    Switch,
    add_hook,
    add_switches,
    shard,
    states_of,
    tops_of,
)
from property_tests.combination_recipes import Combination, Micro, Step
from tests.runtime.reference import loss_of, sgd, wide_input

Leaves = dict[str, Tensor]


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under the names of the plain model."""
    return {strip_wrapper(name): p for name, p in model.named_parameters()}


def passes(micro: Micro) -> list[Callable[[Sequence[Tensor]], Tensor]]:
    """The losses that backward is called on, one after the other."""

    def joint(losses: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(losses)).sum()

    if micro.backward == "joint" or (micro.forwards == 1 and micro.backward != "twice"):
        return [joint]
    if micro.backward == "twice":
        return [joint, joint]
    each = [lambda losses, i=i: losses[i] for i in range(micro.forwards)]
    return each[::-1] if micro.backward == "reversed" else each


def run_passes(
    micro: Micro,
    losses: Sequence[Tensor],
    after: Callable[[], object] = lambda: None,
) -> None:
    chosen = passes(micro)
    for index, choose in enumerate(chosen):
        loss = choose(losses)
        last = index == len(chosen) - 1 or micro.backward != "twice"
        if loss.requires_grad:
            torch.autograd.backward(loss, retain_graph=not last)
        after()


class Broken(RuntimeError):
    """What a hook raises to break a forward."""


class Pair:
    """The sharded model of this rank, and the plain one that stands for all."""

    def __init__(self, world: World, combination: Combination) -> None:
        self.world, self.combination = world, combination
        recipe = combination.model
        layout, twin = (Layout(build(recipe), combination) for _ in range(2))
        twin.checkpoint()
        if not combination.late:
            layout.checkpoint()
        self.model = shard(layout, world)
        add_hook(self.model, combination, world)
        if combination.late:
            layout.checkpoint()
        self.plain = twin.model
        self._meet_names()
        self._cast_as(layout, twin)
        # After the hooks of the units: what they drop, the unit has computed.
        self.switches = layout.inside, add_switches(layout.model)
        self.twin_switches = twin.inside, add_switches(twin.model)
        self.optimizers = [sgd(m.parameters()) for m in (self.model, self.plain)]
        self.sums: list[Leaves] = [{} for _ in range(world.world_size)]
        self.fill = False
        self.batch = 0
        self.tolerance = self._tolerance()
        for micro in (m for s in combination.steps for m in s.micro):
            if micro.by_rank:
                self.do_fill(True)

    def _tolerance(self) -> float:
        """0 where the order of every sum is known and no dtype is narrow."""
        mixed = any(s.options.mixed_precision for s in states_of(self.model))
        if mixed or self.combination.hook == "bf16":
            return 0.05
        local = any(m.mode == "local" for s in self.combination.steps for m in s.micro)
        if self.world.world_size > 2 or local:
            return 1e-5
        return 0.0

    def _meet_names(self) -> None:
        """Which unit each parameter belongs to, by name."""
        names = {id(p): name for name, p in named(self.model).items()}
        self.owner = {
            names[id(leaf)]: (state, region, slot, leaf)
            for state in states_of(self.model)
            for region in state.handle.regions
            for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
        }
        assert self.owner.keys() == named(self.plain).keys()

    def _cast_as(self, layout: Layout, twin: Layout) -> None:
        """Have the plain model cast where the units do."""
        for top in tops_of(self.model):
            ensure_root(states_of(top)[0])
        pairs = [(layout.units[path], twin.units[path]) for path in layout.units]
        for module, plain in [*pairs, (layout.model, twin.model)]:
            state = _get_module_fsdp_state(module)
            assert state is not None
            mixed = state.options.mixed_precision
            if mixed is not None and any(module is m for m in state.modules):
                cast_like(plain, mixed, is_root=state._is_root is True)

    # ---- settings -----------------------------------------------------------

    def unit(self, index: int) -> _FSDPState:
        states = states_of(self.model)
        return states[index % len(states)]

    def do_fill(self, on: bool) -> None:
        by_rank = any(m.by_rank for s in self.combination.steps for m in s.micro)
        for top in tops_of(self.model):
            set_reduce_scatter_unused_params(top, on or by_rank)

    def do_divide(self, index: int, factor: float) -> None:
        if self.combination.hook == "none":
            set_gradient_divide_factor(self.unit(index).module, factor)

    def do_reshard_after_forward(self, index: int, on: bool) -> None:
        set_reshard_after_forward(self.unit(index).module, on, recurse=False)

    def do_prefetch(self, when: str, index: int, targets: tuple[int, ...]) -> None:
        state = self.unit(index)
        chosen = [self.unit(t) for t in targets]
        tree = ensure_root(state)
        modules = [s.module for s in chosen if ensure_root(s) is tree]
        setter = {
            "forward": set_modules_to_forward_prefetch,
            "backward": set_modules_to_backward_prefetch,
        }[when]
        setter(state.module, modules)

    # ---- between steps ------------------------------------------------------

    def inputs(self, rank: int, at: int) -> Tensor:
        x = wide_input(self.combination.model.width)(self.batch + at, rank)
        return x.requires_grad_(self.combination.needs_input_grad)

    def do_evaluate(self, how: str) -> None:
        x = self.inputs(self.world.rank, 0).detach()
        leaves = self.leaves()
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            ours = self.model.eval()(x).clone()
            with self.shown(leaves):
                expected = self.plain.eval()(x).clone()
        self.model.train()
        self.plain.train()
        self.equal(ours, expected, "evaluated")

    def do_drop(self) -> None:
        self.model(self.inputs(self.world.rank, 0))

    def do_unshard(self, index: int, async_op: bool) -> None:
        unshard(self.unit(index).module, async_op=async_op)

    def do_reshard(self, index: int) -> None:
        reshard(self.unit(index).module)

    def _reshard_all(self) -> None:
        for state in states_of(self.model):
            reshard(state.module)

    def do_look(self, index: int) -> None:
        expected = named(self.plain)
        module = self.unit(index).module
        with unshard_params(module, writeback=False):
            found = named(self.model)
            for inner in module.modules():
                state = _get_module_fsdp_state(inner)
                if state is None or state.context is not self.unit(index).context:
                    continue
                for p in inner._parameters.values():
                    names = [n for n, q in found.items() if q is p]
                    if p is not None:
                        self.equal(p, expected[names[0]], f"shown {names[0]}")

    def do_write(self, index: int) -> None:
        self._reshard_all()
        state = self.unit(index)
        with unshard_params(state.module, recurse=False):
            full = {id(leaf): t[name] for t, name, leaf, _ in state.handle.swaps}
            for p in full.values():
                assert p is not None
                p.data.mul_(0.5)
        for name, (owner, *_) in self.owner.items():
            if owner is state:
                named(self.plain)[name].data.mul_(0.5)

    def do_freeze(self, which: int) -> None:
        self._reshard_all()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for model in (self.model, self.plain):
            chosen = sorted(named(model).items())
            if chosen:
                _, p = chosen[which % len(chosen)]
                p.requires_grad_(not p.requires_grad)

    def do_copy(self) -> None:
        self.model, self.switches = copy.deepcopy((self.model, self.switches))
        self._meet_names()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.optimizers = [sgd(m.parameters()) for m in (self.model, self.plain)]

    def do_save_and_load(self) -> None:
        saved = self.model.state_dict()
        expected = self.plain.state_dict()
        assert list(saved) == [strip_wrapper(name) for name in expected]
        for name, value in expected.items():
            self.equal(saved[strip_wrapper(name)], value, f"saved {name}")
        self._reshard_all()
        self.model.load_state_dict(saved)

    def do_break_forward(self, index: int) -> None:
        def fail(*_: object) -> None:
            raise Broken

        hook = self.unit(index).module.register_forward_pre_hook(fail)
        with pytest.raises(Broken):
            self.model(self.inputs(self.world.rank, 0))
        hook.remove()

    # ---- the plain model ----------------------------------------------------

    def leaves(self) -> Leaves:
        """Each parameter of the plain model as its unit computes with it."""
        return {
            name: p.detach()
            .to(self.owner[name][0].options.dtypes(p.dtype).compute)
            .requires_grad_(p.requires_grad)
            for name, p in named(self.plain).items()
        }

    @contextmanager
    def shown(self, leaves: Leaves) -> Iterator[None]:
        """Have the plain model compute with ``leaves``."""
        by_id = {id(p): leaves[name] for name, p in named(self.plain).items()}
        swaps = [
            (module._parameters, key, p)
            for module in self.plain.modules()
            for key, p in module._parameters.items()
            if p is not None
        ]
        for table, key, p in swaps:
            table[key] = by_id[id(p)]  # type: ignore[assignment]  # plain tensors serve
        try:
            yield
        finally:
            for table, key, p in swaps:
                table[key] = p

    def arrive(self, rank: int, leaves: Leaves) -> None:
        """Add what a backward left in the leaves to what the rank has to reduce."""
        for name, leaf in leaves.items():
            if leaf.grad is None:
                continue
            sums, dtypes = self.sums[rank], self.dtypes(name)
            if name in sums:
                sums[name].add_(leaf.grad)
            else:
                sums[name] = leaf.grad.to(dtypes.reduce, copy=True)
            leaf.grad = None

    def dtypes(self, name: str) -> Any:
        return self.owner[name][0].options.dtypes(named(self.plain)[name].dtype)

    def reduce(self, mode: str) -> None:
        """Average over ranks what the mode reduces."""
        if mode == "no_sync":
            return
        for name, p in named(self.plain).items():
            handle = self.owner[name][0].handle
            if mode == "local" and handle.groups.replicas > 1:
                continue
            arrived = [sums.pop(name, None) for sums in self.sums]
            fill = handle.rule.fill and p.requires_grad
            if not fill and arrived[0] is None:
                continue
            dtypes = self.dtypes(name)
            zero = torch.zeros_like(p, dtype=dtypes.reduce)
            terms = [zero if a is None else a for a in arrived]
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            mean = total / (handle.rule.factor or self.world.world_size)
            if p.grad is None:
                if dtypes.gradient != p.dtype:
                    p.grad_dtype = dtypes.gradient
                p.grad = torch.zeros_like(p, dtype=dtypes.gradient)
            p.grad.add_(mean.to(dtypes.gradient))

    # ---- the step -----------------------------------------------------------

    def step(self, step: Step) -> None:
        for name, *arguments in step.actions:
            getattr(self, f"do_{name}")(*arguments)
        with record() as calls:
            for index, micro in enumerate(step.micro):
                keep = micro.keep and index < len(step.micro) - 1
                for top in tops_of(self.model):
                    set_reshard_after_backward(top, not keep)
                self._micro(micro)
                self.batch += micro.forwards
        self._check()
        for optimizer in self.optimizers:
            optimizer.step()
        if step.zero != "keep":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=step.zero == "none")
        assert self.world.all_equal(list(map(str, calls))), calls

    def _micro(self, micro: Micro) -> None:
        world_size, mine = self.world.world_size, self.world.rank
        batches = [
            [self.inputs(rank, at) for at in range(micro.forwards)]
            for rank in range(world_size)
        ]
        leaves = [self.leaves() for _ in batches]
        expected = []
        for rank, xs in enumerate(batches):
            self._bypass(self.twin_switches, micro, rank)
            with self.shown(leaves[rank]):
                expected.append([loss_of(self.plain, x) for x in xs])
        # Checkpoints compute again, so each rank's bypass stands while it runs.
        for choose in passes(micro):
            for rank in range(world_size):
                self._bypass(self.twin_switches, micro, rank)
                with self.shown(leaves[rank]):
                    loss = choose(expected[rank])
                    if loss.requires_grad:
                        again = micro.backward == "twice"
                        torch.autograd.backward(loss, retain_graph=again)
                self.arrive(rank, leaves[rank])
            self.reduce(micro.mode)
        self._bypass(self.twin_switches, Micro(), 0)

        self._bypass(self.switches, micro, mine)
        xs = [self.inputs(mine, at) for at in range(micro.forwards)]
        with ExitStack() as stack:
            for top in tops_of(self.model):
                if micro.mode == "no_sync":
                    stack.enter_context(no_sync(top))
                set_requires_all_reduce(top, micro.mode != "local")
            losses = [loss_of(self.model, x) for x in xs]
            run_passes(micro, losses)
        self.came_back = losses[-1].requires_grad
        self._bypass(self.switches, Micro(), 0)

        for loss, plain in zip(losses, expected[mine], strict=True):
            self.equal(loss, plain, "loss")
        for x, plain in zip(xs, batches[mine], strict=True):
            assert (x.grad is None) is (plain.grad is None), "input"
            if x.grad is not None and plain.grad is not None:
                self.equal(x.grad, plain.grad, "input's gradient")

    def _bypass(
        self, switches: tuple[list[Switch], list[Switch]], micro: Micro, rank: int
    ) -> None:
        inside, outside = switches
        for switch in (*inside, *outside):
            switch.on = False
        if micro.bypass is None or (micro.by_rank and rank % 2 == 0):
            return
        chosen = inside if micro.inside else outside
        if chosen:
            chosen[micro.bypass % len(chosen)].on = True

    # ---- what holds after each step -----------------------------------------

    def _check(self) -> None:
        plain = named(self.plain)
        for name, (_, region, slot, leaf) in self.owner.items():
            grad = plain[name].grad
            assert leaf.requires_grad is plain[name].requires_grad, name
            assert (leaf.grad is None) is (grad is None), (name, leaf.grad, grad)
            self.equal(leaf, part_of(region, slot, plain[name], like=leaf), name)
            if leaf.grad is not None and grad is not None:
                part = part_of(region, slot, grad, like=leaf)
                self.equal(leaf.grad, part, f"gradient of {name}")
        # A backward that does not come by leaves what the forward left: none here
        # (nothing trainable was used), or none in a replicated tree.
        for state in _get_fsdp_states(self.model) if self.came_back else []:
            self._check_idle(state)

    def _check_idle(self, state: _FSDPState) -> None:
        handle, context = state.handle, ensure_root(state)
        assert context.outermost is None
        assert context.reducing is None
        assert not context.tasks
        assert not context.filling
        assert not context.prefetched
        assert not any(unit.remaining for unit in context.lists)
        # A unit awaits its backward also when the loss did not use what it computed.
        assert handle.phase in (Phase.IDLE, Phase.BACKWARD_PRE), handle
        assert not handle.is_full, state.name
        assert not handle.gathered, state.name
        assert not handle.reduce_is_allocated, state.name
        assert handle.held is None
        for region in handle.regions:
            assert region.temporary is None
            assert region.partial is None
            if region.is_cut:
                assert region.full.untyped_storage().nbytes() == 0, state.name
            if region.reduce_buffer is not None:
                assert region.reduce_buffer.untyped_storage().nbytes() == 0
        for table, name, leaf, _ in handle.swaps:
            assert table[name] is leaf

    def equal(self, value: Tensor, expected: Tensor, what: str) -> None:
        value, expected = value.detach(), expected.detach()
        assert value.dtype is expected.dtype, (what, value.dtype, expected.dtype)
        if self.tolerance:
            near = torch.allclose(
                value, expected, rtol=self.tolerance, atol=self.tolerance
            )
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


def run_combination(world: World, combination: Combination) -> str:
    """Carry it out; returns why it was refused, or nothing."""
    # Said of an evaluation, too, where no gradient is wanted.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    try:
        pair = Pair(world, combination)
    except (PlanError, CompositionError) as error:
        return f"{type(error).__name__}: {error}"
    for step in combination.steps:
        pair.step(step)
    pair.do_save_and_load()
    return ""
