"""Reads a checkpoint of any format into a model, sharded over any ranks.

::

    rank 0      look up the newest checkpoint in a directory
    all ranks   open, compare names | verify what this rank needs | agree | copy | agree

No tensor of the model changes before all ranks agree. After that, each rank
copies the slices that the rank holds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.names import Optimizers
from composable_fsdp.runtime.meta_values import unfilled_buffers
from composable_fsdp.storage.compare import LoadReport, compare_model
from composable_fsdp.storage.contents import (
    contents_of,
    optimizers_in,
    units_in,
)
from composable_fsdp.storage.directory import within_limits
from composable_fsdp.storage.load_optim import optimizer_loads
from composable_fsdp.storage.opening import Found, look_up, open_source
from composable_fsdp.storage.planned import (
    Planned,
    SharedReads,
    change,
    name_of,
    verify,
)
from composable_fsdp.storage.selection import (
    Patterns,
    Rename,
    RenamedSource,
    Selection,
    matcher,
    options_of,
    renaming,
)
from composable_fsdp.storage.source import Source
from composable_fsdp.storage.staging import paused_collection
from composable_fsdp.storage.stateful import Redeal, fill, own_values
from composable_fsdp.storage.team import Team, meet_team, team_of, wait_for_pending
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
    """Whether any difference raises. If False, ``load`` loads the matching tensors and
    lists the differences in ``report``, or in a warning without ``report``."""
    cast: bool = False
    """Also load tensors that were saved in another dtype, converted to the model's.
    False: another dtype is a difference."""
    rng: bool = True
    """Restore the random states. At another world size, rank r gets the random state
    that rank r saved, and ranks beyond the saved world size keep their own."""
    report: LoadReport | None = None
    """A report that ``load`` adds the differences to."""
    per_rank: dict[str, Any] | None = None
    """A dict that gets the values that this rank saved by ``per_rank``; objects in the
    dict are filled as those in ``extra``. None: these values are not read."""
    redeal: Redeal | None = None
    """A function that is called if the checkpoint was saved by another number of ranks,
    with the list of the values of all these ranks, this rank's number and the number of
    ranks; returns the values for ``per_rank``. None: another number of ranks is a
    difference, if ``per_rank`` is a dict."""
    include: Patterns = None
    """Patterns of the names to load, as those of ``save``, by the names in the model.
    All these must fit; other tensors of the model and of the checkpoint, with their
    optimizer state, are left alone. None: all names."""
    exclude: Patterns = None
    """Patterns of names to leave alone. None: no name."""
    trainable_only: bool = False
    """Leave buffers, extra states and frozen parameters of the model alone."""
    rename: Rename | None = None
    """The names in the model for those in the checkpoint: a dict of old to new
    prefixes, such as ``{"model": "backbone"}`` (``""`` is no prefix), or a function of
    a name that returns the new name, or None to leave the tensor out."""
    local: Patterns = None
    """Patterns of the names in the checkpoint, as ``include``, that were saved per rank
    (``SaveOptions.local``) and may come back at another world size: rank r gets the
    values that rank r saved, and ranks beyond the saved ones keep their own. None:
    another number of ranks is a difference."""
    share: bool | None = None
    """Whether ranks that hold the same elements (replicas of ``HYBRID_SHARD`` and
    ``NO_SHARD``; all ranks, of tensors in no unit) read an even part each and send it
    to the others; the same on every rank. None: if ``path`` is a URL."""


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

    The model may be sharded over any number of ranks, by any policy, through the
    wrapper or ``fully_shard``, or be a plain module. Each rank reads only the slices
    that the rank holds, and verifies the blocks of these slices first if the checkpoint
    is a native checkpoint. If ``load`` raises, no tensor has changed, unless the
    message says so.

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
    Collective: three all-gathers of objects on the private gloo group of ``save`` (one
    more for a model with an ``expert_mesh``, two more for each checkpoint that another
    job removes meanwhile, and with ``share`` two more, and broadcasts of values); all
    ranks of the module's mesh must call.
    Raises: CheckpointError, TypeError or PhaseError, the same on every rank.
    """
    meet_team(module, "load")
    team = team_of(module)
    # An asynchronous save of the same ranks may still be writing the checkpoint at
    # ``path``.
    before = wait_for_pending(team)
    others = other_experts(team, module)
    given, error = LoadOptions(), None
    try:
        given = options_of(options, LoadOptions, "load")
    except TypeError as raised:
        error = raised
    wanted = _Wanted(optim, extra, given, LoadReport(), others)
    loaded: tuple[Any] | None = None
    # The report of the last attempt counts: an attempt whose checkpoint was removed may
    # have compared a part of the names.
    try:
        for left in reversed(range(_ATTEMPTS)):
            found = look_up(team, path, before, given.share, error)
            wanted = wanted._replace(report=LoadReport())
            loaded = _attempt(team, found, module, wanted, retry=left > 0)
            if loaded is not None:
                break
    finally:
        if given.report is not None:
            given.report.add(wanted.report)
    assert loaded is not None
    if not given.strict and given.report is None:
        wanted.report.warn()
    # After the copy, which fills the persistent buffers.
    _tell_unfilled(module)
    return loaded[0]


