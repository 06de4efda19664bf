"""The audit of the first step: functions that take a shard for the whole parameter.

A mode sees each torch function of the user between the first forward and the forward
after the first optimizer step, except inside forwards of units::

    forward 1        backward, clip, ..., step        forward 2
           |--------- the mode is on ---------------|           nothing from here on

A tensor counts as a part of a parameter if it is the sharded leaf or its gradient,
views their memory, or comes from one of them by element-wise functions. ``rules``
decides what is told. The mode is taken off when torch.compile begins, which would
trace it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from composable_fsdp.access.settings import units_of
from composable_fsdp.features.audit import rules
from composable_fsdp.features.audit.graphs import ShardsInGraphs
from composable_fsdp.features.audit.rules import Part
from composable_fsdp.features.audit.telling import Place, place_of, tell
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.param_paths import param_path, slot_path
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.full_param_checks import handles_of
from composable_fsdp.optim.step_checks import cut_leaf, flat_name
from composable_fsdp.optim.step_hooks import install_step_hooks
from composable_fsdp.runtime.graph_task import current_task
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

_ACTIONS = ("warn", "error", "off")
_CLEARED = 3
"""Forwards without gradients before them after which no step is expected any more."""
_MOST = 64
"""Forwards after which the audit ends without a step."""

_wanted: weakref.WeakKeyDictionary[_FSDPState, str] = weakref.WeakKeyDictionary()
_graphs: weakref.WeakKeyDictionary[RuntimeContext, ShardsInGraphs] = (
    weakref.WeakKeyDictionary()
)
_running: weakref.WeakSet[Audit]


def audit(module: nn.Module, action: str = "warn") -> None:
    """Audit the next step of a sharded model, as its first step is.

    From here to the forward after the next optimizer step, functions are told that take
    this rank's shard of a parameter, or of its gradient, for the whole: norms, sums and
    means over rows, matrix products, rows chosen by number, random fills. Each is told
    once per line, with the parameter and the way out. The first step of every model is
    audited with "warn".

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
        _graphs.pop(context, None)
        begin_audit(context)
        for each in context.observers:
            each.iteration_ends()
    # Optimizers that have stepped are looked at again.
    install_step_hooks()


def begin_audit(context: RuntimeContext) -> None:
    """Begin the audit of a tree, whose forward runs; for ``FIRST_FORWARDS``."""
    root = context.root()
    action = _wanted.get(root, "warn") if root is not None else "off"
    handles = [each for each in context.handles if each.layout.trainable]
    cut = [each for each in handles if cut_leaf(each.layout.trainable[0].leaves[0])]
    if action == "off" or not cut:
        return
    graphs = ShardsInGraphs(is_error=action == "error")
    for handle in cut:
        for region in handle.layout.trainable:
            slots = region.layout.parameters
            graphs.watch(region.leaves, [quoted(slot_path(handle, s)) for s in slots])
    _graphs[context] = graphs
    context.observers = (Audit(context, is_error=action == "error"),)


def note_step(optim: torch.optim.Optimizer) -> None:
    """Have the next forward end the audit of what ``optim`` holds."""
    for handle in handles_of(optim):
        for each in list(_running):
            context = each.context()
            if context is not None and handle in context.handles:
                each.stepped = True
                each.iteration_ends()


