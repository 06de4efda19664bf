"""The hooks on every optimizer's step: who steps on our parameters, and may it.

An optimizer is met and looked at in its first steps after a module was sharded, and
again when its parameters are others. After those a step pays one look for flat
parameters, one at its groups and one into a dictionary.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_fsdp.access.single import region_of
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.replaced import times_replaced
from composable_fsdp.flat.step_counts import count_step, is_counting_steps
from composable_fsdp.optim.clip_check import expect_gradients, require_common_factor
from composable_fsdp.optim.full_param_checks import (
    handles_of,
    parameters_of,
    require_outside_unshard_params,
    steps_on_full_params,
)
from composable_fsdp.optim.names import is_absent
from composable_fsdp.optim.scaler_check import require_common_decision
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.optim.step_checks import (
    prepare_flats,
    require_elementwise,
    require_no_flat_originals,
    require_own_state,
)
from composable_fsdp.optim.trial_step import STAND_IN
from composable_fsdp.optim.unknown_optimizers import require_tried
from composable_fsdp.optim.unmanaged_params import check_unmanaged_params
from composable_fsdp.runtime.unshard import shard_versions
from composable_fsdp.state_dict.dcp_caller import is_state_init_step

_LOOKED_AT = 2
"""The first step sees state that was there before, the second what the first made."""


class _KnownOptimizer:
    """What is known of an optimizer, as long as nothing of ``at`` changes."""

    __slots__ = ("absent", "at", "handles", "looks")

    def __init__(
        self,
        at: object,
        handles: list[FlatParamHandle],
        absent: tuple[_EmptyLeaves, ...],
    ) -> None:
        self.at = at
        """How many applications and replaced parameters there had been, and the lists
        of parameters of its groups."""
        self.handles = tuple([weakref.ref(handle) for handle in handles])
        self.absent = absent
        """Leaves without elements on this rank."""
        self.looks = 0


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _KnownOptimizer] = (
    weakref.WeakKeyDictionary()
)
_unwritten: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[FlatParamHandle]] = (
    weakref.WeakKeyDictionary()
)
"""Units kept full, unwritten before a step that only makes state: that step changes
versions and no value."""
_applications = 0
_any_absent = False
"""Whether an optimizer holds leaves without elements; else no step looks for them."""


def install_step_hooks() -> None:
    """Have every optimizer looked at in its next steps; called when a module is cut.

    Those that have stepped already, too: their parameters may just have become parts.
    """
    global _applications
    if not _applications:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
    _applications += 1
    expect_gradients()


def _before_step(optim: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if is_counting_steps() and is_state_init_step():
        _unwritten[optim] = [
            handle
            for handle in handles_of(optim)
            if handle.full_since is not None
            and handle.full_since == shard_versions(handle)
        ]
    prepare_flats(optim)
    require_outside_unshard_params(optim)
    require_common_factor(optim)
    lists = [group["params"] for group in optim.param_groups]
    at = (_applications, times_replaced(), [(id(each), len(each)) for each in lists])
    met = _known.get(optim)
    if met is None or met.at != at:
        if STAND_IN in vars(optim):
            return
        if steps_on_full_params(optim):
            return  # as long as the block shows them; looked at again each time
        install_optimizer_hooks(
            optim
        )  # first, because it turns what was loaded into parts
        met = _KnownOptimizer(at, handles_of(optim), _empty_leaves(optim))
    elif met.looks == _LOOKED_AT:
        return
    require_elementwise(optim)
    require_no_flat_originals(optim)
    require_own_state(optim)
    require_common_decision(optim)
    if not met.looks:
        require_tried(optim)
        check_unmanaged_params(optim)
    met.looks += 1
    _known[optim] = met


def _after_step(optim: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # After and not before: a closure may run the backward after which units are kept.
    if (is_counting_steps() or _any_absent) and not torch.compiler.is_compiling():
        met = _known.get(optim)
        if met is None:
            return
        if is_counting_steps():
            if optim in _unwritten:
                for handle in _unwritten.pop(optim):
                    handle.full_since = shard_versions(handle)
            else:
                count_step(met.handles)
        if met.absent:
            _count_writes_of_empty(optim, met)
        if not optim.state:
            _note_steps_elsewhere(optim)


def _note_steps_elsewhere(optim: torch.optim.Optimizer) -> None:
    """Have an optimizer without state show that others have some, by an empty one.

    ``torch.distributed.checkpoint.state_dict`` steps with zeros where there is none:
    here alone, and this rank would have state of what no step has reached.
    """
    for leaf in parameters_of(optim):
        place = find_leaf(leaf) if is_absent(leaf) else None
        if place is not None:
            region, index = region_of(*place)
            if region.shown[index]:
                optim.state[leaf] = {}
                return


class _EmptyLeaves(NamedTuple):
    """Leaves of a unit of which other ranks alone hold elements."""

    handle: weakref.ref[FlatParamHandle]
    epoch: int
    """Of the handle, whose regions are others in the next."""
    leaves: list[tuple[torch.Tensor, int, int]]
    """Each with the numbers of its region, and in that."""


def _empty_leaves(optim: torch.optim.Optimizer) -> tuple[_EmptyLeaves, ...]:
    """Unit by unit, those whose versions steps move: fused kernels move none."""
    global _any_absent
    found: dict[int, _EmptyLeaves] = {}
    leaves = [(leaf, group) for group in optim.param_groups for leaf in group["params"]]
    for leaf, group in leaves:
        place = None if leaf.numel() else find_leaf(leaf)
        _any_absent = _any_absent or place is not None
        if place is not None and not group.get("fused"):
            handle, index = place
            each = found.setdefault(
                id(handle), _EmptyLeaves(weakref.ref(handle), handle.epoch, [])
            )
            number = 0
            while index >= len(handle.regions[number].leaves):
                index -= len(handle.regions[number].leaves)
                number += 1
            each.leaves.append((leaf, number, index))
    return tuple(found.values())


def _count_writes_of_empty(optim: torch.optim.Optimizer, met: _KnownOptimizer) -> None:
    """Move the versions of leaves whose elements were stepped on other ranks alone.

    Without a gradient here the optimizer passed them by; a backward through weights of
    before the step would raise on the other ranks, which then are waited for.
    """
    passed: list[torch.Tensor] = []
    # Many units have such leaves on each rank of many, so with one call a unit.
    for link, epoch, leaves in met.absent:
        handle = link()
        if handle is not None:
            if handle.epoch != epoch:
                met.absent = _empty_leaves(optim)
                return _count_writes_of_empty(optim, met)
            # ``quoted``: as the last reduction left it, as nobody clears it here.
            passed += [
                leaf
                for leaf, region, index in leaves
                if leaf.grad is None and handle.regions[region].shown[index]
            ]
    if not passed:
        return
    mine = [p for p in parameters_of(optim) if p.numel()]
    # Where a rank's own gradients were cleared, those of the others were, too.
    if not mine or any(p.grad is not None for p in mine):
        increment_version(passed)
