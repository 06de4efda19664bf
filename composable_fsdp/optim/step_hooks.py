"""Hooks before and after every optimizer step: check that the step is valid.

An optimizer is checked in full in its first ``_LOOKED_AT`` steps after a module was
sharded, and again after its parameter lists changed. Later steps pay for three
look-ups: flat parameters, parameter groups, and a dictionary of known optimizers.
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

from composable_fsdp.errors import CheckpointError, FSDPError
from composable_fsdp.flat import residency
from composable_fsdp.flat.gradients import has_arrived
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle
from composable_fsdp.flat.param_ref import find_param
from composable_fsdp.flat.replaced_params import times_replaced
from composable_fsdp.flat.step_counts import count_step, is_counting_steps
from composable_fsdp.naming import listed
from composable_fsdp.optim.full_param_checks import (
    handles_of,
    parameters_of,
    require_outside_unshard_params,
    steps_on_full_params,
)
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import (
    prepare_flats,
    require_agreement,
    require_elementwise,
    require_no_flat_originals,
)
from composable_fsdp.optim.unmanaged_params import (
    check_unmanaged_params,
    warn_of_unmanaged_params,
)
from composable_fsdp.phases import BACKWARD_PRE
from composable_fsdp.runtime.unshard import shard_versions
from composable_fsdp.state_dict.dcp_caller import is_state_init_step

_LOOKED_AT = 2
"""Steps of an optimizer that are checked in full. The first step sees state that was
loaded before; the second step sees the state that the first step created."""


FIRST_STEPS: list[Callable[[torch.optim.Optimizer], None]] = []
"""Called before the first step of an optimizer over given parameters, once the checks
have passed (``features.defaults``)."""


class _KnownOptimizer:
    """Facts about an optimizer, valid while ``at`` is unchanged."""

    __slots__ = ("absent", "at", "handles", "looks", "uncounted")

    def __init__(
        self,
        at: object,
        handles: list[FlatParamHandle],
        absent: tuple[_EmptyLeaves, ...],
        *,
        uncounted: bool,
    ) -> None:
        self.at = at
        """The number of ``fully_shard`` calls and of replaced parameters when the
        optimizer was last looked at, and identity and length of each group's parameter
        list."""
        # Weak references: the record must not keep the handles of a deleted model
        # alive.
        self.handles = tuple([weakref.ref(handle) for handle in handles])
        self.absent = absent
        """Parameters without elements on this rank, per unit, whose versions steps on
        other ranks move."""
        self.uncounted = uncounted
        """Whether the step may write without moving version counters."""
        self.looks = 0


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _KnownOptimizer] = (
    weakref.WeakKeyDictionary()
)
_unwritten: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[FlatParamHandle]] = (
    weakref.WeakKeyDictionary()
)
"""Units whose recorded versions were current before a step that only creates state.

Such a step raises version counters and changes no value."""
_applications = 0
_any_uncounted = False
"""Whether some optimizer may write without moving version counters."""
_any_absent = False
"""Whether some optimizer holds parameters without elements on this rank. If False, the
hook after the step skips the search for them."""


def install_step_hooks() -> None:
    """Register the global step hooks and have every optimizer checked again.

    Called whenever modules were sharded, and by ``flat_parameters``.
    """
    global _applications
    # torch's global hooks also run for optimizers that exist already. Those that have
    # stepped are checked again, because their parameters may just have been sharded.
    if not _applications:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
    _applications += 1


def _before_step(optim: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Check ``optim`` before its step; the global pre-hook.

    Raises: CompositionError or PhaseError, before any parameter has changed.
    """
    global _any_uncounted
    if torch.compiler.is_compiling():
        return
    # ``torch.distributed.checkpoint.state_dict`` calls ``step`` with zero gradients and
    # a learning rate of zero to create state. Units that were kept unsharded stay valid
    # in such a step, although the version counters change.
    if is_counting_steps():
        # An entry is here if such a step raised before the hook after the step.
        _unwritten.pop(optim, None)
        if _only_creates_state(optim):
            _unwritten[optim] = [
                handle
                for handle in handles_of(optim)
                if handle.writes.gathered_at
                and handle.writes.gathered_at == shard_versions(handle)
            ]
    prepare_flats(optim)
    require_outside_unshard_params(optim)
    # Compare identity and length of the lists instead of all parameters: this line runs
    # in every step.
    lists = [group["params"] for group in optim.param_groups]
    at = (_applications, times_replaced(), [(id(each), len(each)) for each in lists])
    refused: FSDPError | None = None
    met = _known.get(optim)
    if met is None or met.at != at:
        if steps_on_full_params(optim):
            # The step is valid while ``unshard_params`` shows the full parameters. The
            # optimizer is not remembered, so that each of its steps is checked again.
            return
        # Install the hooks before the checks below: the hooks cut state that was loaded
        # earlier into this rank's parts, and the checks expect parts.
        try:
            install_optimizer_hooks(optim)
        except CheckpointError as error:
            # All ranks raise below: a rank that holds nothing of the parameter has seen
            # nothing.
            refused = error
        uncounted = _writes_uncounted(optim)
        _any_uncounted = _any_uncounted or uncounted
        met = _KnownOptimizer(
            at, handles_of(optim), _empty_leaves(optim), uncounted=uncounted
        )
    elif met.looks == _LOOKED_AT:
        return
    require_elementwise(optim)
    require_no_flat_originals(optim)
    require_agreement(optim, refused, is_first=not met.looks)
    if not met.looks:
        check_unmanaged_params(optim)
        _warn_of_unreduced(optim, met.handles)
        for look in FIRST_STEPS:
            look(optim)
    else:
        warn_of_unmanaged_params(optim)
    met.looks += 1
    _known[optim] = met


