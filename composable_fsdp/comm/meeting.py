"""Calls that all ranks of a group have to make together, and their outcomes.

A call on one rank alone would pair its collective with another one of the other ranks.
So it meets them before it sends (``features.guard.meetings``), and a rank that raises
tells those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.errors import CheckpointError, CollectiveError, FSDPError

MEETS: list[Callable[..., None]] = []
"""What ``meet`` calls, with its arguments; ``features.defaults`` fills the list."""


class Call(NamedTuple):
    """A call that all ranks of a group have to make together."""

    name: str
    of: str = ""
    """The module or unit that the call is about; empty if there is none."""
    details: tuple[str | int, ...] = ()
    """What else has to be equal on all ranks: arguments that decide collectives."""
    way_out: str = "Every rank has to make this call, with equal arguments."
    """Last sentences of an error, for a rank that is alone; not compared."""

    @property
    def story(self) -> str:
        """The call in words."""
        inside = ", ".join(map(str, self.details))
        return f"{self.name}({inside})" + (f" of {self.of}" if self.of else "")


def meet(
    groups: Iterable[dist.ProcessGroup], call: Call, *, always: bool = True
) -> None:
    """Wait until every rank of each group makes an equal ``call``.

    Raises: DesyncError, if a rank makes another call, or none within the time limit.
    """
    for each in MEETS:
        each(groups, call, always=always)


class Failure(NamedTuple):
    """An error in the form in which other ranks receive the error."""

    kind: type[Exception]
    text: str
    rank: int

    @classmethod
    def of(cls, error: Exception | None, rank: int) -> Failure | None:
        """Return the failure of the global rank ``rank``; None without an ``error``."""
        if error is None:
            return None
        kind, text = type(error), str(error)
        # A class of a user or of another library may need other arguments, or may not
        # be importable where the message arrives.
        is_ours = kind.__module__ == FSDPError.__module__
        if kind is TypeError or (is_ours and kind is not CollectiveError):
            # ``str`` appends the rank of our errors, and ``rebuilt`` names it itself.
            return cls(kind, str(error.args[0]) if error.args else text, rank)
        return cls(CheckpointError, f"{kind.__name__}: {text}", rank)

    def rebuilt(self, *, named: bool = True) -> Exception:
        """Return the error for this rank; ``named``: the text begins with the rank."""
        return self.kind(f"On rank {self.rank}: {self.text}" if named else self.text)


class Outcome(NamedTuple):
    """The message of a rank in ``exchange``."""

    failure: Failure | None
    value: Any


def exchange(
    error: Exception | None, value: object, group: dist.ProcessGroup
) -> list[Outcome]:
    """Return every rank's outcome in rank order, by an all-gather of objects."""
    said = Outcome(Failure.of(error, dist.get_rank()), value)
    return collectives.all_gather_object(said, group)


@contextmanager
def raise_on_all_ranks(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """If the block raises, send the error to the ranks that wait in ``exchange``."""
    try:
        yield
    # Not BaseException: after Ctrl-C a rank must not wait in an exchange.
    except Exception as error:
        for group in groups:
            exchange(error, None, group)
        raise


@contextmanager
def require_success_on_all_ranks(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """If the block raises on any rank, raise on all that ``groups`` reach in turn.

    Collective: one all-gather of objects over each of ``groups``.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    # The result over the first group is what this rank tells in the next, so that a
    # failure crosses from a shard group to all replicas.
    told = Failure.of(own, dist.get_rank()) if groups else None
    for group in groups:
        everyone = collectives.all_gather_object(told, group)
        told = next(filter(None, everyone), None)
    # This rank's own error has its traceback, and goes before that of an earlier rank.
    if own is not None:
        raise own
    if told is not None:
        raise told.rebuilt()


def send_failure(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Tell the ranks in ``failed_rank`` that this one raised, and do not wait."""
    for group in groups:
        # async_op: this rank's exception is raised at once, whatever the others do.
        flag = torch.tensor([dist.get_rank() + 1], dtype=torch.int32, device=device)
        sent = collectives.all_reduce(flag, group, maximum=True, async_op=True)
        assert sent is not None
        sent.detach()


def failed_rank(
    groups: Sequence[dist.ProcessGroup], device: torch.device
) -> int | None:
    """Return the largest global rank of ``groups`` that raised, or None.

    Collective: an all-reduce of an integer over each of ``groups``, in order.
    """
    if not groups:
        return None
    # On the compute device, because NCCL sends no CPU tensors.
    worst = torch.zeros(1, dtype=torch.int32, device=device)
    for group in groups:
        collectives.all_reduce(worst, group, maximum=True)
    # item() waits for the slowest rank of the groups. The number is the rank + 1, so
    # that 0 means that no rank raised.
    number = int(worst.item())
    return number - 1 if number else None
