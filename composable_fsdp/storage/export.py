"""Writes weights as safetensors files with Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.state_dict.full import gather_unit
from composable_fsdp.storage.compare import View
from composable_fsdp.storage.contents import (
    Contents,
    contents_of,
    mesh_groups_in,
    units_in,
)
from composable_fsdp.storage.convert import MAX_SHARD_BYTES, convert, opened
from composable_fsdp.storage.directory import appear, path_text, unwritable
from composable_fsdp.storage.formats.files import SafetensorsWriter
from composable_fsdp.storage.opening import SAFETENSORS
from composable_fsdp.storage.source import Source, TensorInfo
from composable_fsdp.storage.storages import require_local
from composable_fsdp.storage.team import FirstError, team_of
from composable_fsdp.storage.tensors import is_first_copy, whole_value


def cast_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a weight that is written with ``dtype=wanted``."""
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


class CastWeights(View):
    """A view of ``source`` with the weights, and nothing else, cast to ``dtype``."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        super().__init__(source, optimizer=False, values=False)
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
    their index, as ``from_pretrained`` reads them; or a single file, if it ends in
    ``.safetensors``. Names, shapes and dtypes are the plain model's, buffers included.
    A tied parameter is stored once, and the metadata lists the other names.

    Args:
        path: the directory or file to make, which must not exist.
        source: a module, sharded or plain; or a checkpoint of any format, open or as a
            path.
        max_shard_bytes: the largest size of a file in bytes; a single tensor may be
            larger. Default ``MAX_SHARD_BYTES`` (5 GB).
        dtype: the dtype of floating-point weights in the files, such as
            ``torch.bfloat16``. Default None: as in ``source``.

    Collective: for a module, one gather per region to the first rank, which alone
    writes and holds a full unit in host memory, an all-gather per DTensor over the
    ranks that cut it, and two exchanges of objects; all ranks must call. For a
    checkpoint none: call in a single process.
    Raises: CheckpointError, if ``path`` exists or cannot be written, or for values on
    the meta device; PhaseError, inside a step. The same error on every rank.

    >>> export_safetensors("exported", model)
    """
    if isinstance(source, nn.Module):
        export_module(path, source, max_shard_bytes, dtype)
        return
    path_text(path, "export_safetensors")
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
    """Gather the units of ``module`` in turn, and write them on the first rank."""
    states = units_in(module)
    team = team_of(module, "export_safetensors")
    # Ranks of tensor parallelism gather as well, and a single rank of all writes.
    mesh = mesh_groups_in(module, states)
    own = [state.handle.groups for state in states]
    firsts = {g.is_first and is_first_copy(g.present, mesh) for g in own}
    wanted = True in firsts if states else team.rank == 0
    writing = _Writing(path, dtype, rewrite)
    with writing.files:
        with writing.errors():
            # A single writer needs the same first rank for all units.
            if len(firsts) > 1:
                raise CheckpointError(
                    "Units of the module are sharded over different ranks, so no rank "
                    "is the first of all. Export each part by itself."
                )
            writing.start(module, max_shard_bytes, wanted=wanted)
        team.agree(writing.own.error)
        # Every rank gathers every unit in the same order, also after a failed write:
        # the exchange at the end tells the error.
        whole: dict[str, Tensor] = {}
        for held in writing.contents.tensors if writing.contents else ():
            # In the original dtype: mixed precision may have cast a buffer.
            if not held.is_cut:
                whole[held.names[0]] = held.tensor.detach().to(held.dtype)
                continue
            writing.write({held.names[0]: whole_value(held.tensor).to(held.dtype)})
        # Together: ``rewrite`` may make a tensor of several.
        writing.write(whole)
        for state in states:
            values = gather_unit(state.handle, first_only=True, to_cpu=True)
            names = writing.names.get(id(state.handle), {})
            writing.write({names[slot]: value for slot, value in values.items()})
            del values  # Free the unit before the next gather.
        with writing.errors():
            if writing.writer is not None and writing.own.error is None:
                writing.writer.finish()
                # Renames the files to their final path.
                writing.files.close()
        team.agree(writing.own.error)
    return wanted


class _Writing:
    """An export on this rank: the files, if this rank writes, and the first error."""

    def __init__(
        self,
        path: str | PathLike[str],
        dtype: torch.dtype | None,
        rewrite: Rewrite | None,
    ) -> None:
        self._path, self._dtype, self._rewrite = path, dtype, rewrite
        self.own = FirstError()
        self.files = ExitStack()
        self.writer: SafetensorsWriter | None = None
        self.contents: Contents | None = None
        self.names: dict[int, dict[int, str]] = {}
        """The names of each unit's parameters, by slot index."""

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Keep the first error of the block, which the ranks tell each other later."""
        with self.own:
            try:
                yield
            except OSError as error:
                raise unwritable(Path(self._path), error) from error

    def start(self, module: nn.Module, max_shard_bytes: int, *, wanted: bool) -> None:
        """Check the module, and make the files, if this rank is ``wanted`` to."""
        path = Path(path_text(self._path, "export_safetensors"))
        require_local(str(self._path), "export_safetensors")
        # On every rank: the checks in ``contents_of`` must fail on all ranks alike.
        contents = contents_of(module, "export_safetensors")
        for param in contents.params():
            handle = param.ref.handle
            names = self.names.setdefault(id(handle), {})
            names[param.ref.slot.index] = param.names[0]
        self.contents = contents
        if not wanted:
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
        self.writer = SafetensorsWriter(
            self.files.enter_context(appear(path)),
            tensors,
            aliases,
            max_shard_bytes=max_shard_bytes,
            single=path.suffix == ".safetensors",
        )
        self.files.callback(self.writer.close)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Write tensors, which are given by the model's names, if this rank writes."""
        with self.errors():
            if self.writer is None or self.own.error is not None:
                return
            for name, value in (self._rewrite or dict)(values).items():
                dtype = cast_dtype(value.dtype, self._dtype)
                self.writer.write(name, 0, cast_weight(name, value, dtype))
