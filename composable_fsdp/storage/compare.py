"""Chooses a part of a model by names, and compares a checkpoint with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import wraps
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError, warn
from composable_fsdp.naming import join_name, listed, quoted
from composable_fsdp.storage.contents import Contents, Held
from composable_fsdp.storage.source import Copy, Source

Rename = Mapping[str, str] | Callable[[str], str | None]
"""Old prefixes to new ones, or a function of a name; None leaves the tensor out."""


def renaming(rename: Rename, names: Sequence[str]) -> Callable[[str], str | None]:
    """Return the new name of each name of a checkpoint, as a function."""
    # A function may leave names as they are, so no name of it is misspelt.
    if callable(rename):
        return rename
    pairs = rename.items() if isinstance(rename, Mapping) else [(rename, None)]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise TypeError(
            "load expects rename={old prefix: new prefix}, of texts, or a function of "
            f"a name, got {rename!r}."
        )
    # A module's name with or without the dot at its end.
    table = {old.rstrip("."): new.rstrip(".") for old, new in pairs if new is not None}
    # A misspelt prefix would leave all names as they are.
    unused = [old for old in table if not any(_has(name, old) for name in names)]
    if unused:
        raise CheckpointError(
            f"load: rename has {listed(map(quoted, unused))}, and no name in the "
            f"checkpoint begins with it. The names are {listed(map(quoted, names))}."
        )
    # The longest first: ``model.head`` goes elsewhere than ``model``.
    prefixes = sorted(table, key=len, reverse=True)

    def renamed(name: str) -> str:
        old = next((each for each in prefixes if _has(name, each)), None)
        if old is None:
            return name
        rest = name[len(old) :].removeprefix(".")
        return join_name(table[old], rest) if table[old] and rest else table[old] + rest

    return renamed


def _has(name: str, prefix: str) -> bool:
    """Return whether the name is the prefix, or is of the module of that name."""
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


Progress = Callable[[int], None]
"""A callback that gets the number of bytes read since the last call."""


class View(Source):
    """A view of a source: under other names, without a part, or with progress."""

    def __init__(
        self,
        source: Source,
        rename: Rename | None = None,
        *,
        optimizer: bool = True,
        values: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self._source, self._progress = source, progress
        self.path = source.path
        self.fingerprint, self.saved_ranks = source.fingerprint, source.saved_ranks
        # What is not wanted is not touched: a source may compute it, and raise.
        names = [*source.model, *source.aliases, *(source.own_states if values else ())]
        new = renaming({} if rename is None else rename, names)
        # New name -> old name, and the other way round, without names left out.
        self._old: dict[str, str] = {}
        self._new: dict[str, str] = {}
        for name in names:
            if (found := new(name)) is None:
                continue
            # Of a tensor's whole name, a prefix can leave nothing.
            if not found or found in self._old:
                told = f"{quoted(name)} an empty name"
                if found:
                    told = (
                        f"{quoted(name)} and {quoted(self._old[found])} of the "
                        f"checkpoint the same name {quoted(found)}"
                    )
                raise CheckpointError(
                    f"load: rename gives {told}. Rename one otherwise, or the module "
                    "around it, or return None for it from a function."
                )
            self._old[found], self._new[name] = name, found
        # Tables of names alone: values are read from ``source`` when asked for.
        self.model = self._renamed(source.model)
        self.aliases = {}
        for name, kept in source.aliases.items():
            if name not in self._new:
                continue
            if kept not in self._new:
                raise CheckpointError(
                    f"load: rename leaves out {quoted(kept)} and keeps {quoted(name)}, "
                    "which is tied to it. Keep both, or exclude one of them."
                )
            self.aliases[self._new[name]] = self._new[kept]
        # The name of a wrapper is no name of a tensor, and so not in the tables.
        self.wrappers = {
            name: facts for old, facts in source.wrappers.items() if (name := new(old))
        }
        self.optim, self.param_groups, self.extra = {}, None, None
        if optimizer:
            self.optim = self._renamed(source.optim)
            self.optim_values = self._renamed(source.optim_values)
            self.param_groups = source.param_groups
            # None says that there is no optimizer.
            if rename is not None and self.param_groups is not None:
                self.param_groups = list(map(self._renamed_group, self.param_groups))
        if values:
            self.own_states, self.extra = self._renamed(source.own_states), source.extra

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a mapping by the new names, without names that are left out."""
        new = self._new
        return {new[name]: value for name, value in values.items() if name in new}

    def _renamed_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group with its members by the new names."""
        members = self._renamed(dict.fromkeys(group["params"]))
        return {**group, "params": list(members)}

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        return self._told(self._source.read_model(self._old[name], start, stop))

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        return self._told(self._source.read_optim(self._old[name], state, start, stop))

    def _told(self, values: Tensor) -> Tensor:
        """Report the bytes of ``values`` to ``progress``, and return ``values``."""
        if self._progress is not None:
            self._progress(values.numel() * values.dtype.itemsize)
        return values

    def prepare(self, copies: Sequence[Copy]) -> None:
        self._source.prepare([c._replace(name=self._old[c.name]) for c in copies])

    def finish(self, copies: Sequence[Copy]) -> None:
        self._source.finish([c._replace(name=self._old[c.name]) for c in copies])

    def close(self) -> None:
        """Do nothing: the caller that opened ``source`` closes ``source``."""


Patterns = str | Sequence[str] | Callable[[str], bool] | None
"""A pattern, several patterns, a function of a name, or None."""


Options = TypeVar("Options")
P = ParamSpec("P")
R = TypeVar("R")


def options_of(given: object, kind: type[Options], what: str) -> Options:
    """Return the options of a call, or the defaults for None. Raises: TypeError."""
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"{what} expects options={kind.__name__}(..), got {given!r}.")
    return kind() if given is None else given


def hints_at(kind: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function say that fields of ``kind`` go into its ``options``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() & {each.name for each in fields(kind)}:
                raise TypeError(
                    f"{function.__name__} has {name} among its options; did you mean "
                    f"options={kind.__name__}({name}={kwargs[name]!r})?"
                )
            return function(*args, **kwargs)

        return call

    return decorate


def matcher(patterns: Patterns, what: str) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches any of ``patterns``."""
    if callable(patterns):
        return patterns
    # A text is a sequence, too: of its characters.
    texts = [patterns] if isinstance(patterns, str) else list(patterns or ())
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(
            f"{what} expects patterns of names, such as '*lora*', or a function of a "
            f"name, got a {type(wrong[0]).__name__} among them."
        )

    def matches(name: str) -> bool:
        # Modules around it, too: users name them, and a checkpoint holds tensors.
        around = accumulate(name.split("."), "{}.{}".format)
        return any(fnmatchcase(each, text) for each in around for text in texts)

    return matches


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

    def takes(self, held: Held) -> bool:
        """Return whether the tensor of a model is chosen."""
        # A buffer requires no gradient, and a frozen parameter is the base's.
        is_trained = held.is_parameter and held.shown.requires_grad
        return (is_trained or not self.trainable_only) and self.takes_names(held.names)

    def of_contents(self, contents: Contents) -> Contents:
        """Return the chosen part of ``contents``; a region may lack parameters."""
        # The same object, which tells a save that nothing is left out.
        if self == Selection():
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
            wrappers=tuple(
                each
                for each in contents.wrappers
                if self.takes_names([each.name])
                and (each.tensor.requires_grad or not self.trainable_only)
            ),
            own_states={k: v for k, v in own.items() if self.takes_names([k])},
        )

    # For a load: both sides of the comparison must leave out the same names.
    def leaves_out(self, contents: Contents) -> Callable[[str], bool]:
        """Return a function that tells whether a checkpoint's name is not asked for."""
        chosen = {name for held in contents.each() for name in held.names}
        # Frozen tensors are known by the model alone; a checkpoint does not tell.
        kept = self.of_contents(contents)
        left = chosen - {name for held in kept.each() for name in held.names}
        left |= contents.own_states.keys() - kept.own_states.keys()
        known = chosen | contents.own_states.keys()
        return lambda name: (
            name in left if name in known else not self.takes_names([name])
        )


