"""Try an unknown optimizer's step on parts of a parameter against the whole.

A class does not say whether its step is element-wise. Before the first step of an
optimizer that is neither torch's nor has ``works_on_shards``, a stand-in with the same
options steps on a small parameter, and two more stand-ins step on its parts, with the
same gradients::

    whole  (256, 160)   scales and gradients of both parts are far apart, so a norm, a
      rows 0-100        mean or a factor over the whole differs over a part; the cut is
      rows 101-255      at no multiple of a block in which state could be quantized

The user's optimizer is only read. A stand-in lacks attributes that cannot be copied
(parameters, large tensors, another optimizer) and sends nothing. If its step needs such
an attribute or a collective, the trial is given up with ``CannotTryError``.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

STAND_IN = "_composable_fsdp_stand_in"
"""Attribute that marks stand-ins, so that the step hooks skip them."""
_STEPS = 3
_SHAPES = {True: ((256, 160), 101), False: ((8192,), 2897)}
"""For a matrix (True) and other parameters: the whole shape, rows of the first part."""
_NEAR = 1e-3
"""Accepted difference, relative to the largest change of the parameter: far above
rounding errors, far below the effect of a norm."""
_SMALL = 4096
"""Maximum number of elements of a tensor attribute that is copied for a stand-in."""
_AS_THEY_ARE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    Enum,
    torch.dtype,
    torch.device,
    types.BuiltinFunctionType,
)
_LOCK = threading.Lock()


class Cut(NamedTuple):
    """How a parameter is cut: a matrix by rows, or any parameter at any element."""

    is_matrix: bool
    rows: bool


class CannotTryError(Exception):
    """Raised with the reason why an optimizer's step cannot be tried."""


# Results by optimizer class and by the representation of cut, options and attributes.
_known: weakref.WeakKeyDictionary[type, dict[str, str]] = weakref.WeakKeyDictionary()


def difference(optim: torch.optim.Optimizer, group: dict[str, Any], cut: Cut) -> str:
    """Return how the step on parts differs from the step on the whole; empty if equal.

    Args:
        optim: the user's optimizer; only read.
        group: the parameter group whose options are tried.
        cut: how the parameters are cut.

    Returns: a text for the message, equal on all ranks.

    Collective: none. Random generators are left unchanged.
    Raises: CannotTryError.
    """
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    # A stand-in copies attributes; its ``__del__`` could free resources of the
    # original.
    if hasattr(type(optim), "__del__"):
        raise CannotTryError("it frees something of its own when it goes")
    held = {id(p) for each in optim.param_groups for p in each["params"]}
    kept = _attributes(optim, held)
    options = {k: _copied(v, held) for k, v in options.items()}
    known = _known.setdefault(type(optim), {})
    key = repr((cut, options, kept))
    if key not in known:
        device = group["params"][0].device
        # ``_undisturbed`` changes global state of the process, so a single thread at a
        # time.
        with _LOCK, _undisturbed(device):
            known[key] = _compare(type(optim), kept, options, cut, device)
    return known[key]


def _attributes(optim: torch.optim.Optimizer, held: set[int]) -> dict[str, Any]:
    """Return copies of the optimizer's attributes that can be copied."""
    kept: dict[str, Any] = {}
    for key, value in vars(optim).items():
        if key in ("state", "param_groups"):
            continue
        if key.startswith("_optimizer_"):
            # The user's hooks must not run for a stand-in.
            kept[key] = OrderedDict()
        elif getattr(value, "__self__", None) is not optim:
            # Bound methods of the optimizer are left out above: a scheduler replaces
            # ``step`` by a wrapper that would step the user's optimizer.
            with suppress(CannotTryError):
                kept[key] = _copied(value, held)
    return kept


def _copied(value: Any, held: set[int], seen: tuple[int, ...] = ()) -> Any:
    """Return a copy that shares no mutable object with ``value``, and no parameter.

    Raises: CannotTryError.
    """
    kind = type(value)
    if isinstance(value, _AS_THEY_ARE):
        return value
    if kind is types.FunctionType and value.__closure__ is None:
        return value
    if kind is Tensor and id(value) not in held and value.numel() <= _SMALL:
        return value.detach().clone()
    copied = functools.partial(_copied, held=held, seen=(*seen, id(value)))
    # ``seen`` ends cycles of containers: an object inside itself cannot be copied.
    if id(value) not in seen:
        if kind in (list, tuple, set, deque):
            return kind(map(copied, value))
        if kind is functools.partial:
            function, *args = map(copied, (value.func, *value.args))
            return functools.partial(function, *args, **copied(value.keywords))
        if kind in (dict, OrderedDict):
            return kind((k, copied(v)) for k, v in value.items())
        if kind is defaultdict:
            return defaultdict(value.default_factory, copied(dict(value)))
        if _is_plain_object(value):
            made = object.__new__(kind)
            vars(made).update(copied(dict(vars(value))))
            return made
    raise CannotTryError(f"it keeps a {kind.__name__}")


