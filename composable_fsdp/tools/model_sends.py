"""Collectives of a simulated step that the model itself sends: those of DTensors.

``parallelize_module``, ``DTensor.redistribute`` and the functional collectives are
operations of torch's dispatcher, whose fake forms have shapes and send nothing, so that
no method of a process group is called. They are noted here::

    _c10d_functional::all_reduce(x, "sum", "5") --> SimulatedGroup.note --> Timetable
    _c10d_functional::wait_tensor(y) -------------> the wait for it ------> Timetable

Checked on torch 2.13. Private: ``_resolve_process_group``, the operators of
``_c10d_functional``, and ``ShardingPropagator._propagate_tensor_meta_non_cached``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from composable_fsdp.tools.simulated_world import SimulatedGroup, replaced, share

_FUNCTIONAL = "_c10d_functional"
"""The namespace of the operators."""

_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Collectives by the name of the operator, without "_", "_coalesced" and "_out"."""


class ModelSends(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Notes functional collectives in the block; inside ``FakeTensorMode``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._works: dict[int, dist.Work] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and note a collective or a wait."""
        # A DTensor sends over its local tensor, and an asynchronous result waits.
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace != _FUNCTIONAL:
            return func(*args, **kwargs)
        # The fake forms of these operators have shapes, and tell no process group.
        name = func._opname
        if name == "wait_tensor":
            self._wait(args[0])
            # The fake form would return new memory.
            return args[0]
        result = func(*args, **kwargs)
        kind = next((k for op, k in _KINDS.items() if name.startswith(op)), None)
        group = _group_of(args)
        if kind is not None and group is not None:
            self._note(kind, group, args, result)
        return result

    def _note(self, kind: str, group: SimulatedGroup, args: Any, result: Any) -> None:
        """Note a collective, and give integers that came of it their values."""
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        sums = any(isinstance(each, str) and each.lower() == "sum" for each in args[1:])
        times = group.size() if sums else 1
        for output, own in zip(made, given, strict=False):
            share(kind, group.size(), output, own, times=times, sizes=args[1:3])
        # The larger side of the collective has the whole buffers.
        whole = made if kind == "all_gather" else given
        work = group.note(kind, whole, rounds=2 if kind == "all_reduce" else 1)
        # By storage: a view of the result may be what the model waits for.
        for output in made:
            self._works[output.untyped_storage()._cdata] = work

    def _wait(self, tensor: Tensor) -> None:
        """Note the first wait for a collective."""
        # Later waits for the same result return at once, as on a device.
        work = self._works.pop(tensor.untyped_storage()._cdata, None)
        if work is not None:
            work.wait()


def _group_of(args: Sequence[Any]) -> SimulatedGroup | None:
    """Return the process group among the arguments of an operator, if any."""
    # The name of the group is the last of the texts: a reduction has a text, too.
    found = next(
        (a for a in reversed(args) if isinstance(a, (str, SimulatedGroup))), None
    )
    if isinstance(found, str):
        # torch does not export it, and has no other way from names to groups.
        found = vars(distributed_c10d)["_resolve_process_group"](found)
    return found if isinstance(found, SimulatedGroup) else None


@contextmanager
def model_sends(*, makes_dtensors: bool) -> Iterator[None]:
    """Note what DTensors and functional collectives send in this block."""
    # The import takes a second, which models without DTensors do not need.
    if not makes_dtensors and "torch.distributed.tensor" not in sys.modules:
        with ModelSends():
            yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    plain: Callable[..., Any] = getattr(ShardingPropagator, name)

    @functools.wraps(plain)
    def outside(*args: Any, **kwargs: Any) -> Any:
        # torch computes the shape of a result on tensors of the size of the whole,
        # which no rank has.
        with _disable_current_modes():
            return plain(*args, **kwargs)

    with replaced(ShardingPropagator, name, outside), ModelSends():
        yield
