"""Reading a checkpoint of any format into a model, whatever it is sharded over.

::

    all ranks   open, compare names | verify what this rank needs | agree | copy

Until all ranks agree nothing has changed. Then each reads its own slices.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.contents import (
    Contents,
    contents_of,
    require_optimizer,
    units_in,
)
from composable_fsdp.storage.fit import Fit, LoadReport, fit_model
from composable_fsdp.storage.load_optim import OptimizerLoad
from composable_fsdp.storage.opening import open_source
from composable_fsdp.storage.outcome import team_of
from composable_fsdp.storage.pending import raise_unseen, wait_for_pending
from composable_fsdp.storage.rng import set_rng_state
from composable_fsdp.storage.source import Source
from composable_fsdp.tree.traversal import require_module


# Tensors made in inference mode could not be trained with.
@torch.inference_mode(False)
def load(
    path: str | os.PathLike[str] | Source,
    module: nn.Module,
    optim: torch.optim.Optimizer | None = None,
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
    this raises, unless the message says that it had begun to change the model.

    Args:
        path: a checkpoint, a directory whose file ``latest`` names one, or an open
            ``Source``.
        module: the model; on meta it must have memory first (``to_empty``).
        optim: an optimizer over its parameters, before or after its first step.
        strict: False loads what fits and tells the rest in ``report``, or in a warning.
        cast: also load tensors that were saved in another dtype, converted.
        rng: restore the random states. At another world size a rank gets that of the
            rank of its number; ranks beyond keep their own.
        report: is filled with what did not fit.

    Collective: two gathers of objects on a private gloo group, as ``save``; all ranks
    of the module's mesh must call.
    Raises: CheckpointError or PhaseError, the same on every rank.
    """
    require_module(module, "load")
    team = team_of(units_in(module))
    before = wait_for_pending(team)
    tell = not strict and report is None
    report = LoadReport() if report is None else report
    error: Exception | None = None
    source: Source | None = path if isinstance(path, Source) else None
    result: tuple[Contents, Fit, OptimizerLoad | None, Any] | None = None
    try:
        try:
            source = source or open_source(path)  # type: ignore[arg-type]  # no Source
            if optim is not None:
                require_optimizer(optim, "load")
            contents = contents_of(module, "load")
            fit = fit_model(source, contents, report, cast=cast)
            optimizer = None
            if optim is not None:
                optimizer = OptimizerLoad(source, contents, optim, report, cast=cast)
            if strict:
                report.require_empty(source)
            fit.check()
            if optimizer is not None:
                optimizer.check()
            state = source.rng(team.rank, team.world_size) if rng else None
            result = contents, fit, optimizer, state
        except Exception as raised:
            error = raised
        raise_unseen(team.agree(error, before))
        assert source is not None
        assert result is not None
        _, fit, optimizer, state = result
        try:
            fit.copy()
            if optimizer is not None:
                optimizer.copy()
            if state is not None:
                set_rng_state(state, str(path))
        except Exception as raised:
            error = _halfway(raised)
        team.agree(error)
        if tell:
            report.warn()
        return source.extra
    finally:
        if source is not None and source is not path:
            source.close()


def _halfway(error: Exception) -> CheckpointError:
    """The error for what only shows when values are taken over: a module's or an
    optimizer's own code, or a disk that fails between check and copy."""
    what = error.args[0] if isinstance(error, CheckpointError) else repr(error)
    return CheckpointError(
        f"load had begun to change the model when it failed: {what} Model and "
        "optimizer hold a part of the checkpoint; load again before training goes on."
    )
