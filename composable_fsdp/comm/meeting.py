"""Calls that all ranks of a group have to make together.

``if rank == 0: save(...)`` would send on one rank: its collective pairs with the next
collective of the other ranks. So such a call meets the other ranks before it sends
(``features.guard.meetings``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist

MEETS: list[Callable[..., None]] = []
"""What ``meet`` calls, with its arguments; ``features.defaults`` fills the list."""


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
