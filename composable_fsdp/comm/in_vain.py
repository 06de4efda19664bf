"""Which ranks a rank waits for in vain, by the positions that the ranks told.

::

    the other rank                                   this rank waits for it
    has ended                                        in vain
    waits in an operation that this rank has not     in vain, in whatever group of both
    issued, and will not before the other comes
    waits in a collective of torch over a group of   in vain
    which it has issued more (``torch_waits``)
    anything else                                    for a rank that is late
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from composable_fsdp.comm import torch_waits
from composable_fsdp.comm.hang_report import Position
from composable_fsdp.comm.operations import UNEVEN, OperationRecord
from composable_fsdp.naming import listed

# An operation that completes only if every rank takes part. A broadcast is none of
# them: a rank may have sent its part and left.
_NEEDS_ALL = {
    "all_gather",
    "all_gather_digests",
    "all_gather_object",
    "all_gather_tag",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
}
_FRESH = 10.0
"""Seconds in which a position about a wait inside of torch counts."""


def words_in_vain(
    positions: Iterable[Position], group: str, own: Mapping[str, int], slow: float
) -> list[str]:
    """Return why a rank that waits in the store, or here, waits in vain for others.

    Args:
        positions: those of the missing ranks.
        group: the name of the group whose ranks are waited for.
        own: the number of operations of this rank, by name of the group.
        slow: the seconds of a wait from which a position counts.

    Returns: a text per rank; empty if all may be late. Collective: none.
    """
    words, rest = [], []
    for position in positions:
        # Younger waits may end by themselves: the ranks tell positions once a second.
        stuck = [
            name
            for name, (_, title, number, op, waited) in position.groups.items()
            if title is not None and number > own.get(name, number)
            if op in _NEEDS_ALL and waited > slow
        ]
        # An ended program cannot come, whatever else its last position says.
        if position.has_ended:
            words.append(position.told(group))
        # In the group of this wait the reader can compare the numbers of operations.
        elif stuck:
            words.append(position.told(group if group in stuck else stuck[0]))
        else:
            rest.append(position)
    stuck_there = [
        each
        for each in rest
        if each.torch_wait is not None
        if torch_waits.TorchWait(*each.torch_wait).seconds > slow
    ]
    issued = torch_waits.issued() if stuck_there else {}
    return words + _words_in_torch(stuck_there, group, issued)


def _words_in_torch(
    positions: Iterable[Position], group: str, issued: dict[str, int]
) -> list[str]:
    """Return which ranks wait for this rank in a collective of torch.

    Args:
        positions: those of ranks for which this rank waits, and which wait in torch.
        group: the name of the group in which this rank waits.
        issued: the collectives of torch that this rank has issued (``torch_waits``).

    Returns: a text per rank. Collective: none.
    """
    words = []
    for position in positions:
        wait = torch_waits.TorchWait(*position.torch_wait)
        # An old position may be about another wait, which has ended.
        over = wait.needs(issued) if time.time() - position.at < _FRESH else ""
        if over:
            name = over.partition("@")[0]
            words.append(f"{position.told(group)} over process group {name!r}")
    return words


def left_text(record: OperationRecord, rank: int, text: str) -> str:
    """Return the verdict for a rank that waits in vain for a rank that has raised.

    Args:
        record: the operation in which this rank waits.
        rank: the rank that has raised.
        text: its error.

    Returns: the text. Collective: none.
    """
    return (
        f"{record.title} waits in vain: rank {rank} has left the order and will not "
        f"take part. Rank {rank} says: {text}"
    )


def cycle_text(record: OperationRecord, words: Sequence[str]) -> str:
    """Return the verdict for a rank for which others wait elsewhere."""
    uneven = f" {UNEVEN}" if record.phase == "forward" else ""
    return (
        f"{record.title} waits in vain: {listed(words, '; ')}, and this rank cannot "
        f"come there while it waits here. Make the same calls in the same order on "
        f"every rank.{uneven}"
    )
