"""The audit of the first step: tells of functions that take a shard for the parameter.

A mode sees the user's torch functions from the first forward to the one after the first
optimizer step. A function is right on a shard if each row of its result comes from a
row. Hooks on the AccumulateGrad nodes tell of reads that the mode has not seen.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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

from composable_fsdp.access.settings import units_of
from composable_fsdp.config import Report
from composable_fsdp.errors import PACKAGE, TORCH, CompositionError, warn
from composable_fsdp.features.audit import graphs
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.param_ref import param_ref
from composable_fsdp.naming import quoted
from composable_fsdp.optim.step_checks import cut_leaf, flat_name, handles_of
from composable_fsdp.optim.step_hooks import install_step_hooks
from composable_fsdp.runtime.grad_hooks import accumulators_of
from composable_fsdp.runtime.meta_values import RANDOM
from composable_fsdp.tree.state import RuntimeContext, _FSDPState

_PATIENCE = 8
"""Forwards after which the audit ends without a step: it watches, and so slows, every
function of the process, and a first step may come behind several batches."""

_log = logging.getLogger(__name__)
_wanted: weakref.WeakKeyDictionary[_FSDPState, str] = weakref.WeakKeyDictionary()
_nodes: weakref.WeakKeyDictionary[RuntimeContext, object] = weakref.WeakKeyDictionary()

# ---- what functions do with a part, by name, and by shape ----

_CHOOSES, _DRAWS = "chooses rows by number of", "draws numbers for rows of"
_REDUCES, _MULTIPLIES = "takes elements together of", "computes with the matrix of"
_BY_NAME = {
    "looks for infinities in rows of": "_amp_foreach_non_finite_check_and_unscale_",
    _DRAWS: RANDOM.pattern,
    _MULTIPLIES: "_*r?matmul_*|(b|add|badd|addb)?b?mm|(add)?mv|linear|einsum|kron|cov|"
    "bilinear|chain_matmul|cdist|embedding|corrcoef|tensordot|linalg_(?!.*norm$).*",
}
_ACROSS = {
    _CHOOSES: "select|narrow|index_.*|scatter.*|__[gs]etitem__",
    _REDUCES: "(log_)?softmax|cum(sum|prod)_?|(arg)?sort|flip|roll|normalize",
}
"""Functions that may keep the shape, and are wrong over dimension 0."""
_TURNS = (
    "t|T|mT|H|transpose|permute|swapaxes|move(dim|axis)|([hv]?st|conc)ack|cat|concat.*"
)
_WAYS_OUT = (
    "Each rank gets another result. Over all ranks are clip_grad_norm_, grad_norm, "
    "param_norm and ShardedGradScaler of composable_fsdp; whole values come from "
    "get_full_param, get_full_grad, features.map_on_owners and the forward of a unit, "
    "and are written by set_full_param, set_full_grad, init_weights(model) and inside "
    "unshard_params(model, with_grads=True). works_on_shards = True on an optimizer: "
    'its step is right on parts. audit(model, "off") silences this.'
)
_READ = (
    "The loss reads parameter {} outside the forward of its unit, where this rank has "
    "its shard {} only, and not by a sum over its elements, as an L2 penalty is: its "
    "gradient differs from the plain model's. Compute it in the forward of the unit "
    "and return it as a second output (register_forward_method for another method). "
    'audit(model, "off") silences this.'
)


class _Part(NamedTuple):
    """What a tensor is a part of."""

    name: str  # the parameter, as messages print it
    shape: torch.Size  # of the sharded parameter on this rank
    unit: int  # id of the handle of its unit
    by_rows: bool  # whether dimension 0 of the tensor is the rows of the shard


class _Call(NamedTuple):
    """A call of a torch function that takes parts of parameters."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[tuple[Tensor, _Part]]
    frame: FrameType

    def before(self, tensor: Tensor, part: _Part) -> str:
        """Return what the call does wrong with ``tensor`` by its name; empty if not."""
        found = self._kind(_BY_NAME)
        if found or not (found := self._kind(_ACROSS)):
            return found
        if not self.name.endswith("etitem__"):
            return found if not part.by_rows or self._is_over_rows() else ""
        # An index that takes elements of all rows, whatever the rows are, is right.
        index = self.args[1]
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, Tensor) and first.dtype is torch.bool:
            keeps = first.shape == tensor.shape
        else:
            keeps = first is Ellipsis or first is None or first == slice(None)
        return "" if keeps or not part.by_rows or self.args[0] is not tensor else found

    def after(self, tensor: Tensor, part: _Part, result: Tensor) -> _Part | str | None:
        """Return what ``result`` is a part of, or what the call does wrong, or None."""
        rows = part.by_rows and result.shape[:1] == tensor.shape[:1]
        # ``all`` of a comparison says what it says of this rank's elements.
        if re.fullmatch("new_.*|all|any", self.name):
            return None
        if re.fullmatch(_TURNS, self.name):
            return part._replace(by_rows=False)
        if result.shape == tensor.shape:
            return part
        if result.shape == part.shape or result.numel() == tensor.numel():
            return part._replace(by_rows=rows or result.shape == part.shape)
        if rows and tensor.dim() and not self._is_over_rows():
            return part
        # The gradient of a sum over elements, as of an L2 penalty, is right on parts.
        is_sum = self.name in ("sum", "dot") or self.kwargs.get("reduction") == "sum"
        if is_sum and result.requires_grad and not result.dim():
            return None
        return self._kind({_CHOOSES: _ACROSS[_CHOOSES]}) or _REDUCES

    def _kind(self, rules: dict[str, str]) -> str:
        """Return what the function does by the first of ``rules`` for its name."""
        return next((w for w, p in rules.items() if re.fullmatch(p, self.name)), "")

    def _is_over_rows(self) -> bool:
        """Return whether the call names dimension 0, the rows of its first argument."""
        args, at = self.args, 2 if "norm" in self.name else 1
        named = self.kwargs.get("dim", self.kwargs.get("axis"))
        given = args[at] if named is None and len(args) > at else named
        size = args[0].dim() if args and isinstance(args[0], Tensor) else 0
        dims = given if isinstance(given, (tuple, list)) else (given,)
        return any(type(dim) is int and dim in (0, -size) for dim in dims)


