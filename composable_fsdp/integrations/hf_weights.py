"""``save_pretrained`` and ``from_pretrained`` for sharded models, part by part.

Files may have other names and forms of weights than the model; the table of conversions
of transformers is applied to a part at a time. Checked with transformers 5.23.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.integrations.hf_adapters import (
    adapter_values,
    base_names,
    has_adapters,
    require_merged,
)
from composable_fsdp.runtime.meta_values import unfilled_buffers
from composable_fsdp.storage.compare import LoadReport
from composable_fsdp.storage.contents import contents_of, places, units_in
from composable_fsdp.storage.export import export_module
from composable_fsdp.storage.formats.files import INDEX
from composable_fsdp.storage.load import LoadOptions, load
from composable_fsdp.storage.opening import open_source
from composable_fsdp.storage.source import Source, TensorInfo
from composable_fsdp.storage.team import FirstError, team_of
from composable_fsdp.tools.texts import byte_size

_MAX_SHARD = 50 * 10**9
"""The default of transformers 5, in bytes."""
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_TEMPORARY = ".weights"


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = _MAX_SHARD,
    merged: bool = False,
) -> None:
    """Write a sharded model as ``model.save_pretrained`` writes the plain model.

    Configuration, generation configuration and weights; ``from_pretrained`` reads the
    directory. A model with PEFT's adapters writes the adapter. Weights of an earlier
    save in the directory are replaced when all new weights are written.

    Args:
        model: a model of transformers, or a ``PeftModel``, sharded or plain.
        directory: the directory; made if missing. All ranks pass the same.
        max_shard_size: the largest size of a weight file, in bytes or as text such as
            ``"5GB"``. Default 50 GB.
        merged: whether the base model with ``merge_adapters`` applied is written,
            without adapters. Default False.

    Collective: a gather per region to the first rank, which alone writes and holds the
        full parameters of a unit at a time, in host memory; exchanges of outcomes. All
        ranks must call.
    Raises: ValueError, for a size that cannot be read, or with ``merged`` if an adapter
        is not merged; CheckpointError or OSError, if the directory cannot be written,
        on all ranks alike.

    ::

        save_pretrained(model, "tiny-llama")
    """
    # "0B" raises for a number below 1.
    given = max_shard_size if isinstance(max_shard_size, str) else f"{max_shard_size}B"
    size = byte_size(given, "max_shard_size: ")
    # PEFT's own files hold the adapter and a reference to the base model.
    adapter = has_adapters(model) and not merged
    if merged:
        require_merged(model)
    base: Any = _base_of(model) if merged else model
    first = team_of(model, "save_pretrained").rank == 0
    values = adapter_values(model, keeps=first) if adapter else {}
    save: Callable[[], object] = partial(
        base.save_pretrained, directory, state_dict=values, is_main_process=first
    )
    write_weights(
        model, directory, save, weights=not adapter, writes=first, max_bytes=size
    )


def write_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    others: Callable[[], object],
    *,
    weights: bool = True,
    writes: bool,
    max_bytes: int = _MAX_SHARD,
) -> None:
    """Write a directory: ``others()`` writes all but the weights; all ranks raise."""
    team = team_of(model, "save_pretrained")
    folder = Path(directory)
    own = FirstError()
    with own:
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            # Left by a process that was killed while it wrote.
            shutil.rmtree(folder / _TEMPORARY, ignore_errors=True)
            others()
    team.agree(own.error)
    if not weights:
        return
    names, base = _file_names(model), _base_of(model)
    # Without buffers, as transformers counts.
    count = sum(
        torch.Size(held.shape).numel()
        for held in contents_of(model, "save_pretrained").each()
        if held.names[0] in names and isinstance(held.tensor, nn.Parameter)
    )

    def rewrite(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        kept = {name: values[own] for own, name in names.items() if own in values}
        if not _is_pretrained(base):
            return kept
        from transformers.core_model_loading import revert_weight_conversion

        # Names and shapes decide on the conversion, so meta tensors will do.
        made: dict[str, Tensor] = revert_weight_conversion(base, kept)
        return {name: value.contiguous() for name, value in made.items()}

    wrote = export_module(folder / _TEMPORARY, model, max_bytes, rewrite=rewrite)
    with own:
        if wrote:
            _replace(folder, count)
    team.agree(own.error)


def _replace(folder: Path, count: int) -> None:
    """Move complete weights into ``folder``, in the place of earlier weights."""
    made = folder / _TEMPORARY
    index = made / INDEX
    # A single file has no index.
    if index.exists():
        told = json.loads(index.read_text())
        told["metadata"]["total_parameters"] = count
        index.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
    new = {each.name for each in made.iterdir()}
    for each in folder.iterdir():
        # An index of an earlier save would hide a single new file.
        if _WEIGHTS.fullmatch(each.name) and each.name not in new:
            each.unlink()
    for name in new:
        # A rename in the same file system: a reader sees the old or the new file.
        (made / name).replace(folder / name)
    made.rmdir()


def _file_names(model: nn.Module) -> dict[str, str]:
    """Return the names in files by those of ``model``, in the order of the files."""
    base = _base_of(model)
    ties = dict(getattr(base, "all_tied_weights_keys", None) or {})
    # Buffers that transformers computes again.
    left_out = set(getattr(base, "_keys_to_ignore_on_save", None) or ())
    held = [each.names[0] for each in contents_of(model, "save_pretrained").each()]
    # The order of the plain model's state dict decides on the files: a module's
    # parameters, its buffers, its children.
    every = (
        f"{path}.{key}" if path else key
        for path, each in places(model)
        for key in (*each._parameters, *each._buffers)
    )
    order, inner = {name: at for at, name in enumerate(every)}, base_names(model)
    names = {name: inner(name) for name in sorted(held, key=order.__getitem__)}
    return {
        # transformers drops the same name of a tied parameter in every save.
        name: ties.get(file_name, file_name)
        for name, file_name in names.items()
        if file_name is not None and file_name not in left_out
    }


def load_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: bool = False,
    report: LoadReport | None = None,
) -> None:
    """Load files of transformers' ``save_pretrained`` into a sharded model.

    The model may be on the meta device. Each rank reads the elements that it holds;
    tensors that transformers converts, such as experts, as a whole, one at a time. Tied
    weights and buffers that are in no file get values as in ``from_pretrained``.

    Args:
        model: a model of transformers that ``fully_shard`` was applied to, or a plain
            model.
        directory: the directory, or a file. All ranks pass the same.
        strict: whether a difference in names, shapes or dtypes raises. Default True.
        cast: whether weights of another dtype are converted. Default False.
        report: receives the differences if ``strict`` is False. Default None: a
            warning.

    Collective: as ``load``; all ranks must call.
    Raises: CheckpointError, as ``load``.

    ::

        load_pretrained(model, "tiny-llama")
    """
    # ``to_empty`` would discard the values of a model that has some.
    if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
        units = units_in(model)
        # The device that units compute on.
        model.to_empty(device=units[0].handle.layout.device if units else "cpu")
    _fill_buffers(model)
    # A rank that calls alone gets an error instead of a hang.
    team, own = team_of(model, "load_pretrained"), FirstError()
    with ExitStack() as stack:
        with own:
            contents = contents_of(model, "load_pretrained")
            names = [name for held in contents.each() for name in held.names]
            source = stack.enter_context(open_source(os.fspath(directory)))
            source = stack.enter_context(as_model(_base_of(model), source, names))
        # Before ``load``, in which the other ranks would wait for this one.
        team.agree(own.error)
        options = LoadOptions(strict=strict, cast=cast, rng=False, report=report)
        load(source, model, options=options)


def _fill_buffers(model: nn.Module) -> None:
    """Let transformers compute the buffers that are in no file."""
    holders = {name.rpartition(".")[0] for name in unfilled_buffers(model)}
    for holder in sorted(holders):
        # The innermost model of transformers: a model may hold models with
        # configurations of their own, such as two towers.
        parts = holder.split(".") if holder else []
        names = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
        around = [getattr(model.get_submodule(n), "_init_weights", None) for n in names]
        # Random numbers for parameters of the same module, which the files replace.
        with torch.random.fork_rng(devices=[]):
            for init in list(filter(callable, around))[:1]:
                init(model.get_submodule(holder))


def _base_of(model: Any) -> Any:
    """Return the model of transformers in a ``PeftModel``, or ``model``."""
    return model.get_base_model() if has_adapters(model) else model


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
    """A view of files of transformers with the names and forms of a model."""

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
        # ``experts.10`` comes after ``experts.9``.
        split = {name: re.split(r"(\d+)", name) for name, _ in parts}
        order = {n: [int(p) if p.isdigit() else p for p in s] for n, s in split.items()}
        for name, pattern in sorted(parts, key=lambda part: order[part[0]]):
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

    def close(self) -> None:
        """Close the files."""
        self._last = ("", {})
        self._source.close()
