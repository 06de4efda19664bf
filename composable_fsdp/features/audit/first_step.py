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
from itertools import takewhile
from types import FrameType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from composable_fsdp.access.settings import units_of
from composable_fsdp.config import Report
from composable_fsdp.features.audit import rules
from composable_fsdp.features.audit.graphs import watch_graphs
from composable_fsdp.features.audit.rules import Call, Part
from composable_fsdp.features.audit.telling import (
    harmless,
    is_own_call,
    tell,
    users_frame,
)
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.param_ref import param_ref
from composable_fsdp.naming import quoted
from composable_fsdp.optim.step_checks import cut_leaf, flat_name, handles_of
from composable_fsdp.optim.step_hooks import install_step_hooks
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

_ACTIONS = get_args(Report)
_PATIENCE = 64
"""Microbatches after which the audit ends without a step; two forwards without a
gradient that waits, in programs with a step of their own."""

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
        for each in {a for a in _MODE.units.values() if a.context() is context}:
            each.end(context)
        _nodes.pop(context, None)
        begin_audit(context)
        for observer in context.observers:
            observer.iteration_ends()
    # Optimizers that have stepped are looked at again.
    install_step_hooks()


@harmless
def begin_audit(context: RuntimeContext) -> None:
    """Begin the audit of a tree; for ``FIRST_FORWARD``."""
    # Another model may have turned the mode on; this is a forward.
    _turn(on=False)
    root = context.root()
    action = _wanted.get(root, "warn") if root is not None else "off"
    trained = [each for each in context.handles if each.layout.trainable]
    cut = [each for each in trained if cut_leaf(each.layout.trainable[0].leaves[0])]
    regions = [region for handle in cut for region in handle.layout.trainable]
    # Some may be frozen since, before the first forward.
    leaves = [p for region in regions for p in region.leaves if p.requires_grad]
    if action == "off" or not leaves:
        return
    # Kept: a parameter holds its node only weakly.
    _nodes[context] = watch_graphs(leaves, is_error=action == "error")
    context.observers = (_Audit(context, is_error=action == "error"),)


@harmless
def note_step(optim: torch.optim.Optimizer) -> None:
    """Have the next forward end the audit of what ``optim`` holds."""
    keys = [id(each) for each in handles_of(optim) if id(each) in _MODE.units]
    audits = [*dict.fromkeys(_MODE.units[key] for key in keys)]
    if not audits:
        return
    for each in audits:
        each.has_stepped = True
        each.iteration_ends()
    if id(optim) not in audits[0].hooks:
        audits[0].hooks[id(optim)] = optim.register_step_post_hook(_note_end)
    # One that is there has raised in its last step, whose end no hook told of.
    _MODE.steps = [*takewhile(lambda other: other is not optim, _MODE.steps), optim]
    _turn(on=True)


def _note_end(*_: object) -> None:
    if _MODE.steps:
        _MODE.steps.pop()
        _turn(on=True)


class _Audit:
    """The audit of a tree: watches its forwards, and turns the mode on between them."""

    def __init__(self, context: RuntimeContext, *, is_error: bool) -> None:
        self.context = weakref.ref(context, lambda _: _MODE.forget(self))
        self.is_error = is_error
        self.has_stepped = False
        self._left = _PATIENCE
        self.told: set[tuple[str, str, int]] = set()
        self.hooks: dict[int, RemovableHandle] = {}
        """By id of the optimizer; not removed at the end of a step, where torch
        iterates over them."""
        _MODE.units.update({id(each): self for each in context.handles})

    @harmless
    def iteration_begins(self) -> None:
        """Turn the mode off for the forward; end the audit after the step."""
        _turn(on=False)
        context = self.context()
        assert context is not None  # it calls
        self._left -= 1 if _has_gradients(context) else _PATIENCE // 2
        if self.has_stepped or self._left <= 0:
            self.end(context)

    def end(self, context: RuntimeContext) -> None:
        """Leave nothing behind."""
        context.observers = ()
        _MODE.forget(self)
        for hook in self.hooks.values():
            hook.remove()

    @harmless
    def iteration_ends(self) -> None:
        """Turn the mode on behind a forward that may lead to a step."""
        context = self.context()
        if context is not None and (torch.is_grad_enabled() or self.has_stepped):
            # Units may have been built or laid out anew.
            _MODE.units.update({id(each): self for each in context.handles})
            _turn(on=True)


