"""What torch.distributed.checkpoint wants when it calls us.

``get_model_state_dict`` and its kin know torch's own sharded tensors. Of any other they
ask ``module.state_dict()`` and ``optim.state_dict()``, tell them nothing, and take what
comes for what was ordered: shards for full tensors, one rank's part for everybody's.
What was ordered stands in the caller's frame, so it is read there, off the hot path. So
is what the planners do not pass on: how many ranks save, and what a checkpoint has.

Names checked on torch 2.13: the modules, and in their functions ``info`` with
``full_state_dict`` and ``cpu_offload``, ``model``, ``no_dist`` with ``process_group``,
and ``md``. Where ``info`` is missing we refuse rather than guess; the others only find
mistakes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from composable_fsdp.errors import CheckpointError

_PACKAGE = "torch.distributed.checkpoint"
_MODULE = f"{_PACKAGE}.state_dict"


@dataclass(frozen=True, slots=True)
class DcpRequest:
    """The options of the call, and the model it was given."""

    model: nn.Module
    full: bool
    to_cpu: bool


def dcp_request() -> DcpRequest | None:
    """What torch's functions ask for, if one of them is calling; else ``None``.

    Raises: CheckpointError, if one is whose options cannot be read.
    """
    seen = ""
    for frame in _callers(_MODULE):
        seen = seen or frame.f_code.co_name
        found = _read(frame.f_locals)
        if found is not None:
            return found
    if seen:
        raise CheckpointError(
            f"{_MODULE}.{seen} asks for a state dict; expected its options in "
            "'info' and 'model', which this version of torch does not have. Use "
            "module.state_dict() under state_dict_type(...), and optim_state_dict("
            "model, optim)."
        )
    return None


def _read(names: Any) -> DcpRequest | None:
    info, model = names.get("info"), names.get("model")
    full = getattr(info, "full_state_dict", None)
    to_cpu = getattr(info, "cpu_offload", None)
    if isinstance(full, bool) and isinstance(to_cpu, bool):
        return DcpRequest(model, full, to_cpu) if isinstance(model, nn.Module) else None
    return None


_STEP_FRAMES = 8
"""From a hook of a step to who steps: torch's wrapper, a profiler's, a scheduler's."""


def is_state_init_step() -> bool:
    """Whether the step that is running only makes an optimizer have state.

    With zeros for gradients, and a learning rate of zero; by a rank alone, if it holds
    no element and so has no state where the others have.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_STEP_FRAMES):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == _MODULE:
            return True
        frame = frame.f_back
    return False


def saving_ranks() -> int:
    """How many ranks write the checkpoint that is being planned."""
    group: dist.ProcessGroup | None = None
    for frame in _callers(f"{_PACKAGE}.state_dict_saver"):
        names = frame.f_locals
        if names.get("no_dist"):
            return 1
        group = group or names.get("process_group")
    return dist.get_world_size(group) if dist.is_initialized() else 1


def chunks_to_read() -> tuple[str, list[Any]] | None:
    """Name and chunks of the saved tensor that a load is being planned for."""
    for frame in _callers(f"{_PACKAGE}.planner_helpers"):
        saved = getattr(frame.f_locals.get("md"), "chunks", None)
        if saved is not None:
            return frame.f_locals["fqn"], saved
    return None


def is_checkpointing() -> bool:
    """Whether a save or load of torch's package is calling, its stagers included."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PACKAGE) and name != _MODULE:
            return True
        frame = frame.f_back
    return False


def _callers(module: str) -> Iterator[FrameType]:
    """Running functions of torch's ``module``, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            yield frame
        frame = frame.f_back
