"""``FakeValues``: integers of a step on fake tensors keep values, where they are small.

Fake tensors have no values, so a mixture of experts, whose shapes depend on the router,
would fail. Integers that follow from integers are computed beside the fake tensors;
choices that follow from real numbers are made up, spread evenly::

    scores --topk--> indices     made up: row r takes the next k of n experts
    indices --one_hot, sum, nonzero--> computed from the made-up values
    loss --item--> 1             nobody knows

So each expert gets the same share of the tokens, which is the aim of a router's loss.

Checked on torch 2.13. Private: ``torch.utils._python_dispatch._disable_current_modes``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

aten: Any = torch.ops.aten

outside_modes = _disable_current_modes
"""Runs a block without fake tensors and other modes of torch's dispatcher."""

LARGEST = 1 << 20
"""Tensors of more elements have no values: masks of long sequences, for example."""

_NUMBERS = ("aten::_local_scalar_dense", "aten::equal")
"""Operations whose result is a number that depends on values."""

_BY_VALUES = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
)
"""Operations whose result has a shape that depends on values."""

_CHOICES = (
    "aten::topk",
    "aten::sort",
    "aten::argsort",
    "aten::argmax",
    "aten::argmin",
    "aten::max.dim",
    "aten::min.dim",
    "aten::multinomial",
)
"""Operations whose integers are places in a dim of the input."""

_RARE = ("aten::isnan", "aten::isinf")
"""Conditions that do not hold in a step that trains."""


class FakeValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Keeps values of small integer tensors in the block; inside ``FakeTensorMode``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Real tensors, by the fake ones; views of fake tensors are views here, too.
        self._values: Any = WeakTensorKeyDictionary()

    def like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a fake tensor on the CPU, with the shape and values of ``tensor``."""
        # The strides decide which copies later operations make.
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu"
        )
        # Integers may decide shapes, as the places of tokens do.
        self.know(made, tensor)
        return made

    def know(self, tensor: Tensor, value: Tensor) -> None:
        """Let the fake ``tensor`` have the value of ``value``; on meta: zeros."""
        if _has_values(tensor):
            with outside_modes():
                # The step may write to its inputs, which belong to the caller.
                self._values[tensor] = (
                    torch.zeros(value.shape, dtype=value.dtype, device="cpu")
                    if value.is_meta or isinstance(value, FakeTensor)
                    else value.detach().cpu().clone()
                )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on fake tensors, and on values where all are known."""
        kwargs = kwargs or {}
        name: str = func.name()
        if name in _NUMBERS:
            known = self._known(args, kwargs)
            return _one(args[0]) if known is None else _computed(func, *known)
        # Fake tensors raise for these, so they are computed from values.
        if name.startswith(_BY_VALUES):
            return self._of_unknown_shape(func, args, kwargs)
        # A mask selects as many elements as it has ones; places have a shape.
        if name.startswith(("aten::index.", "aten::index_put", "aten::_index_put")):
            args = (args[0], self._places(args[1]), *args[2:])
        # In bfloat16, torch itself knows the shape and the strides.
        if name == "aten::_grouped_mm" and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args[:2], *args[2:3])
        # A copy writes all values, so those before need not be known.
        if name == "aten::copy_" and self._values.get(args[0]) is None:
            self.know(args[0], args[0])
        # Operations in place change their values, so these are read before.
        known = self._known(args, kwargs)
        # A collective would be sent again for the values.
        if name.startswith("_c10d_functional::"):
            known = None
        result = func(*args, **kwargs)
        self._follow(func, args, result, known, kwargs)
        return result

    def _known(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with values for tensors; None if a tensor has none."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, FakeTensor):
                leaves[index] = self._values.get(leaf)
                if leaves[index] is None:
                    return None
            # Allocations are on the CPU, also if the model's code says meta.
            elif isinstance(leaf, torch.device):
                leaves[index] = torch.device("cpu")
        found: tuple[Any, Any] = pytree.tree_unflatten(leaves, spec)
        return found

    def _follow(
        self, func: Any, args: Any, result: Any, known: Any, kwargs: Any
    ) -> None:
        """Give values to the tensors of ``result`` that need some."""
        name: str = func.name()
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, FakeTensor)]
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        # Large tensors get no values.
        if any(tensor.numel() > LARGEST for tensor in outputs):
            return
        # Memory that nobody has written yet has no values. Real numbers matter only
        # where integers follow from them, as in histograms.
        unwritten = name.startswith(("aten::empty", "aten::new_empty"))
        matters = given or any(map(_has_values, outputs))
        if known is not None and not unwritten and matters:
            values = pytree.tree_leaves(_computed(func, *known))
            leaves = pytree.tree_leaves(result)
            for fake, value in zip(leaves, values, strict=True):
                if isinstance(fake, FakeTensor):
                    self._values[fake] = value
            return
        for fake in filter(_has_values, outputs):
            self._values.pop(fake, None)
            # A tensor that was written in place is none of the choices below.
            if given and not any(fake is each for each in given):
                with outside_modes():
                    self._values[fake] = _made_up(name, args, fake)

    def _of_unknown_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation whose shape depends on values, if these are known."""
        known = self._known(args, kwargs)
        if known is not None:
            return pytree.tree_map_only(Tensor, self._fake, _computed(func, *known))
        # A selection of real numbers by a mask is one by places.
        if func is aten.masked_select.default:
            return aten.index.Tensor(args[0], self._places([args[1]]))
        # Fake tensors raise an error that names the operation.
        return func(*args, **kwargs)

    def _fake(self, value: Tensor) -> Tensor:
        """Return a fake tensor with a value."""
        made = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        self._values[made] = value
        return made

    def _places(self, indices: Any) -> list[Tensor | None]:
        """Return indices with places in the stead of masks whose values are known."""
        found: list[Tensor | None] = []
        for each in indices:
            value = None
            if isinstance(each, FakeTensor) and each.dtype is torch.bool:
                value = self._values.get(each)
            if value is None:
                found.append(each)
                continue
            with outside_modes():
                places = value.nonzero().unbind(1)
            found.extend(self._fake(place) for place in places)
        return found


def _has_values(tensor: Any) -> bool:
    """Return whether ``tensor`` is of integers or booleans, and small."""
    return (
        isinstance(tensor, FakeTensor)
        and not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
        and tensor.numel() <= LARGEST
    )


def _computed(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the result of ``func`` on real tensors."""
    with outside_modes():
        return func(*args, **kwargs)


