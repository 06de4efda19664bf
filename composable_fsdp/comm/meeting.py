"""Calls that all ranks of a group have to make together.

``if rank == 0: save(...)`` would send on one rank: its collective pairs with the next
collective of the other ranks. So such a call meets the other ranks before it sends
(``features.guard.meetings``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from composable_fsdp.naming import ranks_text

MEETS: list[Callable[..., None]] = []
"""What ``meet`` calls, with its arguments; ``features.defaults`` fills the list."""


class Announcement(NamedTuple):
    """What a rank comes to a meeting with."""

    told: str
    """What the rank does, for the error of ranks that do something else."""
    predicate: str
    """What the rank does while it waits."""
    opening: str
    """The begin of this rank's error if the others do not come."""
    way_out: str
    """The last sentences of an error."""
    place: tuple[str, ...] = ()
    """Where in the order of units; empty for a call of the user."""
    facts: object = None
    """What else is compared."""

    def alone(self, why: str) -> str:
        """Return the error of this rank, which gives up because of ``why``."""
        is_whole = self.opening.endswith(".")
        if "never meet" in why:  # with a way out of its own
            return f"{self.opening} {why}." if is_whole else f"{why}."
        why = f"{why[:1].upper()}{why[1:]}" if is_whole else why
        return f"{self.opening} {why}. {self.way_out}"


class Call(NamedTuple):
    """A call that all ranks of a group have to make together."""

    name: str
    """The function that the user called."""
    of: str = ""
    """The module or unit that the call is about; empty if there is none."""
    details: tuple[str | int, ...] = ()
    """What else has to be equal on all ranks: arguments that decide collectives."""
    way_out: str = "Every rank has to make this call, with equal arguments."
    """Last sentences of an error, for a rank that is alone; not compared."""

    @property
    def story(self) -> str:
        """The call in words.

        >>> Call("unshard_params", "TinyGPT", ("writeback=True",)).story
        'unshard_params(writeback=True) of TinyGPT'
        """
        inside = ", ".join(map(str, self.details))
        return f"{self.name}({inside})" + (f" of {self.of}" if self.of else "")

    @property
    def announced(self) -> Announcement:
        """The call as this rank announces it."""
        story = self.story
        opening = f"{story} was called on this rank, and"
        return Announcement(f"calls {story}", f"is in {story}", opening, self.way_out)


def who_does(texts: Mapping[int, str]) -> str:
    """Return which ranks do what, in words.

    >>> who_does({0: "calls save()", 1: "calls load()", 2: "calls load()"})
    'rank 0 calls save(); each of ranks 1-2 calls load()'
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"{'each of ' if len(each) > 1 else ''}{ranks_text(each)} {text}"
        for text, each in ranks.items()
    )


def meet(
    groups: Iterable[dist.ProcessGroup], call: Call, *, always: bool = True
) -> None:
    """Wait until every rank of each group makes an equal ``call``.

    Three round trips to the store per group, or none if ``always`` is False and the
    call is expected.

    Raises: DesyncError, if another rank makes another call, or no call within the time
    limit.
    """
    for each in MEETS:
        each(groups, call, always=always)
