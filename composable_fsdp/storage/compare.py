"""Compares a checkpoint with a model, before any value is verified or copied."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.contents import Contents, Held
from composable_fsdp.storage.source import Copy, Source, TensorInfo

NO_OPTIMIZER = "the checkpoint was saved without an optimizer"
"""The difference if ``load`` gets an optimizer and the checkpoint has no state."""


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
        for each in fields(other):
            getattr(self, each.name).extend(getattr(other, each.name))

    def _lines(self) -> list[str]:
        """Return a line per kind of difference, without empty kinds."""
        parts: dict[str, Iterable[str]] = {
            "Missing in the checkpoint": map(quoted, self.missing),
            "Not in the model": map(quoted, self.unexpected),
            "Of another shape": self.misshaped,
            "Of another dtype": self.dtypes,
            "Tied in the model and different in the checkpoint": self.untied,
            "Of the optimizer": self.optimizer,
            "Of single ranks": self.local,
            "Of extra and per_rank": self.values,
        }
        lines = [(what, listed(names)) for what, names in parts.items()]
        return [f"{what}: {names}." for what, names in lines if names]

    def _ways_out(self) -> list[str]:
        """Return a sentence per kind of difference that ends it."""
        ways = []
        if self.misshaped or self.missing or self.unexpected or self.untied:
            ways.append(
                "Build the model with the arguments (layers, widths, ties) of the one "
                "that was saved."
            )
        if self.dtypes:
            ways.append("LoadOptions(cast=True) converts dtypes.")
        if NO_OPTIMIZER in self.optimizer:
            ways.append("load(path, model) without the optimizer reads the model.")
        elif self.optimizer and not (self.missing or self.unexpected):
            ways.append(
                "Make the optimizer as the saved one was made (its class, its "
                "parameters); load(path, model) without it reads the model alone."
            )
        if self.missing or self.unexpected:
            ways.append(
                "LoadOptions(include=.., exclude=.. or rename=..) loads a part, or "
                "other names."
            )
        if self.values:
            ways.append("Pass to load the objects that were saved, at the same keys.")
        # Without one of the two a lenient load would load nothing.
        others = self.missing or self.unexpected or self.values or self.local
        if self.optimizer != [NO_OPTIMIZER] or others:
            ways.append("LoadOptions(strict=False) loads what fits.")
        return ways

    def require_empty(self, source: Source) -> None:
        """Raise CheckpointError with a list of the differences, if there are any."""
        if self.is_empty():
            return
        raise CheckpointError(
            f"load: the checkpoint{_path(source)} does not fit; nothing was loaded. "
            f"{' '.join(self._lines())} {' '.join(self._ways_out())}"
        )

    def warn(self) -> None:
        """Warn with a list of the differences, if there are any."""
        if not self.is_empty():
            warnings.warn(
                f"load left out what does not fit. {' '.join(self._lines())}",
                stacklevel=4,  # warn, load, inference_mode, the caller
            )


def _path(source: Source) -> str:
    """Return the path of the source with a leading space, if the source has a path."""
    path = getattr(source, "path", None)
    return f" {path}" if path else ""


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """The parameters, buffers and extra states of the model that this rank reads."""

    source: Source
    copies: list[Copy]
    own_states: list[tuple[nn.Module, str]]

    def require_writable(self) -> None:
        """Raise CheckpointError for a tensor whose elements share memory."""
        for each in self.copies:
            into = each.into
            # A stride of 0 over several elements: an expanded tensor. A copy into the
            # tensor would write all of these elements to the same address.
            if any(
                s == 0 and n > 1 for s, n in zip(into.stride(), into.shape, strict=True)
            ):
                raise CheckpointError(
                    f"Elements of {quoted(each.name)} share memory (it is expanded), "
                    "so "
                    "nothing can be loaded into it. Register a clone() of it."
                )

    def set_own_states(self) -> None:
        """Pass the saved extra states to ``set_extra_state`` of their modules."""
        for module, name in self.own_states:
            module.set_extra_state(self.source.own_states[name])


def find(source: Source, names: tuple[str, ...]) -> str | None:
    """Return the name under which the checkpoint has a tensor, or None."""
    # The checkpoint may have any of the names of a tied tensor.
    for name in names:
        if name in source.model:
            return name
        if name in source.aliases:
            return source.aliases[name]
    return None


def copy_of(
    held: Held,
    name: str,
    state: str | None,
    into: Tensor,
    *,
    is_new: bool = False,
) -> Copy:
    """Return the read of this rank's elements of a tensor, or of one of its states."""
    # An interval of the whole tensor is read faster than the rows of a rectangle.
    rectangle, (start, stop) = held.rectangle, held.interval
    if rectangle is not None:
        rectangle, start, stop = rectangle.moved(start, stop)
    return Copy(name, state, start, stop, into, is_new, rectangle, held.holders)


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

    def fits(
        names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> str | None:
        """Return the name in the checkpoint if the tensor fits; report differences."""
        found = find(source, names)
        if found is None:
            report.missing.append(names[0])
            return None
        # All names of a tied tensor count as used, so none of them is unexpected.
        used.update((found, *names))
        ok = _is_fitting(names[0], shape, dtype, source.model[found], report, cast)
        return found if ok else None

    for held in contents.each():
        found = fits(held.names, held.shape, held.dtype)
        start, stop = held.interval
        # A rank without elements of the parameter reads nothing.
        if found is not None and stop > start:
            # A view: the copy writes straight into the flat shard, or the tensor.
            copies.append(copy_of(held, found, None, held.local))
            report.untied += _untied(source, held.names, copies[-1])
    _compare_wrappers(source, contents, report)
    # Each tied tensor is in ``source.model`` once, so the other names never count.
    own_states = contents.own_states
    report.missing += [name for name in own_states if name not in source.own_states]
    others = [name for name in source.model if name not in used]
    others += [name for name in source.own_states if name not in own_states]
    report.unexpected += [name for name in others if not leaves_out(name)]
    fitting = [(m, name) for name, m in own_states.items() if name in source.own_states]
    return ComparedModel(source, copies, fitting)


def _compare_wrappers(source: Source, contents: Contents, report: LoadReport) -> None:
    """Report tensors that wrap others in another way than in the checkpoint."""
    for each in contents.wrappers:
        # Other formats do not tell; their inner tensors are compared as any tensor.
        saved = source.wrappers.get(each.name, each.facts)
        if saved != each.facts:
            report.misshaped.append(
                f"{quoted(each.name)} (expected {each.facts}, the checkpoint has "
                f"{saved})"
            )


def _untied(source: Source, names: tuple[str, ...], target: Copy) -> list[str]:
    """Return the other names of a tied tensor with other values in the checkpoint."""
    # The checkpoint may hold several values for a tensor that the model has only once.
    # Loading any of them would silently drop the others.
    others = [name for name in names if name in source.model and name != target.name]
    if not others:
        return []
    info, value = source.model[target.name], source.read(target)
    return [
        f"{quoted(name)} (tied to {quoted(target.name)})"
        for name in others
        if source.model[name] != info
        or not _same_bytes(source.read(target._replace(name=name)), value)
    ]


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have equal bytes; unlike values, NaN equals NaN."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _is_fitting(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    info: TensorInfo,
    report: LoadReport,
    cast: bool,
) -> bool:
    """Return whether shape and dtype fit; add a line to ``report`` if not."""
    # A tensor of another shape is reported only once, even if the dtype differs, too.
    if info.shape != shape:
        report.misshaped.append(
            f"{quoted(name)} (expected {shape}, the checkpoint has {info.shape})"
        )
        return False
    if info.dtype != dtype and not cast:
        report.dtypes.append(
            f"{quoted(name)} (expected {dtype}, the checkpoint has {info.dtype})"
        )
        return False
    return True
