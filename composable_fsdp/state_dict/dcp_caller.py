"""What a running function of ``torch.distributed.checkpoint`` (DCP) was given.

DCP gathers only torch's own sharded tensors, and takes other results of
``module.state_dict()`` and ``optim.state_dict()`` as they are. So hooks look up the
arguments of the function of DCP that calls them, in its frame::

    get_model_state_dict(model, options)          torch
      -> _get_model_state_dict(model, info)
        -> module.state_dict() -> hook            dcp_request() reads model and info

Three functions for optimizers get a wrapper besides. Names checked on torch 2.13 and
2.11: the functions and their variables, and ``full_state_dict`` and ``cpu_offload`` of
``info``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from math import prod
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat import residency
from composable_fsdp.phases import Residency
from composable_fsdp.planning.partition import Box
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.tree.traversal import _get_fsdp_states

_PACKAGE = "torch.distributed.checkpoint"
_MODULE = f"{_PACKAGE}.state_dict"


class DcpRequest(NamedTuple):
    """The options of a running DCP call, and the model that DCP was given."""

    model: nn.Module
    full: bool
    """Full tensors instead of sharded values."""
    to_cpu: bool
    """Copy the tensors to host memory."""


def _running(*functions: str) -> Mapping[str, Any] | None:
    """Return the variables of the innermost of these functions of DCP that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name in functions and module.startswith(_PACKAGE):
            return frame.f_locals
        frame = frame.f_back
    return None


def dcp_request() -> DcpRequest | None:
    """Return the options of the running DCP call; None if no call is running."""
    if _MODULE not in sys.modules:
        return None
    given = _running(
        "_get_model_state_dict",
        "_get_optim_state_dict",
        "_load_model_state_dict",
        "_load_optim_state_dict",
    )
    if given is None:
        return None
    info = given["info"]
    return DcpRequest(given["model"], info.full_state_dict, info.cpu_offload)


Call = Callable[..., Any]
"""Any function."""

BEFORE_OPTIMIZER: list[Callable[[object], bool]] = []
"""Each prepares an optimizer for DCP, and says whether it is in use on some rank."""


def _with_init_step(run: Call, optim: object) -> Any:
    """Run DCP's function that makes an optimizer create its state, if it has none."""
    # torch decides by the state and the gradients of this rank, which are missing on a
    # rank without elements.
    return None if any(each(optim) for each in BEFORE_OPTIMIZER) else run(optim)


def _with_sharded_leaves(run: Call, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a DCP function for optimizers while modules show the sharded parameters."""
    states = _get_fsdp_states(model)
    shown = [s.handle for s in states if s.handle.residency is Residency.UNSHARDED]
    for handle in shown:
        residency.use_sharded(handle)
    try:
        # An optimizer made after a load with ``assign`` holds parameters that the units
        # have to adopt before hooks look.
        for state in states:
            require_between_steps(state, "state of an optimizer")
        return run(model, *args, **kwargs)
    finally:
        for handle in shown:
            # A call that found the shards replaced has resharded the unit.
            if handle.residency is Residency.HIDDEN:
                residency.use_full(handle)


def install() -> None:
    """Put wrappers around functions of torch, now or when DCP is imported."""
    # Importing DCP takes longer than importing this package.
    if _MODULE in sys.modules:
        _put_in_front(sys.modules[_MODULE])
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _put_in_front(module: ModuleType) -> None:
    """Put wrappers around the functions of DCP for optimizers, once."""
    for name, front in (
        ("_get_optim_state_dict", _with_sharded_leaves),
        ("_load_optim_state_dict", _with_sharded_leaves),
        ("_init_optim_state", _with_init_step),
    ):
        function = getattr(module, name)
        if not isinstance(function, partial):
            setattr(module, name, wraps(function)(partial(front, function)))


class _Finder(MetaPathFinder):
    """A module finder that puts wrappers in place after DCP's module was executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of other finders, with a loader that does more."""
        if name != _MODULE:
            return None
        # Taken out meanwhile: the other finders are asked through this one.
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        loader: Any = spec and spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _put_in_front(module)

        loader.exec_module = exec_module
        return spec


_FINDER = _Finder()


def chunks(boxes: Sequence[Box]) -> list[Any]:
    """Return a ``ChunkStorageMetadata`` per box."""
    # Here, because importing DCP takes longer than importing this package.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in boxes
    ]


def chunks_to_load(boxes: Sequence[Box]) -> list[Any]:
    """Return DCP's chunks for ``boxes``, of which a checkpoint must hold the whole."""
    reading = _running("_create_read_items") or {}
    # DCP reads what the checkpoint has, and leaves the other elements as they were.
    for box in boxes if reading else ():
        # The chunks of a checkpoint do not overlap: each element counts once.
        found = sum(_overlap(box, chunk) for chunk in reading["md"].chunks)
        if found != box.numel:
            raise CheckpointError(
                f"{reading['fqn']!r} is not whole in the checkpoint: of the box at "
                f"{box.offsets} of size {box.sizes} it has {found} of {box.numel} "
                "elements. It was saved by too few ranks, or with parts missing; take "
                "one that all ranks saved."
            )
    return chunks(boxes)


def _overlap(box: Box, chunk: Any) -> int:
    """Return the number of elements that a box and a saved chunk share."""
    cut = zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
    # Not below 0 each: the product of two negative lengths would count.
    return prod(max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in cut)


def write_items(
    fqn: str, local: Tensor, shape: torch.Size, boxes: Sequence[Box], *, parts: int
) -> list[Any]:
    """Return a ``WriteItem`` per box of ``local``, one of ``parts`` parts."""
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

    saving = _running("_save_state_dict")
    # With ``no_dist`` a single process saves, also inside an initialized process group.
    ranks = 1
    if dist.is_initialized() and not (saving and saving["no_dist"]):
        ranks = dist.get_world_size(saving["process_group"] if saving else None)
    # Of a save on a single rank DCP does not check that the boxes cover the tensor, and
    # a load would leave the other elements as they were.
    if ranks < parts:
        raise CheckpointError(
            f"{fqn!r} is in {parts} parts, got {ranks} ranks to save it: "
            "the checkpoint would have holes. Save on all ranks that hold parts, or "
            "take the state dict under FULL_STATE_DICT."
        )
    properties = TensorProperties.create_from_tensor(local)
    return [
        planner.WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, properties, shape),
        )
        for chunk in chunks(boxes)
    ]