NO_OPTIMIZER = "the checkpoint was saved without an optimizer"
"""The difference if ``load`` gets an optimizer and the checkpoint has no state."""


_WORDS = {
    "missing": "Missing in the checkpoint",
    "unexpected": "Not in the model",
    "misshaped": "Of another shape",
    "dtypes": "Of another dtype",
    "untied": "Tied in the model and different in the checkpoint",
    "optimizer": "Of the optimizer",
    "local": "Of single ranks",
    "values": "Of extra and per_rank",
}


@dataclass(slots=True)
class LoadReport:
    """The differences between checkpoint and model, by name; ``load`` fills the lists.

    If all lists are empty, everything fits.
    """

    missing: list[str] = field(default_factory=list)
    """Names that the model has and the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """Names that the checkpoint has and the model lacks."""
    misshaped: list[str] = field(default_factory=list)
    """Tensors of another shape: the model's shape and the checkpoint's shape."""
    dtypes: list[str] = field(default_factory=list)
    """Tensors of another dtype: the model's dtype and the checkpoint's dtype."""
    untied: list[str] = field(default_factory=list)
    """Names that the model ties to another name, with other values in the checkpoint.

    Each rank compares only the part of the tensor that the rank holds.
    """
    optimizer: list[str] = field(default_factory=list)
    """Differences in the optimizer's parameters, states and options."""
    local: list[str] = field(default_factory=list)
    """Values that were saved per rank, by another number of ranks."""
    values: list[str] = field(default_factory=list)
    """Objects in ``extra`` and ``per_rank`` that the checkpoint has no state for."""

    def is_empty(self) -> bool:
        """Return whether everything fits."""
        return not self._lines()

    def add(self, other: LoadReport) -> None:
        """Append the differences of ``other``."""
        for name in _WORDS:
            getattr(self, name).extend(getattr(other, name))

    def _lines(self) -> list[str]:
        """Return a line per kind of difference, without empty kinds."""
        lines = []
        for name, words in _WORDS.items():
            if found := getattr(self, name):
                told = (
                    map(quoted, found) if name in ("missing", "unexpected") else found
                )
                lines.append(f"{words}: {listed(told)}.")
        return lines

    def require_empty(self, source: Source) -> None:
        """Raise CheckpointError with a list of the differences, if there are any."""
        if self.is_empty():
            return
        raise CheckpointError(
            f"load: the checkpoint {source.path} does not fit; nothing was loaded. "
            f"{' '.join(self._lines())} Build the model, the optimizer and the objects "
            "of extra as the saved ones were. Or pass LoadOptions: include, exclude "
            "and rename choose names, cast=True converts dtypes, strict=False loads "
            "what fits; load(path, model) reads the model without an optimizer."
        )

    def warn(self) -> None:
        """Warn with a list of the differences, if there are any."""
        if not self.is_empty():
            warn(
                f"load left out what does not fit. {' '.join(self._lines())}",
            )


