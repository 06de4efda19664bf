"""``Memory``: the bytes of a rank by kind, and ``StepMoment``, when they are there."""

from __future__ import annotations

from typing import Any, NamedTuple


class Memory(NamedTuple):
    """Bytes of a rank at a moment of a step, by kind.

    Args:
        parameters: sharded parameters, and parameters that no unit holds.
        buffers: buffers of the modules, which only ``simulate`` counts.
        gradients: sharded gradients.
        optimizer: states of the optimizer.
        full: full parameters in use, or not freed yet.
        ahead: full parameters whose all-gather is in flight, ahead of their use;
            ``simulate`` counts them as ``full``.
        reduce: buffers of reductions.
        in_flight: gradients from autograd that are not in a reduce buffer yet;
            ``simulate`` counts them as temporaries.
        activations: tensors of the forward that backward needs, the batch included.
        temporaries: tensors that a computation or the optimizer's step allocates and
            frees, such as gradients of activations.
        host: shards, gradients and states of offloaded units in host memory, which are
            not in ``total``.
        when: the moment, for a reader.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    full: int = 0
    ahead: int = 0
    reduce: int = 0
    in_flight: int = 0
    activations: int = 0
    temporaries: int = 0
    host: int = 0
    when: str = "between steps"

    @property
    def total(self) -> int:
        """Sum of all bytes on the device."""
        return sum(self[:10])

    def by_kind(self) -> dict[str, int]:
        """Return the bytes by the name of the field."""
        return dict(zip(self._fields[:11], self[:11], strict=True))


class StepMoment(NamedTuple):
    """A moment of a step.

    Args:
        memory: the bytes.
        event: of a plan, the ``step_memory.Event``; None for the optimizer's step.
        seconds: of a simulated step, the time since its start.
    """

    memory: Memory
    event: Any = None
    seconds: float = 0.0

    @property
    def when(self) -> str:
        """The part of the step, as "backward of blocks.3"."""
        return self.memory.when
