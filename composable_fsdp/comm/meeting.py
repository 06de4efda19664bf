"""Calls that all ranks of a group have to make together.

``if rank == 0: save(...)`` would send on one rank: its collective pairs with the next
collective of the other ranks. So such a call meets the other ranks before it sends
(``features.guard.meetings``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from composable_fsdp.naming import ranks_named

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

    @property
    def told(self) -> str:
        """The call, for ranks that make another one."""
        return f"calls {self.story}"

    @property
    def facts(self) -> None:
        """Nothing that ``told`` does not say."""

    @property
    def predicate(self) -> str:
        """The call, for ranks that wait for this one."""
        return f"is in {self.story}"

    def alone(self, why: str) -> str:
        """Return the error of this rank if the others do not come."""
        return alone_text(
            f"{self.story} was called on this rank, and", why, self.way_out
        )

    def unlike(self, here: Mapping[int, tuple[str, Any]]) -> str:
        """Return the error for the ranks that are ``here``, by what each does."""
        return unlike_text(here)


def alone_text(story: str, why: str, way_out: str) -> str:
    """Return the error of a rank that gives up: ``story``, then ``why``."""
    if not story.endswith("."):
        return f"{why}." if "never meet" in why else f"{story} {why}. {way_out}"
    why = f"{why[:1].upper()}{why[1:]}."
    return f"{story} {why}" if "never meet" in why else f"{story} {why} {way_out}"


def unlike_text(here: Mapping[int, tuple[str, Any]]) -> str:
    """Return the error for the ranks that are ``here``, by what each does."""
    ranks: dict[str, list[int]] = {}
    for rank, (told, _) in sorted(here.items()):
        ranks.setdefault(told, []).append(rank)
    calls = "; ".join(
        f"{'each of ' if len(each) > 1 else ''}{ranks_named(each)} {told}"
        for told, each in ranks.items()
    )
    return (
        f"Ranks make different calls, and each needs all ranks: {calls}. Nothing "
        "was sent, and no value was changed. Make the same calls in the same "
        "order, with equal arguments, on every rank."
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
