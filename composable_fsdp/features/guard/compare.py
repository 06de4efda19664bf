"""Ranks compare facts: digests first, and the facts only if digests differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist

from composable_fsdp.comm import collectives
from composable_fsdp.errors import DesyncError
from composable_fsdp.naming import by_value, ranks_by_value, ranks_text

SAME_CALLS = (
    "Make the same calls in the same order, with equal arguments, on every rank."
)


class Announcement(NamedTuple):
    """What a rank comes to a meeting with."""

    does: str  # a predicate, for the error of ranks that do something else
    way_out: str  # the last sentences of an error
    place: tuple[str, ...] = ()  # in the order of units; empty for a call of the user
    facts: object = None  # what is compared besides the place; ``does`` if None

    def alone(self, why: str) -> DesyncError:
        """Return the error of this rank, which gives up because of ``why``."""
        opening = f"In {self.place[0]}, this" if self.place else "This"
        why = f"{why[:1].upper()}{why[1:].rstrip('.')}"
        return DesyncError(f"{opening} rank {self.does}. {why}. {self.way_out}")


def tag_of(facts: object) -> int:
    """Return 63 bits (tags are signed) that are equal on ranks with equal facts."""
    # ``hash`` differs from rank to rank; ``repr`` takes a quarter of the time of JSON.
    text = repr(facts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def gather(facts: object, route: Iterable[dist.ProcessGroup]) -> dict[int, Any]:
    """Return the facts of all ranks by global rank, by all-gathers of objects."""
    told = [(dist.get_rank(), facts)]
    for group in route:
        told = list(chain(*collectives.all_gather_object(told, group)))
    return dict(told)


def first_difference(
    facts: Mapping[int, Mapping[Any, tuple[str, str]]],
) -> str | None:
    """Return the first fact in which ranks differ, in words; None if there is none.

    ``facts``: by rank and by sortable key, what the fact is about and its value.

    >>> first_difference({0: {1: ("the size", "2")}, 1: {1: ("the size", "3")}, 2: {}})
    'the size: 2 on rank 0, 3 on rank 1, nothing on rank 2'
    """
    for key in sorted(set().union(*facts.values())):
        what = next(each[key][0] for each in facts.values() if key in each)
        values = {r: e.get(key, ("", "nothing"))[1] for r, e in facts.items()}
        if len(set(values.values())) > 1:
            return f"{what}: {by_value(values)}"
    return None


def who_does(texts: Mapping[int, str]) -> str:
    """Return which ranks do what, in words.

    >>> who_does({0: "is in save()", 1: "is in load()", 2: "is in load()"})
    'rank 0 is in save(); each of ranks 1-2 is in load()'
    """
    return "; ".join(
        f"{'each of ' if len(ranks) > 1 else ''}{ranks_text(ranks)} {text}"
        for text, ranks in ranks_by_value(texts).items()
    )


def disagreement(
    told: Mapping[int, str], places: Mapping[int, tuple[str, ...]], way_out: str
) -> str:
    """Return the error of ranks that do different things, at the same place or not."""
    common = len(set(places.values())) == 1 and next(iter(places.values()))
    if not common:
        where = {r: " in " + " of ".join(each) for r, each in places.items() if each}
        told = {rank: text + where.get(rank, "") for rank, text in told.items()}
    at = f" in {common[0]}" if common else ""
    return f"Ranks disagree{at}: {who_does(told)}. {way_out if common else SAME_CALLS}"


def never_meet(predicates: Mapping[int, str]) -> str:
    """Return what ranks that wait for each other do.

    >>> never_meet({1: "is in save()", 0: "is in the all-gather of blocks.3"})[:69]
    'Rank 0 is in the all-gather of blocks.3; rank 1 is in save(). They wi'
    """
    told = who_does(predicates)
    return f"{told[:1].upper()}{told[1:]}. They will never meet."
