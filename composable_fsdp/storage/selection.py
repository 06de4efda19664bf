"""Chooses a part of a model by names, for a save or a load of that part.

A pattern is a name with the wildcards of ``fnmatch``. A pattern that matches a module's
name stands for all that the module holds::

    "*lora*"            every name with lora in it
    "blocks.*.attn"     the attention of every block: blocks.0.attn.weight, ..
    "head"              head.weight, head.bias; not header.weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from composable_fsdp.storage.contents import Contents, HeldParam, HeldTensor
from composable_fsdp.storage.wrappers import HeldWrapper

Patterns = str | Sequence[str] | Callable[[str], bool] | None
"""A pattern, several patterns, a function of a name, or None."""


def matcher(patterns: Patterns, what: str) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches any of ``patterns``.

    None matches no name. Raises: TypeError, naming ``what``.

    >>> is_head = matcher(["head", "*.bias"], "include")
    >>> is_head("head.weight"), is_head("header.weight"), is_head("body.bias")
    (True, False, True)
    """
    if callable(patterns):
        return patterns
    # A text is a sequence, too: of its characters.
    texts = [patterns] if isinstance(patterns, str) else list(patterns or ())
    if not all(isinstance(text, str) for text in texts):
        wrong = next(text for text in texts if not isinstance(text, str))
        raise TypeError(
            f"{what} expects patterns of names, such as '*lora*', or a function of a "
            f"name, got a {type(wrong).__name__} among them."
        )

    def matches(name: str) -> bool:
        return any(_matches(name, text) for text in texts)

    return matches


def _matches(name: str, pattern: str) -> bool:
    """Return whether the name, or the name of a module around it, matches."""
    # The module itself, too: users name modules, and a checkpoint holds tensors.
    parts = name.split(".")
    return any(
        fnmatchcase(".".join(parts[:count]), pattern)
        for count in range(len(parts), 0, -1)
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """The names that a save or load is about; see ``save``."""

    include: Callable[[str], bool] | None = None
    """None: every name."""
    exclude: Callable[[str], bool] | None = None
    trainable_only: bool = False

    @staticmethod
    def of(include: Patterns, exclude: Patterns, trainable_only: bool) -> Selection:
        """Return the selection of a caller's arguments. Raises: TypeError."""
        return Selection(
            None if include is None else matcher(include, "include"),
            None if exclude is None else matcher(exclude, "exclude"),
            trainable_only,
        )

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self == Selection()

    def without(self, names: Set[str]) -> Selection:
        """Return the selection without a set of names."""
        if not names:
            return self
        exclude = self.exclude or (lambda name: False)
        return replace(self, exclude=lambda name: name in names or exclude(name))

    def takes_names(self, names: Iterable[str]) -> bool:
        """Return whether a tensor with ``names`` is chosen by the patterns."""
        # A tied tensor is chosen under any name, and left out under any name.
        names = tuple(names)
        is_in = self.include is None or any(map(self.include, names))
        return is_in and not (self.exclude and any(map(self.exclude, names)))

    def takes(self, held: HeldParam | HeldTensor) -> bool:
        """Return whether the tensor of a model is chosen."""
        # A buffer requires no gradient, and a frozen parameter is the base's.
        if self.trainable_only:
            is_parameter = isinstance(held.shown, nn.Parameter)
            if not is_parameter or not held.shown.requires_grad:
                return False
        return self.takes_names(held.names)

    def _takes_wrapper(self, wrapper: HeldWrapper) -> bool:
        """Return whether a tensor that wraps others is chosen."""
        is_frozen = not wrapper.tensor.requires_grad
        return self.takes_names([wrapper.name]) and not (
            self.trainable_only and is_frozen
        )

    def of_contents(self, contents: Contents) -> Contents:
        """Return the chosen part of ``contents``; a region may lack parameters."""
        # The same object, which tells a save that nothing is left out.
        if self.is_all:
            return contents
        regions = [
            replace(region, params=tuple(filter(self.takes, region.params)))
            for region in contents.regions
        ]
        # A module's extra state has no gradient.
        own = {} if self.trainable_only else contents.own_states
        return replace(
            contents,
            regions=tuple(region for region in regions if region.params),
            tensors=tuple(filter(self.takes, contents.tensors)),
            wrappers=tuple(filter(self._takes_wrapper, contents.wrappers)),
            own_states={k: v for k, v in own.items() if self.takes_names([k])},
        )

    # For a load: both sides of the comparison must leave out the same names.
    def leaves_out(self, contents: Contents) -> Callable[[str], bool]:
        """Return a function that tells whether a checkpoint's name is not asked for.

        A name that ``contents`` (the whole model) lacks is told by the patterns alone.
        """
        chosen = {name for held in contents.each() for name in held.names}
        # Frozen tensors are known by the model alone; a checkpoint does not tell.
        kept = self.of_contents(contents)
        left = chosen - {name for held in kept.each() for name in held.names}
        left |= contents.own_states.keys() - kept.own_states.keys()
        known = chosen | contents.own_states.keys()
        return lambda name: (
            name in left if name in known else not self.takes_names([name])
        )


ALL = Selection()
"""Every tensor."""
