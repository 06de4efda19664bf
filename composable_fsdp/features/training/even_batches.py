"""Batches for ranks whose loaders end at different times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Literal, NoReturn, TypeVar, get_args

import torch
from torch import Tensor, nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.operations import Operation, begin
from composable_fsdp.errors import DesyncError
from composable_fsdp.storage.team import Team, team_of
from composable_fsdp.tree.traversal import require_module

T = TypeVar("T")

Policy = Literal["shortest", "pad", "error"]


def even_batches(
    loader: Iterable[T], module: nn.Module, *, policy: Policy = "shortest"
) -> Iterator[tuple[T, float]]:
    """Iterate over the batches of this rank, as many times as every other rank.

    Multiply the loss by the weight of the batch before backward. The weight is 1 as
    long as every rank has a batch. With ``policy="pad"`` the weight of a batch that a
    rank repeats is 0, and the weight of the other batches is the number of ranks over
    the number of ranks that have a batch, so that the gradients are the mean over those
    ranks. ``float(weight > 0)`` divides by all ranks. Leave batches of weight 0 out of
    metrics; batch normalization counts them, and a loss of inf or NaN stays NaN.

    Args:
        loader: The batches of this rank, of which one is taken ahead of time.
        module: The fully sharded model, or a wrapper around it. Its ranks take part.
        policy: ``"shortest"`` ends on all ranks when the first rank runs out;
            ``"pad"`` goes on until all ranks have run out, and repeats the last batch
            of a rank that has; ``"error"`` raises when some ranks run out before
            others. Default ``"shortest"``.

    Returns: an iterator over pairs (batch, weight), for one loop.
    Collective: an all-reduce of three integers per turn, on a private gloo group and
        not waited for before the turn ends; all ranks of the module must iterate. The
        call itself waits for the other ranks, and creates the group at its first use.
    Raises: TypeError, if ``module`` is none; ValueError, for another policy;
        DesyncError, if another rank does not make this call. While iterating, on all
        ranks alike: DesyncError for ``"error"``, if a rank has no batch to repeat, and
        if the loader of another rank raised; the rank itself raises the error of its
        loader.

    >>> for batch, weight in even_batches(loader, model, policy="pad"):
    ...     (loss_of(batch) * weight).backward()
    ...     clip_grad_norm_(model, 1.0)
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """
    if policy not in get_args(Policy):
        raise ValueError(
            f"even_batches expects a policy of {', '.join(get_args(Policy))}, got "
            f"{policy!r}."
        )
    require_module(module, "even_batches")
    team = team_of(module, f"even_batches(policy={policy!r})", "even batches")
    return _turns(loader, team, policy)


def _turns(
    loader: Iterable[T], team: Team, policy: Policy
) -> Iterator[tuple[T, float]]:
    """Yield the batch and the weight of each turn; see ``even_batches``."""
    source = _Source(loader, team)
    turn: tuple[T, float] | None = None
    sent: Operation | None = None
    # ``finally`` also runs if the caller breaks out of the loop: Python closes the
    # generator then, and the all-reduce in flight must not be waited for.
    try:
        while True:
            # Before the turn, so that the exchange runs during the turn.
            counts, sent = source.take()
            if turn is not None:
                yield turn
            if sent is not None:
                sent.wait()
                sent = None
            # Sums over all ranks, so every decision below is the same on every rank.
            active, failed, empty = counts.tolist()
            if failed:
                source.raise_everywhere()
            uneven = active < team.world_size
            if active == 0 or (uneven and policy == "shortest"):
                return
            if empty or (uneven and policy == "error"):
                source.refuse(empty)
            # Gradients are divided by the number of all ranks; the weight makes up for
            # ranks whose repeated batch counts zero.
            turn = source.batch, team.world_size / active if source.has_batch else 0.0
    finally:
        if sent is not None:
            sent.detach()


class _Source(Generic[T]):
    """The loader of this rank, and what it tells the others of its next batch."""

    batch: T

    def __init__(self, loader: Iterable[T], team: Team) -> None:
        self.has_batch = True
        """Whether ``batch`` is for the next turn; False after the loader's end."""
        self._loader, self._team = loader, team
        self._batches: Iterator[T] | None = None
        self._taken = 0
        self._error: Exception | None = None

    def take(self) -> tuple[Tensor, Operation | None]:
        """Take a batch; begin to count ranks with a batch, an error, or neither."""
        # Some loaders begin again after their end.
        if self.has_batch:
            try:
                if self._batches is None:
                    self._batches = iter(self._loader)
                self.batch = next(self._batches)
                self._taken += 1
            except StopIteration:
                self.has_batch = False
            # Kept and not raised: the other ranks wait for this rank's numbers.
            except Exception as error:
                self.has_batch, self._error = False, error
        facts = [self.has_batch, self._error is not None, not self._taken]
        counts = torch.tensor(facts, dtype=torch.int64, device="cpu")
        if (group := self._team.group) is None:
            return counts, None
        # Integers on the CPU over the private gloo group: no GPU waits for them.
        named = begin("all_reduce", group, [counts], "even_batches")
        return counts, collectives.all_reduce(
            counts, group, async_op=True, operation=named
        )

    def raise_everywhere(self) -> NoReturn:
        """Raise the error of the loader; on other ranks one that names the rank."""
        error = self._error
        told = self._told(f"raised {type(error).__name__}: {error}" if error else "")
        raise error or DesyncError(
            f"The loader of another rank failed in even_batches: {told}. "
            "All ranks end the loop after the same turn."
        )

    def refuse(self, empty: int) -> NoReturn:
        """Raise for different numbers of batches; ``empty``: ranks without any."""
        told = self._told(f"has {'at least ' * self.has_batch}{self._taken}")
        text = f"The ranks have different numbers of batches: {told}."
        if empty:
            text += " A rank without any batch has none to repeat; give every rank at "
            text += "least one batch."
        raise DesyncError(text)

    def _told(self, text: str) -> str:
        """Return the ranks with a text, and these. Collective: gathers objects."""
        pairs = zip(self._team.ranks, self._team.agree(None, text), strict=True)
        return ", ".join(f"rank {rank} {each}" for rank, each in pairs if each)
