"""Makes a save or load end alike on all ranks: an error of a rank is raised everywhere.

A private gloo group keeps its exchanges apart from the collectives of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import group_timeout
from composable_fsdp.comm.meeting import Call, Failure, Outcome, meet
from composable_fsdp.comm.meshes import private_group
from composable_fsdp.errors import (
    CheckpointError,
    CollectiveError,
    DesyncError,
    FSDPError,
)
from composable_fsdp.storage.contents import mesh_groups_in, units_in
from composable_fsdp.storage.tensors import ranks_of


class SaveFuture(Future[None]):
    """The outcome of an asynchronous save; ``is_seen``: a caller has asked."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.is_seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end. Raises: the error of the save, or TimeoutError."""
        self.is_seen = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return the error of the save, or None."""
        self.is_seen = True
        return super().exception(timeout)


pending: dict[tuple[int, ...], SaveFuture] = {}
"""The last asynchronous save, by the global ranks of the team."""


def wait_for_pending(team: Team) -> str | None:
    """Wait for the last asynchronous save; return an error, "" for one that is seen."""
    # Not ``pop``: the call may raise another error first, and a later one this failure.
    future = pending.get(team.ranks)
    seen = future is not None and future.is_seen
    # Waits; ``is_seen`` does not change.
    error = None if future is None else Future.exception(future)
    if future is None or error is None:
        return None
    # Some errors come after the commit, and say so.
    text = error.args[0] if error.args else error
    told = f"The asynchronous save of {future.path} ended with an error. {text}"
    return "" if seen else told


def raise_unseen(team: Team, answers: list[str | None]) -> None:
    """Raise the failure of the previous save once, if no rank has seen it."""
    pending.pop(team.ranks, None)
    # All ranks have the same ``answers``, so all ranks decide alike.
    failures = [each for each in answers if each is not None]
    if failures and all(failures):
        raise CheckpointError(f"{failures[0]} This call did nothing; repeat it.")


class FirstError:
    """Keeps the first error of its blocks, which this rank tells the others later."""

    error: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        # Raised here, the other ranks would wait in the exchange for this rank.
        if isinstance(error, Exception):
            self.error = self.error or error
        return isinstance(error, Exception)


class Team:
    """The ranks of a save or load; ``group`` is None if there is a single rank."""

    __slots__ = ("group", "rank", "ranks", "world_size")

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: tuple[int, ...] = (0,)
    ) -> None:
        self.group, self.ranks = group, ranks
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()

    def beside(self, purpose: str) -> Team:
        """Return the ranks with a second gloo group, whose exchanges never mix."""
        if self.group is None:
            return self
        group = private_group(self.ranks, purpose, group_timeout(self.group))
        return Team(group, self.ranks)

    def agree(self, error: Exception | None, value: Any = None) -> list[Any]:
        """Return every rank's ``value`` in rank order, if no rank has an ``error``.

        Collective: one all-gather of objects over the group.
        """
        everyone = self.outcomes(error, value)
        self.raise_first([each.failure for each in everyone], error)
        return [each.value for each in everyone]

    def outcomes(
        self, error: Exception | None, value: Any = None, *, first: bool = False
    ) -> list[Outcome]:
        """Return every rank's error and ``value``; with ``first`` on rank 0 alone.

        Collective: one all-gather (``first``: gather) of objects over the group.
        """
        said = Outcome(self.failure_of(error), value)
        if self.group is None:
            return [said]
        send = collectives.gather_object if first else collectives.all_gather_object
        with _exchange(error):
            return send(said, self.group) or []

    def failure_of(self, error: Exception | None) -> Failure | None:
        """Return the failure of this rank, as other ranks receive the failure."""
        if isinstance(error, MemoryError):
            error = CheckpointError(
                "this process has no more memory for the checkpoint. Nothing was "
                "changed; free memory, or use more ranks."
            )
        elif isinstance(error, OSError):
            # The reason and the file, without the error number that ``str`` adds.
            told = f"{error.strerror or error}"
            name = f" ({error.filename})" if error.filename else ""
            error = CheckpointError(
                f"the checkpoint could not be accessed: {told}{name}."
            )
        return Failure.of(error, self.ranks[self.rank])

    def from_first(
        self, failures: Sequence[Failure | None], own: Exception | None
    ) -> None:
        """Broadcast ``failures`` from rank 0; raise the first on each rank."""
        if self.group is not None:
            with _exchange(own):
                failures = collectives.broadcast_object(list(failures), self.group)
        self.raise_first(failures, own)

    def raise_first(
        self, failures: Sequence[Failure | None], own: Exception | None
    ) -> None:
        """Raise the first failure, if any; on its rank, ``own`` becomes the cause."""
        failure = next(filter(None, failures), None)
        if failure is not None:
            # On the failing rank, too: the error has the same text on all ranks.
            is_own = failure.rank == self.ranks[self.rank]
            named = self.world_size > 1
            raise failure.rebuilt(named=named) from (own if is_own else None)


@contextmanager
def _exchange(own: Exception | None) -> Iterator[None]:
    """Raise ``own``, or CheckpointError, if a collective of the block breaks."""
    try:
        yield
    # torch raises ValueError for a group that was destroyed.
    except (RuntimeError, ValueError) as error:
        broke = isinstance(error, CollectiveError)
        if isinstance(error, FSDPError) and not broke:
            raise
        raise own or CheckpointError(
            "Another rank was lost, or the process group destroyed, before the ranks "
            f"agreed on a checkpoint ({error}). Nothing was committed unless the path "
            "is there now; verify(path) tells. Start the ranks again and load the last "
            "good checkpoint; call result() of async_save on every rank before "
            "destroy_process_group."
        ) from error


def _meshes(module: object) -> tuple[list[Any], list[dist.ProcessGroup], bool]:
    """Return the meshes of units, the groups of DTensors, and whether all ranks do."""
    if not isinstance(module, nn.Module):
        return [], [], True
    states = units_in(module)
    layouts = list({id(state.ranks): state.ranks for state in states}.values())
    others = mesh_groups_in(module, states)
    # Without an exchange: usually data and tensor parallelism take all ranks.
    is_world = not layouts
    for layout in layouts:
        count, found = layout.world_size, set(ranks_of(layout.shard))
        if layout.replicate is not None:
            found.update(ranks_of(layout.replicate))
        for group in others:
            ranks = ranks_of(group)
            # A dim inside of the ranks of the data adds no rank.
            if found.isdisjoint(set(ranks) - {dist.get_rank()}):
                count *= len(ranks)
                found.update(ranks)
        is_world |= count == dist.get_world_size()
    return layouts, others, is_world


def team_of(module: object, what: str, purpose: str = "checkpoint") -> Team:
    """Return all ranks over whose meshes ``module`` is sharded, once all call.

    Collective: at the first call the creation of the gloo group; in every call
        all-gathers of objects over the shard group and DTensors' meshes, if a mesh does
        not hold all ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Team(None)
    layouts, others, is_world = _meshes(module)
    # Groups in the store: a rank that is alone would wait to create the team's own. The
    # ranks of a smaller mesh know only their rows and columns, which meet in turn.
    pairs = chain.from_iterable((each.shard, each.replicate) for each in layouts)
    groups = [dist.group.WORLD] if is_world else [*pairs, *others]
    several = [group for group in groups if group is not None and group.size() > 1]
    way_out = f"Call {what} on every rank, outside of any 'if rank == 0'."
    wrong: TypeError | None = None
    if not isinstance(module, nn.Module):
        wrong = TypeError(f"expected a module, got a {type(module).__name__}.")
        way_out = f"This call will raise in any case: {wrong}"
    try:
        meet(dict.fromkeys(several), Call(what, way_out=way_out))
    except DesyncError as error:
        # To a rank without a module the others may never come.
        if wrong is None:
            raise
        raise wrong from error
    # A rank that is lost must not be waited for longer here than in training.
    timeout = min((group_timeout(each.shard) for each in layouts), default=None)
    ranks = set[int]()
    if is_world:
        ranks, layouts = set(range(dist.get_world_size())), []
    for layout in layouts:
        # Together, the replicate groups of all ranks in the shard group are the mesh.
        rows = [ranks_of(layout.shard)]
        if layout.replicate is not None:
            own = ranks_of(layout.replicate)
            rows = collectives.all_gather_object(own, layout.shard)
        ranks.update(*rows)
    # Each dim of a DTensor's mesh widens it; meshes are rectangles, alike on all ranks.
    if len(ranks) < dist.get_world_size():
        for group in others:
            ranks.update(*collectives.all_gather_object(sorted(ranks), group))
    members = tuple(sorted(ranks))
    return Team(private_group(members, purpose, timeout), members)
