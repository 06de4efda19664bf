"""Arguments of torch.distributed.checkpoint's functions, for hooks that they call.

``get_model_state_dict`` and its relatives gather torch's own sharded tensors. They use
all others as ``module.state_dict()`` and ``optim.state_dict()`` return them: a shard
where a full tensor was requested, or the part of one rank for all ranks.
Functions in front of torch's private ones keep the arguments of
the running call for the hooks::

    get_model_state_dict(model, options)          torch
      -> _get_model_state_dict(model, info)       keeps the model and info's options
        -> module.state_dict() -> hook            calls dcp_request()

Importing torch.distributed.checkpoint takes longer than importing this package.
``install`` therefore replaces the functions of modules that are loaded, and of the
others when a user imports them.

Names checked on torch 2.13 and 2.11: the functions in ``_FUNCTIONS``, the attributes
``full_state_dict`` and ``cpu_offload`` of ``info``, and the arguments ``no_dist``,
``process_group``, ``fqn``, ``checkpoint_md`` and ``local_chunks``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from inspect import signature
from types import FrameType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from composable_fsdp.errors import CheckpointError

_PACKAGE = "torch.distributed.checkpoint"
_MODULE = f"{_PACKAGE}.state_dict"


@dataclass(frozen=True, slots=True)
class DcpRequest:
    """The options of a running call, and the model that it was given."""

    model: nn.Module
    full: bool
    to_cpu: bool


class CheckedChunks(list[Any]):
    """Chunks that a load wants, with a check against the chunks of the checkpoint."""

    def __init__(
        self, chunks: Sequence[Any], check: Callable[[str, Sequence[Any]], None]
    ) -> None:
        super().__init__(chunks)
        self.check = check


_request: ContextVar[DcpRequest | None] = ContextVar("dcp_request", default=None)
_is_init_step: ContextVar[bool] = ContextVar("dcp_init_step", default=False)
_saving_ranks: ContextVar[int | None] = ContextVar("dcp_saving_ranks", default=None)

Call = Callable[..., Any]


@contextmanager
def _kept(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _with_request(run: Call, given: dict[str, Any]) -> Any:
    info, model = given.get("info"), given.get("model")
    full = getattr(info, "full_state_dict", None)
    to_cpu = getattr(info, "cpu_offload", None)
    readable = isinstance(full, bool) and isinstance(to_cpu, bool)
    request = None
    if readable and isinstance(model, nn.Module):
        request = DcpRequest(model, bool(full), bool(to_cpu))
    with _kept(_request, request):
        return run()


def _with_init_step(run: Call, given: dict[str, Any]) -> Any:
    with _kept(_is_init_step, True):
        return run()


def _with_saving_ranks(run: Call, given: dict[str, Any]) -> Any:
    count = 1
    if not given.get("no_dist") and dist.is_initialized():
        count = dist.get_world_size(given.get("process_group"))
    with _kept(_saving_ranks, count):
        return run()


def _with_check(run: Call, given: dict[str, Any]) -> Any:
    wanted = given.get("local_chunks")
    if isinstance(wanted, CheckedChunks):
        wanted.check(given["fqn"], given["checkpoint_md"].chunks)
    return run()


_FUNCTIONS: dict[str, dict[str, Call]] = {
    _MODULE: {
        "_get_model_state_dict": _with_request,
        "_get_optim_state_dict": _with_request,
        "_load_model_state_dict": _with_request,
        "_load_optim_state_dict": _with_request,
        "_init_optim_state": _with_init_step,
    },
    f"{_PACKAGE}.state_dict_saver": {"_save_state_dict": _with_saving_ranks},
    f"{_PACKAGE}.planner_helpers": {"create_read_items_for_chunk_list": _with_check},
}
"""By module and function: the function in front, called with the rest of the call and
the arguments by name."""

_waiting = dict(_FUNCTIONS)
"""Modules of ``_FUNCTIONS`` whose functions are torch's still."""


def install() -> None:
    """Put the functions in front of torch's, now or when their module is imported."""
    for name in list(_waiting):
        module = sys.modules.get(name)
        if module is not None:
            _put_in_front(module)
    if _waiting and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _put_in_front(module: ModuleType) -> None:
    # If this version of torch lacks a name, the function stays away: ``dcp_request``
    # refuses the calls that then come without options.
    for name, front in _waiting.pop(module.__name__, {}).items():
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, _in_front(function, front))


def _in_front(function: Call, front: Call) -> Call:
    bind = signature(function).bind

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return front(
            partial(function, *args, **kwargs), bind(*args, **kwargs).arguments
        )

    return call


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and replaces functions once a module has run."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        """Modules for which the other finders are being asked."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the others' spec, with a loader that replaces functions."""
        if name not in _waiting or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = find_spec(name)
        finally:
            self.busy.discard(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _put_in_front(module)

        loader.exec_module = exec_module
        return spec


_FINDER = _Finder()


def dcp_request() -> DcpRequest | None:
    """Return the options of the call of torch's that is running, or None.

    Raises: CheckpointError, if one is running whose options are not known.
    """
    request = _request.get()
    if request is not None:
        return request
    for frame in _callers(_MODULE):
        raise CheckpointError(
            f"{_MODULE}.{frame.f_code.co_name} asks for a state dict; expected its "
            "options in 'info' and 'model', which this version of torch does not have. "
            "Use module.state_dict() under state_dict_type(...), and optim_state_dict("
            "model, optim)."
        )
    return None


def is_state_init_step() -> bool:
    """Return whether a step is running that only makes an optimizer have state.

    Gradients and learning rate of such a step are zero. A rank that holds no element,
    and so has no state, takes it alone.
    """
    return _is_init_step.get()


def saving_ranks() -> int:
    """Return how many ranks write the checkpoint that is being planned."""
    known = _saving_ranks.get()
    if known is not None:
        return known
    return dist.get_world_size() if dist.is_initialized() else 1


def is_checkpointing() -> bool:
    """Return whether a save, a load or a stager of torch's package is calling."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PACKAGE) and name != _MODULE:
            return True
        frame = frame.f_back
    return False


def _callers(module: str) -> Iterator[FrameType]:
    """Yield running functions of torch's ``module``, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame
        frame = frame.f_back
