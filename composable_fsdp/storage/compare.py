"""Compares a checkpoint with a model, before any value is verified or copied."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.contents import Contents
from composable_fsdp.storage.source import Copy, Source

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

    def _ways_out(self) -> list[str]:
        """Return a sentence per kind of difference that ends it."""
        names = bool(self.missing or self.unexpected)
        alone = NO_OPTIMIZER in self.optimizer
        ways = {
            "Build the model with the arguments (layers, widths, ties) of the one that "
            "was saved.": self.misshaped or self.untied or names,
            "LoadOptions(cast=True) converts dtypes.": self.dtypes,
            "load(path, model) without the optimizer reads the model.": alone,
            "Make the optimizer as the saved one was made (its class, its parameters); "
            "load(path, model) without it reads the model alone.": self.optimizer
            and not (alone or names),
            "LoadOptions(include=.., exclude=.. or rename=..) loads a part, or other "
            "names.": names,
            "Pass to load the objects that were saved, at the same keys.": self.values,
            # Without one of the two a lenient load would load nothing.
            "LoadOptions(strict=False) loads what fits.": names
            or self.values
            or self.local
            or self.optimizer != [NO_OPTIMIZER],
        }
        return [way for way, is_due in ways.items() if is_due]

    def require_empty(self, source: Source) -> None:
        """Raise CheckpointError with a list of the differences, if there are any."""
        if self.is_empty():
            return
        raise CheckpointError(
            f"load: the checkpoint {getattr(source, 'path', '')} does not fit; nothing "
            "was loaded. "
            f"{' '.join(self._lines())} {' '.join(self._ways_out())}"
        )

    def warn(self) -> None:
        """Warn with a list of the differences, if there are any."""
        if not self.is_empty():
            warnings.warn(
                f"load left out what does not fit. {' '.join(self._lines())}",
                stacklevel=4,  # warn, load, inference_mode, the caller
            )


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """The parameters, buffers and extra states of the model that this rank reads."""

    copies: list[Copy]
    own_states: list[tuple[nn.Module, str]]

    def require_writable(self) -> None:
        """Raise CheckpointError for a tensor whose elements share memory."""
        for each in self.copies:
            into = each.into
            # Stride 0: a copy would write several elements to the same address.
            if any(
                s == 0 and n > 1 for s, n in zip(into.stride(), into.shape, strict=True)
            ):
                raise CheckpointError(
                    f"Elements of {quoted(each.name)} share memory (it is expanded), "
                    "so nothing can be loaded into it. Register a clone() of it."
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
    report: LoadReport,
    leaves_out: Callable[[str], bool] = lambda name: False,
    *,
    cast: bool,
) -> ComparedModel:
    """Compare names, shapes and dtypes; differences go to ``report``."""
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
            to = held.span, held.local, False, held.holders
            copies.append(Copy(name, None, *to))
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
    return ComparedModel(copies, fitting)


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
