"""What a step holds beside the plan's buffers, by unit, measured on fake tensors.

A storage may be allocated before its kind is known, so changes refer to blocks, and
blocks are named later. Memory that a kernel allocates and frees itself is not seen.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
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
    is_wrapper,
    needing_gradients,
    replaced,
    tensors_of,
)
from composable_fsdp.tools.machine import ATTENTION, FUSED, MEMORY, PRODUCT, Cost
from composable_fsdp.tools.memory import Activations
from composable_fsdp.tools.sharding_plan import ShardingPlan
from composable_fsdp.tools.step_memory import Event, parents_of
from composable_fsdp.tree.traversal import require_module

LIVE, HELD, GRADIENTS = "live", "held", "gradients"
"""Kinds of a block: tensors of the step; parameters and buffers; their gradients."""

_FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::detach",
    "aten::_local",
    "prim::",
    "profiler::",
    "_c10d_functional::",
)
"""Beginnings of the names of operations that take no time on the device; collectives
take the time of a link."""


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with memory that a wrapper holds; other tensors themselves."""
    if not is_wrapper(type(tensor)):
        return [tensor]
    # The protocol by which torch takes wrappers apart. A DTensor names its mesh, too.
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # of wrappers
    found = [getattr(tensor, name) for name in names]
    return [p for each in found if isinstance(each, Tensor) for p in parts_of(each)]


def _cost_of(func: Any, args: Any, kwargs: Any, result: Any, nbytes: int) -> Cost:
    """Return what an operation computes and moves; causal attention is half of it."""
    # Counts products, convolutions and attention; loads what training does not need.
    from torch.utils import flop_counter

    name: str = func._schema.name
    kind = ATTENTION if "attention" in name else PRODUCT
    count = flop_counter.flop_registry.get(func._overloadpacket)
    if count is not None:
        operations = float(count(*args, **kwargs, out_val=result))
    # The kernels of CPUs have no counts.
    elif "flash_attention_for_cpu" in name:
        back = name.endswith("backward")
        forms: Any = flop_counter.sdpa_flop_count, flop_counter.sdpa_backward_flop_count
        operations = forms[back](*(tensor.shape for tensor in args[: 3 + back]))
    else:
        return Cost(MEMORY, 0.0, nbytes)
    named = zip([each.name for each in func._schema.arguments], args, strict=False)
    causal = {**dict(named), **kwargs}.get("is_causal", False)
    return Cost(kind, operations / (2 if causal else 1), nbytes)


@dataclass(eq=False)
class Block:
    """A storage."""

    kind: str
    nbytes: int = 0
    link: Callable[[], object] = lambda: None


class Change(NamedTuple):
    """A block has ``more`` bytes than before, at a place of the step."""

    block: Block
    more: int
    at: Any


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Follows the storages of all operations in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change] = []
        self.blocks: dict[int, Block] = {}

    @abstractmethod
    def new_kind(self) -> str:
        """Return the kind of a block that is met first now."""

    @abstractmethod
    def here(self) -> Any:
        """Return the place of the step, for a change."""

    @abstractmethod
    def ran(self, cost: Cost, read: list[Tensor], written: list[Tensor]) -> None:
        """Take note of an operation with a cost."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and follow the storages that it meets."""
        # A wrapper, such as a DTensor, runs operations on what it wraps: those are met.
        if any(map(is_wrapper, types)):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, written = (
            [each for each in tensors_of(values) if not is_wrapper(type(each))]
            for values in ((args, kwargs), result)
        )
        nbytes = sum(t.nbytes for t in (*read, *written))
        # Views move nothing, and allocations write nothing.
        if nbytes and not (func.is_view or func._schema.name.startswith(_FREE)):
            self.ran(_cost_of(func, args, kwargs, result, nbytes), read, written)
        # A tensor on meta has no memory on any device.
        for tensor in (*read, *written):
            if tensor.device.type != "meta":
                self.meet(tensor)
        return result

    def meet(self, tensor: Tensor) -> Block:
        """Return the block of a tensor, with the storage's size of now."""
        storage = tensor.untyped_storage()
        # An address may be used again by a later storage; the link tells.
        key = storage._cdata
        block = self.blocks.get(key)
        if block is None or block.link() is None:
            block = self.blocks[key] = Block(self.new_kind())
            block.link = weakref.ref(storage, partial(self._forget, key, block))
        self._change(block, storage.nbytes())
        return block

    def _forget(self, key: int, block: Block, gone: object) -> None:
        """Note that a storage is freed."""
        self._change(block, 0)
        # A later storage may be at the same address already.
        if self.blocks.get(key) is block:
            del self.blocks[key]

    def _change(self, block: Block, nbytes: int) -> None:
        """Note the size of a block, if it has changed."""
        more = nbytes - block.nbytes
        if more:
            block.nbytes = nbytes
            self.changes.append(Change(block, more, self.here()))

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Say of which kind the storages of ``tensors`` are, also in hindsight."""
        for tensor in tensors:
            for part in () if tensor is None else parts_of(tensor):
                self.meet(part).kind = kind

    def __enter__(self) -> StorageLog:
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = plain(storage, nbytes)
            # A storage that no operation has met is none of the step.
            block = self.blocks.get(storage._cdata)
            if block is not None:
                self._change(block, nbytes)
            return result

        # A resize is no operation of torch's dispatcher.
        self._resizes = replaced(torch.UntypedStorage, "resize_", resize_)
        self._resizes.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._resizes.__exit__(*exc)


def measure_activations(
    module: nn.Module,
    plan: ShardingPlan,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    checkpointing: bool = False,
) -> Activations:
    """Return the memory of a step of ``module`` beside the buffers of ``plan``.

    Forward, loss and backward run on fake tensors: ``module`` may be on meta, and does
    not change. Memory that a kernel allocates and frees itself is not counted, nor are
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
        for unit in plan.units:
            if unit.fqn:
                log.watch(unit.fqn, module.get_submodule(unit.fqn), stack)
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
    for unit, parent in zip(plan.units, parents_of(plan.units), strict=True):
        # The root would repeat the whole forward.
        if parent != 0:
            continue
        each = module.get_submodule(unit.fqn)
        each.forward = partial(
            checkpoint, each.forward, use_reentrant=False, preserve_rng_state=False
        )
        stack.callback(delattr, each, "forward")


class OpLog(StorageLog):  # type: ignore[no-untyped-call]  # torch has no types
    """Counts the bytes of a step by the unit that computes."""

    def __init__(self) -> None:
        super().__init__()
        # The units in the order in which their forwards began.
        self.begun = {"": None}
        # The stretch of the step that runs, and the operations of each stretch.
        self.window = Event("forward", "")
        self.work: defaultdict[Any, Counter[Cost]] = defaultdict(Counter)
        self._running = [""]
        # Units in whose forward a nested unit has run.
        self._entered: set[str] = set()
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

    def watch(self, fqn: str, module: nn.Module, stack: ExitStack) -> None:
        """Follow the forwards of a unit in a block."""
        begin, end = partial(self._begin, fqn), partial(self._end, fqn)
        for handle in (
            module.register_forward_pre_hook(begin, with_kwargs=True),
            # Also after an exception, so that the stack of units stays right.
            module.register_forward_hook(end, always_call=True),
        ):
            stack.callback(handle.remove)

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
        """Return the bytes of each window, without its parameters' gradients."""
        # The plan counts a unit's gradients as present through the unit's backward, so
        # the most is what is missing beside them, at the window's maximum.
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
