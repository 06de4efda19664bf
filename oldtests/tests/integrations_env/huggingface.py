"""The environment variables by which accelerate and the Trainer know their rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import TrainingArguments

from tests.integrations_env.torchrun import torchrun_variables
from tests.support.place import World


@contextmanager
def as_torchrun(world: World) -> Iterator[None]:
    """Show accelerate the ranks of ``world``; it keeps its state in the process."""
    with torchrun_variables(world, ACCELERATE_USE_CPU="true"):
        _forget()
        try:
            yield
        finally:
            _forget()


@contextmanager
def alone() -> Iterator[None]:
    """Show accelerate a process without other ranks, for the plain run beside."""
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"}):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        _forget()
        try:
            yield
        finally:
            _forget()


@contextmanager
def future() -> Iterator[None]:
    """Let peft and TRL use names that this version of transformers deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _forget() -> None:
    """Drop what accelerate knows of the process from a test before."""
    # Its own tests call the same functions.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def arguments(folder: Path, config: Any = TrainingArguments, **more: Any) -> Any:
    """Return arguments of six steps, with four sequences per rank and step."""
    given: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        # Below the norms of these models, so that clipping changes every step.
        "max_grad_norm": 0.5,
        "optim": "adamw_torch",
        "report_to": [],
        "disable_tqdm": True,
        **more,
    }
    return config(str(folder), **given)
