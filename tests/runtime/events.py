"""What units do during a step, in order: gathered, used and freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from composable_fsdp.flat import residency
from composable_fsdp.flat.handle import FlatParamHandle

Event = tuple[str, str]


@contextmanager
def watched() -> Iterator[list[Event]]:
    """Collect (what, unit) while the block runs."""
    seen: list[Event] = []
    names = {"allocate_full": "gather", "free_full": "free", "use_full": "use"}
    real = {name: vars(residency)[name] for name in names}

    def spy(name: str) -> Callable[[FlatParamHandle], None]:
        def note(handle: FlatParamHandle) -> None:
            if handle.form.needs_fill:
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


def units_of(events: list[Event], what: str) -> list[str]:
    return [unit for kind, unit in events if kind == what]
