"""Weights as safetensors files with Hugging Face's names, from a run or from a file.

A sharded module is gathered unit by unit to one rank. Where each tensor's bytes go is
known before the first one comes, so that rank holds one unit and writes it in place,
however the parameters were cut.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.groups import Groups
from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import join, shown, strip_wrapper
from composable_fsdp.state_dict.full import gather_unit
from composable_fsdp.state_dict.settings import state_dict_type
from composable_fsdp.storage.convert import MAX_SHARD_BYTES, convert
from composable_fsdp.storage.formats.detect import SAFETENSORS
from composable_fsdp.storage.formats.files import OUT, begin, commit, unwritable
from composable_fsdp.storage.formats.safetensors_write import SafetensorsWriter
from composable_fsdp.storage.source import Source, TensorInfo
from composable_fsdp.tree.traversal import _get_fsdp_handles


def export_safetensors(
    path: str | PathLike[str],
    source: nn.Module | Source | str | PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weights of ``source`` as safetensors, complete or not at all.

    Makes the directory ``path`` with ``model.safetensors``, or above
    ``max_shard_bytes`` several files and their index, as ``from_pretrained`` takes
    them; the one file ``path`` if it ends in ``.safetensors``. Names, shapes and dtypes
    are the plain model's, buffers included; a tied parameter is stored once and its
    other names stand in the file's metadata.

    Args:
        path: what to make; nothing is overwritten.
        source: a module, sharded or plain; or a checkpoint of any format.
        max_shard_bytes: largest file, unless a single tensor is larger.

    Collective: for a sharded module one gather per region to the first rank, which
    alone writes and holds one unit in host memory, and two exchanges of outcomes; all
    ranks must call and have the same outcome. None for others: call on one rank.
    Raises: CheckpointError, if ``path`` exists or cannot be written, for values that
    are no tensors, or on meta; PhaseError, inside a step.

    >>> export_safetensors("exported", model)  # doctest: +SKIP
    """
    if isinstance(source, nn.Module):
        _export_module(Path(path), source, max_shard_bytes)
        return
    convert(
        source, path, SAFETENSORS, weights_only=True, max_shard_bytes=max_shard_bytes
    )


class _Place(NamedTuple):
    """A parameter that a unit holds: the unit's place in the tree, its slot there."""

    unit: int
    slot: int
    info: TensorInfo


class _Contents(NamedTuple):
    """What a module's state dict has: tensors once, and where each comes from."""

    tensors: dict[str, TensorInfo]
    aliases: dict[str, str]
    sharded: dict[tuple[int, int], str]
    """Name by unit and slot."""
    whole: dict[str, Tensor]


def _export_module(path: Path, module: nn.Module, max_shard_bytes: int) -> None:
    handles = _get_fsdp_handles(module)
    groups = handles[0].groups if handles else Groups(None, None)
    writing = _Writing(path, wanted=groups.is_first)
    try:
        writing.attempt(partial(writing.start, module, handles, max_shard_bytes))
        writing.agree(groups)
        for i, handle in enumerate(handles):
            values = gather_unit(handle, first_only=True, to_cpu=True)
            writing.attempt(partial(writing.write_unit, i, values))
            del values  # before the next one comes
        writing.attempt(writing.finish)
        writing.agree(groups)
    finally:
        writing.clean_up()


