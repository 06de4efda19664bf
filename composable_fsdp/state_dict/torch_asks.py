"""What ``torch.distributed.checkpoint.state_dict`` wants when it calls us.

``get_model_state_dict`` and its kin know torch's own sharded tensors. Of any other they
ask ``module.state_dict()`` and ``optim.state_dict()``, tell them nothing, and take what
comes for what was ordered: shards for full tensors, one rank's part for everybody's.
What was ordered stands in the caller's frame, so it is read there, off the hot path.
Names checked on torch 2.11 and 2.13: the module, and in its functions ``info`` with
``full_state_dict`` and ``cpu_offload``, and ``model``. Where they are missing we refuse
rather than guess.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from composable_fsdp.errors import CheckpointError

_MODULE = "torch.distributed.checkpoint.state_dict"


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the call, and the model it was given."""

    model: nn.Module
    full: bool
    to_cpu: bool


def asked_by_torch() -> Asked | None:
    """What torch's functions ask for, if one of them is calling; else ``None``.

    Raises: CheckpointError, if one is whose options cannot be read.
    """
    frame: FrameType | None = sys._getframe(1)
    seen = ""
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            seen = seen or frame.f_code.co_name
            found = _read(frame.f_locals)
            if found is not None:
                return found
        frame = frame.f_back
    if seen:
        raise CheckpointError(
            f"{_MODULE}.{seen} asks for a state dict; expected its options in "
            "'info' and 'model', which this version of torch does not have. Use "
            "module.state_dict() under state_dict_type(...), and optim_state_dict("
            "model, optim)."
        )
    return None


def _read(names: Any) -> Asked | None:
    info, model = names.get("info"), names.get("model")
    full = getattr(info, "full_state_dict", None)
    to_cpu = getattr(info, "cpu_offload", None)
    if isinstance(full, bool) and isinstance(to_cpu, bool):
        return Asked(model, full, to_cpu) if isinstance(model, nn.Module) else None
    return None
