"""A step without devices: fake tensors, and a process group that only notes its calls.

torch has no fake form of coalesced collectives, so the group's methods are Python.
Private names, checked on torch 2.13: ``FakeProcessGroup._create_internal``,
``ProcessGroup._register_backend``, ``_set_default_backend``, ``Backend._plugins``,
``_disable_current_modes``, the operators of ``_c10d_functional``,
``_propagate_tensor_meta_non_cached``.
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from composable_fsdp.comm import device
from composable_fsdp.comm.groups import SIMULATED, operation_log
from composable_fsdp.comm.operations import PHASES, running_unit
from composable_fsdp.errors import FSDPError, PhaseError, PlanError
from composable_fsdp.phases import Phase
from composable_fsdp.tools.step_time import (
    COMMUNICATION,
    Clock,
    SimulatedEvent,
    SimulatedOperation,
    SimulatedStream,
)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value in this block."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of the class ``kind`` wrap others, as a DTensor does."""
    return hasattr(kind, "__tensor_flatten__")


class FakeOps(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Runs what fake tensors cannot; functional collectives only if ``sends``."""

    def __init__(self, *, sends: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sends = sends

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``; a number that is read is 1, a condition is true."""
        # A DTensor computes and sends with its local tensor, which comes by here.
        if any(map(is_wrapper, types)):
            return NotImplemented
        kwargs = kwargs or {}
        name: str = func.name()
        if name.startswith("_c10d_functional::"):
            if not self._sends:
                raise PlanError(
                    f"simulate counts no collectives of the model's own layers, and "
                    f"the model sends {func._opname}, as tensor parallelism does. "
                    "plan and measure_activations tell the memory."
                )
            # The fake form of a wait would return new memory.
            waits = func._opname == "wait_tensor"
            return args[0] if waits else func(*args, **kwargs)
        # The ranks of a mesh, as ``init_device_mesh`` makes them, are real numbers, and
        # stay so.
        if FakeTensor not in types:
            given = tensors_of((args, kwargs))
            is_cpu = all(tensor.device.type == "cpu" for tensor in given)
            makes_ranks = name == "aten::arange" and kwargs.get("dtype") is torch.int
            if is_cpu if given else makes_ranks:
                with _disable_current_modes():
                    return func(*args, **kwargs)
        if name in _ANSWERS:
            return _ANSWERS[name](func, *args)
        return func(*args, **kwargs)


def _number(func: Any, tensor: Tensor) -> Any:
    """Return a number that is read: 1, or True."""
    # A loss of 1 is finite, and goes the way of training. An integer is the size of
    # something, which nobody knows: fake tensors raise.
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else func(tensor)


def _written(func: Any, tensor: Tensor, indices: Any, *more: Any) -> Any:
    """Return ``tensor``, of which a part is written."""
    # A mask selects an unknown number of elements, as of an embedding's output of which
    # tensor parallelism clears some rows. The shape of the result is known.
    if any(each is not None and each.dtype is torch.bool for each in indices):
        return tensor if func._schema.name.endswith("_") else tensor.clone()
    return func(tensor, indices, *more)


def _grouped_product(func: Any, left: Tensor, right: Tensor, *more: Any) -> Any:
    """Return the result of ``_grouped_mm``: a product per group of rows."""
    # In bfloat16, torch itself knows the shape and the strides.
    if left.dtype == torch.bfloat16:
        return func(left, right, *more)
    shape = [left.shape[-2], right.shape[-1]]
    # Two matrices: the groups share their inner dim, as in the gradient of a weight.
    if left.ndim == right.ndim == 2:
        return left.new_empty([len(more[0]), *shape])
    return left.new_empty([left.shape[0], *shape] if left.ndim == right.ndim else shape)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": _number,
    "aten::equal": lambda func, *args: True,
    "aten::index_put": _written,
    "aten::index_put_": _written,
    "aten::_grouped_mm": _grouped_product,
}
"""What runs in the place of an operation that fake tensors cannot run."""


