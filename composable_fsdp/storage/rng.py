"""Saves and restores the random generators of a rank, as tensors and JSON.

The generators are torch's on the CPU, torch's on each CUDA device if CUDA is in use,
Python's, and numpy's global generator if numpy is imported.
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
    """Return the states of this rank's generators: ``torch``, ``cuda`` and ``others``.

    All values are tensors of ``uint8``; ``cuda`` is a list, and ``others`` holds JSON
    text.
    """
    others: dict[str, Any] = {"python": random.getstate()}
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kind, keys, *rest = numpy_random.get_state()
        # The default kind of numpy's global generator; other kinds have other states.
        if kind == "MT19937":
            others["numpy"] = [kind, keys.tolist(), *rest]
    # Saving must not initialize CUDA: an unused CUDA context takes time and device
    # memory.
    cuda: list[Tensor] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no type
        cuda = torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        # As bytes in a tensor: Python's generator alone has 625 numbers per rank, which
        # would make the manifest large.
        "others": torch.tensor(
            list(json.dumps(others).encode()), dtype=torch.uint8, device="cpu"
        ),
    }


def check_rng_state(state: dict[str, Any], where: str) -> None:
    """Try ``state`` on generators that no other code uses; see ``set_rng_state``."""
    _give(state, where, is_trial=True)


def set_rng_state(state: dict[str, Any], where: str) -> None:
    """Set this rank's generators to ``state``.

    A generator in ``state`` that does not exist now (numpy is not imported, fewer CUDA
    devices) is left out. A generator that is not in ``state`` is not changed.

    Raises: CheckpointError, naming ``where``, for a state that a generator refuses.
    """
    _give(state, where, is_trial=False)


def _give(state: dict[str, Any], where: str, *, is_trial: bool) -> None:
    """Set the generators, or new generators if ``is_trial``."""
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
            # Devices that do not exist now are left out.
            for i, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
                if is_trial:
                    torch.Generator(f"cuda:{i}").set_state(each)
                else:
                    torch.cuda.set_rng_state(each, i)
    # ``setstate``, ``set_state`` and ``json`` raise any of these for damaged states.
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
