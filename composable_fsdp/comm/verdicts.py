"""The state of a verdict in the key-value store, which two ranks may move at once.

::

    said -------> acted       another rank has abandoned its collective
         `------> withdrawn   the rank that left sends again

The rank that is first decides for both: either the group is of no use any more, or no
rank has left.
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from composable_fsdp.comm import agreement

SAID, ACTED, WITHDRAWN = "said", "acted", "withdrawn"
"""States of a verdict: a rank has left the order; another rank has abandoned the
collective in which it waited; the rank that left sends again."""


def keys_of_this_time(prefix: str) -> str:
    """Return a prefix of keys that no earlier default group of this store has used.

    Called once per default group. Collective: none; one round trip.
    """
    # Default groups that follow one another may share a store, as that of torchrun.
    # Positions and verdicts from before would accuse ranks: the names of groups repeat,
    # and operations are counted from 1 on again. The store counts how often this rank
    # was there; all ranks take part in each default group.
    own = f"{prefix}/times/{dist.get_rank()}"
    times = int(agreement.key_value_store().add(own, 1))
    return prefix if times == 1 else f"{prefix}/{times}"


def say_verdict(key: str, state: str, number: int, text: str) -> None:
    """Write the verdict of this rank.

    Args:
        key: where the verdict is.
        state: ``SAID`` or ``ACTED``.
        number: the number of the last operation that this rank has issued.
        text: the error of this rank.

    Collective: none.
    """
    # The time makes every verdict another value.
    value = json.dumps([state, number, dist.get_rank(), text, time.time()])
    agreement.key_value_store().set(key, value)


def move_verdict(key: str, before: str, after: str) -> bool:
    """Move the verdict at ``key`` from the state ``before`` to ``after``.

    Args:
        key: where the verdict is; there may be none.
        before: a state. A verdict in another state stays as it is.
        after: the next state.

    Returns: whether ``after`` is the state now. Collective: none.
    """
    store = agreement.key_value_store()
    if not store.check([key]):
        return False
    known = store.get(key).decode()
    state, *rest = json.loads(known)
    if state == before:
        # Another rank may move the verdict at the same moment: one of them wins, and
        # the other reads how. Either the collective was abandoned, and no rank uses the
        # group again, or the rank that had left takes part in it.
        moved = json.dumps([after, *rest])
        state = json.loads(store.compare_set(key, known, moved))[0]
    return bool(state == after)
