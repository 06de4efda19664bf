"""Makes a save or load end alike on all ranks: an error of a rank is raised everywhere.

The ranks of a save or load are the ranks of the model's mesh. They exchange objects
over a private gloo group, which the first save or load makes. So checkpoint exchanges
never mix with the collectives of training, and use no tensor in GPU memory. The
exception is ``team_of``: for a 2-D mesh of some ranks only, ``team_of`` gathers over
the shard group itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import NOTICE_AFTER
from composable_fsdp.comm.nodes import private_group
from composable_fsdp.errors import CheckpointError, FSDPError, PhaseError
from composable_fsdp.storage.contents import units_in

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointError, PhaseError, TypeError)
}
"""Errors that keep their class on other ranks; all others become CheckpointError."""


class Team:
    """The ranks of a save or load; ``group`` is None if there is a single rank.

    ``rank`` is this rank's number in the group, ``ranks`` are the global ranks of all.
    """

    __slots__ = ("group", "rank", "ranks", "world_size")

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: tuple[int, ...] = (0,)
    ) -> None:
        self.group, self.ranks = group, ranks
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()

    def agree(self, error: Exception | None, value: Any = None) -> list[Any]:
        """Return every rank's ``value`` in rank order, if no rank has an ``error``.

        Collective: one all-gather of objects over the group; all ranks of the group
        must call.
        Raises: the error of the first rank that has an error, the same on every rank.
        """
        said = (_described(error), value)
        everyone = [said]
        if self.group is not None:
            with _Exchange(error):
                everyone = collectives.all_gather_object(said, self.group)
        _raise_first([text for text, _ in everyone], self.rank, error)
        return [value for _, value in everyone]

    def to_first(self, error: Exception | None, value: Any) -> list[tuple[Any, Any]]:
        """Return on rank 0 every rank's (error, value); return an empty list elsewhere.

        Collective: one gather of objects over the group; all ranks of the group must
        call.
        """
        said = (_described(error), value)
        if self.group is None:
            return [said]
        with _Exchange(error):
            return collectives.gather_object(said, self.group) or []

    @staticmethod
    def describe(error: Exception | None) -> tuple[str, str] | None:
        """Return the class name and the text of ``error``, or None."""
        return _described(error)

    def from_first(self, errors: Sequence[Any], own: Exception | None) -> None:
        """Send ``errors`` from rank 0 to all ranks, and raise the first error on each.

        ``errors`` is the list of errors that ``to_first`` returned, by rank; the value
        of rank 0 is used. ``own`` is this rank's error, the cause of an entry of
        ``errors``.

        Collective: one broadcast of objects over the group; all ranks of the group must
        call.
        Raises: the first error, the same on every rank.
        """
        if self.group is not None:
            with _Exchange(own):
                errors = collectives.broadcast_object(list(errors), self.group)
        _raise_first(errors, self.rank, own)


class _Exchange:
    """A context around a collective that waits for the other ranks of a checkpoint.

    ``own`` is this rank's error, which the collective tells the other ranks. If the
    wait gets long, a warning shows ``own`` on this rank. If the collective breaks, the
    context raises CheckpointError (or ``own``) instead of torch's error.
    """

    def __init__(self, own: Exception | None) -> None:
        self._own = own
        # The other ranks may never come, for example if only this rank has called
        # ``save``. Without the warning, the user would see a hang and not the error.
        text = f"Waiting for the other ranks of a checkpoint to tell them: {own}"
        self._timer = threading.Timer(NOTICE_AFTER, warnings.warn, [text])
        # A waiting timer must not keep the interpreter alive at exit.
        self._timer.daemon = True

    def __enter__(self) -> None:
        if self._own is not None:
            self._timer.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        # torch raises ValueError for a group that was destroyed.
        kinds = (RuntimeError, ValueError)
        if isinstance(error, kinds) and not isinstance(error, FSDPError):
            raise self._own or CheckpointError(
                "Another rank was lost, or the process group destroyed, while the "
                f"ranks agreed on a checkpoint ({error}). Nothing was committed unless "
                "the path is there now; verify(path) tells. Start the ranks again and "
                "load the last good checkpoint."
            ) from error


def _described(error: Exception | None) -> tuple[str, str] | None:
    """Return the class name and the text of an error, as sent to other ranks."""
    if error is None:
        return None
    text = str(error.args[0]) if isinstance(error, FSDPError) and error.args else ""
    if isinstance(error, OSError):
        name = f" ({error.filename})" if error.filename else ""
        # The reason and the file, without the error number that ``str`` adds.
        text = f"{error.strerror or error}{name}"
        return "CheckpointError", f"the checkpoint could not be accessed: {text}."
    kind = type(error).__name__
    if kind not in _KINDS:
        return "CheckpointError", f"{kind}: {text or error}"
    return kind, text or str(error)


def _raise_first(
    errors: Sequence[tuple[str, str] | None], rank: int, own: Exception | None
) -> None:
    """Raise the first error of ``errors``; on ``rank``, ``own`` becomes the cause."""
    for other, error in enumerate(errors):
        if error is None:
            continue
        kind, text = error
        # The rank's number in the team, which may differ from the global rank.
        if len(errors) > 1:
            text = f"On rank {other}: {text}"
        raise _KINDS[kind](text) from (own if other == rank else None)


def team_of(module: object, purpose: str = "checkpoint") -> Team:
    """Return all ranks over whose meshes the units in ``module`` are sharded.

    A module without units belongs to all ranks of the default group. For an object that
    is no module, the team is also all ranks: only there can the other ranks learn of
    the error. ``purpose`` separates groups that must not share collectives.

    Collective: for each mesh that has a replicate group and does not hold all ranks, an
    all-gather of objects over the shard group, in every call; at the first call with
    these ranks, the creation of the gloo group. None for a mesh of all ranks after the
    first call.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Team(None)
    problem, states = None, []
    if isinstance(module, nn.Module):
        states = units_in(module)
    else:
        problem = TypeError(f"expected a module, got a {type(module).__name__}.")
    ranks: set[int] = set() if states else set(range(dist.get_world_size()))
    for layout in {id(state.ranks): state.ranks for state in states}.values():
        # The usual case needs no exchange: the mesh holds all ranks.
        if layout.world_size == dist.get_world_size():
            ranks = set(range(layout.world_size))
            break
        shard, replicate = layout.shard, layout.replicate
        if replicate is None:
            ranks |= set(dist.get_process_group_ranks(shard))
            continue
        # A rank knows only the members of this rank's shard and replicate group. The
        # replicate groups of all ranks in the shard group together are the mesh.
        column = dist.get_process_group_ranks(replicate)
        for found in collectives.all_gather_object(column, shard):
            ranks |= set(found)
    members = tuple(sorted(ranks))
    # Making the group waits for all ranks of the group.
    with _Exchange(problem):
        return Team(private_group(members, purpose), members)
