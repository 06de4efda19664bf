"""A training step as a CUDA graph, captured in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree

from composable_fsdp.flat import memory
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.optim.step_hooks import after_step

_log = logging.getLogger("composable_fsdp")
P = ParamSpec("P")
T = TypeVar("T")
_MOST_KEYS = 64
"""Shapes of inputs that are remembered."""
WARM_UP = 3
"""Eager steps before a capture, as many as torch's own ``make_graphed_callables``."""


def capture(
    step: Callable[P, T], *example_inputs: object, max_graphs: int = 8
) -> CapturedStep[P, T]:
    """Return a callable that runs ``step`` as a CUDA graph, without host time.

    Every call is one training step with the numbers of ``step``: the first three are
    eager, the next one captures, and later ones replay. Inputs of another shape or
    dtype, and other settings of an optimizer that the graph would keep (a learning rate
    that is a float), get one more eager step and a graph. On the CPU all are eager.

    A step cannot be captured if the host must wait in it: units with ``CPUOffload``,
    ``loss.item()``, optimizers without ``capturable=True``. Then all calls are eager,
    the log says once why, and ``reason`` has the text. Python inside of ``step`` runs
    in eager calls and in captures only.

    Args:
        step: A function of tensors (in tuples, lists and dicts, too) and of hashable
            values. It ends with the gradients dropped (``zero_grad()``). The tensors
            that it returns are copied out of the graph's memory.
        example_inputs: Arguments of a call, if there are any yet. They give the inputs
            of the first graph their memory; no step runs with their values.
        max_graphs: The most graphs that are kept. Calls that would need one more are
            eager.

    Collectives: those of ``step``. All ranks call together; some may replay.
    Raises: TypeError, if an argument is neither a tensor nor hashable. What ``step``
    raises in an eager call.

    Example::

        >>> def step(x):
        ...     loss = loss_of(x)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss.detach()
        >>> train_step = capture(step)
        >>> losses = [float(train_step(x)) for x in loader]
    """
    captured = CapturedStep(step, max_graphs)
    if example_inputs:
        captured.prepare(*example_inputs)
    return captured


@dataclass
class _Graph:
    """One graph with the tensors that it reads and the value that it returns."""

    inputs: list[Tensor]
    settings: Hashable = None
    moves: int = 0
    replay: Callable[[], None] | None = None
    output: Any = None