class Audit(TorchFunctionMode):
    """The mode, and the observer of the tree's forwards that turns it on and off."""

    def __init__(self, context: RuntimeContext, *, is_error: bool) -> None:
        super().__init__()
        self.context = weakref.ref(context)
        self.is_error = is_error
        self.stepped = self.is_over = False
        self._forwards = self._cleared = 0
        self._told: set[tuple[str, str, int]] = set()
        self._shards: dict[int, weakref.ref[FlatParameter]] = {}
        self._parts: dict[int, tuple[weakref.ref[Tensor], Part]] = {}
        _running.add(self)

    def iteration_begins(self) -> None:
        """Turn the mode off for the forward; end the audit after the step."""
        context = self.context()
        assert context is not None  # it calls
        self._forwards += 1
        self._cleared += not _has_gradients(context)
        late = self._cleared > _CLEARED or self._forwards > _MOST
        self.is_over = self.is_over or self.stepped or late
        _take_off(self)
        if self.is_over:
            context.observers = ()
            _running.discard(self)

    def iteration_ends(self) -> None:
        """Turn the mode on behind a forward that may lead to a step."""
        context = self.context()
        if (
            context is None
            or self.is_over
            or not (torch.is_grad_enabled() or self.stepped)
        ):
            return
        self._shards = {
            region.shard.untyped_storage()._cdata: weakref.ref(region)
            for handle in context.handles
            for region in handle.layout.regions
            if cut_leaf(region.leaves[0])
        }
        _put_on(self)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            self.is_over
            or torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            given = list(self._given(args, kwargs))
        if not given:
            return func(*args, **kwargs)
        place, name = place_of(sys._getframe(1)), rules.name_of(func)
        if place is not None:
            for tensor, part in given:
                what = rules.before(name, args, kwargs, tensor, part)
                if what:
                    self._tell(what, name, part, place)
                    return func(*args, **kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            results = result if isinstance(result, (tuple, list)) else (result,)
            paired = len(given) == len(results) > 1 and name.startswith("_foreach")
            for index, each in enumerate(results):
                if isinstance(each, Tensor):
                    of = given[index : index + 1] if paired else given
                    self._follow(name, args, kwargs, of, each, place)
        return result

    def _follow(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[tuple[Tensor, Part]],
        result: Tensor,
        place: Place | None,
    ) -> None:
        """Note what ``result`` is a part of, or tell that it is of no whole."""
        found: Part | str | None = None
        for each in given:
            found = rules.after(name, args, kwargs, each, result)
            if not isinstance(found, str):
                break
        if isinstance(found, str):
            if place is not None:
                self._tell(found, name, given[0][1], place)
        elif found is not None and find_leaf(result) is None:
            self._parts[id(result)] = weakref.ref(result), found

    def _given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Tensor, Part]]:
        """Yield the arguments that are parts of parameters."""
        for each in (*args, *kwargs.values()):
            for tensor in each if isinstance(each, (list, tuple)) else (each,):
                if isinstance(tensor, Tensor):
                    part = self._part(tensor)
                    if part is not None:
                        yield tensor, part

    def _part(self, tensor: Tensor) -> Part | None:
        """Return what ``tensor`` is a part of; None if of no sharded parameter."""
        leaf, flat = find_leaf(tensor), find_flat(tensor)
        context = self.context()
        if context is None:
            return None
        if leaf is not None and leaf[0] in context.handles:
            is_cut = cut_leaf(tensor) is not None
            name = quoted(param_path(*leaf))
            return Part(name, tensor.shape, leaf[0].layout.rows) if is_cut else None
        if flat is not None and flat[0] in context.handles:
            return Part(flat_name(*flat), tensor.shape, by_rows=False)
        known = self._parts.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        try:
            storage = tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # no memory of its own
            return None
        region = self._region_at(context, storage)
        return None if region is None else _part_at(region, tensor)

    def _region_at(self, context: RuntimeContext, storage: int) -> FlatParameter | None:
        """Return the region whose shard, or in a backward gradient, has ``storage``."""
        link = self._shards.get(storage)
        if link is not None or current_task() < 0:
            return link() if link is not None else None
        # Hooks of the user get views of the reduced gradient.
        for handle in context.handles:
            for region in handle.layout.trainable:
                for each in (region.gradient.shard, region.reduce.temporary):
                    if each is not None and each.untyped_storage()._cdata == storage:
                        return region if cut_leaf(region.leaves[0]) else None
        return None

    def _tell(self, what: str, name: str, part: Part, place: Place) -> None:
        """Tell once per function and line."""
        key = name, place.file, place.line
        if key not in self._told:
            self._told.add(key)
            by = f" in {place.optimizer}" if place.optimizer else ""
            text = f"{name}{by} {_TEXTS[what].format(part.name, tuple(part.shape))}"
            silence = ' audit(model, "off") silences this.'
            tell(text + silence, place, is_error=self.is_error)


