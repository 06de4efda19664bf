"""Hooks before and after every optimizer step: check that the step is valid.

An optimizer is checked in full in its first ``_LOOKED_AT`` steps after a module was
sharded or its parameter lists changed. Later steps pay for three look-ups.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat import residency
from composable_fsdp.flat.gradients import has_arrived
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.param_ref import find_param, times_replaced
from composable_fsdp.flat.residency import count_step, is_counting_steps
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
from composable_fsdp.runtime.unshard import shard_versions
from composable_fsdp.state_dict.dcp_caller import is_state_init_step

_LOOKED_AT = 2
"""Steps that are checked in full: the second sees the state that the first created."""


FIRST_STEPS: list[Callable[[torch.optim.Optimizer], None]] = []
"""Called before the first step of an optimizer, once the checks have passed."""


class _KnownOptimizer:
    """Facts about an optimizer, valid while ``at`` is unchanged."""

    __slots__ = ("at", "empty", "handles", "looks", "uncounted")

    def __init__(self, at: object, optim: torch.optim.Optimizer) -> None:
        self.at = at
        """Numbers of ``fully_shard`` calls and of replaced parameters, and identity and
        length of each group's list."""
        # Weak, so that a deleted model is free.
        self.handles = tuple([weakref.ref(handle) for handle in handles_of(optim)])
        self.empty = _empty_leaves(optim)
        """Parameters whose elements, and steps, are all on other ranks."""
        self.uncounted = _writes_uncounted(optim)
        """Whether the step may write without moving version counters."""
        self.looks = 0


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _KnownOptimizer] = (
    weakref.WeakKeyDictionary()
)
_unwritten: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[FlatParamHandle]] = (
    weakref.WeakKeyDictionary()
)
"""Units whose recorded versions were current before a step that only creates state,
which raises versions and changes no value."""
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
        register_optimizer_step_post_hook(_after_step)
    _applications += 1


