"""Version counters of full leaves: autograd may read weights only inside a window.

A full leaf may be read from the wait for the unit's all-gather until the unit is
resharded. A graph that reads the leaf earlier or later would read freed memory, or
memory that an all-gather is writing. Autograd compares the version of every saved
tensor with the version at unpacking, so the version counters express which leaves may
be read::

    unshard    wait_unsharded         reshard
    --- unreadable ---|--- readable ---|--- unreadable ---
                       the version of the sharded leaf

``torch._C._autograd._unsafe_set_version_counter`` is private; used only here, checked
on torch 2.13 and 2.11.
"""

from __future__ import annotations

from operator import attrgetter

import torch

from composable_fsdp.flat.handle import LEAVES, FlatParamHandle
from composable_fsdp.naming import join_name, quoted

set_versions = torch._C._autograd._unsafe_set_version_counter
"""Set the version counters of a tuple of tensors."""
version_of = attrgetter("_version")
"""Return the version counter of a tensor without a Python-level function call."""

_FIRST = 1 << 31
"""Lower bound of unreadable versions, above all versions that writes reach; counters
have 32 bits."""
_given = 0


def unreadable_versions(number: int) -> tuple[int, ...]:
    """Return versions for ``number`` leaves that mean "must not be read".

    Each version is given out once (until the counter wraps around), so that the version
    in an autograd error identifies the leaf.
    """
    global _given
    first = _FIRST + _given % (_FIRST >> 1)
    _given += number
    return tuple(range(first, first + number))


def make_readable(handle: FlatParamHandle) -> None:
    """Allow autograd to read the full leaves, whose data must be there.

    Collective: none.
    """
    # The version of a readable full leaf is the version of its sharded leaf: an
    # optimizer step, a load or a write between forward and backward raises the same
    # error as in plain torch. If the version differs afterwards, the full leaf was
    # written to (``forward_writes``). Read at every wait: a parent's forward may write
    # to its children's shards.
    now = tuple(map(version_of, handle.sharded_placed))
    if handle.handed_out:
        # An optimizer that steps on a flat parameter increments only the version of the
        # flat parameter, which stands for all leaves.
        steps = sum(map(version_of, handle.handed_out))
        now = tuple([version + steps for version in now])
    if now != handle.form.readable:
        set_versions(handle.form.placed, now)
        handle.form.readable = now


def make_unreadable(handle: FlatParamHandle) -> None:
    """Make autograd refuse to read the full leaves from now on.

    Collective: none.
    """
    if handle.form.readable is not None:
        set_versions(handle.form.placed, handle.form.unreadable)
        handle.form.readable = None


def find_unreadable(text: str) -> str | None:
    """Return the name of the parameter that autograd refused to read.

    ``text`` is the message of autograd's error, from which the version is parsed. The
    result is ``None`` if ``text`` names no unreadable version that is in use.
    """
    _, found, rest = text.partition("is at version ")
    number = rest.partition(";")[0]
    if not found or not number.isdecimal() or int(number) < _FIRST:
        return None
    handles = {link() for link in LEAVES.values()}
    for handle in handles:
        if handle is not None and int(number) in handle.form.unreadable:
            place = handle.places[handle.form.unreadable.index(int(number))]
            return quoted(join_name(handle.full_fqn, place.fqn))
    return None
