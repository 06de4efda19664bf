"""Counting the bytes of live storages, op by op::

    with fake_tensors(), LiveBytes() as live:
        model = fully_shard(build())
        step(model)                      # the first step makes what stays
        live.reset()
        step(model)
    live.peak

``resize_`` counts; what one kernel allocates and frees inside itself is not seen.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp.comm.device import UnitEvents
from composable_fsdp.flat.handle import FlatParamHandle


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """``now`` and ``peak``: bytes of all storages that ops in the block have met.

    ``at_peak`` is what ``observe``, if set, returned at the peak. Coalesced collectives
    of fake tensors are counted and left out: torch has no fake form of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.at_peak: Any = None
        self.observe: Callable[[], Any] | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize: Any = None

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        alive = (reference() for reference in list(self._storages.values()))
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def reset(self) -> None:
        """Begin a new peak at what is alive now."""
        self.peak = 0
        self._sample()

    def _sample(self) -> None:
        now = self.now
        if now > self.peak:
            self.peak = now
            self.at_peak = self.observe() if self.observe is not None else None

    def _meet(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            # A wrapper, as a DTensor, has the size of the whole and no memory: what it
            # wraps comes by in the ops it makes.
            if not isinstance(tensor, Tensor) or hasattr(tensor, "__tensor_flatten__"):
                continue
            if tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._storages.get(key)
            if known is None or known() is None:
                forget = partial(self._forget, key)
                self._storages[key] = weakref.ref(storage, forget)

    def _forget(self, key: int, gone: object) -> None:
        if self._storages.get(key) is gone:
            del self._storages[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, then count."""
        # While this mode runs an op of a wrapper, the ops on what is wrapped pass by.
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        if _is_coalesced(func) and any(isinstance(t, FakeTensor) for t in given):
            self._meet(given)
            self._sample()
            return FakeWork().boxed()
        result = func(*args, **kwargs)
        self._meet([*given, *pytree.tree_leaves(result)])
        self._sample()
        return result

    def __enter__(self) -> LiveBytes:
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = plain(storage, nbytes)
            self._sample()
            return result

        self._resize = patch.object(torch.UntypedStorage, "resize_", resize_)
        self._resize.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._resize.stop()


def _is_coalesced(func: Any) -> bool:
    name: str = func.name()
    return name.startswith("c10d::") and "coalesced" in name


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made in the block have sizes and dtypes, and no memory."""
    with warnings.catch_warnings():
        # Addresses are compared, never read: all fake tensors have the same.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with FakeTensorMode():
            yield


class _Nothing:
    """A stream and an event: whatever is asked of it, it does not do."""

    event = None

    def _ignore(self, *args: object) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _ignore
    begin_iteration = wait_for_caller = wait_for_step = _ignore


class _Streams(_Nothing):
    gather = reduce = all_reduce = compute = _Nothing()
    stepped = None
    host_waits = False

    def gradient_streams(self, events: object) -> list[_Nothing]:
        return [_Nothing()]

    def current(self) -> _Nothing:
        return _Nothing()

    def on(self, stream: object) -> nullcontext[None]:
        return nullcontext()


@contextmanager
def cuda_order(handles: Iterable[FlatParamHandle]) -> Iterator[None]:
    """Go the way of CUDA with ``handles`` on any device, on streams that do nothing.

    For trees that have not run yet. Allocations and frees come in the order in which
    the CPU issues them for a GPU, which is what a caching allocator counts.
    """
    units = list(handles)
    for handle in units:
        make: Any = _Nothing
        handle.events = UnitEvents(make)
    # Between host and device torch casts on the device, in a tensor of its own.
    offloads = any(handle.layout.offload for handle in units)

    def to_device(target: Tensor, source: Tensor) -> None:
        casts = offloads and target.dtype != source.dtype
        target.copy_(source.clone() if casts else source)

    def to_host(target: Tensor, source: Tensor) -> None:
        target.copy_(source.to(target.dtype))

    with (
        patch("composable_fsdp.tree.root.make_streams", lambda device: _Streams()),
        patch("composable_fsdp.runtime.unshard.copy_async", to_device),
        patch("composable_fsdp.runtime.offload.copy_async", to_host),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
        patch.object(torch.cuda, "current_stream", lambda device=None: _Nothing()),
    ):
        yield