def _before_step(optim: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Check ``optim`` before its step; the global pre-hook."""
    global _any_counts
    if torch.compiler.is_compiling():
        return
    if is_counting_steps():
        _note_unwritten(optim)
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
        _any_counts = _any_counts or met.uncounted or bool(met.empty)
    elif met.looks == _LOOKED_AT:
        return
    require_elementwise(optim)
    require_no_flat_originals(optim)
    require_agreement(optim, refused, is_first=not met.looks)
    if not met.looks:
        require_current(optim)
        _warn_of_unreduced(optim, met.handles)
        for look in FIRST_STEPS:
            look(optim)
    met.looks += 1
    _known[optim] = met


def _note_unwritten(optim: torch.optim.Optimizer) -> None:
    """Note units that stay valid in a step that only creates state."""
    # An entry is here if such a step raised before the hook after the step.
    _unwritten.pop(optim, None)
    if _only_creates_state(optim):
        _unwritten[optim] = [
            handle
            for handle in handles_of(optim)
            if handle.writes.gathered_at
            and handle.writes.gathered_at == shard_versions(handle)
        ]


def _after_step(optim: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count the step for units that are kept unsharded; the global post-hook."""
    # Count after the step: a closure inside ``step`` may run the backward after which
    # units are kept unsharded.
    if (is_counting_steps() or _any_counts) and not torch.compiler.is_compiling():
        met = _known.get(optim)
        if met is None:
            return
        if is_counting_steps():
            if optim in _unwritten:
                # The values are unchanged, so accept the new versions as current.
                for handle in _unwritten.pop(optim):
                    handle.writes.gathered_at = shard_versions(handle)
            else:
                count_step(met.handles)
                _hide_old_values(met.handles)
        if met.uncounted or met.empty:
            _count_writes(optim, met)


def _warn_of_unreduced(
    optim: torch.optim.Optimizer, handles: Sequence[weakref.ref[FlatParamHandle]]
) -> None:
    """Warn of units whose gradients wait for a reduction, which this step passes by."""
    waiting = [h for link in handles if (h := link()) is not None and has_arrived(h)]
    if waiting:
        names = listed(handle.name for handle in waiting)
        warnings.warn(
            f"{type(optim).__name__}.step() was called while gradients of {names} wait "
            "for a reduction (a backward under no_sync, or without gradient "
            "synchronization): the step does not train them. Run the last backward "
            "before the step outside no_sync.",
            stacklevel=5,
        )


def _only_creates_state(optim: torch.optim.Optimizer) -> bool:
    """Return whether the running step creates state and changes no value."""
    # DCP sets ``lr`` of each group to zero. A group without ``lr`` is stepped at its
    # own rate, and weight decay changes its parameters without any gradient.
    return is_state_init_step() and all("lr" in g for g in optim.param_groups)


def _writes_uncounted(optim: torch.optim.Optimizer) -> bool:
    """Return whether a step may write without moving version counters."""
    # A foreign optimizer is taken for one of those, since its kernels are not known. A
    # version that moves twice does no harm.
    is_torchs = type(optim).__module__.startswith("torch.optim")
    return not is_torchs or any(group.get("fused") for group in optim.param_groups)


def _count_writes(optim: torch.optim.Optimizer, met: _KnownOptimizer) -> None:
    """Move versions that the step has not moved, as other steps and ranks do.

    Backward would else use the new weights, or raise on the ranks that hold elements.
    """
    # Lists: this runs in every step, where each item of a generator is a call.
    if [1 for each in met.empty if each.is_old()]:
        met.empty = _empty_leaves(optim)
    written = _uncounted(optim, met) if met.uncounted else []
    for link, _, leaves in met.empty:
        if (unit := link()) is not None:
            # ``shown`` tells of the other ranks: it is as the last reduction set it,
            # and ``zero_grad`` on this rank does not clear it. DCP's step that creates
            # state gives these parameters gradients, too.
            written += [
                leaf
                for leaf, region, index in leaves
                if leaf.grad is None
                and unit.layout.regions[region].gradient.shown[index]
            ]
    if written and _may_have_stepped(optim, met.handles):
        increment_version(written)


def _uncounted(
    optim: torch.optim.Optimizer, met: _KnownOptimizer
) -> list[torch.Tensor]:
    """Return what a step between forward and backward may have written uncounted."""
    written: list[torch.Tensor] = []
    for handle in filter(None, (link() for link in met.handles)):
        # Backward must not refuse after a step that has changed no value.
        if handle.phase is not BACKWARD_PRE or _only_creates_state(optim):
            continue
        for region in handle.layout.trainable:
            flat = region.flat is not None and region.flat.grad is not None
            # An optimizer passes by parameters without a gradient. For a parameter
            # without elements here, ``shown`` tells of the other ranks.
            written += [
                leaf
                for leaf, shown in zip(
                    region.leaves, region.gradient.shown, strict=True
                )
                if flat or leaf.grad is not None or (shown and not leaf.numel())
            ]
    return written


class _EmptyLeaves(NamedTuple):
    """Parameters of a unit whose elements are all on other ranks."""

    handle: weakref.ref[FlatParamHandle]
    epoch: int
    """The handle's epoch; a later epoch has other regions."""
    leaves: list[tuple[torch.Tensor, int, int]]
    """Per parameter: the tensor, the region's number, the number inside the region."""

    def is_old(self) -> bool:
        """Return whether the unit has other regions now."""
        unit = self.handle()
        return unit is not None and unit.layout.epoch != self.epoch


def _empty_leaves(optim: torch.optim.Optimizer) -> list[_EmptyLeaves]:
    """Return, per unit, the parameters of ``optim`` without elements on this rank.

    Fused kernels do not move version counters, so their groups are left out.
    """
    found: dict[int, _EmptyLeaves] = {}
    groups = [group for group in optim.param_groups if not group.get("fused")]
    for leaf in [p for group in groups for p in group["params"]]:
        place = None if leaf.numel() else find_param(leaf)
        if place is not None:
            handle = place.handle
            unit = _EmptyLeaves(weakref.ref(handle), handle.layout.epoch, [])
            number = handle.layout.regions.index(place.region)
            row = leaf, number, place.index
            found.setdefault(id(handle), unit).leaves.append(row)
    return list(found.values())


def _hide_old_values(handles: Sequence[weakref.ref[FlatParamHandle]]) -> None:
    """Show sharded parameters where a step has made full ones old."""
    for link in handles:
        handle = link()
        # A unit in forward or backward reads the full parameters.
        if handle is None or handle.backward.task != NO_TASK or handle.running.calls:
            continue
        if handle.residency is residency.UNSHARDED:
            residency.use_sharded(handle)
        elif handle.residency is residency.SHARDED and handle.form.handed is not None:
            handle.form.handed(handle)


def _may_have_stepped(
    optim: torch.optim.Optimizer, handles: Sequence[weakref.ref[FlatParamHandle]]
) -> bool:
    """Return whether the step may have changed parameters, on this or another rank."""
    # If this rank's gradients were cleared before the step, so were those of other
    # ranks. Only a parameter that the last reduction gave a gradient tells; a rank that
    # holds elements of none cannot.
    stepped = set(map(id, parameters_of(optim)))
    # Lazily: usually the first has a gradient, and the hook runs in every step.
    found = (
        each.grad is not None
        for link in handles
        if (handle := link()) is not None
        for each in _reduced(handle)
        if id(each) in stepped and each.numel()
    )
    first = next(found, True)
    return first or any(found)


def _reduced(handle: FlatParamHandle) -> Iterator[torch.Tensor]:
    """Yield what the last reduction gave a gradient, and the flat parameters."""
    for region in handle.layout.trainable:
        for leaf, shown in zip(region.leaves, region.gradient.shown, strict=True):
            if shown:
                yield leaf
    # A flat parameter holds this rank's elements of all its leaves.
    yield from handle.writes.flat_parameters
