"""A step of a model that is not sharded, on fake tensors, and the memory it needs.

::

    module --stand-ins of parameters--> forward, loss, backward, all on fake tensors
                                         |  StepLog follows every storage
                                         '-> saved by unit, largest sum by Window

A ``Window`` is a stretch of the step in which one unit computes. The stretches have the
places of the plan's events, so their bytes are added to those of the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.tools.fake_values import FakeValues
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.storages import Block, StorageMode, parts_of

FAKE_LOG = "torch._subclasses.fake_tensor"
"""The logger of torch's fake tensors."""


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


@contextmanager
def muted(name: str) -> Iterator[None]:
    """Turn the logger ``name`` off in this block."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def default_loss(output: Any) -> Tensor:
    """Return the output's loss, or the sum of its tensors of real numbers.

    Raises: PlanError, if no tensor of the output needs gradients.
    """
    # Outputs of transformers are mappings and have attributes.
    found = output.get("loss") if isinstance(output, Mapping) else None
    found = getattr(output, "loss", found)
    # A model with labels, for example of transformers, computes its loss itself.
    if isinstance(found, Tensor):
        return found
    # Every output that needs gradients takes part, so backward is complete.
    sums = [each.sum() for each in needing_gradients(output)]
    if not sums:
        raise PlanError(
            "The output of the model has no tensor that needs gradients, so there is "
            "no loss. Pass loss=, a function from the output to the loss."
        )
    return torch.stack([each.float() for each in sums]).sum() if sums[1:] else sums[0]


def needing_gradients(values: Any) -> list[Tensor]:
    """Return the tensors in ``values`` that need gradients."""
    leaves = pytree.tree_leaves(values)
    return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]


def stand_ins(
    module: nn.Module, plan: ShardingPlan, values: FakeValues
) -> dict[str, Tensor]:
    """Return fake tensors for all parameters and buffers of ``module``, by name."""
    compute = {
        join_name(unit.fqn, fqn): unit.options.dtypes(region.dtype).compute
        for unit in plan.units
        for region in unit.regions
        for slot in region.parameters
        for fqn in slot.fqns
    }
    mixed = plan.units[0].options.mixed_precision
    low = mixed and mixed.buffer_dtype
    known: dict[tuple[int, str], Tensor] = {}
    found: dict[str, Tensor] = {}
    for prefix, each in walk.named(module, every_path=True):
        for name, value in [*each._parameters.items(), *each._buffers.items()]:
            if value is None:
                continue
            fqn = join_name(prefix, name)
            # Parameters that no unit holds keep their dtype.
            dtype = compute.get(fqn, value.dtype)
            if name in each._buffers and low and value.is_floating_point():
                dtype = low
            # A shared module has several paths. A parameter that is tied to another has
            # a stand-in of its own: autograd would keep the first of its gradients to
            # itself, and the plan counts that gradient.
            key = (id(each), name)
            if key not in known:
                # Sizes of a rank's part of a DTensor; the whole is on no rank.
                made = _like_dtensor(values.like(local_of(value), dtype), value)
                known[key] = made.requires_grad_(value.requires_grad)
            found[fqn] = known[key]
    return found


def fake_inputs(given: Any, plan: ShardingPlan, values: FakeValues) -> Any:
    """Return fake tensors in the place of the inputs, as the root casts them."""
    mixed = plan.units[0].options.mixed_precision
    casts = mixed is not None and mixed.cast_root_forward_inputs
    # FSDP1's default casts the inputs of the root alone.
    low = mixed.param_dtype if mixed is not None and casts else None

    def fake(value: Tensor) -> Tensor:
        return values.like(value, low if value.is_floating_point() else None)

    return pytree.tree_map_only(Tensor, fake, given)


class Step(nn.Module):
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


class StepLog(StorageMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Counts bytes that a step saves and allocates, by the unit that computes.

    Args:
        fqns: names of the units.
    """

    def __init__(self, fqns: set[str]) -> None:
        super().__init__()
        self._fqns = fqns
        self.saved = {fqn: [0, 0, 0] for fqn in fqns | {""}}
        """Bytes per unit: before, after and inputs, as in ``UnitActivations``."""
        self.outer = {"": ""}
        """The outermost unit around each unit, by name."""
        self.window = Window("forward", "", is_entry=True)
        """The stretch of the step that runs."""
        self._running = [""]
        # Units in whose forward a nested unit has run.
        self._entered: set[str] = set()
        # Storages that are counted as saved already.
        self._packed: set[int] = set()
        # Nested units whose backward is not over, by the unit around them.
        self._pending: dict[str, int] = {}
        self._changes: list[tuple[Block, int, Window]] = []

    def _new_kind(self) -> str:
        return LIVE

    def _note(self, block: Block, more: int) -> None:
        self._changes.append((block, more, self.window))

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Leave parameters and buffers out; tell their gradients from the rest."""
        self.mark(tensors.values(), HELD)
        # The parameters of a shared module have several names.
        for tensor in {id(t): t for t in tensors.values()}.values():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def _note_gradient(self, leaf: Tensor) -> None:
        """Count the gradient of a parameter as such."""
        self.mark([leaf.grad], GRADIENTS)

    def pack(self, tensor: Tensor) -> Tensor:
        """Count the storage of a saved tensor, once in all; parameters do not count."""
        for part in parts_of(tensor):
            block = self._meet(part)
            # A repeated forward saves for a short time, which the windows see.
            if (
                self.window.phase == "forward"
                and block.kind == LIVE
                and id(block) not in self._packed
            ):
                # The graph holds the tensor, so no later block gets the same id.
                self._packed.add(id(block))
                unit = self._running[-1]
                self.saved[unit][unit in self._entered] += block.nbytes
        return tensor

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Follow the forwards of the units of ``module`` in this block."""
        handles = []
        for fqn, each in walk.named(module):
            if fqn and fqn in self._fqns:
                # Also after an exception, so that the stack of units stays right.
                handles += [
                    each.register_forward_pre_hook(
                        partial(self._begin, fqn), with_kwargs=True
                    ),
                    each.register_forward_hook(
                        partial(self._end, fqn), always_call=True
                    ),
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
        # What the enclosing unit saves from here on, it saves after a nested unit.
        self._entered.add(above)
        self.outer.setdefault(fqn, self.outer[above] or fqn)
        # Inputs that need no gradient, as masks, are shared by all units.
        inputs = needing_gradients((args, kwargs))
        parts = [part for each in inputs for part in parts_of(each)]
        self.saved[fqn][2] += sum(t.untyped_storage().nbytes() for t in parts)
        self._pending[above] = self._pending.get(above, 0) + 1
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
        for tensor in needing_gradients(output):
            tensor.register_hook(partial(self._begin_backward, window))  # type: ignore[no-untyped-call]
        self.window = Window("forward", self._running[-1], is_entry=False)

    def begin_backward(self) -> None:
        """Begin with the loss, which counts to the root's backward."""
        self.window = Window("backward", "", is_entry="" not in self._entered)

    def _begin_backward(self, window: Window, gradient: Tensor) -> None:
        """Begin the backward of a unit: the gradient of an output has arrived."""
        self.window = window

    def _end_backward(self, above: str) -> None:
        """End the backward of a unit inside unit ``above``."""
        # Between two nested units, the one that has ended stands for what follows.
        self._pending[above] -= 1
        # What the unit around them computes first in forward, it computes last here.
        if not self._pending[above]:
            self.window = Window("backward", above, is_entry=True)

    def largest(self) -> dict[Window, int]:
        """Return the most bytes of each window, without its parameters' gradients.

        The plan counts a unit's gradients as present through the unit's backward, so
        the bytes here are those that are missing beside them, at the window's maximum.
        """
        found: dict[Window, int] = {}
        live = most = gradients = 0
        window = None
        # An end that belongs to no window closes the last one.
        for block, more, at in [*self._changes, (Block(HELD), 0, None)]:
            # A unit that runs twice has two stretches with the same name.
            if at != window:
                if window is not None:
                    found[window] = max(found.get(window, 0), most - gradients)
                window, most, gradients = at, live, 0
            if block.kind == GRADIENTS:
                gradients += more
            elif block.kind == LIVE:
                live += more
            most = max(most, live + gradients)
        return found


LIVE, HELD, GRADIENTS = "live", "held", "gradients"
"""Kinds of a block: tensors of the step; parameters and buffers; their gradients."""


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
