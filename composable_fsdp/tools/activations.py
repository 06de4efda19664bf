"""Measures what a step holds beside the plan's buffers, by unit, on fake tensors.

A ``Window`` is a stretch of the step in which one unit computes. The stretches have the
places of the plan's events, so their bytes are added to those of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.tools.fake_world import (
    default_loss,
    fake_like,
    fake_tensors,
    needing_gradients,
)
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.simulated_world import tensors_of
from composable_fsdp.tools.step_memory import COMPUTE, Event
from composable_fsdp.tools.storages import Block, Change, StorageLog

LIVE, HELD, GRADIENTS = "live", "held", "gradients"
"""Kinds of a block: tensors of the step; parameters and buffers; their gradients."""


class Window(NamedTuple):
    """A stretch of a step, with the names that ``step_memory.Event`` has.

    Args:
        phase: "forward" or "backward".
        unit: name of the unit that computes.
        is_entry: of a unit with nested units: forward before them, or backward after
            them. True for a unit without nested units.
    """

    phase: str
    unit: str
    is_entry: bool


class Held(NamedTuple):
    """Bytes at an event: kept for backward, and beside these while the event runs."""

    saved: int
    beside: int


class _Bytes(NamedTuple):
    """Bytes at the start of a window, the most in the window, and at its end."""

    start: int
    most: int
    end: int


@dataclass(frozen=True)
class Activations:
    """Tensors of a step beside parameters, their gradients and the optimizer.

    Args:
        batch: the inputs as text, for a reader.
        windows: bytes per ``Window``: at its start, the most, and at its end.
        order: names of the units in the order in which their forwards began.
        checkpointed: whether each unit directly below the root runs under activation
            checkpointing.
        measure: measures the same step for another plan, or with checkpointing.
    """

    batch: str
    windows: Mapping[Window, tuple[int, int, int]] = field(repr=False)
    order: tuple[str, ...] = field(repr=False)
    checkpointed: bool
    measure: Callable[..., Activations] = field(repr=False, compare=False)

    def with_checkpointing(self) -> Activations:
        """Measure again, with checkpointing of each unit directly below the root."""
        return self.measure(checkpointing=True)

    def through(self, events: Iterable[Event], fqns: Sequence[str]) -> list[Held]:
        """Return the bytes at each event; ``fqns`` names the units of the plan."""
        found, level = [], 0
        for event in events:
            window = Window(event.phase, fqns[event.unit], event.is_entry)
            held = Held(level, 0)
            if event.kind == COMPUTE and window in self.windows:
                start, most, level = self.windows[window]
                # What forward allocates is kept, and backward frees what was kept.
                kept = level if window.phase == "forward" else start
                # Backward frees it while gradients of parameters come.
                held = Held(min(kept, most), max(0, most - kept))
            found.append(held)
        return found


def measure_activations(
    module: nn.Module,
    plan: ShardingPlan,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    batch: str | None = None,
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
        batch: the inputs as text. Default None: the shapes of the tensors.
        checkpointing: whether each unit directly below the root runs under activation
            checkpointing. Default False.

    Returns: the activations, for ``forecast``.
    Raises: PlanError, if the step fails on fake tensors.

    >>> from composable_fsdp import forecast, plan
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> planned = plan(model, world_size=2)
    >>> found = measure_activations(model, planned, [torch.zeros(4, 8)])
    >>> max(m.memory.activations for m in forecast(planned, activations=found).moments)
    256
    """
    # Copies, because an iterator would be exhausted by the text of the shapes.
    given = dict(inputs) if isinstance(inputs, Mapping) else list(inputs)
    text = batch or ", ".join(
        # A scalar has an empty shape.
        "x".join(map(str, tensor.shape)) or "1"
        for tensor in tensors_of(given)
    )
    log = StepLog({unit.fqn for unit in plan.units})
    try:
        with fake_tensors(makes_dtensors=False), log:
            # The module keeps its own parameters; the step sees the stand-ins.
            tensors = _stand_ins(module, plan)
            log.hold(tensors)
            args, kwargs = _fake_inputs(given, plan)
            step = _Step(module, loss, log)
            # The names of the module's parameters, inside the step.
            named = {f"module.{name}": each for name, each in tensors.items()}
            with log.watch(module), _checkpointed(module, plan, wanted=checkpointing):
                torch.func.functional_call(step, named, args, kwargs, tie_weights=False)
    # The step is the user's code and may raise anything.
    except Exception as error:
        raise PlanError(
            "The activations could not be measured, because the "
            f"{log.window.phase} of this {type(module).__name__} fails on fake "
            f"tensors, which have shapes and no values: {first_line(error)}. Check the "
            "inputs, the loss and the dtypes; leave the batch out to plan without "
            "activations."
        ) from error
    # The log enters units as their forwards begin. Models need not run their modules in
    # the order of ``.modules()``: CLIP registers the text model first and runs the
    # vision model first.
    return Activations(
        text,
        log.measured(),
        tuple(log.begun),
        checkpointing,
        partial(
            measure_activations,
            module,
            plan=plan,
            inputs=given,
            loss=loss,
            batch=text,
            checkpointing=checkpointing,
        ),
    )