class _Writing:
    """One export on one rank: what it writes, if it does, and what went wrong so far.

    A rank that fails goes on with the collectives, so that no other waits for it.
    """

    def __init__(self, path: Path, *, wanted: bool) -> None:
        self._path = path
        self._wanted = wanted
        self._error: Exception | None = None
        self._work: Path | None = None
        self._writer: SafetensorsWriter | None = None
        self._contents: _Contents | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        """Do it, unless something failed before; keep the error."""
        if self._error is None:
            try:
                action()
            except OSError as error:
                self._error = unwritable(self._path, error)
            except Exception as error:
                self._error = error

    def agree(self, groups: Groups) -> None:
        """Raise on every rank if one failed: there its own error, elsewhere its text.

        Collective: one exchange over the shard group, and one over the replicas.
        """
        text = str(self._error) if self._error else ""
        for group in (groups.shard, groups.replicate):
            if group is not None:
                texts = collectives.all_gather_object(text, group)
                text = next(filter(None, texts), "")
        if self._error is not None:
            raise self._error
        if text:
            raise CheckpointError(f"Another rank failed: {text}")

    def start(
        self, module: nn.Module, handles: list[FlatParamHandle], max_shard_bytes: int
    ) -> None:
        """Look at the module, make the files, and write what no unit holds."""
        self._contents = contents = _contents(module, handles)
        if not self._wanted:
            return
        self._work = begin(self._path)
        self._writer = SafetensorsWriter(
            self._work / OUT,
            contents.tensors,
            contents.aliases,
            max_shard_bytes=max_shard_bytes,
            single=self._path.suffix == ".safetensors",
        )
        for name, value in contents.whole.items():
            self._writer.write(name, 0, value)

    def write_unit(self, index: int, values: dict[int, Tensor]) -> None:
        """Write the full parameters of one unit, by slot index."""
        if self._writer is None or self._contents is None:
            return
        for slot, value in values.items():
            name = self._contents.sharded.get((index, slot))
            if name is not None:
                self._writer.write(name, 0, value)

    def finish(self) -> None:
        """Give the files their name."""
        if self._writer is not None and self._work is not None:
            self._writer.finish()
            commit(self._work, self._path)

    def clean_up(self) -> None:
        """Leave nothing half done."""
        if self._writer is not None:
            self._writer.close()
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)


def _contents(module: nn.Module, handles: list[FlatParamHandle]) -> _Contents:
    """What the module's state dict would hold, without gathering it.

    Raises: CheckpointError, for an entry that is no tensor, is on meta, or is a shard
    under a name that is not the plain model's.
    """
    places = _places(module, handles)
    shards = {
        region.shard.untyped_storage().data_ptr()
        for handle in handles
        for region in handle.regions
        if region.shard.numel()
    }
    found = _Contents({}, {}, {}, {})
    first: dict[object, str] = {}
    for name, value in _local_state(module, handles).items():
        _require_value(name, value)
        place = places.get(name)
        if place is None and value.untyped_storage().data_ptr() in shards:
            raise CheckpointError(
                f"{shown(name)} is this rank's shard of a parameter that the model has "
                "under another name: a state dict hook renames it. Remove the hook "
                "while exporting."
            )
        key: object = name
        if place is not None:
            key = (place.unit, place.slot)
        elif value.numel():
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        kept = first.setdefault(key, name)
        if kept != name:
            found.aliases[name] = kept
        elif place is not None:
            found.sharded[place.unit, place.slot] = name
            found.tensors[name] = place.info
        else:
            found.whole[name] = value
            found.tensors[name] = TensorInfo(value.dtype, tuple(value.shape))
    return found


def _local_state(module: nn.Module, handles: list[FlatParamHandle]) -> dict[str, Any]:
    """The state dict with shards in it: names and buffers, without a collective."""
    if not handles:
        return module.state_dict()
    with state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        return module.state_dict()


def _places(module: nn.Module, handles: list[FlatParamHandle]) -> dict[str, _Place]:
    """What units hold, by every name that the plain model has for it."""
    owners: dict[tuple[int, str], _Place] = {}
    for i, handle in enumerate(handles):
        slots = {
            slot.index: _Place(
                i, slot.index, TensorInfo(region.layout.dtype, tuple(slot.shape))
            )
            for region in handle.regions
            for slot in region.layout.parameters
        }
        for info in handle.infos:
            owners[id(info.module), info.name] = slots[info.slot_index]
    return {
        strip_wrapper(join(path, name)): owners[id(owner), name]
        for path, owner in module.named_modules(remove_duplicate=False)
        for name in owner._parameters
        if (id(owner), name) in owners
    }


def _require_value(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{shown(name)} in the state dict is a {type(value).__name__}; safetensors "
            "holds tensors only. Save it apart, and leave it out of the state dict."
        )
    if value.is_meta:
        raise CheckpointError(
            f"{shown(name)} is on meta and has no values. Load or initialise the model "
            "first."
        )