class _Mode(TorchFunctionMode):
    """Follows the parts of the parameters of all trees that are audited."""

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[int, _Audit] = {}
        """By id of the unit's handle."""
        self.steps: list[torch.optim.Optimizer] = []
        """Those whose step runs, one in another."""
        self._parts: dict[int, tuple[weakref.ref[Tensor], Part]] = {}

    def forget(self, of: _Audit) -> None:
        """End an audit; the last leaves nothing behind."""
        self.units = {key: each for key, each in self.units.items() if each is not of}
        if not self.units:
            self._parts, self.steps = {}, []

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
            self._follow(call, frame, result)
        return result

    @harmless
    def _begin(
        self, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """Return a call that takes parts; None for any other, and one that was told."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        given = self._given((*args, *kwargs.values()))
        if not given:
            return None
        call = Call(rules.name_of(func), args, kwargs, given)
        for tensor, part in given:
            what = rules.before(call, tensor, part)
            if what and self._tell(what, part, call, frame):
                return None
        return call

    @harmless
    def _follow(self, call: Call, frame: FrameType, result: Any) -> None:
        """Note which results are parts; tell what is wrong with others."""
        given, wrong = call.given, []
        with torch._C.DisableTorchFunction():
            results = result if isinstance(result, (tuple, list)) else (result,)
            paired = len(given) == len(results) and call.name.startswith("_foreach")
            for index, each in enumerate(results):
                of = given[index : index + 1] if paired else given
                if isinstance(each, Tensor):
                    found = [rules.after(call, *g, each) for g in of]
                    good = (f for f in found if not isinstance(f, str))
                    kind: Part | str | None = next(good, found[0])
                    if isinstance(kind, str):
                        wrong.append((kind, of[0][1]))
                    elif kind is not None and find_leaf(each) is None:
                        self._parts[id(each)] = weakref.ref(each), kind
        for what, part in wrong:
            self._tell(what, part, call, frame)

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
            rows = leaf[0].layout.plan.options.keeps_rows or tensor.dim() < 2
            return Part(quoted(param_ref(*leaf).name), tensor.shape, id(leaf[0]), rows)
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
        _turn(on=True)
        try:
            yield
        finally:
            _turn(on=False)

    def _tell(self, what: str, part: Part, call: Call, frame: FrameType) -> bool:
        """Tell once per function and line, unless parts are right there."""
        of, place = self.units.get(part.unit), users_frame(frame)
        if place is None or of is None:
            return False
        key = call.name, place.f_code.co_filename, place.f_lineno
        if key not in of.told:
            of.told.add(key)
            by = f" in {type(self.steps[0]).__name__}" if self.steps else ""
            text = (
                f"{call.name}{by} {what} parameter {part.name} or of its gradient, of "
                f"which this rank has a part {tuple(part.shape)} only: {_TEXTS[what]} "
                'audit(model, "off") silences this.'
            )
            tell(text, place, is_error=of.is_error)
        return True


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


def _turn(*, on: bool) -> None:
    """Put the mode on, or off; below those of the user, whose ``with`` pops the top."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # untyped in torch
    new = [each for each in stack if each is not _MODE]
    if on and _MODE.units and not any(map(_is_right_on_parts, _MODE.steps)):
        # A default device must stay at the bottom.
        new.insert(bool(new) and isinstance(new[0], DeviceContext), _MODE)
        _hear_of_compilations()
    if len(new) != len(stack):
        for _ in stack:
            _pop_mode()  # type: ignore[no-untyped-call]  # ditto
        for each in new:
            _push_mode(each)  # type: ignore[no-untyped-call]  # ditto


def _is_right_on_parts(optim: torch.optim.Optimizer) -> bool:
    """Return whether a step needs no audit, whose mode would double its time."""
    is_torchs = type(optim).__module__.startswith("torch.optim.")
    return is_torchs or getattr(optim, "works_on_shards", False)


def _hear_of_compilations() -> None:
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        calls = dynamo.callback_handler.start_callbacks
        if _before_compilation not in calls:
            calls.append(_before_compilation)


def _before_compilation(args: Any) -> None:
    """Take the mode off before dynamo notes and traces the modes of this thread."""
    if args.callback_trigger.name == "DYNAMO":
        _turn(on=False)