def first_line(error: Exception) -> str:
    """Return the class and the first line of an error, without its full stop."""
    text = next(iter(str(error).splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {text}"


def _stand_ins(module: nn.Module, plan: ShardingPlan) -> dict[str, Tensor]:
    """Return fake tensors for all parameters and buffers of ``module``, by name."""
    compute = {
        join_name(unit.fqn, fqn): unit.options.dtypes(region.dtype).compute
        for unit in plan.units
        for region in unit.regions
        for slot in region.parameters
        for fqn in slot.fqns
    }
    mixed = plan.units[0].options.mixed_precision
    known: dict[tuple[int, str], Tensor] = {}
    found: dict[str, Tensor] = {}
    for prefix, each in walk.named(module, every_path=True):
        for name, value in [*each._parameters.items(), *each._buffers.items()]:
            if value is None:
                continue
            fqn = join_name(prefix, name)
            # Parameters that no unit holds keep their dtype.
            dtype = compute.get(fqn, value.dtype)
            if name in each._buffers and mixed and value.is_floating_point():
                dtype = mixed.buffer_dtype or dtype
            # A shared module has several paths. A parameter that is tied to another has
            # a stand-in of its own: autograd would keep the first of its gradients to
            # itself, and the plan counts that gradient.
            key = (id(each), name)
            if key not in known:
                # Sizes of a rank's part of a DTensor; the whole is on no rank.
                made = _like_dtensor(fake_like(local_of(value), dtype), value)
                known[key] = made.requires_grad_(value.requires_grad)
            found[fqn] = known[key]
    return found


def _like_dtensor(local: Tensor, tensor: Tensor) -> Tensor:
    """Return a DTensor placed as ``tensor``, of ``local``; ``local`` if it is none."""
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    dtensor: Any = tensor
    made: Tensor = DTensor.from_local(
        local,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )
    return made


def _fake_inputs(given: Any, plan: ShardingPlan) -> tuple[Any, Any]:
    """Return the arguments with fake tensors, as the root casts them."""
    mixed = plan.units[0].options.mixed_precision
    # FSDP1's default casts the inputs of the root alone.
    low = mixed.param_dtype if mixed and mixed.cast_root_forward_inputs else None
    made = pytree.tree_map_only(
        Tensor, lambda t: fake_like(t, low if t.is_floating_point() else None), given
    )
    return ((), made) if isinstance(made, dict) else (tuple(made), {})


@contextmanager
def _checkpointed(
    module: nn.Module, plan: ShardingPlan, *, wanted: bool
) -> Iterator[None]:
    """Let each unit directly below the root repeat its forward in backward."""
    outer: list[str] = []
    for unit in plan.units if wanted else ():
        # The root would repeat the whole forward.
        if unit.fqn and not any(unit.fqn.startswith(f"{name}.") for name in outer):
            outer.append(unit.fqn)
    modules = [module.get_submodule(name) for name in outer]
    for each in modules:
        each.forward = partial(
            checkpoint, each.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for each in modules:
            del each.forward


class _Step(nn.Module):
    """A module whose forward is a step of ``module``: forward, loss and backward.

    ``torch.func.functional_call`` gives parameters to a forward, and a checkpointed
    part repeats its forward in backward, with the same parameters.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[[Any], Tensor] | None, log: StepLog
    ) -> None:
        super().__init__()
        self.module, self._loss, self._log = module, loss, log

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Run the step; without anything to train, only the forward."""
        output = self.module(*args, **kwargs)
        self._log.begin_backward()
        if self._loss is None and not needing_gradients(output):
            return
        loss = (self._loss or default_loss)(output)
        # The output stays alive in the caller of a training step, as here.
        loss.backward()  # type: ignore[no-untyped-call]


class StepLog(StorageLog):  # type: ignore[no-untyped-call]  # torch has no types
    """Counts the bytes of a step by the unit that computes, of units named ``fqns``."""

    def __init__(self, fqns: set[str]) -> None:
        super().__init__()
        self._fqns = fqns
        self.begun = {"": None}
        """The units in the order in which their forwards began."""
        self.window = Window("forward", "", is_entry=True)
        """The stretch of the step that runs."""
        self._running = [""]
        # Units in whose forward a nested unit has run.
        self._entered: set[str] = set()
        # Nested units whose backward is not over, by the unit around them.
        self._pending: dict[str, int] = {}

    def new_kind(self) -> str:
        return LIVE

    def here(self) -> Window:
        return self.window

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Leave parameters and buffers out; tell their gradients from the rest."""
        self.mark(tensors.values(), HELD)

        def note(leaf: Tensor) -> None:
            self.mark([leaf.grad], GRADIENTS)

        # The parameters of a shared module have several names.
        for tensor in {id(t): t for t in tensors.values()}.values():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Follow the forwards of the units of ``module`` in this block."""
        handles = []
        for fqn, each in walk.named(module):
            if fqn and fqn in self._fqns:
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
        self.window = Window("forward", fqn, is_entry=True)

    def _end(self, fqn: str, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward of unit ``fqn``."""
        self._running.pop()
        if self.window.phase == "backward":
            return
        # A unit with nested units computes first in backward where they come last.
        window = Window("backward", fqn, is_entry=fqn not in self._entered)

        def begin_backward(gradient: Tensor) -> None:
            self.window = window

        for tensor in needing_gradients(output):
            tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]
        self.window = Window("forward", self._running[-1], is_entry=False)

    def begin_backward(self) -> None:
        """Begin with the loss, which counts to the root's backward."""
        self.window = Window("backward", "", is_entry="" not in self._entered)

    def _end_backward(self, above: str) -> None:
        """End the backward of a unit inside unit ``above``."""
        # Between two nested units, the one that has ended stands for what follows.
        self._pending[above] -= 1
        # What the unit around them computes first in forward, it computes last here.
        if not self._pending[above]:
            self.window = Window("backward", above, is_entry=True)

    def measured(self) -> dict[Window, _Bytes]:
        """Return the bytes of each window, without its parameters' gradients.

        The plan counts a unit's gradients as present through the unit's backward, so
        the most is what is missing beside them, at the window's maximum.
        """
        found: dict[Window, _Bytes] = {}
        live = start = most = gradients = 0
        window: Any = self.changes[0].at if self.changes else None
        # An end that belongs to no window closes the last one.
        for block, more, at in [*self.changes, Change(Block(HELD), 0, None)]:
            if at != window:
                # A unit that runs twice has two stretches with the same name.
                known = found.get(window, _Bytes(start, 0, 0))
                found[window] = _Bytes(
                    max(known.start, start), max(known.most, most - gradients), live
                )
                window, start, most, gradients = at, live, live, 0
            if block.kind == GRADIENTS:
                gradients += more
            elif block.kind == LIVE:
                live += more
            most = max(most, live + gradients)
        return found
