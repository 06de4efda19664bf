"""Reading a checkpoint of any format into a model, whatever it is sharded over.

::

    all ranks   open, compare names | verify what this rank needs | agree | copy | agree

Until all ranks agree nothing has changed. Then each reads its own slices.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.runtime.meta_buffers import unfilled_buffers
from composable_fsdp.storage.compare import ComparedModel, LoadReport, compare_model
from composable_fsdp.storage.consensus import Team, team_of
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
from composable_fsdp.tree.traversal import require_module


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
    """Read model, optimizer and random states; returns the ``extra`` that was saved.

    The model may be sharded over any number of ranks, by any policy, on either path, or
    be a plain one. Each rank reads the slices that it holds and nothing else; with a
    native checkpoint it verifies the blocks of those first. Nothing has changed when
    this raises, unless the message says so.

    Args:
        path: a checkpoint, a directory whose file ``latest`` names one, or an open
            ``Source``.
        module: the model; on meta it must have memory first (``to_empty``).
        optim: an optimizer over its parameters, or a list of several, before or after
            their first step. They may be others than those that saved, if together they
            have the same parameters.
        strict: False loads what fits and tells the rest in ``report``, or in a warning.
        cast: also load tensors that were saved in another dtype, converted.
        rng: restore the random states. At another world size a rank gets that of the
            rank of its number; ranks beyond keep their own.
        report: is filled with what did not fit.

    Collective: two gathers of objects on a private gloo group, as ``save``; all ranks
    of the module's mesh must call.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank.
    """
    team = team_of(module)
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
            contents = contents_of(module, "load")
            fit = compare_model(source, contents, report, cast=cast)
            loads = optimizer_loads(source, contents, optims, report)
            if strict:
                report.require_empty(source)
            fit.require_writable()
            copies = [*fit.copies, *(copy for each in loads for copy in each.plan())]
            source.prepare(copies)
            state = source.rng(team.rank, team.world_size) if rng else None
            if state is not None:
                check_rng_state(state, str(getattr(source, "path", "the checkpoint")))
            result = fit, loads, copies, state
        except Exception as raised:
            error = raised
        opened = () if source is None else _identity(source)
        answers = team.agree(error, (before, opened))
        raise_unseen(team, [before for before, _ in answers])
        _require_same([opened for _, opened in answers])
        assert source is not None
        assert result is not None
        _change(team, *result)
        if tell:
            report.warn()
        _tell_unfilled(module)
        return source.extra
    finally:
        if source is not None and source is not path:
            source.close()


def _tell_unfilled(module: nn.Module) -> None:
    names = unfilled_buffers(module)
    if names:
        warnings.warn(
            f"load filled what the checkpoint has; buffers "
            f"{', '.join(map(quoted, names[:8]))}{' ..' if names[8:] else ''} are not "
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
    """Change everything on all ranks, or raise on all of them.

    Little can fail by now: a disk, or a module's own ``set_extra_state``.
    """
    error: Exception | None = None
    try:
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
    """What tells a checkpoint from others, and where it is."""
    return source.fingerprint, str(getattr(source, "path", ""))


def _require_same(opened: list[Any]) -> None:
    """Refuse ranks that have opened different checkpoints, and would mix them.

    So does a path that each rank looks up for itself, or ``latest`` while another save
    replaces it. All ranks know all answers.
    """
    (first, path), *_ = opened
    for rank, (fingerprint, other) in enumerate(opened):
        if fingerprint != first:
            raise CheckpointError(
                f"The ranks opened different checkpoints: rank 0 {path}, rank {rank} "
                f"{other}. Nothing was loaded. Pass the same on every rank, such as "
                "what rank 0 has found."
            )
