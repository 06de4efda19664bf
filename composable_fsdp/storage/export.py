"""Writes weights as safetensors files with Hugging Face's names, from module or file.

The parameters of a sharded module are gathered unit by unit to the first rank, which
holds those of a single unit at a time, and writes each tensor in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.state_dict.full import gather_unit
from composable_fsdp.storage.contents import Held, contents_of, units_in
from composable_fsdp.storage.convert import MAX_SHARD_BYTES, Watched, convert, opened
from composable_fsdp.storage.directory import appear, path_text, unwritable
from composable_fsdp.storage.formats.safetensors_files import SafetensorsWriter
from composable_fsdp.storage.mesh_copies import (
    is_first_copy,
    mesh_groups_in,
    whole_value,
)
from composable_fsdp.storage.opening import SAFETENSORS
from composable_fsdp.storage.source import Source, TensorInfo
from composable_fsdp.storage.storages import require_local
from composable_fsdp.storage.team import meet_team, team_of
from composable_fsdp.tree.state import _FSDPState


def cast_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a weight that is written with ``dtype=wanted``.

    Integers, booleans and complex numbers keep their dtype; None keeps every dtype.

    >>> cast_dtype(torch.float32, torch.bfloat16), cast_dtype(torch.int64, torch.half)
    (torch.bfloat16, torch.int64)
    """
    return wanted if wanted is not None and own.is_floating_point else own


