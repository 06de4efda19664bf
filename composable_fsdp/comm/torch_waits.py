"""Waits of the program in collectives of torch, which no ``Operation`` stands for.

A rank that goes on to ``torch.distributed.barrier()`` while the others wait for it in
an all-gather of this package waits for them, too, and no sequence of this package shows
that. The watch thread (``comm.watch``) reads the stack of the main thread::

    the innermost line outside of torch    the function of torch that the line called
    of the program                         barrier, all_reduce, wait_tensor, ...
    of this package                        none: an ``Operation`` stands for the wait

Two ranks wait for each other for ever if one waits in a collective that the other has
not issued, and the other waits for the first. Torch counts the collectives of a group;
those that are not of this package are compared. The arguments of the function tell the
group, except those of ``wait_tensor``, for which every group is compared.

Private: ``torch._C._distributed_c10d.ProcessGroup._get_sequence_number_for_group`` and
``distributed_c10d._world.pg_map``, checked on torch 2.13. Gloo counts messages from
rank to rank, too, which is why a count alone is no proof: the stack has to say that the
rank waits, and in which group.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

from composable_fsdp.comm import agreement
from composable_fsdp.comm.operations import Reporter, operation_logs

_PACKAGE = Path(__file__).parents[1]
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_C10D = distributed_c10d.__file__
_FUNCTIONAL = str(Path(_TORCH, "distributed", "_functional_collectives.py"))

# Each ends only if every rank of the group takes part. A broadcast does not.
_NEEDS_ALL = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
}
_WAIT = "wait_tensor"
"""The function that waits for a functional collective, as those of DTensor."""


class TorchWait(NamedTuple):
    """A wait of a rank in a collective of torch, as the rank tells the others."""

    function: str
    """The function of torch."""
    seconds: float
    """How long the rank waits, as far as the watch thread has seen."""
    issued: dict[str, int]
    """By name of a group (``agreement.name_in_store``): the number of collectives of
    torch that the rank has issued."""
    group: str = ""
    """The name of the group in which the rank waits; empty if unknown."""

    def needs(self, issued: dict[str, int]) -> str:
        """Return the group in which a rank that has ``issued`` these is waited for.

        Empty if there is none.
        """
        # A rank may have issued more in another group, without a wait, or messages.
        names = [self.group] if self.group else self.issued
        counts = {name: self.issued.get(name, 0) for name in names}
        more = [n for n, count in counts.items() if count > issued.get(n, count)]
        return more[0] if more else ""


class WaitSeen:
    """What the watch thread has seen of the main thread's wait."""

    def __init__(self) -> None:
        # Neither the frame itself, which would keep the program's variables alive after
        # the wait, nor the line: a loop may call barrier again.
        self._wait: tuple[str, str, int, dict[str, int]] | None = None
        self._since = 0.0

    def look(self, main: int | None) -> TorchWait | None:
        """Return the wait of thread ``main``; None if it waits in nothing of torch.

        Called once a second. Collective: none.
        """
        frame = sys._current_frames().get(main) if main is not None else None
        found = None if frame is None else _in_torch(frame)
        if found is None:
            self._wait = None
            return None
        # An identity may be that of a later call, but not with the same numbers.
        wait = (*found, issued())
        if wait != self._wait:
            self._wait, self._since = wait, time.monotonic()
        name, group, _, counts = wait
        return TorchWait(name, time.monotonic() - self._since, counts, group)


def is_over(told: TorchWait | None, now: TorchWait | None) -> bool:
    """Return whether the wait ``told`` has ended, given the wait of this moment."""
    return told is not None and (now is None or now.seconds < told.seconds)


def _in_torch(frame: FrameType) -> tuple[str, str, int] | None:
    """Return in which function of torch a thread waits, the group, the frame's ``id``.

    The group is empty if unknown.
    """
    found: tuple[str, str, int] | None = None
    at: FrameType | None = frame
    # From the innermost frame outwards, up to the first line that is not torch's.
    while at is not None:
        path, name = at.f_code.co_filename, at.f_code.co_name
        if path == _C10D and name in _NEEDS_ALL and found is None:
            # Parameters are public names of torch, local variables are not.
            names, *_, values = inspect.getargvalues(at)
            given = {each: values[each] for each in names if each in values}
            # A collective that is only being issued is no wait.
            if given.get("async_op"):
                return None
            found = name, _named(given), id(at)
        elif path == _FUNCTIONAL and name == _WAIT and found is None:
            found = _WAIT, "", id(at)
        elif not path.startswith((_TORCH, "<")):
            ours = Path(path).is_relative_to(_PACKAGE)
            return None if ours else found
        at = at.f_back
    return found


def _named(given: dict[str, Any]) -> str:
    """Return the name of the group among the arguments of a function of torch."""
    # The default group may be gone at this moment.
    with suppress(Exception):
        group = given["group"] or distributed_c10d._get_default_group()
        return agreement.name_in_store(group)
    return ""


def issued() -> dict[str, int]:
    """Return, by name, how many collectives of torch this rank has issued.

    Collective: none.
    """
    logs = operation_logs()
    own = {log.name: log.number for log in logs}
    # Threads of a save send over private groups, which are not watched, and a thread is
    # between the two counts at times.
    left_out = {log.name for log in logs if type(log.watcher) is Reporter}
    found: dict[str, int] = {}
    for group in list(distributed_c10d._world.pg_map):
        if group.group_name in left_out:
            continue
        # A backend without numbers, and a group that is destroyed at this moment.
        with suppress(Exception):
            number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # torch's stubs lack it
            name = agreement.name_in_store(group)
            found[name] = number - own.get(group.group_name, 0)
    return found
