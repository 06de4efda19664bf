"""Frozen parameters that wrap tensors, as quantized weights do, as plain parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.compose.registry import has_api
from composable_fsdp.errors import CompositionError, PlanError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.flat_state import is_wrapper


class TensorsInside(nn.Module):
    """The tensors of a frozen parameter that wrapped them, in its place."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__()
        keys, self._context = wrapper.__tensor_flatten__()
        self._kind: Any = type(wrapper)
        self._size, self._stride = wrapper.size(), wrapper.stride()
        self._dtypes: dict[str, torch.dtype] = {}
        for key in keys:
            inner = getattr(wrapper, key)
            self._dtypes[key] = inner.dtype
            self.register_parameter(key, nn.Parameter(inner, requires_grad=False))

    def wrapped(self) -> Tensor:
        """Return the tensor of the original class, over the parameters' memory."""
        inner: dict[str, Tensor] = {}
        for key, dtype in self._dtypes.items():
            tensor = self.get_parameter(key)
            if tensor.dtype != dtype:
                raise PlanError(
                    f"Tensor {key!r} inside of a {self._kind.__name__} of shape "
                    f"{tuple(self._size)} is of {tensor.dtype}; expected {dtype}, as "
                    "quantized. MixedPrecision(param_dtype=...) of its unit casts the "
                    "tensor, which changes the values of the weight. Leave param_dtype "
                    "out for this unit, and build the model in the compute dtype."
                )
            # Not the parameter itself: a wrapper that holds parameters could not be
            # detached. The alias has the parameter's memory, so autograd's saved
            # tensors are full again when the unit is gathered for the backward.
            inner[key] = tensor.detach()
        made: Tensor = self._kind.__tensor_unflatten__(
            inner, self._context, self._size, self._stride
        )
        return made


def open_wrapped_params(module: nn.Module) -> nn.Module:
    """Replace frozen parameters that wrap tensors by those tensors, to shard them.

    For quantized weights of torchao (``Int8Tensor``, ``NF4Tensor``) and other classes
    with ``__tensor_flatten__``; call before ``fully_shard``. Afterwards ``weight`` is a
    module with the parameters ``weight.qdata``, ``weight.scale`` and so on; while the
    forward of the owning module runs, it is a tensor of the original class.

    Returns: ``module``.

    >>> net = nn.Linear(4, 4)
    >>> open_wrapped_params(net) is net  # without such parameters nothing changes
    True

    Raises: PlanError, before anything is changed, if such a parameter is trainable,
        wraps wrappers, makes its tensors anew when asked, or has several owners.
    """
    found = list(_wrapped(module))
    names: dict[int, str] = {}
    for fqn, _, _, wrapper in found:
        _refuse(wrapper, fqn, names.setdefault(id(wrapper), fqn))
    for _, owner, name, wrapper in found:
        del owner._parameters[name]
        owner.add_module(name, TensorsInside(wrapper))
    for owner in {id(each): each for _, each, _, _ in found}.values():
        # Behind the hook of a unit, which comes first wherever it is registered.
        owner.register_forward_pre_hook(_show_wrapped)
        owner.register_forward_hook(_hide_wrapped, always_call=True)
    return module


def _wrapped(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield name, owner, attribute and value of the parameters that wrap tensors."""
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if is_wrapper(parameter):
                yield f"{prefix}.{name}".lstrip("."), owner, name, parameter


def _refuse(wrapper: Any, fqn: str, first: str) -> None:
    """Raise PlanError for a wrapper whose tensors cannot stand for it."""
    where = f"Parameter {quoted(fqn)}, a {type(wrapper).__name__},"
    way_out = "Pass the parameter to fully_shard in ignored_states instead."
    # Tensors that are opened twice would be gathered and stored twice.
    if first != fqn:
        raise PlanError(
            f"{where} is {quoted(first)} as well; open_wrapped_params expected one "
            f"owner. {way_out}"
        )
    # A gradient belongs to the wrapper, and no tensor inside has one.
    if wrapper.requires_grad:
        raise PlanError(
            f"{where} is trainable; open_wrapped_params expected frozen parameters. "
            "Freeze the parameter (requires_grad_(False)), or quantize after training."
        )
    for key in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, key)
        # A tensor that is made when asked for is no state: it might forget a change.
        is_held = inner is getattr(wrapper, key)
        if type(inner) not in (Tensor, nn.Parameter) or not is_held:
            raise PlanError(
                f"{where} has a {type(inner).__name__} as {key!r}; open_wrapped_params "
                f"expected a plain tensor that it holds. {way_out}"
            )


def _show_wrapped(owner: nn.Module, args: object) -> None:
    """Let the attributes of ``owner`` be the wrappers while its forward runs."""
    # A recomputation calls the forward without hooks, so it would find no wrapper.
    if has_api(owner, "checkpoint"):
        raise CompositionError(
            f"checkpoint was applied to a {type(owner).__name__} that owns parameters "
            "of open_wrapped_params; expected a module around. Apply checkpoint to "
            "the module that holds the owner, or wrap the owner by checkpoint_wrapper."
        )
    for name, child in owner._modules.items():
        if type(child) is TensorsInside:
            # Found before submodules, which torch looks up only where no attribute is.
            owner.__dict__[name] = child.wrapped()


def _hide_wrapped(owner: nn.Module, args: object, output: object) -> None:
    """Drop the wrappers: after the reshard their memory is empty."""
    for name, child in owner._modules.items():
        if type(child) is TensorsInside:
            owner.__dict__.pop(name, None)