_ATTEMPTS = 5
"""The number of times that a directory is looked up beside a job that removes."""


class _Wanted(NamedTuple):
    """Arguments of ``load``, and the report of an attempt."""

    optim: Optimizers | None
    extra: Any
    options: LoadOptions
    report: LoadReport
    others: frozenset[str]
    """The names of experts that other ranks hold."""


@paused_collection()
def _attempt(
    team: Team, found: Found, module: nn.Module, wanted: _Wanted, *, retry: bool
) -> tuple[Any] | None:
    """Load the checkpoint; return ``extra`` in a tuple, or None to look up another.

    Collective: two all-gathers of objects over the team's group (four if reads are
    shared, with broadcasts of values); one less before None.
    """
    error: Exception | None = None
    source: Source | None = None
    planned: Planned | None = None
    try:
        try:
            require_module(module, "load")
            given = found.what
            source = given if isinstance(given, Source) else open_source(given)
            planned = _planned(team, source, module, wanted)
            if found.share:
                is_local = source.local_ranks > 0
                planned.shared = SharedReads(team, planned.copies, is_local=is_local)
        except Exception as raised:
            error = raised
        error = (
            verify(team, planned, share=found.share, rng=wanted.options.rng) or error
        )
        gone = retry and error is not None and found.is_gone()
        opened = () if source is None else _identity(source)
        # Every rank takes part, also a rank with an error, so that no other rank waits.
        everyone = team.outcomes(error, (opened, gone))
        if any(each.value[1] for each in everyone):
            return None
        team.raise_first([each.failure for each in everyone], error)
        _require_same(team.ranks, [each.value[0] for each in everyone])
        assert planned is not None
        # From here on, tensors of the model and the optimizer are overwritten.
        change(team, planned)
        filled, own = planned.objects
        # After the agreement: a load that raises leaves the caller's dict alone.
        if wanted.options.per_rank is not None:
            wanted.options.per_rank.update(own.value or {})
        # Values are read into the memory of the shards, past the version counters.
        for _, _, state_of_unit in walk_states(module):
            state_of_unit.initial.forget()
        return (filled.value,)
    finally:
        # The caller of ``load`` closes a source that the caller has opened.
        if source is not None and source is not found.what:
            source.close()


def _of_ranks(source: Source, team: Team, wanted: _Wanted) -> Selection:
    """Return the selection without the tensors that this rank has no values for."""
    given = wanted.options
    selection = Selection.of(given.include, given.exclude, given.trainable_only)
    rename, told = given.rename, matcher(given.local, "local")
    saved = source.local_ranks
    # ``on_rank`` has shown this rank's own values, and nothing is left to decide.
    if saved in (0, team.world_size):
        return selection
    names = [*source.local_tensors, *source.local_states]
    if rename is not None:
        new = renaming(rename, [*source.model, *source.aliases, *names])
        pairs = [(name, new(name)) for name in names]
    else:
        pairs = [(name, name) for name in names]
    asked = [(old, n) for old, n in pairs if n and selection.takes_names([n])]
    untold = sorted(old for old, _ in asked if not told(old))
    if untold:
        wanted.report.local.append(other_ranks_text(untold, saved, team.world_size))
    # A refused name, or a name without values here, is not missing as well.
    beyond = team.rank >= saved
    left = {
        n
        for old, n in asked
        if old in source.local_tensors and (beyond or not told(old))
    }
    return selection.without(left)


