"""The audit of the first step: functions that take a shard for the whole parameter.

A mode sees each torch function of the user between the first forward and the forward
after the first optimizer step, except inside forwards of units. A tensor is a part of a
parameter if it is the leaf or its gradient, or a view or element-wise function of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext

from composable_fsdp.access.settings import units_of
from composable_fsdp.config import Report
from composable_fsdp.features.audit import rules
from composable_fsdp.features.audit.graphs import watch_graphs
from composable_fsdp.features.audit.rules import Part
from composable_fsdp.features.audit.telling import (
    Place,
    harmless,
    is_own_call,
    place_of,
    tell,
)
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.param_ref import param_path, slot_path
from composable_fsdp.naming import quoted
from composable_fsdp.optim.step_checks import cut_leaf, flat_name, handles_of
from composable_fsdp.optim.step_hooks import install_step_hooks
from composable_fsdp.tree.moments import Observer
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

_ACTIONS = get_args(Report)
# One before which gradients were cleared counts for half of them: then the program has
# its own way to step.
_PATIENCE = 64
"""Forwards after which the audit ends without a step."""

_wanted: weakref.WeakKeyDictionary[_FSDPState, str] = weakref.WeakKeyDictionary()
_nodes: weakref.WeakKeyDictionary[RuntimeContext, object] = weakref.WeakKeyDictionary()


def audit(module: nn.Module, action: Report = "warn") -> None:
    """Audit the next step of a sharded model, as its first step is with "warn".

    From here to the forward after the next optimizer step, functions are told that take
    this rank's shard of a parameter, or of its gradient, for the whole: norms, sums and
    means over rows, matrix products, rows chosen by number, random fills. Each is told
    once per line, with the parameter and the way out.

    Args:
        module: The model, or a part; all parameters of the model are audited.
        action: "warn" (default), "error" to raise, or "off", which also ends the audit
            of the first step if called before it.

    Raises: CompositionError, if ``module`` holds no fully sharded module, or later,
        with "error"; ValueError, for another ``action``.

    >>> audit(model, "off")
    """
    if action not in _ACTIONS:
        raise ValueError(
            f"audit expects an action of {', '.join(_ACTIONS)}, got {action!r}."
        )
    states = units_of(module, "audit", recurse=True)
    for state in states:
        _wanted[state] = action
    for context in {state.context for state in states if state.context is not None}:
        context.observers = ()
        _nodes.pop(context, None)
        begin_audit(context)
        observers: tuple[Observer, ...] = context.observers
        for each in observers:
            each.iteration_ends()
    # Optimizers that have stepped are looked at again.
    install_step_hooks()


@harmless
def begin_audit(context: RuntimeContext) -> None:
    """Begin the audit of a tree; for ``FIRST_FORWARD``."""
    # Another model may have turned the mode on; this is a forward.
    _take_off()
    root = context.root()
    action = _wanted.get(root, "warn") if root is not None else "off"
    trained = [each for each in context.handles if each.layout.trainable]
    cut = [each for each in trained if cut_leaf(each.layout.trainable[0].leaves[0])]
    leaves = {
        leaf: quoted(slot_path(handle, slot))
        for handle in cut
        for region in handle.layout.trainable
        for leaf, slot in zip(region.leaves, region.layout.parameters, strict=True)
        if leaf.requires_grad  # frozen since, before the first forward
    }
    if action == "off" or not leaves:
        return
    nodes = watch_graphs([*leaves], [*leaves.values()], is_error=action == "error")
    # Kept: a parameter holds its node only weakly.
    _nodes[context] = nodes
    context.observers = (_Audit(context, is_error=action == "error"),)


@harmless
def note_step(optim: torch.optim.Optimizer) -> None:
    """Have the next forward end the audit of what ``optim`` holds."""
    handles = set(map(id, handles_of(optim)))
    for each in {_MODE.units[key] for key in handles & _MODE.units.keys()}:
        each.has_stepped = True
        each.iteration_ends()
    if type(optim).__module__.startswith("torch.optim."):
        # Torch's own step is right on parts, and the mode would double its time.
        _take_off()

        def put_on_again(*_: object) -> None:
            hook.remove()
            _put_on()

        hook = optim.register_step_post_hook(put_on_again)


class _Audit:
    """The audit of a tree: watches its forwards, and turns the mode on between them."""

    def __init__(self, context: RuntimeContext, *, is_error: bool) -> None:
        self.context = weakref.ref(context, lambda _: _MODE.forget(self))
        self.is_error = is_error
        self.has_stepped = False
        self._left = _PATIENCE
        self.told: set[tuple[str, str, int]] = set()
        _MODE.add(self, context)

    @harmless
    def iteration_begins(self) -> None:
        """Turn the mode off for the forward; end the audit after the step."""
        _take_off()
        context = self.context()
        assert context is not None  # it calls
        self._left -= 1 if _has_gradients(context) else _PATIENCE // 2
        if self.has_stepped or self._left <= 0:
            context.observers = ()
            _MODE.forget(self)

    @harmless
    def iteration_ends(self) -> None:
        """Turn the mode on behind a forward that may lead to a step."""
        context = self.context()
        if context is not None and (torch.is_grad_enabled() or self.has_stepped):
            _MODE.add(self, context)
            _put_on()


class _Call(NamedTuple):
    """A call that takes parts of parameters."""

    name: str
    place: Place | None  # the user's line; None if parts are right there
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[tuple[Tensor, Part]]


class _Mode(TorchFunctionMode):
    """Follows the parts of the parameters of all trees that are audited."""

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[int, _Audit] = {}
        """By id of the unit's handle."""
        self._parts: dict[int, tuple[weakref.ref[Tensor], Part]] = {}

    def add(self, of: _Audit, context: RuntimeContext) -> None:
        """Audit the cut units of a tree, as they are laid out now."""
        self.units.update({id(each): of for each in context.handles})

    def forget(self, of: _Audit) -> None:
        """End an audit; the last leaves nothing behind."""
        self.units = {key: each for key, each in self.units.items() if each is not of}
        if not self.units:
            self._parts = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # First: a graph compiled under the mode must be that compiled without it, which
        # a recomputation on autograd's thread gets.
        if torch.compiler.is_compiling() or not self.units:
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        own = is_own_call(frame, func)
        call = None if own else self._begin(frame, func, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:
            self._follow(call, result)
        return result

    @harmless
    def _begin(
        self, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        """Return a call that takes parts; None for any other, and one that was told."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        given = self._given((*args, *kwargs.values()))
        if not given:
            return None
        call = _Call(rules.name_of(func), place_of(frame), args, kwargs, given)
        for tensor, part in given if call.place is not None else ():
            if what := rules.before(call.name, args, kwargs, tensor, part):
                self._tell(what, part, call)
                return None
        return call

    @harmless
    def _follow(self, call: _Call, result: Any) -> None:
        """Note which results are parts; tell what is wrong with others."""
        name, _, args, kwargs, given = call
        wrong = []
        with torch._C.DisableTorchFunction():
            results = result if isinstance(result, (tuple, list)) else (result,)
            paired = len(given) == len(results) > 1 and name.startswith("_foreach")
            for index, each in enumerate(results):
                of = given[index : index + 1] if paired else given
                if isinstance(each, Tensor):
                    found = [rules.after(name, args, kwargs, g, each) for g in of]
                    good = (f for f in found if not isinstance(f, str))
                    kind: Part | str | None = next(good, found[0])
                    if isinstance(kind, str):
                        wrong.append((kind, of[0][1]))
                    elif kind is not None and find_leaf(each) is None:
                        self._parts[id(each)] = weakref.ref(each), kind
        for what, part in wrong:
            self._tell(what, part, call)

    def _given(self, values: Iterable[Any]) -> list[tuple[Tensor, Part]]:
        """Return the arguments that are parts of parameters."""
        found = []
        with torch._C.DisableTorchFunction():
            for value in values:
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    part = self._part(each) if isinstance(each, Tensor) else None
                    if part is not None:
                        found.append((each, part))
        return found

    def _part(self, tensor: Tensor) -> Part | None:
        """Return what ``tensor`` is a part of; None if of no audited parameter."""
        leaf, flat = find_leaf(tensor), find_flat(tensor)
        if leaf is not None:
            if id(leaf[0]) not in self.units or cut_leaf(tensor) is None:
                return None
            rows = leaf[0].layout.rows or tensor.dim() < 2
            return Part(quoted(param_path(*leaf)), tensor.shape, id(leaf[0]), rows)
        if flat is not None and id(flat[0]) in self.units:
            return Part(flat_name(*flat), tensor.shape, id(flat[0]), by_rows=False)
        link, part = self._parts.get(id(tensor), (None, None))
        return part if link is not None and link() is tensor else None

    @contextmanager
    def around_hook(self, leaf: nn.Parameter, gradient: Tensor) -> Iterator[None]:
        """Turn the mode on for a hook of the user; for ``HOOK_WATCHES``."""
        # A backward does not show the modes of its caller to hooks.
        part = self._part(leaf)
        if part is None:
            yield
            return
        self._parts[id(gradient)] = weakref.ref(gradient), part
        _put_on()
        try:
            yield
        finally:
            _take_off()

    def _tell(self, what: str, part: Part, call: _Call) -> None:
        """Tell once per function and line."""
        of, name, place = self.units.get(part.unit), call.name, call.place
        if place is None or of is None:
            return
        key = name, place.file, place.line
        if key not in of.told:
            of.told.add(key)
            by = f" in {place.optimizer}" if place.optimizer else ""
            text = (
                f"{name}{by} {what} parameter {part.name} or of its gradient, of which "
                f"this rank has a part {tuple(part.shape)} only: {_TEXTS[what]} "
                'audit(model, "off") silences this.'
            )
            tell(text, place, is_error=of.is_error)


_MODE = _Mode()
around_hook = _MODE.around_hook

_WHOLE = (
    "get_full_param and get_full_grad give the whole, features.map_on_owners steps on "
    "it, and works_on_shards = True on an optimizer: its step is right on parts."
)
_TEXTS = {
    rules.REDUCES: "each rank gets another result. clip_grad_norm_, grad_norm and "
    f"param_norm of composable_fsdp are over all ranks; {_WHOLE}",
    rules.MULTIPLIES: "it is not the product of the whole matrix. Compute in the "
    f"forward of the unit; {_WHOLE}",
    rules.CHOOSES: "a row has another number there. set_full_param and set_full_grad "
    f"write whole values, unshard_params(model, with_grads=True) shows them; {_WHOLE}",
    rules.DRAWS: "rows repeat under one seed. Fill inside unshard_params(model), or "
    "pass param_init_fn to fully_shard.",
    rules.DECIDES: "a rank that finds an infinity would skip the step while others "
    "step. composable_fsdp.ShardedGradScaler takes the same arguments.",
}


def _has_gradients(context: RuntimeContext) -> bool:
    """Return whether gradients wait for a step, or for a reduction."""
    return any(
        handle.reduction.due or any(leaf.grad is not None for leaf in region.graded)
        for handle in context.handles
        for region in handle.layout.trainable
    )


def _put_on() -> None:
    """Put the mode below those of the user, whose ``with`` takes off the top."""
    _take_off()
    if not _MODE.units:
        return
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # untyped in torch
    # A default device must stay at the bottom.
    at = 1 if stack and isinstance(stack[0], DeviceContext) else 0
    _replace(stack, [*stack[:at], _MODE, *stack[at:]])
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        calls = dynamo.callback_handler.start_callbacks
        if _before_compilation not in calls:
            calls.append(_before_compilation)


def _take_off() -> None:
    """Take the mode off this thread."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # untyped in torch
    if _MODE in stack:
        _replace(stack, [each for each in stack if each is not _MODE])


def _before_compilation(args: Any) -> None:
    """Take the mode off before dynamo notes and traces the modes of this thread."""
    if args.callback_trigger.name == "DYNAMO":
        _take_off()


def _replace(old: list[Any], new: list[Any]) -> None:
    """Make ``new`` the modes of this thread, the lowest first."""
    for _ in old:
        _pop_mode()  # type: ignore[no-untyped-call]  # ditto
    for each in new:
        _push_mode(each)  # type: ignore[no-untyped-call]  # ditto
