"""Fully qualified names (FQN), by path component, without those that wrappers add."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

WRAPPED_MODULE = "_fsdp_wrapped_module"
"""The attribute of ``FullyShardedDataParallel`` that holds the wrapped module."""

CHECKPOINTED_MODULE = "_checkpoint_wrapped_module"
"""The attribute of ``checkpoint_wrapper``'s class (ours and torch's) for its module."""

TRANSPARENT = (WRAPPED_MODULE, CHECKPOINTED_MODULE)
"""The path components that no name shows."""

LISTED = 5
"""The largest number of items that a message shows of a list."""

ROOT_NAME = "(root)"
"""The name of the root in messages, instead of the empty string."""


P = ParamSpec("P")
R = TypeVar("R")


def takes_optimizer(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` take ``optimizer=`` as another name of its ``optim=``."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "optimizer" in kwargs:
            if "optim" in kwargs:
                raise TypeError(
                    f"{function.__name__} got optim= and optimizer=, two names of one "
                    "argument. Pass one."
                )
            kwargs["optim"] = kwargs.pop("optimizer")
        return function(*args, **kwargs)

    return call


def join_name(prefix: str, name: str) -> str:
    """Return two dotted names joined by a dot; each name may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def strip_wrapper(name: str) -> str:
    """Return ``name`` without the components of wrappers.

    >>> strip_wrapper("layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    >>> strip_wrapper("my_fsdp_wrapped_module.weight")
    'my_fsdp_wrapped_module.weight'
    """
    if not any(component in name for component in TRANSPARENT):
        return name
    # Only whole components count: a user's module ``my_fsdp_wrapped_module`` keeps its
    # name.
    return ".".join(part for part in name.split(".") if part not in TRANSPARENT)


def strip_wrapper_in_text(text: str) -> str:
    """Return ``text`` with the components of wrappers removed from all names.

    >>> strip_wrapper_in_text("size mismatch for a._fsdp_wrapped_module.b: ...")
    'size mismatch for a.b: ...'
    """
    # The lookbehind keeps a component that only ends with a wrapper's component.
    return re.sub(rf"(?<!\w)(?:{'|'.join(TRANSPARENT)})\.", "", text)


def quoted(name: str) -> str:
    """Return ``name`` quoted for a message; ``ROOT_NAME`` for the root."""
    return repr(name) if name else ROOT_NAME


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in words.

    >>> ranks_text([0]), ranks_text([0, 1, 2, 5])
    ('rank 0', 'ranks 0-2, 5')
    """
    runs = runs_of(ranks)
    single = len(runs) == 1 and runs[0].isdigit()
    return f"rank{'' if single else 's'} {', '.join(runs)}"


def runs_of(numbers: Iterable[int]) -> list[str]:
    """Return the runs of consecutive numbers as text, each as "first-last".

    >>> runs_of([0, 2, 1, 5])
    ['0-2', '5']
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ["-".join(map(str, run)) for run in runs]


def ranks_by_value(values: Mapping[int, R]) -> dict[R, list[int]]:
    """Return which ranks have which values, those of the lowest rank first."""
    ranks: dict[R, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    return ranks


def by_value(values: Mapping[int, object]) -> str:
    """Return which ranks have which values, in words.

    >>> by_value({0: "(7, 8)", 1: "(8, 7)", 2: "(7, 8)"})
    '(7, 8) on ranks 0, 2, (8, 7) on rank 1'
    """
    told = ranks_by_value(values).items()
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in told)


def listed(items: Iterable[object], separator: str = ", ") -> str:
    """Return at most ``LISTED`` items as text, and the number of the others.

    >>> listed(range(8))
    '0, 1, 2, 3, 4 and 3 more'
    """
    # All items are read: the number of those left out belongs to the message.
    texts = [str(item) for item in items]
    rest = len(texts) - LISTED
    more = f" and {rest} more" if rest > 0 else ""
    return separator.join(texts[:LISTED]) + more


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return what is closest to ``word`` as a question; empty if nothing is close."""
    near = get_close_matches(word, list(known), n=most, cutoff=0.6 - 0.2 * (most > 1))
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def size_text(nbytes: int) -> str:
    """Return bytes as text, in the largest unit that gives a number of at least 1.

    >>> size_text(512), size_text(1536), size_text(3 * 2**20)
    ('512 B', '1.50 KiB', '3.00 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"
