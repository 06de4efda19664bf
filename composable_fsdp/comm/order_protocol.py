"""What an order log asks of the module that compares it with other ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol


class Comparison(Protocol):
    """Compares an order log with other ranks: ``comm.comparison``."""

    said: list[str]
    elsewhere: tuple[Any, ...]

    @property
    def peers(self) -> tuple[Any, ...]:
        """The ranks to compare with (``Peers``), per group."""

    def meet_after_tear(self, number: int, torn: dict[int, tuple[int, int]]) -> None:
        """Wait until every rank has abandoned the same rounds at the same uses."""

    def compare_begin(self, number: int, mode: Hashable) -> None:
        """Compare the begin of a round, which no rank could expect."""

    def depart_begin(
        self, number: int, mode: Hashable, *, other: str, wanted: Hashable
    ) -> None:
        """Compare the begin of a round that is not the expected begin."""

    def compare(self, number: int, index: int, use: object) -> None:
        """Compare a use of a round that all ranks record."""

    def depart(
        self, number: int, index: int, use: object, wanted: object, since: int
    ) -> None:
        """Compare a use that is not the recorded use ``wanted``."""

    def compare_round(self, number: int, uses: Sequence[object]) -> None:
        """Compare all uses of a round that has ended."""

    def clear(self, number: int, *, dropped: bool) -> None:
        """Remove what the round wrote to the store, once all ranks have ended it."""