def cast_weight(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values of the weight ``name`` in ``dtype``."""
    made = values.to(dtype)
    if made is not values and not torch.equal(made.isfinite(), values.isfinite()):
        largest = values[values.isfinite()].abs().max()
        raise CheckpointError(
            f"{name!r} holds {float(largest):.4g}, which {dtype} cannot hold. Write "
            "another dtype, such as torch.bfloat16."
        )
    return made


class CastWeights(Watched):
    """A view of ``source`` with the weights, and nothing else, cast to ``dtype``."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        super().__init__(source, None, weights_only=True)
        self.model = {
            name: TensorInfo(cast_dtype(info.dtype, dtype), info.shape)
            for name, info in source.model.items()
        }

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        values = super().read_model(name, start, stop)
        return cast_weight(name, values, self.model[name].dtype)


Rewrite = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Returns the tensors to write for those of the model, which may be on meta."""


def export_safetensors(
    path: str | PathLike[str],
    source: nn.Module | Source | str | PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of ``source`` as safetensors, completely or not at all.

    ``path`` becomes a directory with ``model.safetensors``, or with several files and
    their index if the weights are larger than ``max_shard_bytes``, as
    ``from_pretrained`` reads them. If ``path`` ends in ``.safetensors``, ``path``
    becomes a single file. Names, shapes and dtypes are the plain model's, buffers
    included. A tied parameter is stored once, and the file's metadata lists the other
    names.

    Args:
        path: the directory or file to make; no existing file is overwritten.
        source: a module, sharded or plain; or a checkpoint of any format, open or as a
            path.
        max_shard_bytes: the largest size of a file in bytes; a single tensor may be
            larger. Default ``MAX_SHARD_BYTES`` (5 GB).
        dtype: the dtype of floating-point weights in the files, such as
            ``torch.bfloat16``. Default None: as in ``source``.

    Collective: for a module, one gather per region to the first rank, which alone
    writes and holds a full unit in host memory, an all-gather per DTensor over the
    ranks that cut the tensor, and two exchanges of outcomes over the private gloo group
    of ``save``; all ranks must call. For a checkpoint none: call in
    a single process.
    Raises: CheckpointError, if ``path`` exists or cannot be written, or for values on
    the meta device; PhaseError, inside a step. The same error on every rank.

    >>> export_safetensors("exported", model)
    """
    if isinstance(source, nn.Module):
        export_module(path, source, max_shard_bytes, dtype)
        return
    with opened(source) as found:
        convert(
            found if dtype is None else CastWeights(found, dtype),
            path,
            SAFETENSORS,
            weights_only=True,
            max_shard_bytes=max_shard_bytes,
        )


def export_module(
    path: str | PathLike[str],
    module: nn.Module,
    max_shard_bytes: int,
    dtype: torch.dtype | None = None,
    rewrite: Rewrite | None = None,
) -> bool:
    """Gather the units of ``module`` in turn, and write them on the first rank.

    Collective: as ``export_safetensors`` for a module.
    """
    states = units_in(module)
    meet_team(module, "export_safetensors")
    team = team_of(module)
    # Ranks of tensor parallelism gather as well, and a single rank of all writes.
    groups = mesh_groups_in(module, states)
    wanted = _is_first(states[0], groups) if states else team.rank == 0
    # A single writer needs the same first rank for all units.
    alike = all(_is_first(state, groups) == wanted for state in states)
    writing = _Writing(wanted=wanted, dtype=dtype, rewrite=rewrite)
    with writing.files:
        limit = max_shard_bytes
        writing.attempt(partial(writing.start, path, module, limit, alike=alike))
        team.agree(writing.error)
        for held in writing.loose:
            whole = {held.names[0]: whole_value(held.tensor)}
            writing.attempt(partial(writing.write, whole))
        # Every rank gathers every unit in the same order, also after a failed write:
        # the exchange at the end tells the error.
        for state in states:
            values = gather_unit(state.handle, first_only=True, to_cpu=True)
            writing.attempt(partial(writing.write_unit, id(state.handle), values))
            del values  # Free the unit before the next gather.
        writing.attempt(writing.finish)
        team.agree(writing.error)
    return wanted


def _is_first(state: _FSDPState, groups: Sequence[dist.ProcessGroup]) -> bool:
    """Return whether this rank receives the full parameters of a unit, and writes."""
    own = state.handle.groups
    return own.is_first and is_first_copy((*own.present, *own.cut), groups)


class _Writing:
    """An export on this rank: the files, if this rank writes, and the first error."""

    def __init__(
        self, *, wanted: bool, dtype: torch.dtype | None, rewrite: Rewrite | None
    ) -> None:
        self._wanted, self._dtype, self._rewrite = wanted, dtype, rewrite
        self.error: Exception | None = None
        self.files = ExitStack()
        self._path = Path()
        self._writer: SafetensorsWriter | None = None
        self._names: dict[tuple[int, int], str] = {}
        self.loose: list[Held] = []
        """The DTensors that no unit holds, which all ranks gather."""

    def attempt(self, action: Callable[[], None]) -> None:
        """Run ``action`` unless an earlier action has failed; keep the error."""
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = unwritable(self._path, error)
            except Exception as error:
                self.error = error

    def start(
        self,
        path: str | PathLike[str],
        module: nn.Module,
        max_shard_bytes: int,
        *,
        alike: bool,
    ) -> None:
        """Check the module, make the files, and write the tensors in no unit."""
        text = path_text(path, "export_safetensors")
        require_local(text, "export_safetensors")
        self._path = Path(text)
        if not alike:
            raise CheckpointError(
                "Units of the module are sharded over different ranks, so no rank is "
                "the first of all. Export each part by itself."
            )
        # On every rank: the checks in ``contents_of`` must fail on all ranks alike.
        contents = contents_of(module, "export_safetensors")
        # The first rank would write its own experts, and the file lack the others.
        for param in contents.params():
            if param.ref.handle.groups.experts_ref is not None:
                raise CheckpointError(
                    f"{param.ref.handle.name} has an expert_mesh, and this rank its "
                    "own experts alone; an export gathers over the ranks of a unit. "
                    "Call save(path, model), and then "
                    "storage.export_safetensors(files, path) in a single process."
                )
        # Gathered values arrive by slot index; the file needs names.
        self._names = {
            (id(held.ref.handle), held.ref.slot.index): held.names[0]
            for held in contents.params()
        }
        self.loose = [each for each in contents.tensors if each.rectangle is not None]
        if not self._wanted:
            return
        tensors = {
            each.names[0]: TensorInfo(cast_dtype(each.dtype, self._dtype), each.shape)
            for each in contents.each()
        }
        aliases = {n: each.names[0] for each in contents.each() for n in each.names[1:]}
        if self._rewrite is not None:
            # Without memory: the whole model may not fit.
            metas = {
                name: torch.empty(info.shape, dtype=info.dtype, device="meta")
                for name, info in tensors.items()
            }
            tensors, aliases = {}, {}
            for name, each in self._rewrite(metas).items():
                tensors[name] = TensorInfo(each.dtype, tuple(each.shape))
        self._writer = SafetensorsWriter(
            self.files.enter_context(appear(self._path)),
            tensors,
            aliases,
            max_shard_bytes=max_shard_bytes,
            single=self._path.suffix == ".safetensors",
        )
        self.files.callback(self._writer.close)
        # In the original dtype: mixed precision may have cast a buffer.
        self.write(
            {
                each.names[0]: each.tensor.detach().to(each.dtype)
                for each in contents.tensors
                if each.rectangle is None
            }
        )

    def write_unit(self, handle: int, values: dict[int, Tensor]) -> None:
        """Write the full parameters of a unit; ``values`` is by slot index."""
        self.write({self._names[handle, slot]: value for slot, value in values.items()})

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Write tensors, which are given by the model's names, if this rank writes."""
        if self._writer is None:
            return
        for name, value in (self._rewrite or dict)(values).items():
            dtype = cast_dtype(value.dtype, self._dtype)
            self._writer.write(name, 0, cast_weight(name, value, dtype))

    def finish(self) -> None:
        """Complete the files, and rename them to their final path."""
        if self._writer is not None:
            self._writer.finish()
            self.files.close()
