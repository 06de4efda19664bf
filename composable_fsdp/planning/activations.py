"""Measures what a forward saves for backward, per unit, on fake tensors.

The forward computes shapes and no values, so a batch of any size takes no memory::

    module, inputs --forward on fake tensors--> bytes saved, per unit --> Activations
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.memory import Event
from composable_fsdp.planning.plan import ShardingPlan

FAKE_LOG = "torch._subclasses.fake_tensor"
"""The logger of torch's fake tensors."""


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


@dataclass(frozen=True)
class Activations:
    """Tensors that a forward saves for backward.

    Args:
        units: the bytes of each unit, by the unit's name.
        batch: the inputs as text, for a reader.
        checkpointed: whether each unit directly below the root runs under activation
            checkpointing, which keeps the unit's inputs and repeats its forward in
            backward. Default False.
        measure: measures the same forward for a plan with other dtypes. Default None:
            the bytes are taken for those of every dtype.
    """

    units: Mapping[str, UnitActivations]
    batch: str
    checkpointed: bool = False
    measure: Callable[[ShardingPlan], Activations] | None = field(
        default=None, repr=False, compare=False
    )

    def with_checkpointing(self) -> Activations:
        """Return the activations with checkpointing of each unit below the root."""
        return replace(self, checkpointed=True)

    def measured_for(self, plan: ShardingPlan) -> Activations:
        """Return the activations of the same forward in the dtypes of ``plan``."""
        if self.measure is None:
            return self
        return replace(self.measure(plan), checkpointed=self.checkpointed)

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
    batch: str | None = None,
) -> Activations:
    """Return what a forward of ``module`` saves for backward, per unit of ``plan``.

    The forward runs on fake tensors: ``module`` may be on meta, no value is computed,
    and no parameter changes. Parameters have the compute dtype of their unit. Memory
    inside an operation, and gradients of activations, are not counted.

    Args:
        module: the module that was planned; not sharded.
        plan: the plan of ``module``.
        inputs: positional or keyword arguments of the forward; tensors may be on meta.
        batch: the inputs as text. Default None: the shapes of the tensors.

    Returns: the activations.
    Raises: PlanError, if the forward fails on fake tensors.
    Collective: none.

    >>> from composable_fsdp import plan
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> planned = plan(model, world_size=2)
    >>> measure_activations(model, planned, [torch.zeros(4, 8)]).units[""].before
    256
    """
    # Copies, because an iterator would be exhausted by the text of the shapes.
    given = dict(inputs) if isinstance(inputs, Mapping) else list(inputs)
    count = _Count({unit.fqn for unit in plan.units})
    try:
        # torch logs a traceback of each operation that fails; the error below has it.
        with muted(FAKE_LOG), FakeTensorMode(allow_non_fake_inputs=True):
            # The module keeps its own parameters; the forward sees the stand-ins.
            tensors = _stand_ins(module, plan)
            count.ignored = {_key(tensor) for tensor in tensors.values()}
            given = pytree.tree_map_only(Tensor, _Inputs(plan), given)
            with count.watch(module), saved_tensors_hooks(count.pack, lambda x: x):
                args, kwargs = (
                    ((), given) if isinstance(given, dict) else (tuple(given), {})
                )
                torch.func.functional_call(module, tensors, args, kwargs)
    # The forward is the user's code and may raise anything.
    except Exception as error:
        raise PlanError(
            "The activations could not be measured, because the forward of this "
            f"{type(module).__name__} fails on fake tensors: {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '').rstrip('.')}. Check the inputs "
            "and the dtypes; leave the batch out to plan without activations."
        ) from error
    words = batch or _shapes(inputs)
    again = partial(measure_activations, module, inputs=inputs, batch=words)
    return Activations(count.found(), words, measure=lambda other: again(plan=other))


