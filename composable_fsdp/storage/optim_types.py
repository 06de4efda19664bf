"""Checks saved options and states of an optimizer before a load changes anything.

Optimizers look at their options and states only when the state has been replaced, or in
the next step. A value of a wrong type there would leave a model that is half loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.scalars import SCALARS

STATES: dict[str, tuple[str, ...]] = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
}
"""The states that a step of torch's own optimizers reads, if a parameter has any."""


def require_options(
    optim: object, own: Mapping[str, Any], saved: Mapping[str, Any], g: int
) -> None:
    """Raise CheckpointError for a saved option of another type than the present one."""
    # Options that this version of torch does not know are kept, and no code reads them;
    # ``initial_lr`` of a scheduler is one.
    for name, value in saved.items():
        if name in own and name not in ("params", "param_names"):
            if _is_alike(own[name], value):
                continue
            raise CheckpointError(
                f"load: option {name!r} of group {g} is {repr(value)[:80]} in the "
                f"checkpoint; this {type(optim).__name__} expects a value such as "
                f"{own[name]!r}. Nothing was loaded. The checkpoint is damaged, or of "
                "another optimizer; load(path, model) without it reads the model alone."
            )


def _is_alike(own: Any, saved: Any) -> bool:
    """Return whether ``saved`` can stand where ``own`` stands."""
    # None: the optimizer chooses (``foreach``, ``fused``), or has switched it off.
    if own is None or saved is None:
        return not _is_number(own) and not isinstance(saved, (list, dict))
    # Before numbers: in Python, a bool is an int.
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool) and isinstance(saved, bool)
    if _is_number(own):
        return _is_number(saved)
    # JSON and torch.save may exchange lists and tuples; the length is part of the
    # meaning (``betas``).
    if isinstance(own, (list, tuple)):
        return (
            isinstance(saved, (list, tuple))
            and len(own) == len(saved)
            and all(map(_is_alike, own, saved))
        )
    # A subclass of the user stands for its base class in both directions.
    return isinstance(saved, type(own)) or isinstance(own, type(saved))


def _is_number(value: Any) -> bool:
    """Return whether the value is a real number, also in a tensor of a single element.

    A learning rate may be a tensor, so that a compiled step need not be compiled again.
    """
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def require_states(
    optim: object,
    name: str,
    tensors: Mapping[str, Any],
    values: Mapping[str, Any],
    own: Mapping[str, Any],
) -> None:
    """Raise CheckpointError for a state that is missing, or of a wrong type."""
    # The first problem is enough: a reader fixes the checkpoint, not the state.
    for problem in _problems(optim, tensors, values, own):
        raise CheckpointError(
            f"load: the optimizer state of {quoted(name)} {problem}. Nothing was "
            "loaded. The checkpoint is damaged, or of another optimizer; load(path, "
            "model) without it reads the model alone."
        )


def _problems(
    optim: object,
    tensors: Mapping[str, Any],
    values: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Iterator[str]:
    """Yield what is wrong with the states of a parameter; see ``require_states``."""
    kind = type(optim)
    # A class of the user may have any states, and a parameter without a step has none.
    is_known = getattr(torch.optim, kind.__name__, None) is kind
    expected = STATES.get(kind.__name__, ()) if is_known else ()
    if not expected or not (tensors or values):
        return
    # A further state that only one option of Adam makes.
    if own.get("amsgrad"):
        expected = (*expected, "max_exp_avg_sq")
    # All names at once: a user sees from them which optimizer has saved the state.
    missing = [each for each in expected if each not in {**tensors, **values}]
    if missing:
        yield (
            f"lacks {listed(map(repr, missing))}, which a step of {kind.__name__} reads"
        )
    for state, value in values.items():
        if state in expected and not (state in SCALARS and _is_number(value)):
            wanted = "a number" if state in SCALARS else "a tensor"
            yield f"has {state!r} {repr(value)[:80]}; expected {wanted}"
