"""Reads a checkpoint of any format into a model, sharded over any ranks.

::

    all ranks   open, compare names | verify what this rank needs | agree | copy | agree

No tensor of the model changes before all ranks agree. After that, each rank
copies the slices that the rank holds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.runtime.meta_buffers import unfilled_buffers
from composable_fsdp.storage.compare import ComparedModel, LoadReport, compare_model
from composable_fsdp.storage.contents import (
    contents_of,
    optimizers_in,
)
from composable_fsdp.storage.directory import path_text
from composable_fsdp.storage.load_optim import OptimizerLoad, optimizer_loads
from composable_fsdp.storage.opening import open_source
from composable_fsdp.storage.pending import raise_unseen, wait_for_pending
from composable_fsdp.storage.rng import check_rng_state, set_rng_state
from composable_fsdp.storage.source import Copy, Source
from composable_fsdp.storage.team import Team, meet_team, team_of
from composable_fsdp.tree.traversal import require_module, walk_states


# Tensors made in inference mode could not be trained with.
@torch.inference_mode(False)
def load(
    path: str | os.PathLike[str] | Source,
    module: nn.Module,
    optim: Optimizers | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    rng: bool = True,
    report: LoadReport | None = None,
) -> Any:
    """Read model, optimizer and random states; return the ``extra`` that was saved.

    The model may be sharded over any number of ranks, by any policy, through the
    wrapper or ``fully_shard``, or be a plain module. Each rank reads only the slices
    that the rank holds, and verifies the blocks of these slices first if the checkpoint
    is a native checkpoint. If ``load`` raises, no tensor has changed, unless the
    message says so.

    Args:
        path: a checkpoint of any format, a directory whose file ``latest`` names a
            checkpoint, or an open ``Source``.
        module: the model. A model on the meta device must get memory first
            (``to_empty``).
        optim: an optimizer over the model's parameters, or a list of optimizers, before
            or after the first step. The optimizers may be divided differently than at
            the save, if together they have the same parameters. Default None: optimizer
            state is not read.
        strict: whether any difference raises. If False, ``load`` loads the matching
            tensors and lists the differences in ``report``, or in a warning without
            ``report``. Default True.
        cast: also load tensors that were saved in another dtype, converted to the
            model's dtype. Default False: another dtype is a difference.
        rng: restore the random states. At another world size, rank r gets the random
            state that rank r saved, and ranks beyond the saved world size keep their
            own. Default True.
        report: a report that ``load`` adds the differences to. Default None.

    Returns: the saved ``extra``, or None.
    Collective: two all-gathers of objects on the private gloo group of ``save``; all
    ranks of the module's mesh must call.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank.
    """
    meet_team(module, "load")
    team = team_of(module)
    # An asynchronous save of the same ranks may still be writing the checkpoint at
    # ``path``.
    before = wait_for_pending(team)
    tell = not strict and report is None
    report = LoadReport() if report is None else report
    error: Exception | None = None
    source: Source | None = path if isinstance(path, Source) else None
    result: tuple[ComparedModel, list[OptimizerLoad], list[Copy], Any] | None = None
    try:
        try:
            require_module(module, "load")
            source = source or open_source(path_text(path, "load"))
            optims = optimizers_in(optim, "load")
            compared = _prepare(
                source, module, optims, report, strict=strict, cast=cast
            )
            state = source.rng(team.rank, team.world_size) if rng else None
            if state is not None:
                # Try the random state on other generators: after the agreement nothing
                # may fail.
                check_rng_state(state, str(getattr(source, "path", "the checkpoint")))
            result = *compared, state
        except Exception as raised:
            error = raised
        opened = () if source is None else _identity(source)
        # Every rank takes part, also a rank with an error, so that no other rank waits.
        answers = team.agree(error, (before, opened))
        raise_unseen(team, [before for before, _ in answers])
        _require_same(team.ranks, [opened for _, opened in answers])
        assert source is not None
        assert result is not None
        # From here on, tensors of the model and the optimizer are overwritten.
        _change(team, *result)
        # Values are read into the memory of the shards, past the version counters.
        for _, _, state_of_unit in walk_states(module):
            state_of_unit.initial.forget()
        if tell:
            report.warn()
        # After the copy, which fills the persistent buffers.
        _tell_unfilled(module)
        return source.extra
    finally:
        # The caller of ``load`` closes a source that the caller has opened.
        if source is not None and source is not path:
            source.close()


def _prepare(
    source: Source,
    module: nn.Module,
    optims: Sequence[torch.optim.Optimizer],
    report: LoadReport,
    *,
    strict: bool,
    cast: bool,
) -> tuple[ComparedModel, list[OptimizerLoad], list[Copy]]:
    """Compare the checkpoint with model and optimizers, and verify the blocks to read.

    Args:
        source: the checkpoint.
        module: the model; unchanged.
        optims: the optimizers; unchanged.
        report: gets the differences.
        strict: raise for a difference.
        cast: take tensors of another dtype.

    Returns: the comparison of the model and of each optimizer, and all copies.
    Raises: CheckpointError.
    Collective: none.
    """
    contents = contents_of(module, "load")
    fit = compare_model(source, contents, report, cast=cast)
    loads = optimizer_loads(source, contents, optims, report)
    if strict:
        report.require_empty(source)
    fit.require_writable()
    copies = [*fit.copies, *(copy for each in loads for copy in each.plan())]
    # The last step that reads before the ranks agree: damaged blocks must be found now,
    # because after the agreement a failure leaves the model partly loaded.
    source.prepare(copies)
    return fit, loads, copies


def _tell_unfilled(module: nn.Module) -> None:
    """Warn about non-persistent buffers that have memory but no values."""
    names = unfilled_buffers(module)
    if names:
        warnings.warn(
            f"load filled what the checkpoint has; buffers "
            f"{listed(map(quoted, names))} are not "
            "persistent, were on meta and have memory without values (to_empty). Set "
            "them before the first forward, which raises otherwise.",
            stacklevel=3,
        )


@torch.no_grad()
def _change(
    team: Team,
    fit: ComparedModel,
    loads: list[OptimizerLoad],
    copies: list[Copy],
    state: dict[str, Any] | None,
) -> None:
    """Copy all values on all ranks, or raise on all ranks.

    Args:
        team: the ranks of the load.
        fit: the comparison of the model with the checkpoint.
        loads: the planned load of each optimizer.
        copies: the slices of model and optimizer that this rank reads.
        state: this rank's random state, or None to leave the generators alone.

    Collective: one all-gather of objects over the team's group.
    Raises: CheckpointError, the same on every rank.
    """
    error: Exception | None = None
    try:
        # Few things can still fail: reading the disk, or a module's
        # ``set_extra_state``.
        fit.source.finish(copies)
        fit.set_own_states()
        for each in loads:
            each.install()
        if state is not None:
            set_rng_state(state, str(getattr(fit.source, "path", "the checkpoint")))
    except Exception as raised:
        error = CheckpointError(
            f"load failed when a part was loaded already ({type(raised).__name__}: "
            f"{raised}). The model is of no use now; load a checkpoint into it."
        )
        error.__cause__ = raised
    team.agree(error)


def _identity(source: Source) -> tuple[str, str]:
    """Return the checkpoint's fingerprint (equal only for equal content) and path."""
    return source.fingerprint, str(getattr(source, "path", ""))


def _require_same(ranks: Sequence[int], opened: list[Any]) -> None:
    """Raise CheckpointError if the ranks have opened different checkpoints.

    All ranks know all answers, so all ranks raise.
    """
    # The ranks open different checkpoints if each rank looks up the path for itself, or
    # if another save replaces ``latest`` between two ranks' reads.
    (first, path), *_ = opened
    for rank, (fingerprint, other) in zip(ranks, opened, strict=True):
        if fingerprint != first:
            raise CheckpointError(
                f"The ranks opened different checkpoints: rank {ranks[0]} {path}, "
                f"rank {rank} {other}. Nothing was loaded. Pass the same on every "
                "rank, such as what rank 0 has found."
            )