def _is_plain_object(value: Any) -> bool:
    """Return whether ``__dict__`` has the whole state of ``value``."""
    # Slots, ``__new__`` and ``__reduce_ex__`` of a class may keep state elsewhere.
    kind: Any = type(value)
    return (
        not isinstance(value, (Tensor, nn.Module, torch.optim.Optimizer))
        and kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and not hasattr(kind, "__del__")
        and hasattr(value, "__dict__")
        and not any(getattr(base, "__slots__", ()) for base in kind.__mro__)
    )


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Raises CannotTryError if a step calls a collective."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The trial does not know which ranks step, so a collective could wait for ever.
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CannotTryError(f"its step sends something ({func})")
        return func(*args, **(kwargs or {}))


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Run the block without effect on random generators, warnings and compilation."""
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numbers = None if numpy is None else numpy.random.get_state()
    # ``set_stance`` imports dynamo, which is slow. If dynamo is not imported yet, the
    # process has compiled nothing.
    compiles = "torch._dynamo" in sys.modules
    stance: Any = torch.compiler.set_stance("force_eager") if compiles else None
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            warnings.catch_warnings(),
            stance or nullcontext(),
            torch.inference_mode(False),
            torch.enable_grad(),
            _NoCollectives(),  # type: ignore[no-untyped-call]  # untyped in torch
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numbers)


def _compare(
    kind: type[torch.optim.Optimizer],
    kept: dict[str, Any],
    options: dict[str, Any],
    cut: Cut,
    device: torch.device,
) -> str:
    """Step on the whole and on two parts; return the difference as text.

    Raises: CannotTryError.
    """
    # Draw on the CPU with a fixed seed, so that all ranks draw the same values.
    drawn = torch.Generator().manual_seed(1)
    shape, first = _SHAPES[cut.is_matrix]
    values = [
        torch.randn(shape, generator=drawn, device="cpu") for _ in range(_STEPS + 1)
    ]
    for at, value in enumerate(values):
        # The part with large weights has small gradients, and the other way round.
        value[:first] *= 0.2 if at else 5.0
    start, *gradients = [value.to(device) for value in values]

    def stepped(parts: slice, *, seed: int = 0, flat: bool = False) -> Tensor:
        """Return the parameter's part after ``_STEPS`` steps of a new stand-in.

        Args:
            parts: the rows of the part.
            seed: seed of the random generators; default: 0.
            flat: step on the part as a vector; default: in its own shape.

        Returns: the values, with rows as in the whole parameter.

        Collective: none.
        """
        chosen = [value[parts].clone() for value in (start, *gradients)]
        if flat:
            chosen = [value.flatten() for value in chosen]
        made = _stand_in(kind, kept, options)
        return _trained(made, chosen, seed).reshape(-1, *shape[1:])

    whole = stepped(slice(None))
    parts = (slice(first), slice(first, None))
    try:
        halves = [stepped(part, flat=not cut.rows) for part in parts]
    except CannotTryError as error:
        # The step on the whole worked, so the optimizer depends on the shape.
        return f"on the whole it steps, and on a part {error}"
    change = (whole - start).abs().max().item()
    apart = (whole - torch.cat(halves)).abs().max().item()
    if apart <= _NEAR * change:
        return ""
    # If the step depends on the seed, the difference between whole and parts may come
    # from the random numbers alone.
    if not torch.equal(whole, stepped(slice(None), seed=1)):
        raise CannotTryError("its step draws random numbers")
    return (
        f"after {_STEPS} steps on a parameter {shape} that change it by {change:.1e}, "
        f"and on its two parts, values are {apart:.1e} apart"
    )


def _stand_in(
    kind: type[torch.optim.Optimizer], kept: dict[str, Any], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer with copied attributes and options, without parameters."""
    # Do not call ``__init__``: its arguments are not known.
    made = object.__new__(kind)
    vars(made).update({k: _copied(v, set()) for k, v in kept.items()})
    vars(made)[STAND_IN] = True
    made.state = defaultdict(dict)
    made.param_groups = [{k: _copied(v, set()) for k, v in options.items()}]
    return made


def _trained(optim: torch.optim.Optimizer, values: list[Tensor], seed: int) -> Tensor:
    """Return the parameter after a step per gradient.

    ``values`` are the start value of the parameter, then the gradients.
    """
    parameter = nn.Parameter(values[0])
    optim.param_groups[0]["params"] = [parameter]
    step: Any = type(optim).step
    while getattr(step, "hooked", False):
        # Remove torch's wrapper, which would call the global step hooks.
        step = step.__wrapped__
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if parameter.is_cuda:
        torch.cuda.default_generators[parameter.get_device()].manual_seed(seed)
    for gradient in values[1:]:
        parameter.grad = gradient.clone()
        try:
            step(optim)
        except CannotTryError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            raise CannotTryError(f"its step raised {text}") from error
    return parameter.detach()
