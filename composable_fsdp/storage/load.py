"""Reads a checkpoint of any format into a model, sharded over any ranks.

No tensor of the model changes before all ranks have verified their parts and agree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted, takes_optimizer
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.storage.compare import (
    LoadReport,
    Patterns,
    Rename,
    Selection,
    View,
    compare_model,
    hints_at,
    matcher,
    options_of,
    renaming,
)
from composable_fsdp.storage.contents import contents_of, optimizers_in
from composable_fsdp.storage.directory import path_text, within_limits
from composable_fsdp.storage.load_optim import optimizer_loads
from composable_fsdp.storage.opening import find_checkpoint, open_source
from composable_fsdp.storage.source import Source
from composable_fsdp.storage.stateful import Redeal, fill, own_values, set_rng_state
from composable_fsdp.storage.storages import join, split, whole_path
from composable_fsdp.storage.team import (
    FirstError,
    Team,
    raise_unseen,
    team_of,
    wait_for_pending,
)
from composable_fsdp.storage.writer import paused_collection
from composable_fsdp.tree.traversal import require_module, walk_states


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load reads, and how it treats differences; see ``load``.

    >>> report = LoadReport()
    >>> load("runs", model, options=LoadOptions(strict=False, report=report))
    >>> report.is_empty()
    True
    """

    strict: bool = True
    """Whether any difference raises. If False, ``load`` loads what matches and lists
    the differences in ``report``, or in a warning without ``report``."""
    cast: bool = False
    """Also load tensors of another dtype, converted to the model's."""
    rng: bool = True
    """Restore the random states: rank r gets what rank r saved, and ranks beyond the
    saved world size keep their own."""
    report: LoadReport | None = None
    """A report that ``load`` adds the differences to."""
    per_rank: dict[str, Any] | None = None
    """A dict that gets the values that this rank saved by ``per_rank``; objects in it
    are filled as those in ``extra``. None: these values are not read."""
    redeal: Redeal | None = None
    """A function that is called if another number of ranks saved, with the list of the
    values of all these ranks, this rank's number and the number of ranks; returns the
    values for ``per_rank``. None: another number is a difference."""
    include: Patterns = None
    """Patterns of the names to load, as those of ``save``, by the names in the model.
    All these must fit; other tensors, with their optimizer state, are left alone."""
    exclude: Patterns = None
    """Patterns of names to leave alone. None: no name."""
    trainable_only: bool = False
    """Leave buffers, extra states and frozen parameters of the model alone."""
    rename: Rename | None = None
    """The names in the model for those in the checkpoint: a dict of old to new
    prefixes, such as ``{"model": "backbone"}`` (``""`` is no prefix), or a function of
    a name that returns the new name, or None to leave the tensor out."""
    local: Patterns = None
    """Patterns of the names in the checkpoint that were saved per rank
    (``SaveOptions.local``) and may come back at another world size: rank r gets what
    rank r saved, and ranks beyond those keep their own. None: it is a difference."""


@takes_optimizer
@hints_at(LoadOptions)
# Tensors made in inference mode could not be trained with.
@torch.inference_mode(False)
def load(
    path: str | os.PathLike[str] | Source,
    module: nn.Module,
    optim: Optimizers | None = None,
    extra: Any = None,
    *,
    options: LoadOptions | None = None,
) -> Any:
    """Read model, optimizer and random states; return the ``extra`` that was saved.

    The model may be sharded over any number of ranks, by any policy, or be a plain
    module. Each rank reads only the slices that it holds; of a native checkpoint it
    verifies the blocks of these first. If ``load`` raises, no tensor has changed,
    unless the message says so.

    Args:
        path: a checkpoint of any format, a directory of checkpoints of this library,
            whose newest is read, or an open ``Source``.
        module: the model. A model on the meta device must get memory first
            (``to_empty``).
        optim: an optimizer over the model's parameters, or a list of optimizers, before
            or after the first step. The optimizers may be divided differently than at
            the save, if together they have the same parameters. Default None: optimizer
            state is not read.
        extra: the objects that ``save`` got in ``extra``, such as schedulers, at the
            same keys. Each object with a ``load_state_dict`` gets its saved state;
            other values are ignored. Default None: no object is filled.
        options: see ``LoadOptions``. Default None: ``LoadOptions()``.

    Returns: the saved ``extra``, or None. The objects that were passed stand in place
    of their states.
    Collective: three all-gathers of objects on the private gloo group of ``save``; all
    ranks of the module's mesh must call.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank.

    >>> save("runs/step-200", model, optimizer, {"epoch": 2})
    >>> load("runs", model, optimizer)  # the newest
    {'epoch': 2}
    """
    team = team_of(module, "load")
    job = _Load(team, module, optim, extra)
    # An asynchronous save of the same ranks may still be writing the checkpoint.
    before = wait_for_pending(team)
    with job.own:
        job.options = options_of(options, LoadOptions, "load")
    report = job.options.report
    try:
        value = _run(job, _look_up(job, path, before))
    finally:
        if report is not None:
            report.add(job.report)
    if not job.options.strict and report is None:
        job.report.warn()
    return value


def _look_up(
    job: _Load, path: str | os.PathLike[str] | Source, before: str | None
) -> str | Source:
    """Return the checkpoint to open: rank 0 looks, and an all-gather tells."""
    place, name, team = "", "", job.team
    with job.own:
        if not isinstance(path, Source):
            place = whole_path(path_text(path, "load"))
            # Ranks that looked for themselves would differ beside a job that saves.
            if team.rank == 0 and (found := find_checkpoint(place)[0]) != place:
                # A name, and not the path: each rank may have a disk of its own.
                name = split(found)[1]
    # Also ranks with an open source take part: the call may differ between ranks.
    answers = team.agree(job.own.error, (before, name))
    raise_unseen(team, [each[0] for each in answers])
    if isinstance(path, Source):
        return path
    name = answers[0][1]
    return join(place, name) if name else place