@contextmanager
def fake_tensors(*, sends: bool) -> Iterator[None]:
    """Make tensors in this block fake; log and warn of nothing that is meant so."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Addresses are compared, never read: all fake tensors have the same.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # torch logs a traceback of each operation that fails; the error has it.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        stack.enter_context(replaced(log, "disabled", True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # Without the module there is no DTensor, and its import takes a second.
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor._sharding_prop import ShardingPropagator

            name = "_propagate_tensor_meta_non_cached"
            plain = getattr(ShardingPropagator, name)

            # torch computes the shape of a result on tensors of the size of the whole,
            # which no rank has.
            def propagate(*args: Any, **kwargs: Any) -> Any:
                with _disable_current_modes():
                    return plain(*args, **kwargs)

            stack.enter_context(replaced(ShardingPropagator, name, propagate))
        stack.enter_context(FakeOps(sends=sends))
        yield


@contextmanager
def explained(name: str, place: Callable[[], str]) -> Iterator[None]:
    """Turn errors of the model's code in this block into PlanError."""
    try:
        yield
    except FSDPError:
        raise
    # Models, losses and optimizers are the user's code and may raise anything.
    except Exception as error:
        text = next(iter(str(error).splitlines()), "").rstrip(".")
        raise PlanError(
            f"The step of {name} fails on fake tensors, which have shapes and no "
            f"values, in {place()}: {type(error).__name__}: {text}. Check the batch, "
            "the loss and the dtypes; keep tensors on the CPU; shapes may not depend "
            "on values. plan without a batch needs no step."
        ) from error


def fake_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fake tensor on the CPU with the shape and strides of ``tensor``."""
    # The strides decide which copies later operations make.
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu"
    )


def fake_arguments(
    given: Any, low: torch.dtype | None = None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a forward with fake tensors, real numbers in ``low``."""

    def fake(tensor: Tensor) -> Tensor:
        dtype = low if low and tensor.is_floating_point() else tensor.dtype
        # A function of the user may have made a fake tensor, which is counted once.
        is_done = type(tensor) is FakeTensor and tensor.dtype == dtype
        return tensor if is_done else fake_like(tensor, dtype)

    values = [given] if isinstance(given, Tensor) else given
    made = pytree.tree_map_only(Tensor, fake, values)
    return ((), made) if isinstance(made, Mapping) else (tuple(made), {})


def needing_gradients(values: Any) -> list[Tensor]:
    """Return the tensors in ``values`` that need gradients."""
    return [t for t in tensors_of(values) if t.requires_grad]


def default_loss(output: Any) -> Tensor:
    """Return the output's loss, or the sum of its tensors of real numbers."""
    # Outputs of transformers are mappings and have attributes.
    found = output.get("loss") if isinstance(output, Mapping) else None
    found = getattr(output, "loss", found)
    # A model with labels, for example of transformers, computes its loss itself.
    if isinstance(found, Tensor):
        return found
    # Every output that needs gradients takes part, so backward is complete.
    sums = [each.sum() for each in needing_gradients(output)]
    if not sums:
        raise PlanError(
            "The output of the model has no tensor that needs gradients, so there is "
            "no loss. Pass loss=, a function from the output to the loss."
        )
    return torch.stack([each.float() for each in sums]).sum() if sums[1:] else sums[0]