def find(source: Source, names: tuple[str, ...]) -> str | None:
    """Return the name under which the checkpoint has a tensor, or None."""
    for name in names:
        if name in source.model:
            return name
        if name in source.aliases:
            return source.aliases[name]
    return None


def compare_model(
    source: Source,
    contents: Contents,
    selection: Selection,
    report: LoadReport,
    *,
    cast: bool,
) -> tuple[list[Copy], list[tuple[nn.Module, str]]]:
    """Compare names, shapes and dtypes; return what this rank reads."""
    leaves_out = selection.leaves_out(contents)
    contents = selection.of_contents(contents)
    copies: list[Copy] = []
    used: set[str] = set()
    for held in contents.each():
        name = find(source, held.names)
        if name is None:
            report.missing.append(held.names[0])
            continue
        # All names of a tied tensor count as used, so none of them is unexpected.
        used.update((name, *held.names))
        info = source.model[name]
        if info.shape != held.shape:
            told = _unlike(held.names[0], held.shape, info.shape)
            report.misshaped.append(told)
        elif info.dtype != held.dtype and not cast:
            report.dtypes.append(_unlike(held.names[0], held.dtype, info.dtype))
        elif held.span.numel:
            _require_writable(held.local, name)
            copies.append(Copy(name, None, held.span, held.local))
            report.untied += _untied(source, held.names, copies[-1])
    for each in contents.wrappers:
        saved = source.wrappers.get(each.name, each.facts)
        if saved != each.facts:
            report.misshaped.append(_unlike(each.name, each.facts, saved))
    own_states = contents.own_states
    report.missing += [name for name in own_states if name not in source.own_states]
    others = [name for name in source.model if name not in used]
    others += [name for name in source.own_states if name not in own_states]
    report.unexpected += [name for name in others if not leaves_out(name)]
    fitting = [(m, name) for name, m in own_states.items() if name in source.own_states]
    return copies, fitting


def _require_writable(into: Tensor, name: str) -> None:
    """Raise CheckpointError for a tensor whose elements share memory."""
    # Stride 0: a copy would write several elements to the same address.
    if any(s == 0 and n > 1 for s, n in zip(into.stride(), into.shape, strict=True)):
        raise CheckpointError(
            f"Elements of {quoted(name)} share memory (it is expanded), so nothing can "
            "be loaded into it. Register a clone() of it."
        )


def _untied(source: Source, names: tuple[str, ...], target: Copy) -> list[str]:
    """Return the other names of a tied tensor with other values in the checkpoint."""
    # To load any of the checkpoint's several values would silently drop the others.
    others = [name for name in names if name in source.model and name != target.name]
    if not others:
        return []
    info, value = source.model[target.name], source.read(target)
    return [
        f"{quoted(name)} (tied to {quoted(target.name)})"
        for name in others
        if source.model[name] != info
        # Bytes and not values: NaN equals NaN.
        or not torch.equal(
            source.read(target._replace(name=name)).view(torch.uint8),
            value.view(torch.uint8),
        )
    ]


def _unlike(name: str, own: object, saved: object) -> str:
    """Return the words for a tensor that is another in the checkpoint."""
    return f"{quoted(name)} (expected {own}, the checkpoint has {saved})"