# ---- whose call it is ----

_RIGHT = tuple(
    f"{TORCH}{folder}/"
    for folder in ("optim", "distributed", "_dynamo", "_inductor", "_functorch", "fx")
)
"""Parts of torch that may do with shards what they do: torch's element-wise optimizers
(``optim.step_checks`` refuses the others), checkpoints, compilers."""
_DOOR, _OWNERS = f"{PACKAGE}doors/fsdp2_torch.py", f"{PACKAGE}features/owners.py"


def _users_frame(frame: FrameType | None) -> tuple[FrameType, str] | None:
    """Return the user's frame, and the optimizer; None where parts are right."""
    entry = ""
    # FSDP2's door wraps functions of torch, for all programs once its names are used.
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, _DOOR)):
        entry, frame = frame.f_code.co_filename, frame.f_back
    if frame is None or entry.startswith(_RIGHT):
        return None
    if frame.f_code.co_filename.startswith(PACKAGE):
        return None
    optimizer = ""
    caller: FrameType | None = frame
    while caller is not None:
        # ``map_on_owners`` gives whole parameters to the user's function.
        if caller.f_code.co_filename == _OWNERS:
            return None
        if caller.f_code.co_name == "step":
            stepped = caller.f_locals.get("self")
            if getattr(stepped, "works_on_shards", False):
                return None
            if isinstance(stepped, torch.optim.Optimizer):
                optimizer = f" in {type(stepped).__name__}"
        caller = caller.f_back
    return frame, optimizer


@contextmanager
def _harmless() -> Iterator[None]:
    """Put errors of the audit itself into the log."""
    try:
        yield
    except (CompositionError, Warning):  # what the audit tells
        raise
    except Exception:
        _log.warning("The audit has missed a call by an error.", exc_info=True)


# ---- the audit of a tree ----


def audit(module: nn.Module, action: Report = "warn") -> None:
    """Audit the next step of a sharded model, as its first step is with "warn".

    From here to the forward after the next optimizer step, functions are told that take
    this rank's shard of a parameter, or of its gradient, for the whole. Each is told
    once per line, with the parameter and the way out.

    Args:
        module: The model, or a part; all parameters of the model are audited.
        action: "warn" (default), "error" to raise, or "off", which also ends the audit
            of the first step if called before it.

    Raises: CompositionError, if ``module`` holds no fully sharded module, or later,
        with "error"; ValueError, for another ``action``.

    >>> audit(model, "off")
    """
    if action not in get_args(Report):
        raise ValueError(
            f"audit expects an action of {', '.join(get_args(Report))}, got {action!r}."
        )
    states = units_of(module, "audit", recurse=True)
    for state in states:
        _wanted[state] = action
    for context in {state.context for state in states if state.context is not None}:
        for each in context.observers:
            each.end(context)
        _nodes.pop(context, None)
        begin_audit(context)
        for each in context.observers:
            each.iteration_ends()
    # Optimizers that have stepped are looked at again.
    install_step_hooks()