_running = weakref.WeakSet()

_WHOLE = (
    "get_full_param(model, name) or get_full_grad(model, name) give the whole; "
    "map_on_owners steps on whole parameters, and works_on_shards = True on an "
    "optimizer says that its step is right on parts."
)
_PART = "parameter {} or of its gradient, of which this rank has a part {} only"
_TEXTS = {
    rules.REDUCES: f"takes elements together of {_PART}: each rank gets another "
    "result. clip_grad_norm_, grad_norm and param_norm of composable_fsdp are over "
    f"all ranks; {_WHOLE}",
    rules.MULTIPLIES: f"computes with the matrix of {_PART}: it is not the result of "
    f"the whole matrix. Compute in the forward of the unit; {_WHOLE}",
    rules.CHOOSES: f"chooses rows by number of {_PART}: they are other rows on each "
    "rank. set_full_param and set_full_grad write whole values, unshard_params(model, "
    f"with_grads=True) shows them; {_WHOLE}",
    rules.DRAWS: f"draws numbers for rows of {_PART}: rows repeat under one seed. Fill "
    "inside unshard_params(model), or pass param_init_fn to fully_shard.",
    rules.DECIDES: f"looks for infinities in {_PART}: a rank that finds one would skip "
    "the step while others step. Use composable_fsdp.ShardedGradScaler, which takes "
    "the same arguments.",
}


def _part_at(region: FlatParameter, tensor: Tensor) -> Part:
    """Return what a view of the shard or the flat gradient of ``region`` is of."""
    offset = tensor.storage_offset()
    for index, (start, stop, at) in enumerate(region.cuts.parts):
        leaf = region.leaves[index]
        if at <= offset < at + stop - start and tensor.numel() <= leaf.numel():
            found = find_leaf(leaf)
            name = quoted(param_path(*found)) if found is not None else ""
            rows = leaf.dim() > 0 and tensor.shape == leaf.shape
            return Part(name, leaf.shape, by_rows=rows)
    names = listed(quoted(slot.fqn) for slot in region.layout.parameters)
    return Part(names, tensor.shape, by_rows=False)


def _has_gradients(context: RuntimeContext) -> bool:
    """Return whether gradients wait for a step, or for a reduction."""
    return any(
        handle.reduction.due or any(leaf.grad is not None for leaf in region.graded)
        for handle in context.handles
        for region in handle.layout.trainable
    )


def _put_on(mode: Audit) -> None:
    """Put ``mode`` below the modes of the user, whose ``with`` takes off the top."""
    _take_off(mode)
    stack = _stack()
    # A default device must stay at the bottom.
    at = 1 if stack and isinstance(stack[0], DeviceContext) else 0
    _replace([*stack[:at], mode, *stack[at:]])
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        calls = dynamo.callback_handler.start_callbacks
        if _before_compilation not in calls:
            calls.append(_before_compilation)


def _take_off(mode: Audit | None) -> None:
    """Take ``mode`` off this thread, or all audits, and those that are over."""
    _replace(
        [
            each
            for each in _stack()
            if not isinstance(each, Audit)
            or not (mode in (None, each) or each.is_over or each.context() is None)
        ]
    )


def _before_compilation(args: Any) -> None:
    """Take the audits off before dynamo notes and traces the modes of this thread."""
    if args.callback_trigger.name == "DYNAMO":
        _take_off(None)


def _stack() -> list[Any]:
    """Return the modes of this thread, the lowest first."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(at) for at in range(count)]


def _replace(stack: list[Any]) -> None:
    """Make ``stack`` the modes of this thread."""
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for each in stack:
        torch._C._push_on_torch_function_stack(each)
