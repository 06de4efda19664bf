"""One outcome for all ranks: who takes part, and what any of them has to say.

The ranks of a save or load are those of the model's mesh. They talk on a gloo group of
their own, made at the first one, so nothing mixes with the collectives of training and
no tensor of a GPU is involved.
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


class Team:
    """The ranks of one save or load; ``group`` is None if there is one rank.

    ``ranks`` are their global ranks.
    """

    __slots__ = ("group", "rank", "ranks", "world_size")

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: tuple[int, ...] = (0,)
    ) -> None:
        self.group, self.ranks = group, ranks
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()

    def agree(self, error: Exception | None, value: Any = None) -> list[Any]:
        """Return every rank's ``value``, if none has an ``error``.

        Collective: one gather of objects over the group; all its ranks must call.
        Raises: the first rank's error, the same on every rank.
        """
        said = (_described(error), value)
        everyone = [said]
        if self.group is not None:
            with _Exchange(error):
                everyone = collectives.all_gather_object(said, self.group)
        _raise_first([text for text, _ in everyone], self.rank, error)
        return [value for _, value in everyone]

    def to_first(self, error: Exception | None, value: Any) -> list[tuple[Any, Any]]:
        """On rank 0 what every rank said, as (error, value); nothing elsewhere.

        Collective: one gather of objects over the group.
        """
        said = (_described(error), value)
        if self.group is None:
            return [said]
        with _Exchange(error):
            return collectives.gather_object(said, self.group) or []

    @staticmethod
    def describe(error: Exception | None) -> tuple[str, str] | None:
        """An error as ``from_first`` takes it."""
        return _described(error)

    def from_first(self, errors: Sequence[Any], own: Exception | None) -> None:
        """Let rank 0 say how it went: ``errors`` as ``to_first`` gave them.

        ``own`` is this rank's error, which caused one of them.

        Collective: one broadcast of objects over the group.
        Raises: the first error, the same on every rank.
        """
        if self.group is not None:
            with _Exchange(own):
                errors = collectives.broadcast_object(list(errors), self.group)
        _raise_first(errors, self.rank, own)


class _Exchange:
    """Around what waits for other ranks, and what this one has to tell them, ``own``.

    Says ``own`` here when the wait gets long: they may never come, as when one rank
    alone has called. Turns a collective that broke into an error that says what is
    known.
    """

    def __init__(self, own: Exception | None) -> None:
        self._own = own
        text = f"Waiting for the other ranks of a checkpoint to tell them: {own}"
        self._timer = threading.Timer(NOTICE_AFTER, warnings.warn, [text])
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
    """Kind and text, as it crosses to other ranks."""
    if error is None:
        return None
    text = str(error.args[0]) if isinstance(error, FSDPError) and error.args else ""
    if isinstance(error, OSError):
        name = f" ({error.filename})" if error.filename else ""
        text = f"{error.strerror or error}{name}"
        return "CheckpointError", f"the checkpoint could not be accessed: {text}."
    kind = type(error).__name__
    if kind not in _KINDS:
        return "CheckpointError", f"{kind}: {text or error}"
    return kind, text or str(error)


def _raise_first(
    errors: Sequence[tuple[str, str] | None], rank: int, own: Exception | None
) -> None:
    for other, error in enumerate(errors):
        if error is None:
            continue
        kind, text = error
        if len(errors) > 1:
            text = f"On rank {other}: {text}"
        raise _KINDS[kind](text) from (own if other == rank else None)


def team_of(module: object, purpose: str = "checkpoint") -> Team:
    """The ranks over whose mesh the units in ``module`` are sharded, all of them.

    A module without units is everyone's: all ranks of the default group. So is what is
    no module at all, which the other ranks can only be told there. ``purpose`` keeps
    groups apart that must not share collectives.

    Collective: at the first call with these ranks one object gather per unusual mesh,
    and the making of the group; later none.
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
        if layout.world_size == dist.get_world_size():
            ranks = set(range(layout.world_size))
            break
        shard, replicate = layout.shard, layout.replicate
        if replicate is None:
            ranks |= set(dist.get_process_group_ranks(shard))
            continue
        column = dist.get_process_group_ranks(replicate)
        for found in collectives.all_gather_object(column, shard):
            ranks |= set(found)
    members = tuple(sorted(ranks))
    with _Exchange(problem):
        return Team(private_group(members, purpose), members)