@_harmless()
def begin_audit(context: RuntimeContext) -> None:
    """Begin the audit of a tree; for ``FIRST_FORWARD``."""
    # Another model may have turned the mode on; this is a forward.
    _turn(on=False)
    root = context.root()
    action = _wanted.get(root, "warn") if root is not None else "off"
    regions = [region for each in context.handles for region in each.layout.trainable]
    cut = [region for region in regions if cut_leaf(region.leaves[0])]
    # Some may be frozen since, before the first forward.
    leaves = [leaf for each in cut for leaf in each.leaves if leaf.requires_grad]
    if action == "off" or not leaves:
        return
    made = _Audit(context, leaves, is_error=action == "error")
    context.observers = (made,)
    with torch.inference_mode(False), torch.enable_grad():
        _nodes[context] = nodes = accumulators_of(leaves)  # held weakly by parameters
    # By id: a node holds its hook, and a hook that held a leaf would keep it for ever.
    for node, leaf in zip(nodes, leaves, strict=True):
        node.register_prehook(partial(made.reached, id(leaf)))


@_harmless()
def note_step(optim: torch.optim.Optimizer) -> None:
    """Have the next forward end the audit of what ``optim`` holds."""
    units = [id(each) for each in handles_of(optim)]
    for each in {_MODE.units[unit] for unit in units if unit in _MODE.units}:
        each.has_stepped = True
        each.iteration_ends()


class _Audit:
    """The audit of a tree: watches its forwards, and turns the mode on between them."""

    def __init__(
        self, context: RuntimeContext, leaves: list[nn.Parameter], *, is_error: bool
    ) -> None:
        self.context = weakref.ref(context, lambda _: _MODE.forget(self))
        self.unseen = set(map(id, leaves))
        """The shards that no function with a gradient was seen to take."""
        self.has_stepped = False
        self._is_error, self._left = is_error, _PATIENCE
        self._told: set[tuple[object, ...]] = set()
        _MODE.units.update({id(each): self for each in context.handles})

    @_harmless()
    def iteration_begins(self) -> None:
        """Turn the mode off for the forward; end the audit after the step."""
        _turn(on=False)
        self._left -= 1
        if (context := self.context()) and (self.has_stepped or not self._left):
            self.end(context)

    def end(self, context: RuntimeContext) -> None:
        """Leave nothing behind."""
        context.observers = ()
        _MODE.forget(self)

    @_harmless()
    def iteration_ends(self) -> None:
        """Turn the mode on behind a forward that may lead to a step."""
        context = self.context()
        if context is not None and (torch.is_grad_enabled() or self.has_stepped):
            # Units may have been built or laid out anew.
            _MODE.units.update({id(each): self for each in context.handles})
            _turn(on=True)

    @_harmless()
    def reached(self, number: int, _: object) -> None:
        """Tell of unseen shards that a loss reads, if that is wrong on parts."""
        frame = graphs.backward_frame() if number in self.unseen else None
        if frame is None:
            return
        for leaf, is_right in graphs.uses(frame.f_locals["outputs"]).items():
            found = find_leaf(leaf) if id(leaf) in self.unseen else None
            self.unseen.discard(id(leaf))
            if found is not None and not is_right:
                text = _READ.format(quoted(param_ref(*found).name), tuple(leaf.shape))
                user = _users_frame(frame.f_back)
                self.tell(text, "loss", None if user is None else user[0])

    def tell(self, text: str, what: str, frame: FrameType | None = None) -> None:
        """Warn at the line of ``frame``, or of a backward, once; or raise."""
        place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ()
        if (what, *place) in self._told:
            return
        self._told.add((what, *place))
        text = f"composable_fsdp: shard taken for the parameter: {text}"
        if self._is_error:
            raise CompositionError(text + (" ({}:{})".format(*place) if place else ""))
        if place:
            warnings.warn_explicit(text, UserWarning, *place)
        else:
            warn(text)


