"""Pass the arguments of ``torch.distributed.checkpoint`` (DCP) functions to hooks.

Names checked on torch 2.13 and 2.11: the functions in ``_waiting``, ``full_state_dict``
and ``cpu_offload`` of ``info``, the arguments ``no_dist``, ``process_group``, ``fqn``,
``checkpoint_md`` and ``local_chunks``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from inspect import signature
from math import prod
from types import ModuleType
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
    to_cpu: bool


# A context variable and not a global: async_save runs DCP in another thread.
_facts: ContextVar[Mapping[str, Any]] = ContextVar("dcp_facts", default={})  # noqa: B039  # never changed
"""Of the DCP call that runs: ``request``, and the number ``saving_ranks``."""

Call = Callable[..., Any]


def dcp_request() -> DcpRequest | None:
    """Return the options of the running DCP call; None if no call is running."""
    return _facts.get().get("request")


@contextmanager
def _knowing(**facts: Any) -> Iterator[None]:
    """Have hooks know ``facts`` while the block runs."""
    token = _facts.set({**_facts.get(), **facts})
    try:
        yield
    finally:
        _facts.reset(token)


def _with_request(run: Call, given: dict[str, Any]) -> Any:
    """Run a DCP function with its options known."""
    model, info = given["model"], given["info"]
    request = DcpRequest(model, info.full_state_dict, info.cpu_offload)
    with _knowing(request=request):
        return run()


def _with_sharded_leaves(run: Call, given: dict[str, Any]) -> Any:
    """Run a DCP function for optimizers while modules show the sharded parameters."""
    states = _get_fsdp_states(given["model"])
    shown = [s.handle for s in states if s.handle.residency is Residency.UNSHARDED]
    for handle in shown:
        residency.use_sharded(handle)
    try:
        # An optimizer made after a load with ``assign`` holds parameters that the units
        # have to adopt before hooks look.
        for state in states:
            require_between_steps(state, "state of an optimizer")
        return _with_request(run, given)
    finally:
        for handle in shown:
            # A call that found the shards replaced has resharded the unit.
            if handle.residency is Residency.HIDDEN:
                residency.use_full(handle)


BEFORE_OPTIMIZER: list[Callable[[object], bool]] = []
"""Each prepares an optimizer for DCP, and says whether it is in use on some rank."""


def _with_init_step(run: Call, given: dict[str, Any]) -> Any:
    """Run DCP's function that makes an optimizer create its state, if it has none."""
    # torch decides by the state and the gradients of this rank, which are missing on a
    # rank without elements.
    if any(callback(given.get("optim")) for callback in BEFORE_OPTIMIZER):
        return None
    return run()


def _with_saving_ranks(run: Call, given: dict[str, Any]) -> Any:
    """Run DCP's save function with the number of saving ranks known."""
    count = 1
    # With ``no_dist`` a single process saves, also inside an initialized process group.
    if not given.get("no_dist") and dist.is_initialized():
        count = dist.get_world_size(given.get("process_group"))
    with _knowing(saving_ranks=count):
        return run()


class CheckedChunks(list[Any]):
    """DCP's chunks to load for ``boxes``, of which a checkpoint must hold the whole."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__(chunks(boxes))
        self.boxes = boxes


def _with_check(run: Call, given: dict[str, Any]) -> Any:
    """Run DCP's function that plans the reads, if the checkpoint has all elements."""
    wanted = given.get("local_chunks")
    # DCP reads what the checkpoint has, and leaves the other elements as they were.
    for box in wanted.boxes if isinstance(wanted, CheckedChunks) else ():
        # The chunks of a checkpoint do not overlap: each element counts once.
        found = sum(_overlap(box, chunk) for chunk in given["checkpoint_md"].chunks)
        if found != box.numel:
            raise CheckpointError(
                f"{given['fqn']!r} is not whole in the checkpoint: of the box at "
                f"{box.offsets} of size {box.sizes} it has {found} of {box.numel} "
                "elements. It was saved by too few ranks, or with parts missing; take "
                "one that all ranks saved."
            )
    return run()


def _overlap(box: Box, chunk: Any) -> int:
    """Return the number of elements that a box and a saved chunk share."""
    cut = zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
    # Not below 0 each: the product of two negative lengths would count.
    return prod(max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in cut)


_waiting: dict[str, dict[str, Call]] = {
    _MODULE: {
        "_get_model_state_dict": _with_request,
        "_get_optim_state_dict": _with_sharded_leaves,
        "_load_model_state_dict": _with_request,
        "_load_optim_state_dict": _with_sharded_leaves,
        "_init_optim_state": _with_init_step,
    },
    f"{_PACKAGE}.state_dict_saver": {"_save_state_dict": _with_saving_ranks},
    f"{_PACKAGE}.planner_helpers": {"create_read_items_for_chunk_list": _with_check},
}
"""By module of torch that is not imported yet, the wrappers of its functions, called
with the call without arguments and a dict of the arguments by name."""


def install() -> None:
    """Put wrappers around the functions of torch, now or when they are imported."""
    for name in [name for name in _waiting if name in sys.modules]:
        _put_in_front(sys.modules[name], _waiting.pop(name))
    # Importing DCP takes longer than importing this package.
    if _waiting and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _put_in_front(module: ModuleType, wrappers: dict[str, Call]) -> None:
    """Put wrappers around the functions of a module, of those that this torch has."""
    for name, front in wrappers.items():
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, wraps(function)(partial(_call, function, front)))


def _call(function: Call, front: Call, *args: Any, **kwargs: Any) -> Any:
    """Call ``front`` with the call of ``function``, and the arguments by name."""
    # By name, because torch's callers pass some arguments by position.
    given = signature(function).bind(*args, **kwargs).arguments
    return front(partial(function, *args, **kwargs), given)


class _Finder(MetaPathFinder):
    """A module finder that puts wrappers in place after a module was executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of other finders, with a loader that does more."""
        wrappers = _waiting.pop(name, None)
        if wrappers is None:
            return None
        # Taken out meanwhile: the other finders are asked through this one.
        try:
            spec = find_spec(name)
        finally:
            _waiting[name] = wrappers
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _put_in_front(module, _waiting.pop(name, {}))

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


def write_items(
    fqn: str, local: Tensor, shape: torch.Size, boxes: Sequence[Box], *, parts: int
) -> list[Any]:
    """Return a ``WriteItem`` per box of ``local``, one of ``parts`` parts."""
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

    ranks = _facts.get().get("saving_ranks")
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
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
