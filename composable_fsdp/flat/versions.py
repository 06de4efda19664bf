"""Version counters of full leaves: autograd reads weights inside their window only.

A full leaf may be read from the wait for its all-gather to the reshard of its unit. A
graph that reads it later, or earlier, would read freed memory or one that an all-gather
is writing. Autograd compares the version of every tensor that it saved with the one it
finds, so the counters say which leaves may be read::

    unshard    wait_unsharded         reshard
    --- unreadable ---|--- readable ---|--- unreadable ---
                       the version of the sharded leaf

The version of a readable full leaf is that of its sharded leaf: a step, a load or a
write between forward and backward is the error that it is in plain torch. A full leaf
whose version is another one was written to while its unit was full (``writes``).

``torch._C._autograd._unsafe_set_version_counter`` is private; used only here, checked
on torch 2.13 and 2.11.
"""

from __future__ import annotations

from operator import attrgetter

import torch

from composable_fsdp.flat.handle import LEAVES, FlatParamHandle
from composable_fsdp.naming import join_name, quoted

set_versions = torch._C._autograd._unsafe_set_version_counter
version_of = attrgetter("_version")

_FIRST = 1 << 31
"""Above every version that writes lead to; counters have 32 bits."""
_given = 0


def unreadable_versions(number: int) -> tuple[int, ...]:
    """Versions for ``number`` leaves that mean "not to be read", each given once.

    An error of autograd names the version it found, and that names the leaf.
    """
    global _given
    first = _FIRST + _given % (_FIRST >> 1)
    _given += number
    return tuple(range(first, first + number))


def make_readable(handle: FlatParamHandle) -> None:
    """Let autograd read the full leaves. Their data must be there. Sends nothing."""
    # Asked anew at each wait: a parent's forward may write to its children's shards.
    now = tuple(map(version_of, handle.sharded_placed))
    if handle.handed_out:
        # A flat parameter that an optimizer steps on stands for all leaves.
        steps = sum(map(version_of, handle.handed_out))
        now = tuple([version + steps for version in now])
    if now != handle.readable:
        set_versions(handle.full_placed, now)
        handle.readable = now


def make_unreadable(handle: FlatParamHandle) -> None:
    """Have autograd refuse to read the full leaves from now on. Sends nothing."""
    if handle.readable is not None:
        set_versions(handle.full_placed, handle.unreadable)
        handle.readable = None


def find_unreadable(text: str) -> str | None:
    """The name of the parameter that autograd refused to read, as ``text`` says.

    None if ``text`` names no version of ``unreadable_versions`` that is in use.
    """
    _, found, rest = text.partition("is at version ")
    number = rest.partition(";")[0]
    if not found or not number.isdecimal() or int(number) < _FIRST:
        return None
    handles = {link() for link in LEAVES.values()}
    for handle in handles:
        if handle is not None and int(number) in handle.unreadable:
            place = handle.places[handle.unreadable.index(int(number))]
            return quoted(join_name(handle.full_fqn, place.fqn))
    return None
