"""Names and forms of weights in files of transformers, which differ from the model's.

transformers has a table of conversions per model, which is applied to a part of the
weights at a time: a file of Mixtral has two matrices per expert, the model one tensor
for all. Checked with transformers 5.23, which introduced the table.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.source import Source, TensorInfo


def to_file(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of files for tensors of ``model``, by name, in their order."""
    if not hasattr(model, "_weight_conversions") and not _is_pretrained(model):
        return dict(values)
    from transformers.core_model_loading import revert_weight_conversion

    # Names and shapes decide on the conversion, so meta tensors will do.
    made: dict[str, Tensor] = revert_weight_conversion(model, dict(values))
    return {name: value.contiguous() for name, value in made.items()}


def _is_pretrained(model: nn.Module) -> bool:
    """Return whether ``model`` is a model of transformers, without importing it."""
    # By name, because scripts without transformers import this module, too.
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)


def as_model(model: nn.Module, source: Source, names: Iterable[str]) -> Source:
    """Return ``source`` with the tensors of ``model`` in place of the files'."""
    if not _is_pretrained(model):
        return source
    made = FileSource(model, source, set(names))
    is_same = not made._made and all(k == v for k, v in made._same.items())
    return source if is_same else made


class FileSource(Source):
    """A view of files of transformers with the names and forms of a model.

    A tensor that is only named differently is read by slices. A tensor that is made of
    others is made as a whole, and kept until another tensor is read.
    """

    def __init__(self, model: nn.Module, source: Source, names: set[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        self._model, self._source = model, source
        # The conversions of models inside the model are in the same table.
        table = get_model_conversion_mapping(model)
        renamings = [each for each in table if isinstance(each, WeightRenaming)]
        converters = [each for each in table if isinstance(each, WeightConverter)]
        self._converters = {k: c for c in converters for k in c.source_patterns}
        self._same: dict[str, str] = {}
        # Name in the model -> the names in the files and the patterns they match.
        self._made: dict[str, list[tuple[str, str]]] = {}
        known: dict[str, Any] = dict.fromkeys(names, True)
        prefix = getattr(model, "base_model_prefix", "")
        for name in source.model:
            # Files of the base model alone lack the prefix, and files of a larger
            # model have one too many; transformers adds or removes the prefix.
            found, pattern = rename_source_key(
                name, renamings, converters, prefix or None, known
            )
            # A model may already hold the form of the files (older transformers).
            if pattern is None or name in names:
                self._same[name if name in names else found] = name
            else:
                self._made.setdefault(found, []).append((name, pattern))
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        # Names that are the same cost nothing; others are made from tensors on meta.
        infos = {name: source.model[at] for name, at in self._same.items()}
        # A conversion may make several tensors, of which ``_made`` has the first name.
        self._first: dict[str, str] = {}
        for first in self._made:
            for name, value in self._convert(first, on_meta=True).items():
                infos[name] = TensorInfo(value.dtype, tuple(value.shape))
                self._first[name] = first
        self.model = infos
        self.aliases = source.aliases
        self.optim, self.param_groups, self.extra = {}, None, None
        self.fingerprint = source.fingerprint
        self.path = str(getattr(source, "path", ""))

    def _convert(self, first: str, *, on_meta: bool) -> dict[str, Tensor]:
        """Return the tensors of the model that are made with ``first``."""
        parts = self._made[first]
        # A copy per use, because a converter collects the tensors that it is given.
        converter = copy.deepcopy(self._converters[parts[0][1]])
        for name, pattern in sorted(parts, key=lambda part: _natural(part[0])):
            info = self._source.model[name]
            # Shapes only: nothing is read when the files are opened.
            if on_meta:
                value = torch.empty(info.shape, dtype=info.dtype, device="meta")
            else:
                value = self._source.read_model(name, 0, info.numel).view(info.shape)
            converter.add_tensor(first, name, pattern, value)
        try:
            made = converter.convert(
                first, model=self._model, config=getattr(self._model, "config", None)
            )
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: transformers cannot make {first!r} of "
                f"{[name for name, _ in parts[:5]]}: {error}. Check that the files are "
                "those of this architecture."
            ) from error
        # Some conversions return lists of a single tensor.
        return {n: v[0] if isinstance(v, list) else v for n, v in made.items()}

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of a tensor of the model."""
        if name in self._same:
            return self._source.read_model(self._same[name], start, stop)
        first = self._first[name]
        # The parts of a tensor are read one after the other.
        if self._last[0] != first:
            self._last = first, self._convert(first, on_meta=False)
        return self._last[1][name].reshape(-1)[start:stop]

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """Raise KeyError: files of transformers have no optimizer state."""
        raise KeyError((name, state))

    def close(self) -> None:
        """Close the files."""
        self._last = ("", {})
        self._source.close()


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``experts.10`` after ``experts.9``."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")
    ]
