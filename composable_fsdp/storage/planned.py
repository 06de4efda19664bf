"""The changes of a load on this rank: read and verified first, then changed.

::

    all ranks   verify | agree | copy | agree
    shared      tell the reads | verify own part | agree | copy | agree | send | agree
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.bounds import within_limits
from composable_fsdp.storage.compare import ComparedModel
from composable_fsdp.storage.load_optim import OptimizerLoad
from composable_fsdp.storage.rng import check_rng_state, set_rng_state
from composable_fsdp.storage.shared_reads import SharedReads
from composable_fsdp.storage.source import Copy, Source
from composable_fsdp.storage.stateful import Filling
from composable_fsdp.storage.team import Team


@dataclass(slots=True)
class Planned:
    """All that a load will change on this rank, compared and verified."""

    model: ComparedModel
    optims: list[OptimizerLoad]
    copies: list[Copy]
    """The slices of model and optimizers that this rank reads."""
    objects: list[Filling] = field(default_factory=list)
    """The objects of the caller, with their states."""
    rng: dict[str, Any] | None = None
    """This rank's random state, or None to leave the generators alone."""
    shared: SharedReads | None = None
    """The reads that other ranks make as well, if ranks share reads."""


def name_of(source: Source) -> str:
    """Return the path of the source, for messages."""
    return str(getattr(source, "path", "the checkpoint"))


def verify(
    team: Team, planned: Planned | None, *, share: bool, rng: bool
) -> Exception | None:
    """Verify the bytes that this rank reads, and fill memory that is new.

    Args:
        team: the ranks of the load.
        planned: the reads of this rank; None after an error.
        share: whether ranks share reads; the same on every rank.
        rng: whether to read this rank's random state.

    Returns: the error, if any.
    Collective: with ``share``, an all-gather of objects over the team's group.
    """
    shared = None if planned is None else planned.shared
    everyone: list[Any] = []
    if share:
        told = {} if shared is None else shared.told
        everyone = [each.value for each in team.outcomes(None, told)]
    if planned is None:
        return None
    try:
        if shared is not None:
            planned.copies = shared.divide(everyone)
        # The last step that reads before the ranks agree: damaged blocks must be found
        # now, because after the agreement a failure leaves the model partly loaded.
        source = planned.model.source
        with within_limits(name_of(source)):
            source.prepare(planned.copies)
        planned.rng = source.rng(team.rank, team.world_size) if rng else None
        if planned.rng is not None:
            # Try the random state on other generators: after the agreement nothing may
            # fail.
            check_rng_state(planned.rng, name_of(source))
    except Exception as raised:
        return raised
    return None


@torch.no_grad()
def change(team: Team, planned: Planned) -> None:
    """Copy all values on all ranks, or raise on all ranks.

    Collective: one all-gather of objects over the team's group; if reads are shared,
    another one, and broadcasts of values.
    Raises: CheckpointError, the same on every rank.
    """
    source, shared = planned.model.source, planned.shared

    def fill() -> None:
        source.finish(planned.copies)

    # Few things can still fail: reading the disk, a module's ``set_extra_state``, or an
    # object's ``load_state_dict``.
    def give() -> None:
        if shared is not None:
            shared.send()
        planned.model.set_own_states()
        for each in planned.optims:
            each.install()
        # After the optimizers: a scheduler may look at their options.
        for filling in planned.objects:
            filling.give()
        if planned.rng is not None:
            set_rng_state(planned.rng, name_of(source))

    if shared is not None:
        # No rank waits for a part that another rank could not read again.
        team.agree(_failure_of(fill))
        team.agree(_failure_of(give))
    else:
        team.agree(_failure_of(fill, give))


def _failure_of(*steps: Callable[[], None]) -> Exception | None:
    """Return the error of the first step that fails, for the user, or None."""
    try:
        for step in steps:
            step()
    except Exception as raised:
        error = CheckpointError(
            f"load failed when a part was loaded already ({type(raised).__name__}: "
            f"{raised}). The model is of no use now; load a checkpoint into it."
        )
        error.__cause__ = raised
        return error
    return None