class _Mode(TorchFunctionMode):
    """Follows the parts of the parameters of all trees that are audited."""

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[int, _Audit] = {}  # by id of the unit's handle
        self._parts: dict[int, tuple[weakref.ref[Tensor], _Part]] = {}

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
        # Most calls of a step are those of this package and of torch's optimizers.
        if frame.f_code.co_filename.startswith((PACKAGE, _RIGHT[0])):
            return func(*args, **kwargs)
        call = self._begin(frame, func, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:
            self._follow(call, result)
        return result

    @_harmless()
    def _begin(
        self, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        """Return a call that takes parts; None for any other, and one that was told."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        given = []
        with torch._C.DisableTorchFunction():
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    part = self._part(each) if isinstance(each, Tensor) else None
                    if part is not None:
                        given.append((each, part))
        name: str = getattr(func, "__name__", "")
        if name == "__get__":  # of a property
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        call = _Call(name, args, kwargs, given, frame)
        for tensor, part in given:
            if (wrong := call.before(tensor, part)) and self._tell(wrong, part, call):
                return None
        return call if given else None

    @_harmless()
    def _follow(self, call: _Call, result: Any) -> None:
        """Note which results are parts; tell what is wrong with others."""
        given, wrong = call.given, []
        results = result if isinstance(result, (tuple, list)) else (result,)
        paired = len(given) == len(results) and call.name.startswith("_foreach")
        with torch._C.DisableTorchFunction():
            for index, each in enumerate(results):
                if not isinstance(each, Tensor):
                    continue
                of = given[index : index + 1] if paired else given
                for tensor, part in of if each.requires_grad else ():
                    self.units[part.unit].unseen.discard(id(tensor))
                found = [call.after(*pair, each) for pair in of]
                kind = next((f for f in found if not isinstance(f, str)), found[0])
                if isinstance(kind, str):
                    wrong.append((kind, of[0][1]))
                elif kind is not None and find_leaf(each) is None:
                    self._parts[id(each)] = weakref.ref(each), kind
        for what, part in wrong:
            self._tell(what, part, call)

    def _part(self, tensor: Tensor) -> _Part | None:
        """Return what ``tensor`` is a part of; None if of no audited parameter."""
        link, part = self._parts.get(id(tensor), (None, None))
        if (ref := cut_leaf(tensor)) is not None:
            rows = ref.handle.layout.plan.options.keeps_rows or tensor.dim() < 2
            part = _Part(quoted(ref.name), tensor.shape, id(ref.handle), rows)
        elif (flat := find_flat(tensor)) is not None:
            part = _Part(flat_name(*flat), tensor.shape, id(flat[0]), by_rows=False)
        elif part is None or link is None or link() is not tensor:
            return None
        return part if part.unit in self.units else None

    @contextmanager
    def around_hook(self, leaf: nn.Parameter, gradient: Tensor) -> Iterator[None]:
        """Turn the mode on for a hook of the user; for ``HOOK_WATCHES``."""
        # A backward does not show the modes of its caller to hooks.
        if (part := self._part(leaf)) is None:
            yield
            return
        self._parts[id(gradient)] = weakref.ref(gradient), part
        _turn(on=True)
        try:
            yield
        finally:
            _turn(on=False)

    def _tell(self, what: str, part: _Part, call: _Call) -> bool:
        """Tell once per function and line, unless parts are right there."""
        of, user = self.units.get(part.unit), _users_frame(call.frame)
        if user is None or of is None:
            return False
        text = (
            f"{call.name}{user[1]} {what} parameter {part.name} or of its gradient, of "
            f"which this rank has a part {tuple(part.shape)} only. {_WAYS_OUT}"
        )
        of.tell(text, call.name, user[0])
        return True


_MODE = _Mode()
around_hook = _MODE.around_hook


def _turn(*, on: bool) -> None:
    """Put the mode on, or off; below those of the user, whose ``with`` pops the top."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # untyped in torch
    new = [each for each in stack if each is not _MODE]
    if on and _MODE.units:
        # A default device stays at the bottom, and ``with torch.device`` at the top.
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        new.insert(bool(new) and new[0] is default, _MODE)
        dynamo: Any = sys.modules.get("torch._dynamo")
        calls = [] if dynamo is None else dynamo.callback_handler.start_callbacks
        if _before_compilation not in calls:
            calls.append(_before_compilation)
    if len(new) != len(stack):
        for _ in stack:
            _pop_mode()  # type: ignore[no-untyped-call]  # ditto
        for each in new:
            _push_mode(each)  # type: ignore[no-untyped-call]  # ditto


def _before_compilation(args: Any) -> None:
    """Take the mode off before dynamo notes and traces the modes of this thread."""
    if args.callback_trigger.name == "DYNAMO":
        _turn(on=False)