def _made_up(name: str, args: Any, fake: Tensor) -> Tensor:
    """Return a value for a tensor that depends on real numbers."""
    if fake.dtype is torch.bool:
        # A condition that holds goes the way of a finite loss, for example.
        differs = name.startswith("aten::ne.") and args[0] is args[1]
        value = not (differs or name.startswith(_RARE))
        return torch.full(fake.shape, value, dtype=torch.bool, device="cpu")
    # A cast of unknown numbers has no better value.
    if not name.startswith(_CHOICES):
        return torch.zeros(fake.shape, dtype=fake.dtype, device="cpu")
    # Rows take the places in turn: even shares, and no place twice in a row of topk.
    dim = next((a for a in args[1:] if type(a) is int), -1)
    if name.startswith(("aten::topk", "aten::multinomial")):
        dim = args[2] if name.startswith("aten::topk") and len(args) > 2 else -1
    count = args[0].shape[dim] if args[0].ndim else 1
    return (
        (torch.arange(fake.numel(), device="cpu") % max(count, 1))
        .view(fake.shape)
        .to(fake.dtype)
    )


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor | None = None) -> Tensor:
    """Return the result of ``_grouped_mm``: a product per group of rows."""
    # Two matrices: the groups share their inner dim, as in the gradient of a weight.
    shape = [left.shape[-2], right.shape[-1]]
    if left.ndim == right.ndim == 2:
        assert ends is not None
        return left.new_empty([len(ends), *shape])
    return left.new_empty([left.shape[0], *shape] if left.ndim == right.ndim else shape)


def _one(tensor: Tensor) -> float | complex:
    """Return 1 as a number of the kind of ``tensor``; of booleans, True."""
    # A condition that is true goes the way of a finite loss, for example.
    if tensor.dtype is torch.bool:
        return True
    if tensor.dtype.is_complex:
        return 1 + 0j
    return 1.0 if tensor.dtype.is_floating_point else 1