@paused_collection()
def _run(job: _Load, given: str | Source) -> Any:
    """Load the checkpoint; return ``extra``. Collective: two all-gathers of objects."""
    source: Source | None = None
    team, own = job.team, job.own
    try:
        with own:
            require_module(job.module, "load")
            source = given if isinstance(given, Source) else open_source(given)
            job.plan(source)
            job.verify()
        opened = ("", "") if source is None else (source.fingerprint, source.path)
        answers = team.agree(own.error, opened)
        for rank, (fingerprint, path) in zip(team.ranks, answers, strict=True):
            # Each rank may have looked up the path for itself.
            if fingerprint != answers[0][0]:
                raise CheckpointError(
                    f"The ranks opened different checkpoints: rank {team.ranks[0]} "
                    f"{answers[0][1]}, rank {rank} {path}. Nothing was loaded. Pass "
                    "the same on every rank, such as what rank 0 has found."
                )
        # From here on, tensors of the model and the optimizer are overwritten.
        return job.change()
    finally:
        # The caller of ``load`` closes a source that the caller has opened.
        if source is not None and source is not given:
            source.close()


@dataclass
class _Load:
    """A load on this rank: what is asked for, and all that it will change."""

    team: Team
    module: nn.Module
    optim: Optimizers | None
    extra: Any
    options: LoadOptions = field(default_factory=LoadOptions)
    own: FirstError = field(default_factory=FirstError)
    report: LoadReport = field(default_factory=LoadReport)

    def plan(self, source: Source) -> None:
        """Compare the checkpoint with all that is to be filled on this rank."""
        given, report, team = self.options, self.report, self.team
        # Before the names are renamed and compared: ranks may have other names.
        source.on_rank(team.rank)
        self._filled = fill(self.extra, source.extra, "extra")
        self._own = own_values(source, team, given.per_rank, given.redeal)
        report.values += [*self._filled.problems, *self._own.problems]
        # Random states, ``extra`` and the fingerprint have no names of tensors.
        rename, self._given, self._source = given.rename, source, source
        if rename is not None:
            self._source = View(source, rename, optimizer=self.optim is not None)
        with within_limits(source.path):
            selection = self._selection(source)
            contents = contents_of(self.module, "load", inner=True)
            optims = optimizers_in(self.optim, "load")
            what = self._source, contents, selection, report
            copies, self._own_states = compare_model(*what, cast=given.cast)
            self._optims = optimizer_loads(*what, optims)
            if given.strict:
                report.require_empty(source)
            reads = [each.plan() for each in self._optims]
        self._copies = [*copies, *chain.from_iterable(reads)]
        if team.rank == 0:
            source.require_checksums()

    def _selection(self, source: Source) -> Selection:
        """Return the selection without tensors that this rank has no values for."""
        given, ranks = self.options, self.team.world_size
        selection = Selection.of(given.include, given.exclude, given.trainable_only)
        told, saved = matcher(given.local, "local"), source.local_ranks
        # ``on_rank`` has shown this rank's own values, and nothing is left to decide.
        if saved in (0, ranks):
            return selection
        names = source.local_tensors
        everything = [*source.model, *source.aliases, *names]
        new = renaming(given.rename or {}, everything)
        asked = [old for old in names if (n := new(old)) and selection.takes_names([n])]
        untold = sorted(old for old in asked if not told(old))
        if untold:
            self.report.local.append(
                f"{listed(map(quoted, untold))} were saved per rank "
                f"(SaveOptions.local) by {saved} ranks, and {ranks} load: pass "
                "LoadOptions(local=[..]) with their names, if rank r is to get what "
                "rank r saved, and ranks beyond the saved ones are to keep their own"
            )
        # A refused name, or a name without values here, is not missing as well.
        left = {old for old in asked if self.team.rank >= saved or not told(old)}
        return selection.without({str(new(old)) for old in left})

    def verify(self) -> None:
        """Verify the bytes that this rank reads, and fill memory that is new."""
        team, where = self.team, self._source.path
        # Damage must be found now: later, a failure leaves the model partly loaded.
        with within_limits(where):
            self._source.prepare(self._copies)
        asked = self.options.rng
        self._rng = self._given.rng(team.rank, team.world_size) if asked else None
        if self._rng is not None:
            set_rng_state(self._rng, where, is_trial=True)

    @torch.no_grad()
    def change(self) -> Any:
        """Copy all values on all ranks, or raise on all ranks; return ``extra``.

        Collective: one all-gather of objects over the team's group.
        """
        error: Exception | None = None
        # Few things can still fail: the disk, or an object's own method.
        try:
            self._source.finish(self._copies)
            self._give()
        except Exception as raised:
            error = CheckpointError(
                f"load failed when a part was loaded already ({type(raised).__name__}: "
                f"{raised}). The model is of no use now; load a checkpoint into it."
            )
            error.__cause__ = raised
        self.team.agree(error)
        # After the agreement: a load that raises leaves the caller's dict alone.
        if self.options.per_rank is not None:
            self.options.per_rank.update(self._own.value or {})
        # Values are read into the memory of the shards, past the version counters.
        for _, _, state in walk_states(self.module):
            state.initial.forget()
        return self._filled.value

    def _give(self) -> None:
        """Give all that is no tensor to its objects."""
        for module, name in self._own_states:
            module.set_extra_state(self._source.own_states[name])
        for each in self._optims:
            each.install()
        # After the optimizers: a scheduler may look at their options.
        self._filled.give()
        self._own.give()
        if self._rng is not None:
            set_rng_state(self._rng, self._source.path)
