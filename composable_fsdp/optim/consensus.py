"""Raise an exception of a rank on all ranks, so that no rank blocks in a collective.

Use ``raise_on_all_ranks`` before an exchange of objects that can carry the error text,
and ``require_success_on_all_ranks`` before the first of several broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm import collectives
from composable_fsdp.errors import CheckpointError, FSDPError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import _get_fsdp_states


def units_known(model: object, optim: object) -> list[_FSDPState]:
    """Return the units in ``model``; if ``model`` is no module, the units of ``optim``.

    The units of ``optim`` are returned only if they share a single shard group.
    """
    if isinstance(model, nn.Module):
        return _get_fsdp_states(model)
    # ``model`` is wrong on this rank, and may be right on the other ranks. Find the
    # units through the optimizer, so that the other ranks receive the error.
    optims = optim if isinstance(optim, (list, tuple)) else [optim]
    groups = [g for each in optims for g in getattr(each, "param_groups", ())]
    parameters = [p for group in groups for p in group["params"]]
    places = (find_leaf(p) or find_flat(p) for p in parameters)
    handles = dict.fromkeys(place[0] for place in places if place is not None)
    states = [_get_module_fsdp_state(handle.infos[0].module) for handle in handles]
    units = [state for state in states if state is not None]
    # With several groups, the order of collectives follows the model, which is not
    # known.
    return units if len(shard_groups(units)) == 1 else []


def shard_groups(units: Sequence[_FSDPState]) -> list[dist.ProcessGroup]:
    """Return the shard groups of the units, each once, in the order of the units."""
    groups = [unit.handle.groups.shard for unit in units]
    return list(dict.fromkeys(group for group in groups if group is not None))


@contextmanager
def raise_on_all_ranks(units: Sequence[_FSDPState]) -> Iterator[None]:
    """If the block raises, send the error text to the ranks that wait in the exchange.

    Collective: none if the block succeeds; else one all-gather of objects per shard
    group, which pairs with the exchange of ``require_same_state`` on the other ranks.
    """
    try:
        yield
    except Exception as error:
        for group in shard_groups(units):
            # The object has the form of ``require_same_state``: entries, then the error
            # text.
            collectives.all_gather_object(([], text_of(error)), group)
        raise


@contextmanager
def require_success_on_all_ranks(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """If the block raises on any rank, raise on all ranks.

    Collective: one all-gather of texts over each of ``groups``.
    Raises: the exception of the block; on the other ranks CheckpointError with its
    text.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    said = "" if own is None else f"On rank {_rank()}: {text_of(own)}"
    # The first group tells the text to all ranks of a shard group, the second tells the
    # other replicas.
    for group in groups:
        said = next(filter(None, collectives.all_gather_object(said, group)), "")
    if own is not None:
        raise own
    if said:
        raise CheckpointError(said)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def text_of(error: Exception) -> str:
    """Return the message of an error, for other ranks.

    Errors of this package are sent without the rank that they append; other errors are
    sent with their type.
    """
    if isinstance(error, (FSDPError, TypeError)) and error.args:
        # ``str(error)`` would append this rank, and the receiver names the rank itself.
        return str(error.args[0])
    return f"{type(error).__name__}: {error}"