def _planned(team: Team, source: Source, module: nn.Module, wanted: _Wanted) -> Planned:
    """Compare the checkpoint with all that is to be filled on this rank."""
    # Before the names are renamed and compared: ranks may have other names.
    source.on_rank(team.rank)
    # Only compared here; ``_change`` gives the states.
    filled = fill(wanted.extra, source.extra, "extra")
    own = own_values(source, team, wanted.options.per_rank, wanted.options.redeal)
    wanted.report.values += [*filled.problems, *own.problems]
    # Random states, ``extra`` and the fingerprint have no names of tensors.
    rename = wanted.options.rename
    shown = source if rename is None else RenamedSource(source, rename)
    with within_limits(name_of(source)):
        selection = _of_ranks(source, team, wanted).without(wanted.others)
        planned = _prepare(shown, module, wanted, selection)
    # Formats with a checksum per file: a read by each rank would cost more, and the
    # error of rank 0 reaches the other ranks in the next exchange.
    if team.rank == 0:
        source.require_checksums()
    planned.objects = [filled, own]
    return planned


def _prepare(
    source: Source, module: nn.Module, wanted: _Wanted, selection: Selection
) -> Planned:
    """Compare the checkpoint with model and optimizers, and list what to read."""
    contents = contents_of(module, "load", inner=True)
    report, optims = wanted.report, optimizers_in(wanted.optim, "load")
    chosen, leaves_out = selection.of_contents(contents), selection.leaves_out(contents)
    fit = compare_model(source, chosen, report, leaves_out, cast=wanted.options.cast)
    loads = optimizer_loads(source, contents, optims, report, selection)
    if wanted.options.strict:
        report.require_empty(source)
    fit.require_writable()
    copies = [*fit.copies, *(copy for each in loads for copy in each.plan())]
    return Planned(fit, loads, copies)


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


def _identity(source: Source) -> tuple[str, str]:
    """Return the checkpoint's fingerprint (equal only for equal content) and path."""
    return source.fingerprint, str(getattr(source, "path", ""))


def _require_same(ranks: Sequence[int], opened: list[Any]) -> None:
    """Raise CheckpointError if the ranks have opened different checkpoints."""
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


def other_experts(team: Team, module: object) -> frozenset[str]:
    """Return the names of experts that other ranks hold, and this rank does not.

    Collective: an all-gather of objects over the team's group, if a unit has an
    ``expert_mesh``; else none. Meshes are alike on all ranks.
    """
    states = units_in(module) if isinstance(module, nn.Module) else []
    if all(state.handle.groups.experts_ref is None for state in states):
        return frozenset()
    own: list[str] = []
    error: Exception | None = None
    try:
        assert isinstance(module, nn.Module)
        contents = contents_of(module, "load", inner=True)
        # All names of a tied parameter: the file may have any.
        own = [name for held in contents.each() for name in held.names]
    except Exception as raised:
        error = raised
    # Also with an error, because the other ranks wait here.
    everyone = team.agree(error, own)
    return frozenset(name for each in everyone for name in each) - frozenset(own)


def other_ranks_text(names: Sequence[str], saved: int, loading: int) -> str:
    """Return the difference of a load of single ranks' values at another world size."""
    return (
        f"{listed(map(quoted, names))} were saved per rank (SaveOptions.local) by "
        f"{saved} ranks, and {loading} load: pass LoadOptions(local=[..]) with their "
        "names, if rank r is to get what rank r saved, and ranks beyond the saved ones "
        "are to keep their own"
    )