def _after_step(optim: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count the step for units that are kept unsharded; the global post-hook."""
    # Count after the step: a closure inside ``step`` may run the backward after which
    # units are kept unsharded.
    looks = is_counting_steps() or _any_absent or _any_uncounted
    if looks and not torch.compiler.is_compiling():
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
        if met.absent:
            _count_writes_of_empty(optim, met)
        # Backward must not refuse after a step that has changed no value.
        if met.uncounted and not _only_creates_state(optim):
            _count_writes_before_backward(optim, met.handles)


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
    """Return whether a step may write without moving version counters.

    torch's fused kernels do, and so may kernels of other libraries.
    """
    # A foreign optimizer is taken for one of those, since its kernels are not known. A
    # version that moves twice does no harm.
    is_torchs = type(optim).__module__.startswith("torch.optim")
    return not is_torchs or any(group.get("fused") for group in optim.param_groups)


def _count_writes_before_backward(
    optim: torch.optim.Optimizer, handles: Sequence[weakref.ref[FlatParamHandle]]
) -> None:
    """Move the versions of units between forward and backward, as other steps do.

    Their backward would otherwise use the new weights, or the old, by strategy.
    """
    written: list[torch.Tensor] = []
    for link in handles:
        handle = link()
        if handle is None or handle.phase is not BACKWARD_PRE:
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
    if written and _may_have_stepped(optim, handles):
        increment_version(written)


def _hide_old_values(handles: Sequence[weakref.ref[FlatParamHandle]]) -> None:
    """Show sharded parameters where a step has made the full ones of ``unshard`` old.

    The next forward refuses the old values; so do parts of the unit from now on.
    """
    for link in handles:
        handle = link()
        # A unit in forward or backward reads the full parameters.
        if (
            handle is not None
            and handle.residency is residency.UNSHARDED
            and handle.backward.task == NO_TASK
            and not handle.running.calls
        ):
            residency.use_sharded(handle)


class _EmptyLeaves(NamedTuple):
    """Parameters of a unit whose elements are all on other ranks."""

    handle: weakref.ref[FlatParamHandle]
    epoch: int
    """The handle's epoch; a later epoch has other regions."""
    leaves: list[tuple[torch.Tensor, int, int]]
    """Per parameter: the tensor, the region's number, the number inside the region."""


def _empty_leaves(optim: torch.optim.Optimizer) -> tuple[_EmptyLeaves, ...]:
    """Return, per unit, parameters without elements whose versions a step raises.

    Groups with ``fused`` are left out: fused kernels do not change version counters.
    """
    global _any_absent
    found: dict[int, _EmptyLeaves] = {}
    leaves = [(leaf, group) for group in optim.param_groups for leaf in group["params"]]
    for leaf, group in leaves:
        place = None if leaf.numel() else find_param(leaf)
        _any_absent = _any_absent or place is not None
        if place is not None and not group.get("fused"):
            handle = place.handle
            each = found.setdefault(
                id(handle), _EmptyLeaves(weakref.ref(handle), handle.layout.epoch, [])
            )
            number = handle.layout.regions.index(place.region)
            each.leaves.append((leaf, number, place.index))
    return tuple(found.values())


def _count_writes_of_empty(optim: torch.optim.Optimizer, met: _KnownOptimizer) -> None:
    """Raise the version counters of parameters that only other ranks stepped."""
    # This rank has no gradient of these parameters, so the optimizer skipped them.
    # Autograd compares version counters of saved tensors in backward. A backward
    # through the weights of before the step would raise on the other ranks only, and
    # this rank would wait for them in a collective.
    passed: list[torch.Tensor] = []
    # Collect first and call ``increment_version`` once: with many ranks, most units
    # have such parameters.
    for link, epoch, leaves in met.absent:
        handle = link()
        if handle is not None:
            if handle.layout.epoch != epoch:
                met.absent = _empty_leaves(optim)
                return _count_writes_of_empty(optim, met)
            # ``shown`` is as the last reduction set it: ``zero_grad`` on this rank does
            # not clear it, because there is no gradient to clear.
            passed += [
                leaf
                for leaf, region, index in leaves
                if leaf.grad is None
                and handle.layout.regions[region].gradient.shown[index]
            ]
    if passed and _may_have_stepped(optim, met.handles):
        increment_version(passed)


def _may_have_stepped(
    optim: torch.optim.Optimizer, handles: Sequence[weakref.ref[FlatParamHandle]]
) -> bool:
    """Return whether the step may have changed parameters, on this or another rank."""
    # If this rank's own gradients were cleared before the step, the gradients on other
    # ranks were cleared, too. Only a parameter that the last reduction gave a gradient
    # tells: a frozen or unused one has none in any case. A rank that holds elements of
    # no such parameter cannot tell.
    stepped = set(map(id, parameters_of(optim)))
    # One after the other: usually the first has a gradient, and the hook runs in every
    # step.
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
