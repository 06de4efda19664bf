"""The random generators of a rank, as tensors and JSON, and back.

torch's on the CPU, torch's on each CUDA device if CUDA is in use, Python's, and numpy's
global one if it is imported. No generator is made for the sake of saving it.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """This rank's generators: ``torch``, ``cuda`` and ``others``, of ``uint8``."""
    others: dict[str, Any] = {"python": random.getstate()}
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kind, keys, *rest = numpy_random.get_state()
        if kind == "MT19937":
            others["numpy"] = [kind, keys.tolist(), *rest]
    cuda: list[Tensor] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no type
        cuda = torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "others": torch.tensor(list(json.dumps(others).encode()), dtype=torch.uint8),
    }


def check_rng_state(state: dict[str, Any], where: str) -> None:
    """Try ``state`` on generators that nobody uses; see ``set_rng_state``."""
    _give(state, where, is_trial=True)


def set_rng_state(state: dict[str, Any], where: str) -> None:
    """Make this rank's generators go on from ``state``.

    A generator that is not there now (numpy not imported, another number of CUDA
    devices) is left out, one that was not there then is left as it is.

    Raises: CheckpointError, naming ``where``, for a state that no generator takes.
    """
    _give(state, where, is_trial=False)


def _give(state: dict[str, Any], where: str, *, is_trial: bool) -> None:
    numpy_random: Any = sys.modules.get("numpy.random")
    python: Any = random.Random() if is_trial else random
    host = torch.Generator() if is_trial else torch.default_generator
    try:
        others = json.loads(bytes(state["others"].tolist()))
        version, keys, gauss = others["python"]
        python.setstate((version, tuple(keys), gauss))
        if numpy_random is not None and "numpy" in others:
            numpy = numpy_random.RandomState() if is_trial else numpy_random
            numpy.set_state(tuple(others["numpy"]))
        host.set_state(state["torch"])
        if state["cuda"] and torch.cuda.is_available():
            for i, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
                if is_trial:
                    torch.Generator(f"cuda:{i}").set_state(each)
                else:
                    torch.cuda.set_rng_state(each, i)
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"{where}: a random state is of another kind than this version of Python "
            f"and torch takes ({error}). Pass rng=False to leave the generators alone."
        ) from error