@dataclass
class CapturedStep(Generic[P, T]):
    """What ``capture`` returns: call it instead of the step."""

    step: Callable[P, T]
    max_graphs: int
    reason: str | None = None
    """Why no further graph is captured; ``None`` otherwise."""
    captures: int = 0
    """How many graphs were captured."""
    _graphs: dict[Hashable, _Graph] = field(default_factory=dict, repr=False)
    _optimizers: dict[int, Optimizer] = field(default_factory=dict, repr=False)
    _warm: int = 0
    _pool: Any = None

    def prepare(self, *args: object) -> None:
        """Make the memory of the inputs of a graph for calls like ``args``."""
        key, tensors = _key(args, {})
        if _on_gpu(tensors):
            self._graphs[key] = _Graph([torch.empty_like(t) for t in tensors])

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Take one step; see ``capture``."""
        key, tensors = _key(args, kwargs)
        if not _on_gpu(tensors):
            return self.step(*args, **kwargs)
        graph = self._graphs.get(key)
        if graph is not None and self._is_ready(graph):
            graph.inputs = graph.inputs or [torch.empty_like(t) for t in tensors]
            with torch.no_grad():
                for static, tensor in zip(graph.inputs, tensors, strict=True):
                    static.copy_(tensor, non_blocking=True)
            if graph.replay is None:
                self._capture(graph, args, kwargs)
            if graph.replay is not None:
                graph.replay()
                for optimizer in self._optimizers.values():
                    after_step(optimizer)  # its hooks do not run in a replay
                # Copied, because a replay writes over the tensors of the graph.
                copied: T = _pytree.tree_map_only(Tensor, Tensor.clone, graph.output)
                return copied
        elif graph is None and self.reason is None:
            # Memory for the inputs comes with the capture: not all shapes come again.
            self._graphs[key] = _Graph([])
            if len(self._graphs) > _MOST_KEYS:
                old = (k for k, each in self._graphs.items() if each.replay is None)
                del self._graphs[next(old)]
        if self.reason is not None:
            return self.step(*args, **kwargs)
        return self._warm_up(args, kwargs)

    def _is_ready(self, graph: _Graph) -> bool:
        """Return whether the call can be a replay, now or after a capture."""
        # The graph keeps these settings of the optimizers as they are.
        settings = tuple(
            (name, value)
            for optimizer in self._optimizers.values()
            for group in optimizer.param_groups
            for name, value in group.items()
            if isinstance(value, (int, float, tuple))
        )
        moved = graph.moves != memory.moves()
        if graph.replay is not None:
            if graph.settings == settings and not moved:
                return True
            # The graph computes with the numbers of its capture, and at the addresses.
            graph.replay = None
            self.captures -= moved
            if not any(each.replay for each in self._graphs.values()):
                # Torch has freed the pool together with the last graph.
                self._pool = None
            return False
        graph.settings, graph.moves = settings, memory.moves()
        if self.reason is None and self.captures >= self.max_graphs:
            self._give_up(
                f"{self.captures} graphs (max_graphs) were captured for other shapes "
                "of inputs or other settings of the optimizer. Pad the inputs to fewer "
                "shapes, and give the optimizer its learning rate as a tensor"
            )
        return self.reason is None and self._warm >= WARM_UP

    def _warm_up(self, args: Any, kwargs: Any) -> T:
        """Take an eager step on a side stream, and note the optimizers that step."""
        self._warm += 1
        hook = register_optimizer_step_pre_hook(self._note)
        try:
            with _side_stream():
                return self.step(*args, **kwargs)
        finally:
            hook.remove()

    def _note(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Hook of optimizer steps: remember the optimizer."""
        self._optimizers[id(optimizer)] = optimizer

    def _capture(self, graph: _Graph, args: Any, kwargs: Any) -> None:
        """Capture the step into ``graph``, or give up with the reason."""
        groups = [g for o in self._optimizers.values() for g in o.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        if hindrance := _hindrance(parameters, leaves):
            self._give_up(hindrance)
            return
        static = iter(graph.inputs)
        leaves = [next(static) if isinstance(v, Tensor) else v for v in leaves]
        args, kwargs = _pytree.tree_unflatten(leaves, spec)
        try:
            run = partial(self.step, *args, **kwargs)
            graph.replay, graph.output, self._pool = _record(run, self._pool)
        except RuntimeError as error:
            # What a capture issues does not run: these gradients have no values.
            for parameter in parameters:
                parameter.grad = None
            self._give_up(f"the capture failed: {error}")
        else:
            self.captures += 1

    def _give_up(self, reason: str) -> None:
        """Capture nothing more; calls that have a graph go on to replay it."""
        self.reason = reason
        _log.warning("capture: steps without a graph run eagerly: %s.", reason)


def _hindrance(parameters: list[Tensor], inputs: list[Any]) -> str:
    """Return why a step of the parameters cannot be captured; empty if it may be."""
    if not _on_gpu(parameters):
        return "the optimizers' parameters are not on a GPU"
    if any(leaf[0].layout.offload for leaf in map(find_leaf, parameters) if leaf):
        return "a unit keeps its parameters in host memory (CPUOffload)"
    if any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        return "an input requires a gradient, which would not reach it"
    return ""


def _key(args: Any, kwargs: Any) -> tuple[Hashable, list[Tensor]]:
    """Return what two calls of one graph have in common, and the tensors of a call."""
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    facts = [
        (v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else v
        for v in leaves
    ]
    key = (str(spec), *facts)
    try:
        hash(key)
    except TypeError as error:
        kinds = [type(v).__name__ for v in leaves if not isinstance(v, Tensor)]
        raise TypeError(
            f"A captured step expects tensors and hashable values, got {kinds}: "
            f"{error}. Make the value part of the function."
        ) from None
    return key, tensors


def _on_gpu(tensors: list[Tensor]) -> bool:
    """Return whether a call may be captured: all its tensors are on a GPU."""
    return torch.cuda.is_available() and all(t.is_cuda for t in tensors)


@contextmanager
def _side_stream() -> Iterator[None]:
    """Run on another stream, where a capture expects the steps before it."""
    caller = torch.cuda.current_stream()
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
    side.wait_stream(caller)
    with torch.cuda.stream(side):
        yield
    # Memory of this step that is freed later is used again on ``side`` alone, after
    # ``side`` has waited for the caller's stream; so nothing needs ``record_stream``.
    caller.wait_stream(side)


def _record(step: Callable[[], T], pool: Any) -> tuple[Callable[[], None], T, Any]:
    """Capture ``step``, and return the replay, the output and the pool of memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = step()
    return graph.replay, output, graph.pool()
