"""Saves and fills objects with ``state_dict`` and ``load_state_dict``.

Schedulers, gradient scalers and data loaders stand in ``extra`` and ``per_rank`` beside
plain values. A save stores the state in place of the object; a load that gets the same
objects at the same keys fills them::

    save(.., extra={"sched": sched, "epoch": 3})   {"sched": {..}, "epoch": 3}
    load(.., extra={"sched": sched})               sched.load_state_dict({..})

Saves and restores the random generators of a rank, as tensors and JSON.

The generators are torch's on the CPU, torch's on each CUDA device if CUDA is in use,
Python's, and numpy's global generator if numpy is imported.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed
from composable_fsdp.storage.contents import units_in
from composable_fsdp.storage.source import Source
from composable_fsdp.storage.team import Team

Redeal = Callable[[list[Any], int, int], dict[str, Any]]
"""Returns the values of a rank, from those of all saved ranks, at another world size.
"""
Keys = tuple[Any, ...]
_MAX_DEPTH = 100
"""The deepest nesting in which objects are looked for; values are saved no deeper."""


def is_stateful(value: object) -> bool:
    """Return whether ``value`` is an object with a state that can be given back."""
    # A class has the methods, too, and no state.
    if isinstance(value, type):
        return False
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, name, None)) for name in methods)


def _objects_in(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield each object with a state, and the keys that lead there."""
    if is_stateful(value):
        yield path, value
    elif len(path) <= _MAX_DEPTH and type(value) in (dict, list, tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from _objects_in(each, (*path, key))


def _put(value: Any, path: Keys, new: Any) -> Any:
    """Return ``value`` with ``new`` at the place of the keys; copies containers."""
    if not path:
        return new
    made: Any = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = _put(made[path[0]], path[1:], new)
    return tuple(made) if isinstance(value, tuple) else made


def _place(where: str, path: Keys) -> str:
    """Return the words for the place of the keys."""
    return where + "".join(f"[{key!r}]" for key in path)


def states_of(value: Any, where: str) -> Any:
    """Return ``value`` with the state in place of each object that has a state.

    Collective: those of the objects' ``state_dict``.
    """
    for path, each in list(_objects_in(value)):
        _require_own_state(each, _place(where, path))
        value = _put(value, path, _without_counters(each.state_dict()))
    return value


def _without_counters(state: Any, depth: int = 0) -> Any:
    """Return a state with a dict in place of each Counter; see ``_as_given``."""
    if isinstance(state, dict) and depth <= _MAX_DEPTH:
        return {k: _without_counters(v, depth + 1) for k, v in state.items()}
    if type(state) is list and depth <= _MAX_DEPTH:
        return [_without_counters(each, depth + 1) for each in state]
    return state


def _as_given(state: Any, own: Any) -> Any:
    """Return a saved state with a Counter where the object's ``own`` state has one."""
    if isinstance(state, dict) and isinstance(own, dict):
        made = {key: _as_given(each, own.get(key)) for key, each in state.items()}
        return Counter(made) if isinstance(own, Counter) else made
    if isinstance(state, list) and isinstance(own, list) and len(state) == len(own):
        return list(map(_as_given, state, own))
    return state


def _require_own_state(value: object, where: str) -> None:
    """Raise TypeError for an object whose state is spread over ranks."""
    # Before a step, the state dict of a sharded optimizer is plain tensors of a rank,
    # which no later check could tell from whole ones.
    if isinstance(value, torch.optim.Optimizer):
        raise TypeError(
            f"{where} is an optimizer ({type(value).__name__}); its state is cut over "
            "the ranks. Pass it as optim=..., or several as a list."
        )
    if isinstance(value, nn.Module) and units_in(value):
        raise TypeError(
            f"{where} is a sharded module ({type(value).__name__}); its parameters are "
            "cut over the ranks. Save it by a save of its own, or pass a module that "
            "holds both."
        )


@dataclass(slots=True)
class Filling:
    """The states that a load gives to the objects of the caller; see ``fill``."""

    value: Any = None
    """The saved value, with the objects in place of their states."""
    states: list[tuple[Any, Any]] = field(default_factory=list)
    """Each object, with the state for ``load_state_dict``."""
    problems: list[str] = field(default_factory=list)
    """Objects without a saved state."""

    def give(self) -> None:
        """Call ``load_state_dict`` of every object.

        Collective: those of the objects' ``load_state_dict``.
        """
        for each, state in self.states:
            # Schedulers keep the lists and dicts of the state, which an open source
            # may give out again.
            given = _as_given(copy.deepcopy(state), each.state_dict())
            each.load_state_dict(given)


def fill(objects: Any, saved: Any, where: str) -> Filling:
    """Find the saved state of each object in ``objects``, at the same keys."""
    found = Filling(saved)
    # Plain values of ``objects`` say nothing: users pass the same dict as to ``save``.
    for path, each in _objects_in(objects):
        own, state, problem = objects, saved, ""
        for depth, key in enumerate(path):
            problem = _lacking(own, state, key, _place(where, path[:depth]))
            if problem:
                break
            own, state = own[key], state[key]
        if not problem:
            found.states.append((each, state))
            found.value = _put(found.value, path, each)
        elif problem not in found.problems:
            found.problems.append(problem)
    return found


def _lacking(own: Any, saved: Any, key: Any, where: str) -> str:
    """Return why ``saved`` has no ``key`` of the container ``own``, or ""."""
    if saved is None:
        return f"the checkpoint was saved without {where}"
    is_dict = isinstance(own, dict)
    if not isinstance(saved, dict if is_dict else list | tuple):
        return f"{where} was saved as a {type(saved).__name__}"
    if key in saved if is_dict else key < len(saved):
        return ""
    keys = listed(map(repr, saved)) if is_dict else f"{len(saved)} items"
    return f"{where}[{key!r}] was not saved ({where} has {keys})"


def own_values(
    source: Source, team: Team, wanted: Any, redeal: Redeal | None
) -> Filling:
    """Return the values for this rank's ``per_rank``; see ``load``."""
    if wanted is None:
        return Filling()
    require_dict(wanted, "load expects per_rank=None or a dict")
    saved = source.saved_ranks
    # A rank without values of its own saved an empty dict, so the numbers are equal.
    if saved == team.world_size:
        return fill(wanted, source.rank_values(team.rank), "per_rank")
    if not saved:
        return Filling(problems=["the checkpoint was saved without per_rank"])
    if redeal is None:
        return Filling(
            problems=[
                f"per_rank was saved by {saved} ranks, and {team.world_size} load: "
                "LoadOptions(redeal=function) gets the values of all of them and "
                "returns those of a rank"
            ]
        )
    all_values = [source.rank_values(rank) for rank in range(saved)]
    dealt = redeal(all_values, team.rank, team.world_size)
    require_dict(dealt, "redeal must return a dict")
    return fill(wanted, dealt, "per_rank")


def require_dict(value: object, expected: str) -> None:
    """Raise TypeError, unless ``value`` is a dict."""
    if not isinstance(value, dict):
        raise TypeError(f"{expected}, got a {type(value).__name__}.")


def rng_state() -> dict[str, Any]:
    """Return the states of this rank's generators, as tensors of ``uint8``."""
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
    """Set this rank's generators to ``state``."""
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
            f"and torch takes ({error}). LoadOptions(rng=False) leaves them alone."
        ) from error