@contextmanager
def muted(name: str) -> Iterator[None]:
    """Turn the logger ``name`` off in this block."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _shapes(inputs: Sequence[Any] | Mapping[str, Any]) -> str:
    """Return the shapes of all tensors in ``inputs`` as text."""
    # A scalar has an empty shape.
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    return ", ".join("x".join(map(str, tensor.shape)) or "1" for tensor in tensors)


def _key(tensor: Tensor) -> int:
    """Return what identifies the storage of ``tensor`` while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


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
    low = mixed and mixed.buffer_dtype
    known: dict[int, Tensor] = {}
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
            # Tied parameters share a stand-in.
            if id(value) not in known:
                known[id(value)] = torch.empty(
                    value.shape,
                    dtype=dtype,
                    device="cpu",
                    requires_grad=value.requires_grad,
                )
            found[fqn] = known[id(value)]
    return found


class _Inputs:
    """Makes fake tensors of the inputs, as the root casts them."""

    def __init__(self, plan: ShardingPlan) -> None:
        mixed = plan.units[0].options.mixed_precision
        casts = mixed is not None and mixed.cast_root_forward_inputs
        # FSDP1's default casts the inputs of the root alone.
        self._dtype = mixed.param_dtype if mixed is not None and casts else None

    def __call__(self, value: Tensor) -> Tensor:
        """Return a fake tensor for ``value``."""
        dtype = value.dtype
        if self._dtype is not None and dtype.is_floating_point:
            dtype = self._dtype
        return torch.empty(value.shape, dtype=dtype, device="cpu")


class _Count:
    """Counts the storages that autograd saves, by the innermost unit that runs."""

    def __init__(self, fqns: set[str]) -> None:
        self.ignored: set[int] = set()
        self._fqns = fqns
        self._running = [""]
        # Storages that are counted already.
        self._seen: set[int] = set()
        # [before, after, inputs] per unit.
        self._bytes = {fqn: [0, 0, 0] for fqn in fqns | {""}}
        self._outer = {"": ""}
        # Units in whose forward a nested unit has run.
        self._entered: set[str] = set()

    def pack(self, tensor: Tensor) -> Tensor:
        """Count the storage of ``tensor``, once in all; parameters do not count."""
        key = _key(tensor)
        # Parameters are in the plan; a storage that two operations save exists once.
        if key not in self.ignored and key not in self._seen:
            self._seen.add(key)
            unit = self._running[-1]
            size = tensor.untyped_storage().nbytes()
            self._bytes[unit][unit in self._entered] += size
        # The graph holds the tensor, so no later storage gets the same key.
        return tensor

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Follow the forwards of the units of ``module`` in this block."""
        handles = []
        for fqn, each in walk.named(module):
            if fqn and fqn in self._fqns:
                # Also after an exception, so that the stack of units stays right.
                handles += [
                    each.register_forward_pre_hook(self._begin(fqn), with_kwargs=True),
                    each.register_forward_hook(self._end, always_call=True),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, fqn: str) -> Callable[..., None]:
        """Return a hook that begins the forward of unit ``fqn``."""

        def begin(module: nn.Module, *inputs: Any) -> None:
            # What the enclosing unit saves from here on, it saves after a nested unit.
            self._entered.add(self._running[-1])
            self._outer.setdefault(fqn, self._outer[self._running[-1]] or fqn)
            self._running.append(fqn)
            # Inputs that need no gradient, as masks, are shared by all units.
            self._bytes[fqn][2] += sum(
                tensor.untyped_storage().nbytes()
                for tensor in pytree.tree_leaves(inputs)
                if isinstance(tensor, Tensor) and tensor.requires_grad
            )

        return begin

    # Hooks of forward take these three arguments.
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward of the unit that runs."""
        self._running.pop()

    def found(self) -> dict[str, UnitActivations]:
        """Return the counts of all units."""
        return {
            fqn: UnitActivations(before, after, inputs, self._outer.get(fqn, fqn))
            for fqn, (before, after, inputs) in self._bytes.items()
        }
