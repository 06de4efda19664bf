"""Saves and fills objects with ``state_dict``, and the random generators of a rank."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed
from composable_fsdp.storage.contents import units_in
from composable_fsdp.storage.source import Source
from composable_fsdp.storage.team import Team
from composable_fsdp.storage.values import MAX_DEPTH

Redeal = Callable[[list[Any], int, int], dict[str, Any]]
"""Returns the values of a rank, at another world size, from those of all ranks."""


def is_stateful(value: object) -> bool:
    """Return whether ``value`` is an object with a state that can be given back."""
    # A class has the methods, too, and no state.
    methods = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in methods
    )


def states_of(value: Any, where: str, depth: int = 0) -> Any:
    """Return ``value`` with the state in place of each object that has a state."""
    if is_stateful(value):
        # Its state dict may be plain tensors of a rank, which look like whole ones.
        if isinstance(value, torch.optim.Optimizer):
            raise TypeError(
                f"{where} is an optimizer ({type(value).__name__}); its state is cut "
                "over the ranks. Pass it as optim=..., or several as a list."
            )
        if isinstance(value, nn.Module) and units_in(value):
            raise TypeError(
                f"{where} is a sharded module ({type(value).__name__}); its parameters "
                "are cut over the ranks. Save it by a save of its own, or pass a "
                "module that holds both."
            )
        # A Counter is told by the object itself at the load.
        return _like(value.state_dict(), None)
    if depth > MAX_DEPTH or type(value) not in (dict, list, tuple):
        return value
    made = {
        key: states_of(each, f"{where}[{key!r}]", depth + 1)
        for key, each in _items(value)
    }
    return made if isinstance(value, dict) else type(value)(made.values())


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of a dict, list or tuple."""
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _like(state: Any, own: Any, depth: int = 0) -> Any:
    """Return a state with a Counter where the state ``own`` has one, else a dict."""
    if isinstance(state, dict) and depth <= MAX_DEPTH:
        mine = own if isinstance(own, dict) else {}
        made = {k: _like(each, mine.get(k), depth + 1) for k, each in state.items()}
        return Counter(made) if isinstance(own, Counter) else made
    if type(state) is list and depth <= MAX_DEPTH:
        alike = isinstance(own, list) and len(own) == len(state)
        pairs = zip(state, own if alike else [None] * len(state), strict=True)
        return [_like(each, other, depth + 1) for each, other in pairs]
    return state


@dataclass(slots=True)
class Filling:
    """The states that a load gives to the objects of the caller."""

    value: Any = None
    """The saved value, with the objects in place of their states."""
    states: list[tuple[Any, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def give(self) -> None:
        """Call ``load_state_dict`` of every object."""
        for each, state in self.states:
            # Schedulers keep the lists of the state, which a source may give out again.
            given = _like(copy.deepcopy(state), each.state_dict())
            each.load_state_dict(given)

    def take(self, objects: Any, saved: Any, where: str, depth: int = 0) -> Any:
        """Find the saved state of each object, at the same keys; see ``value``."""
        if is_stateful(objects):
            self.states.append((objects, saved))
            return objects
        # Plain values of ``objects`` say nothing: users pass the same dict to ``save``.
        if not _holds_objects(objects, depth):
            return saved
        is_dict = isinstance(objects, dict)
        if not isinstance(saved, dict if is_dict else list | tuple):
            what = f"{where} was saved as a {type(saved).__name__}"
            if saved is None:
                what = f"the checkpoint was saved without {where}"
            self.problems.append(what)
            return saved
        made: Any = dict(saved) if is_dict else list(saved)
        for key, each in _items(objects):
            if key in saved if is_dict else key < len(saved):
                inner = f"{where}[{key!r}]"
                made[key] = self.take(each, saved[key], inner, depth + 1)
            elif _holds_objects(each, depth + 1):
                keys = listed(map(repr, saved)) if is_dict else f"{len(saved)} items"
                text = f"{where}[{key!r}] was not saved ({where} has {keys})"
                self.problems.append(text)
        return type(saved)(made)


def fill(objects: Any, saved: Any, where: str) -> Filling:
    """Find the saved state of each object in ``objects``, at the same keys."""
    found = Filling()
    found.value = found.take(objects, saved, where)
    return found


def _holds_objects(value: Any, depth: int) -> bool:
    """Return whether ``value`` is or holds an object with a state."""
    if is_stateful(value):
        return True
    if depth > MAX_DEPTH or type(value) not in (dict, list, tuple):
        return False
    return any(_holds_objects(each, depth + 1) for _, each in _items(value))


def own_values(
    source: Source, team: Team, wanted: Any, redeal: Redeal | None
) -> Filling:
    """Return the values for this rank's ``per_rank``; see ``load``."""
    saved, ranks = source.saved_ranks, team.world_size
    if wanted is None:
        return Filling()
    if not isinstance(wanted, dict):
        kind = type(wanted).__name__
        raise TypeError(f"load expects per_rank=None or a dict, got a {kind}.")
    if not saved:
        return Filling(problems=["the checkpoint was saved without per_rank"])
    # A rank without values of its own saved an empty dict, so the numbers are equal.
    if saved == ranks:
        return fill(wanted, source.rank_values(team.rank), "per_rank")
    if redeal is None:
        problem = (
            f"per_rank was saved by {saved} ranks, and {ranks} load: "
            "LoadOptions(redeal=function) gets the values of all of them and returns "
            "those of a rank"
        )
        return Filling(problems=[problem])
    values = redeal([source.rank_values(r) for r in range(saved)], team.rank, ranks)
    if not isinstance(values, dict):
        raise TypeError(f"redeal must return a dict, got a {type(values).__name__}.")
    return fill(wanted, values, "per_rank")


def rng_state() -> dict[str, Any]:
    """Return the states of this rank's generators, as tensors of ``uint8``."""
    others: dict[str, Any] = {"python": random.getstate()}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        kind, keys, *rest = numpy_random.get_state()
        # The default kind of numpy's global generator; other kinds have other states.
        if kind == "MT19937":
            others["numpy"] = [kind, keys.tolist(), *rest]
    # Saving must not initialize CUDA: a context takes time and device memory.
    cuda: list[Tensor] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no type
        cuda = torch.cuda.get_rng_state_all()
    # As bytes: Python's generator alone has 625 numbers per rank.
    text = list(json.dumps(others).encode())
    told = torch.tensor(text, dtype=torch.uint8, device="cpu")
    return {"torch": torch.get_rng_state(), "cuda": cuda, "others": told}


def set_rng_state(state: dict[str, Any], where: str, *, is_trial: bool = False) -> None:
    """Set this rank's generators to ``state``; new ones, of no use, if ``is_trial``."""
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
        # Devices that do not exist now are left out.
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for i, each in enumerate(state["cuda"][:devices]):
            if is_trial:
                torch.Generator(f"cuda:{i}").set_state(each)
            else:
                torch.cuda.set_rng_state(each, i)
    except Exception as error:  # Damaged states raise many kinds of errors.
        raise CheckpointError(
            f"{where}: a random state is of another kind than this version of Python "
            f"and torch takes ({error}). LoadOptions(rng=False) leaves them alone."
        ) from error