class _SimulatedWork(dist.Work):
    """A collective that ends at a time."""

    def __init__(self, clock: Clock, end: float) -> None:
        super().__init__()
        self._clock, self._end = clock, end

    def is_completed(self) -> bool:
        """Return True: no data is moved, so nothing is missing."""
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the next work of the current stream behind the collective."""
        # On CPU the host itself waits, and everything is on the first stream.
        self._clock.go_on(self._clock.current.number, self._end)
        return True


def _noted(kind: str) -> Any:
    """Return a method of a process group that notes a collective of ``kind``."""

    def method(self: SimulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        # What is written and what is sent; a collective in place has one of them.
        written, sent = map(tensors_of, (*args, None, None)[:2])
        gathers = kind.endswith("gather") and written
        return self.note(kind, written if gathers else sent or written)

    return method


class SimulatedGroup(dist.ProcessGroup):
    """Collectives that move no data, and are noted with the bytes of a ring."""

    def __init__(self, rank: int, size: int, clock: Clock) -> None:
        # Only this form makes the C++ object that calls back into Python.
        super().__init__(rank, size)  # type: ignore[call-arg]  # not in the stub
        # The backend keeps the name of the group, and answers the other methods.
        backend = FakeProcessGroup._create_internal(rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, backend)
        self._set_default_backend(kind)
        self._clock = clock

    def getBackendName(self) -> str:
        """Return the name under which C++ asks for the backend."""
        return SIMULATED

    def note(self, op: str, whole: Sequence[Tensor]) -> dist.Work:
        """Note a collective of whole buffers."""
        # The bytes of a sum go twice around the ring.
        rounds = 1 + (op == "all_reduce")
        nbytes = sum(tensor.nbytes for tensor in whole)
        seconds = self._clock.machine.collective(nbytes, self.size(), rounds=rounds)
        # torch calls the groups of a mesh "mesh_tp" and so on; the group of all ranks
        # serves each mesh dim that has all ranks.
        is_world = self is dist.group.WORLD
        name = "world" if is_world else str(self.group_desc).removeprefix("mesh_")
        phase = self._clock.stage
        unit = running_unit(phase)
        # A collective of this package is in the log, and has no work yet. Those of the
        # program are in no log.
        last = next(reversed(operation_log(self).operations), None)
        if last is not None and not (last.work or last.waited or last.done):
            op, unit = last.op, last.unit
            # Without a unit, the phase is the outermost call, which is ``simulate``.
            if isinstance(last.phase, Phase):
                phase = PHASES[Phase(last.phase)]
        made = SimulatedOperation(COMMUNICATION, op, unit)._replace(
            phase=phase, nbytes=nbytes, group=name, ranks=self.size()
        )
        clock = self._clock
        return _SimulatedWork(clock, clock.send_on(clock.current.number, made, seconds))

    all_gather_single = all_gather_single_coalesced = _noted("all_gather")
    reduce_scatter_single = reduce_scatter_single_coalesced = _noted("reduce_scatter")
    # A coalesced all-reduce has the arguments of a single one.
    allreduce = allreduce_coalesced = _noted("all_reduce")
    allgather = all_gather_single
    all_to_all_single = alltoall = _noted("all_to_all")
    broadcast = _noted("broadcast")
    reduce = _noted("reduce")
    gather = _noted("gather")
    scatter = _noted("scatter")
    send = _noted("send")
    recv = _noted("recv")
    barrier = _noted("barrier")
    # Names of torch before 2.13.
    alltoall_base = all_to_all_single
    _allgather_base = allgather_into_tensor_coalesced = all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = reduce_scatter_single


_clocks: list[Clock] = []
"""The last entry is the clock of new groups: torch passes no arguments to a backend."""


@contextmanager
def simulated_world(world_size: int, clock: Clock, *, streams: bool) -> Iterator[None]:
    """Be rank 0 of ``world_size`` ranks that do not exist, in this block."""
    if dist.is_initialized():
        raise PhaseError(
            "simulate makes process groups of its own, and this process has a default "
            f"process group ({dist.get_backend()}, {dist.get_world_size()} ranks). "
            "Call simulate before init_process_group, or in a process of its own."
        )
    # A backend is registered once per process, and cannot be removed.
    if SIMULATED.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            SIMULATED,
            lambda store, rank, size, timeout: SimulatedGroup(rank, size, _clocks[-1]),
            devices=["cpu"],
        )
    plain = DeviceMesh.__init__

    # Fake tensors of a step are on the CPU, also if the script trains on GPUs.
    @wraps(plain)
    def make(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain(self, "cpu", *args, **kwargs)

    # The stack restores everything in reverse, also after an error in the block.
    with ExitStack() as stack:
        stack.enter_context(replaced(DeviceMesh, "__init__", make))
        # Units take their streams when they are made, so stand-ins come first.
        for target, name, value in _stand_ins(clock) if streams else ():
            stack.enter_context(replaced(target, name, value))
        _clocks.append(clock)
        stack.callback(_clocks.pop)
        # The store is never read: groups of this backend have no peers to meet.
        dist.init_process_group(
            SIMULATED, store=HashStore(), rank=0, world_size=world_size
        )
        stack.callback(dist.destroy_process_group)
        yield


def _stand_ins(clock: Clock) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return replacements by streams of ``clock``: owner, name and function."""
    live: weakref.WeakSet[device.Streams] = weakref.WeakSet()

    def current_stream(device: object = None) -> SimulatedStream:
        return clock.current

    return [
        (device, "as_cuda", lambda: True),
        (device, "_Stream", clock.new_stream),
        (device, "_Event", SimulatedEvent),
        # Optimizer hooks see the streams of all trees of this process.
        (device, "live_streams", lambda: live),
        (device, "use_stream", clock.use),
        (device, "current_stream", current_stream),
        # A program may ask torch, as the runtime does before it issues work.
        (torch.cuda, "stream", clock.use),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ]
