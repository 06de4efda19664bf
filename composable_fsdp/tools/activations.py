"""Measures what a step holds beside the plan's buffers, by unit, on fake tensors.

A window is a stretch of the step in which one unit computes. The stretches have the
names of the plan's events, so their bytes are added to those of the plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from composable_fsdp.naming import ROOT_NAME, join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.tools.fake_world import (
    default_loss,
    explained,
    fake_arguments,
    fake_like,
    fake_tensors,
    needing_gradients,
)
from composable_fsdp.tools.machine import FUSED, MEMORY, Cost
from composable_fsdp.tools.memory import Activations
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.simulated_world import tensors_of
from composable_fsdp.tools.step_memory import Event
from composable_fsdp.tools.storages import Block, Change, StorageLog
from composable_fsdp.tree.traversal import require_module

LIVE, HELD, GRADIENTS = "live", "held", "gradients"
"""Kinds of a block: tensors of the step; parameters and buffers; their gradients."""


def measure_activations(
    module: nn.Module,
    plan: ShardingPlan,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    checkpointing: bool = False,
) -> Activations:
    """Return the memory of a step of ``module`` beside the buffers of ``plan``.

    Forward, loss and backward run on fake tensors: ``module`` may be on meta, no value
    is computed, and no parameter changes. Parameters have the compute dtype of their
    unit. Memory that a kernel allocates and frees itself is not counted, nor are
    buffers of the modules. Shapes may not depend on values.

    Args:
        module: the module that was planned; not sharded.
        plan: the plan of ``module``.
        inputs: positional or keyword arguments of the forward; tensors may be on meta.
        loss: a function from the output to the loss. Default None: the output's
            ``loss``, or else the sum of its tensors of real numbers.
        checkpointing: whether each unit directly below the root runs under activation
            checkpointing. Default False.

    Returns: the activations, for ``forecast``.
    Raises: TypeError, if ``module`` is none; PlanError, if the step fails on fake
        tensors.

    >>> from composable_fsdp import forecast, plan
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> planned = plan(model, world_size=2)
    >>> found = measure_activations(model, planned, [torch.zeros(4, 8)])
    >>> max(m.memory.activations for m in forecast(planned, activations=found).moments)
    256
    """
    require_module(module, "measure_activations")
    # Copies, because an iterator would be exhausted by the text of the shapes.
    given = dict(inputs) if isinstance(inputs, Mapping) else list(inputs)
    # A scalar has an empty shape.
    shapes = ("x".join(map(str, each.shape)) or "1" for each in tensors_of(given))
    # Ids and labels have one shape.
    text = ", ".join(dict.fromkeys(shapes))
    log = OpLog()
    with (
        explained(type(module).__name__, log.place),
        fake_tensors(sends=True),
        log,
        ExitStack() as stack,
    ):
        # The module keeps its own parameters; the step sees the stand-ins, which live
        # longer than the log: an end of their gradients is no part of the step.
        held = _stand_in(module, plan, stack)
        log.hold(held)
        # FSDP1's default casts the inputs of the root alone.
        mixed = plan.units[0].options.mixed_precision
        low = mixed.param_dtype if mixed and mixed.cast_root_forward_inputs else None
        args, kwargs = fake_arguments(given, low)
        if checkpointing:
            _checkpoint_units(module, plan, stack)
        stack.enter_context(log.watch(module, {unit.fqn for unit in plan.units}))
        output = module(*args, **kwargs)
        log.window = log.window_of("")
        # Without anything to train there is only the forward.
        if loss is not None or needing_gradients(output):
            # The output stays alive in the caller of a training step, as here.
            (loss or default_loss)(output).backward()  # type: ignore[no-untyped-call]
        del output
    again: dict[str, Any] = {"loss": loss, "checkpointing": checkpointing}
    again |= {"plan": plan, "inputs": given}
    first = next(iter(tensors_of(given)), torch.empty((), device="meta"))
    ids = not first.is_floating_point() and not first.is_complex()
    # The log enters units as their forwards begin. Models need not run their modules in
    # the order of ``.modules()``: CLIP registers the text model first and runs the
    # vision model first.
    return Activations(
        text,
        log.measured(),
        tuple(log.begun),
        checkpointing,
        measure=partial(measure_activations, module, **again),
        work=log.work,
        # A scalar has no rows.
        tokens=first.numel() if ids else (*first.shape, 1)[0],
    )


def _stand_in(module: nn.Module, plan: ShardingPlan, stack: ExitStack) -> list[Tensor]:
    """Give ``module`` fake parameters and buffers in a block, and return them."""
    compute = {
        join_name(unit.fqn, fqn): unit.options.dtypes(region.dtype).compute
        for unit in plan.units
        for region in unit.regions
        for slot in region.parameters
        for fqn in slot.fqns
    }
    mixed = plan.units[0].options.mixed_precision
    found: list[Tensor] = []
    for prefix, each in walk.named(module):
        tables: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for table in tables:
            plain = {name: value for name, value in table.items() if value is not None}
            stack.callback(table.update, plain)
            for name, value in plain.items():
                # Parameters that no unit holds keep their dtype.
                dtype = compute.get(join_name(prefix, name), value.dtype)
                if table is each._buffers and mixed and value.is_floating_point():
                    dtype = mixed.buffer_dtype or dtype
                # A parameter that is tied to another has a stand-in of its own:
                # autograd would keep the first of its gradients to itself, and the plan
                # counts that gradient. Sizes of a DTensor are those of a rank's part;
                # the whole is on no rank.
                made = fake_like(local_of(value), dtype)
                if is_dtensor(value):
                    made = type(value).from_local(
                        made,
                        value.device_mesh,
                        value.placements,
                        run_check=False,
                        shape=value.shape,
                        stride=value.stride(),
                    )
                found.append(made.requires_grad_(value.requires_grad))
                table[name] = made
    return found


def _checkpoint_units(module: nn.Module, plan: ShardingPlan, stack: ExitStack) -> None:
    """Let each unit directly below the root repeat its forward in backward."""
    outer: list[str] = []
    for unit in plan.units:
        # The root would repeat the whole forward.
        if not unit.fqn or any(unit.fqn.startswith(f"{name}.") for name in outer):
            continue
        outer.append(unit.fqn)
        each = module.get_submodule(unit.fqn)
        each.forward = partial(
            checkpoint, each.forward, use_reentrant=False, preserve_rng_state=False
        )
        stack.callback(delattr, each, "forward")


class OpLog(StorageLog):  # type: ignore[no-untyped-call]  # torch has no types
    """Counts the bytes of a step by the unit that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = {"": None}
        """The units in the order in which their forwards began."""
        self.window = Event("forward", "")
        """The stretch of the step that runs."""
        self._running = [""]
        # Units in whose forward a nested unit has run.
        self._entered: set[str] = set()
        self.work: defaultdict[Any, Counter[Cost]] = defaultdict(Counter)
        """The operations of each window."""
        # Of compiled kernels: sizes of blocks that only they have written, and what the
        # present kernel has read, in bytes, and in which window.
        self._made: dict[Block, int] = {}
        self._seen: set[Block] = set()
        self._moved = 0
        self._filled = self.window
        # Nested units whose backward is not over, by the unit around them.
        self._pending: dict[str, int] = {}

    def new_kind(self) -> str:
        return LIVE

    def here(self) -> Event:
        return self.window

    def place(self) -> str:
        window = self.changes[-1].at if self.changes else self.window
        return f"{window.phase} of {window.unit or ROOT_NAME}"

    def ran(self, cost: Cost, read: list[Tensor], written: list[Tensor]) -> None:
        if self.window != self._filled:
            # What the kernels of the last window have made and left is in memory.
            left = sum(n for block, n in self._made.items() if block.nbytes)
            self._end_kernel(left)
            self._made.clear()
            self._filled = self.window
        self.work[self.window][cost] += 1
        inputs, outputs = list(map(self.meet, read)), list(map(self.meet, written))
        # A compiler computes what is between matrix products in one kernel. Memory has
        # what goes into the kernel, and what products or later windows read of it.
        if cost.kind == MEMORY:
            new = {each for each in inputs if each not in self._made} - self._seen
            self._seen |= new
            self._moved += sum(block.nbytes for block in new)
            self._made.update({block: block.nbytes for block in outputs})
        else:
            self._end_kernel(sum(self._made.pop(block, 0) for block in inputs))

    def _end_kernel(self, written: int) -> None:
        """Note the kernel that a compiler makes of the operations so far."""
        moved, self._moved = self._moved + written, 0
        self._seen.clear()
        if moved:
            self.work[self._filled][Cost(FUSED, 0, moved)] += 1

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Leave parameters and buffers out; tell their gradients from the rest."""
        self.mark(tensors, HELD)

        def note(leaf: Tensor) -> None:
            self.mark([leaf.grad], GRADIENTS)

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    @contextmanager
    def watch(self, module: nn.Module, fqns: set[str]) -> Iterator[None]:
        """Follow the forwards of the units named ``fqns`` in a block."""
        handles = []
        for fqn, each in walk.named(module):
            if fqn and fqn in fqns:
                begin, end = partial(self._begin, fqn), partial(self._end, fqn)
                handles += [
                    each.register_forward_pre_hook(begin, with_kwargs=True),
                    # Also after an exception, so that the stack of units stays right.
                    each.register_forward_hook(end, always_call=True),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # Hooks of forward take the last three arguments.
    def _begin(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the forward of unit ``fqn``."""
        above = self._running[-1]
        self._running.append(fqn)
        # Checkpointing repeats forwards in backward, which are part of that backward.
        if self.window.phase == "backward":
            return
        self._entered.add(above)
        self.begun.setdefault(fqn)
        self._pending[above] = self._pending.get(above, 0) + 1
        inputs = needing_gradients((args, kwargs))
        # Without such an input, nothing tells when the unit's backward ends.
        if inputs:
            register_multi_grad_hook(inputs, lambda _: self._end_backward(above))
        self.window = Event("forward", fqn)

    def _end(self, fqn: str, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward of unit ``fqn``."""
        self._running.pop()
        if self.window.phase == "backward":
            return
        window = self.window_of(fqn)

        def begin_backward(gradient: Tensor) -> None:
            self.window = window

        for tensor in needing_gradients(output):
            tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]
        self.window = Event("forward", self._running[-1], is_entry=False)

    def window_of(self, fqn: str) -> Event:
        """Return the first window of a unit in backward; the root's has the loss."""
        # A unit with nested units computes first in backward where they come last.
        return Event("backward", fqn, is_entry=fqn not in self._entered)

    def _end_backward(self, above: str) -> None:
        """End the backward of a unit inside unit ``above``."""
        # Between two nested units, the one that has ended stands for what follows.
        self._pending[above] -= 1
        # What the unit around them computes first in forward, it computes last here.
        if not self._pending[above]:
            self.window = Event("backward", above)

    def measured(self) -> dict[Event, tuple[int, int, int]]:
        """Return the bytes of each window, without its parameters' gradients.

        The plan counts a unit's gradients as present through the unit's backward, so
        the most is what is missing beside them, at the window's maximum.
        """
        found: dict[Event, tuple[int, int, int]] = {}
        live = start = most = gradients = 0
        window: Any = self.changes[0].at if self.changes else None
        # An end that belongs to no window closes the last one.
        for block, more, at in [*self.changes, Change(Block(HELD), 0, None)]:
            if at != window:
                # A unit that runs twice has two stretches with the same name.
                before, highest, _ = found.get(window, (start, 0, 0))
                highest = max(highest, most - gradients)
                found[window] = max(before, start), highest, live
                window, start, most, gradients = at, live, live, 0
            if block.kind == GRADIENTS:
                gradients += more
            elif block.kind == LIVE:
                live += more
            most = max(most, live + gradients)
        return found
