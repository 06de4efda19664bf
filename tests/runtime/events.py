"""What units do during a step, in order: gathered, used, freed, and when asked for.

``grad`` stands where the gradient of a unit's output is there, before any hook of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from composable_fsdp.flat import residency
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.tree.traversal import _get_fsdp_states
from tests.support.models import TinyGPT, module_at
from tests.support.reference import apply_units, backward, gpt_input, loss_of

Event = tuple[str, str]


@contextmanager
def watched() -> Iterator[list[Event]]:
    """Collect (what, unit) while the block runs."""
    seen: list[Event] = []
    names = {"allocate_full": "gather", "free_full": "free", "use_full": "use"}
    real = {name: vars(residency)[name] for name in names}

    def spy(name: str) -> Callable[[FlatParamHandle], None]:
        def note(handle: FlatParamHandle) -> None:
            if handle.form.needs_gather:
                seen.append((names[name], handle.full_fqn))
            real[name](handle)

        return note

    for name in names:
        setattr(residency, name, spy(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(residency, name, function)


def note_gradients(model: nn.Module, seen: list[Event]) -> None:
    """Add an event ``grad`` when the gradient of a unit's output is known."""

    def arm(name: str, module: nn.Module, args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: seen.append(("grad", name)))  # type: ignore[no-untyped-call]  # torch

    names = {id(m): strip_wrapper(n) for n, m in model.named_modules()}
    for state in _get_fsdp_states(model):
        # After our own hook, which goes before hooks that are there when it comes.
        state.module.register_forward_hook(partial(arm, names[id(state.module)]))


def units_of(events: list[Event], what: str) -> list[str]:
    """The units of the events of one kind, in order."""
    return [unit for kind, unit in events if kind == what]


def most_live(events: list[Event]) -> int:
    """The largest number of units that had memory at once."""
    live, most = 0, 0
    for kind, _ in events:
        live += {"gather": 1, "free": -1}.get(kind, 0)
        most = max(most, live)
    return most


def unused(events: list[Event]) -> list[str]:
    """Units that were gathered and freed without a use in between."""
    waiting: set[str] = set()
    wasted = []
    for kind, unit in events:
        if kind == "gather":
            waiting.add(unit)
        elif kind == "use":
            waiting.discard(unit)
        elif kind == "free" and unit in waiting:
            wasted.append(unit)
            waiting.discard(unit)
    return wasted


def gpt_steps(
    rank: int,
    path: str,
    steps: int = 3,
    *,
    layers: int = 4,
    arrange: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> list[tuple[list[Event], list[Event]]]:
    """Events of forward and of backward of each step of a small GPT."""
    model = TinyGPT(layers=layers)
    units = [f"blocks.{i}" for i in range(layers)]
    return steps_of(
        apply_units(model, units, path=path, **options),
        [gpt_input(step, rank) for step in range(steps)],
        arrange,
    )


def steps_of(
    model: nn.Module,
    inputs: list[Tensor],
    arrange: Callable[[nn.Module], None] | None = None,
) -> list[tuple[list[Event], list[Event]]]:
    """Events of forward and of backward of one step per input."""
    if arrange is not None:
        arrange(model)
    found = []
    with watched() as seen:
        note_gradients(model, seen)
        for x in inputs:
            seen.clear()
            loss = loss_of(model, x)
            forward = list(seen)
            seen.clear()
            backward(loss)
            found.append((forward, list(seen)))
    return found


def block(model: nn.Module, index: int) -> nn.Module:
    """A block of a sharded ``TinyGPT``, on either path."""
    return module_at(model, f"blocks.{index}")
