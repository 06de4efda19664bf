"""Fake tensors for a step, and numbers that are read.

``parallelize_module``, ``DTensor.redistribute`` and the functional collectives are
operations of torch's dispatcher, whose fake forms send nothing.

Checked on torch 2.13. Private: ``_disable_current_modes``, the operators of
``_c10d_functional``, ``_propagate_tensor_meta_non_cached``.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from composable_fsdp.errors import FSDPError, PlanError
from composable_fsdp.tools.simulated_world import replaced, tensors_of


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
    """Return the output's loss, or the sum of its tensors of real numbers.

    Raises: PlanError, if no tensor of the output needs gradients.
    """
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
