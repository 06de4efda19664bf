"""Hooks before and after every optimizer step: check that the step is valid.

After the first steps of an optimizer, a step pays for three look-ups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_fsdp.errors import CheckpointError, warn
from composable_fsdp.flat import residency
from composable_fsdp.flat.gradients import are_cleared, has_arrived
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle, find_leaf
from composable_fsdp.flat.param_ref import times_replaced
from composable_fsdp.flat.residency import is_counting_steps
from composable_fsdp.naming import listed
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import (
    handles_of,
    parameters_of,
    prepare_flats,
    require_agreement,
    require_current,
    require_elementwise,
    require_no_flat_originals,
    require_outside_unshard_params,
    steps_on_full_params,
)
from composable_fsdp.phases import BACKWARD_PRE

_LOOKED_AT = 2
"""Steps that are checked in full: the second sees the state that the first created."""


FIRST_STEPS: list[Callable[[Optimizer], None]] = []
"""Called before the first steps, once checked."""


class _KnownOptimizer:
    """Facts about an optimizer, valid while ``at`` is unchanged."""

    __slots__ = ("at", "handles", "has_empty", "held", "looks", "uncounted")

    def __init__(self, at: object, optim: Optimizer) -> None:
        self.at = at
        """Counts of ``fully_shard`` calls and replaced parameters; groups' lists."""
        # Weak, so that a deleted model is free.
        self.handles = tuple([weakref.ref(handle) for handle in handles_of(optim)])
        parameters = parameters_of(optim)
        self.held = frozenset(map(id, parameters))
        self.has_empty = any(not p.numel() and find_leaf(p) for p in parameters)
        """Whether elements, and steps, of some of these are all on other ranks."""
        # Fused kernels do not move version counters, on any rank, and a foreign
        # optimizer may have such. A version that moves twice does no harm.
        is_torchs = type(optim).__module__.startswith("torch.optim")
        self.uncounted = not is_torchs or any(
            g.get("fused") for g in optim.param_groups
        )
        """Whether the step may write without moving version counters."""
        self.looks = 0

    def units(self) -> list[FlatParamHandle]:
        """Return the units of models that still exist."""
        return [handle for link in self.handles if (handle := link()) is not None]


_known: weakref.WeakKeyDictionary[Optimizer, _KnownOptimizer] = (
    weakref.WeakKeyDictionary()
)
_applications = 0
_any_counts = False
"""Whether steps of some optimizer do not move all version counters by themselves."""


def install_step_hooks() -> None:
    """Register the global step hooks and have every optimizer checked again."""
    global _applications
    # Optimizers that have stepped are checked again: their parameters may just have
    # been sharded.
    if not _applications:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(after_step)
    _applications += 1


def _before_step(optim: Optimizer, args: Any, kwargs: Any) -> None:
    """Check ``optim`` before its step; the global pre-hook."""
    global _any_counts
    if torch.compiler.is_compiling():
        return
    prepare_flats(optim)
    require_outside_unshard_params(optim)
    # Not all parameters: this line runs in every step.
    lists = [group["params"] for group in optim.param_groups]
    at = (_applications, times_replaced(), [(id(each), len(each)) for each in lists])
    refused = None
    met = _known.get(optim)
    if met is None or met.at != at:
        if steps_on_full_params(optim):
            # Not remembered, so that each of its steps is checked.
            return
        # First, so that state that was loaded earlier is cut into parts.
        try:
            install_optimizer_hooks(optim)
        except CheckpointError as error:
            # All ranks raise below: one that holds nothing of it has seen nothing.
            refused = str(error.args[0])
        met = _KnownOptimizer(at, optim)
        _any_counts = _any_counts or met.uncounted or met.has_empty
    elif met.looks == _LOOKED_AT:
        return
    require_elementwise(optim)
    require_no_flat_originals(optim)
    require_agreement(optim, refused, is_first=not met.looks)
    if not met.looks:
        require_current(optim)
        _warn_of_unreduced(optim, met)
    for look in FIRST_STEPS:
        look(optim)
    met.looks += 1
    _known[optim] = met


def after_step(optim: Optimizer, *_: object) -> None:
    """Count the step for units that are kept unsharded; the global post-hook."""
    # Count after the step: a closure inside ``step`` may run the backward after which
    # units are kept unsharded.
    if (is_counting_steps() or _any_counts) and not torch.compiler.is_compiling():
        met = _known.get(optim)
        if met is None:
            return
        if is_counting_steps():
            _count_step(met)
        if met.uncounted or met.has_empty:
            _count_writes(met)


def _warn_of_unreduced(optim: Optimizer, met: _KnownOptimizer) -> None:
    """Warn of units whose gradients wait for a reduction, which this step passes by."""
    waiting = [handle.name for handle in met.units() if has_arrived(handle)]
    if waiting:
        warn(
            f"{type(optim).__name__}.step() was called while gradients of "
            f"{listed(waiting)} wait for a reduction (a backward under no_sync, or "
            "without gradient synchronization): the step does not train them. Run the "
            "last backward before the step outside no_sync.",
        )


def _count_writes(met: _KnownOptimizer) -> None:
    """Move versions that the step has not moved, as other steps and ranks do."""
    written: list[torch.Tensor] = []
    for handle in met.units():
        # Steps that no rank counts matter only to a graph that waits for its backward.
        if met.uncounted and handle.phase is not BACKWARD_PRE:
            continue
        for region in handle.layout.trainable:
            # If this rank's gradients were cleared before the step, so were those of
            # other ranks; a rank that holds no elements cannot tell.
            if region.holders and are_cleared(region.holders):
                continue
            # Of a parameter without elements here ``shown`` tells of the other ranks:
            # it is as the last reduction set it, and ``zero_grad`` does not clear it.
            shown, leaves = region.gradient.shown, region.leaves
            written += [leaves[index] for index in region.cuts.absent if shown[index]]
            if met.uncounted:
                written += [each for each in region.graded if each.grad is not None]
    if written:
        keys = zip(written, map(id, written), strict=True)
        increment_version([each for each, key in keys if key in met.held])


def _count_step(met: _KnownOptimizer) -> None:
    """Count a step; show sharded parameters where it has made full ones old."""
    for handle in met.units():
        handle.writes.steps += 1
        # A unit in forward or backward reads the full parameters.
        if handle.backward.task != NO_TASK or handle.calls:
            continue
        if handle.residency is residency.UNSHARDED:
            residency.use_sharded(handle)
        elif handle.residency is residency.SHARDED and handle.form.handed is not None:
            handle.form.handed(handle)
