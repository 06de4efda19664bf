"""Measures memory of a step beside the plan's buffers, per unit, on fake tensors.

The step computes shapes and no values, so a batch of any size takes no memory::

    module, inputs --step on fake tensors--> saved by forward, per unit  --> Activations
                                        '--> more than that, per window -'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from composable_fsdp.errors import PlanError
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import is_dtensor
from composable_fsdp.tools.fake_step import (
    FAKE_LOG,
    Step,
    StepLog,
    Window,
    fake_inputs,
    muted,
    stand_ins,
)
from composable_fsdp.tools.fake_values import FakeValues
from composable_fsdp.tools.model_sends import model_sends
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.step_memory import COMPUTE, Event


class UnitActivations(NamedTuple):
    """Bytes that the forward of a unit saves, without the units nested in the unit.

    Args:
        before: bytes saved before the nested units run; all bytes, if none do.
        after: bytes saved after the first nested unit has run.
        inputs: bytes of the inputs, which checkpointing keeps.
        outer: name of the outermost enclosing unit below the root; the unit's own name
            if no other encloses the unit.
    """

    before: int
    after: int
    inputs: int
    outer: str


class Held(NamedTuple):
    """Bytes at an event: saved by forward, and beside these while the event runs."""

    saved: int
    beside: int


@dataclass(frozen=True)
class Activations:
    """Tensors of a step beside parameters, their gradients and the optimizer.

    Args:
        units: the bytes that forward saves, by the unit's name.
        batch: the inputs as text, for a reader.
        beside: bytes of other tensors, such as gradients of activations and the loss,
            at the moment of a window with most of them; negative, if backward has freed
            more by then. Default: none.
        checkpointed: whether each unit directly below the root runs under activation
            checkpointing, which keeps the unit's inputs and repeats its forward in
            backward. Default False.
        measure: measures the same forward for a plan with other dtypes. Default None:
            the bytes are taken for those of every dtype.
        order: names of the units in the order in which their forwards began. Default:
            the order of the plan.
    """

    units: Mapping[str, UnitActivations]
    batch: str
    beside: Mapping[Window, int] = field(default_factory=dict, repr=False)
    checkpointed: bool = False
    measure: Callable[[ShardingPlan], Activations] | None = field(
        default=None, repr=False, compare=False
    )
    order: tuple[str, ...] = field(default=(), repr=False)

    def with_checkpointing(self) -> Activations:
        """Return the activations with checkpointing of each unit below the root."""
        return replace(self, checkpointed=True)

    def measured_for(self, plan: ShardingPlan) -> Activations:
        """Return the activations of the same forward in the dtypes of ``plan``."""
        if self.measure is None:
            return self
        return replace(self.measure(plan), checkpointed=self.checkpointed)

    def through(self, events: Iterable[Event], fqns: Sequence[str]) -> list[Held]:
        """Return the bytes at each event; ``fqns`` names the units of the plan."""
        steps = [(event, fqns[event.unit]) for event in events]
        changes = [
            self.change(event, fqn) if event.kind == COMPUTE else (0, 0)
            for event, fqn in steps
        ]
        # What an operation allocates is there while it runs; what it frees, until then.
        after = accumulate(more - less for more, less in changes)
        held = [now + less for now, (_, less) in zip(after, changes, strict=True)]
        beside = [
            self.beside.get(_window(event, fqn), 0) if event.kind == COMPUTE else 0
            for event, fqn in steps
        ]
        # Backward frees saved tensors while gradients of parameters come.
        return [
            Held(saved + min(0, more), max(0, more))
            for saved, more in zip(held, beside, strict=True)
        ]

    def change(self, event: Event, fqn: str) -> tuple[int, int]:
        """Return the bytes that the computation ``event`` of unit ``fqn`` allocates.

        The second number is the bytes that the computation frees at its end.
        """
        unit = self.units.get(fqn)
        if unit is None:
            return 0, 0
        # The root is not checkpointed: it would repeat the whole forward.
        forward = event.phase == "forward"
        if not (self.checkpointed and fqn):
            part = unit.before if event.is_entry else unit.after
            return (part, 0) if forward else (0, part)
        # The outermost unit repeats the forwards of the units nested in it.
        if fqn != unit.outer:
            return 0, 0
        if forward:
            return (unit.inputs if event.is_entry else 0), 0
        # All that the unit and the units nested in it would have saved.
        again = sum(u.before + u.after for u in self.units.values() if u.outer == fqn)
        # The first computation of the unit's backward repeats the forward; the last
        # frees all. A unit without nested units has a single computation.
        nested = any(u.outer == fqn for name, u in self.units.items() if name != fqn)
        return (
            again if not (event.is_entry and nested) else 0,
            again + unit.inputs if event.is_entry else 0,
        )


def measure_activations(
    module: nn.Module,
    plan: ShardingPlan,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    batch: str | None = None,
) -> Activations:
    """Return the memory of a step of ``module`` beside the buffers of ``plan``.

    Forward, loss and backward run on fake tensors: ``module`` may be on meta, no value
    is computed, and no parameter changes. Parameters have the compute dtype of their
    unit. Memory that a kernel allocates and frees itself is not counted, nor are
    buffers of the modules. Choices that depend on values, as the router's of a mixture
    of experts, are spread evenly.

    Args:
        module: the module that was planned; not sharded.
        plan: the plan of ``module``.
        inputs: positional or keyword arguments of the forward; tensors may be on meta.
        loss: a function from the output to the loss. Default None: the output's
            ``loss``, or else the sum of its tensors of real numbers.
        batch: the inputs as text. Default None: the shapes of the tensors.

    Returns: the activations.
    Raises: PlanError, if the step fails on fake tensors.

    >>> from composable_fsdp import plan
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> planned = plan(model, world_size=2)
    >>> measure_activations(model, planned, [torch.zeros(4, 8)]).units[""].before
    256
    """
    # Copies, because an iterator would be exhausted by the text of the shapes.
    given = dict(inputs) if isinstance(inputs, Mapping) else list(inputs)
    log = StepLog({unit.fqn for unit in plan.units})
    try:
        # torch logs a traceback of each operation that fails; the error below has it.
        with (
            muted(FAKE_LOG),
            FakeTensorMode(allow_non_fake_inputs=True),
            FakeValues() as values,
            _sends_of(module),
            log,
        ):
            # The module keeps its own parameters; the step sees the stand-ins.
            tensors = stand_ins(module, plan, values)
            log.hold(tensors)
            given = fake_inputs(given, plan, values)
            with log.watch(module), saved_tensors_hooks(log.pack, lambda x: x):
                args, kwargs = (
                    ((), given) if isinstance(given, dict) else (tuple(given), {})
                )
                # The names of the module's parameters, inside the step.
                named = {f"module.{name}": each for name, each in tensors.items()}
                step = Step(module, loss, log)
                torch.func.functional_call(step, named, args, kwargs, tie_weights=False)
    # The step is the user's code and may raise anything.
    except Exception as error:
        raise PlanError(
            "The activations could not be measured, because the "
            f"{log.window.phase} of this {type(module).__name__} fails on fake "
            f"tensors: {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '').rstrip('.')}. Check the inputs, "
            "the loss and the dtypes; leave the batch out to plan without activations."
        ) from error
    words = batch or _shapes(inputs)
    again = partial(measure_activations, module, inputs=inputs, loss=loss, batch=words)
    order = tuple(log.outer)  # the log enters units as their forwards begin
    units = {
        fqn: UnitActivations(before, after, kept, log.outer.get(fqn, fqn))
        for fqn, (before, after, kept) in log.saved.items()
    }
    found = Activations(
        units, words, measure=lambda other: again(plan=other), order=order
    )
    # Models need not run their modules in the order of ``.modules()``: CLIP registers
    # the text model first and runs the vision model first.
    largest = log.largest()
    return replace(found, beside=_beside(found, plan.in_forward_order(order), largest))


def _sends_of(module: nn.Module) -> AbstractContextManager[None]:
    """Return the block in which DTensors of ``module`` send nothing and are local."""
    parameters = (p for each in walk.modules(module) for p in each._parameters.values())
    has_dtensors = any(map(is_dtensor, parameters))
    return model_sends(makes_dtensors=False) if has_dtensors else nullcontext()


def _beside(
    saved: Activations, plan: ShardingPlan, largest: Mapping[Window, int]
) -> dict[Window, int]:
    """Return the bytes of each window that ``saved`` does not have."""
    events = [e for e in plan.step_memory().events if e.kind == COMPUTE]
    fqns = [unit.fqn for unit in plan.units]
    counted = saved.through(events, fqns)
    found: dict[Window, int] = {}
    for event, held in zip(events, counted, strict=True):
        window = _window(event, fqns[event.unit])
        found[window] = largest.get(window, held.saved) - held.saved
    return found


def _window(event: Event, fqn: str) -> Window:
    """Return the window of a computation of unit ``fqn``."""
    return Window(event.phase, fqn, event.is_entry)


def _shapes(inputs: Sequence[Any] | Mapping[str, Any]) -> str:
    """Return the shapes of all tensors in ``inputs`` as text."""
    # A scalar has an empty shape.
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    return ", ".join("x".join(map(str, tensor.shape)) or "1" for tensor in tensors)
