"""Initialize a sharded model as the plain model would be, unit by unit.

A unit is full while the initializer runs on it. All ranks draw equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from composable_fsdp.access.settings import units_of
from composable_fsdp.access.unshard_params import _summoned, _unshard_states
from composable_fsdp.entries.initial_values import Init, empty_like
from composable_fsdp.errors import PlanError
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.naming import listed, quoted
from composable_fsdp.phases import Phase
from composable_fsdp.tree.root import ensure_root, forget_root, outermost
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import (
    _get_fsdp_states,
    require_module,
    wrapped_in,
)


def init_weights(
    module: nn.Module, fn: Callable[[nn.Module], object] | None = None
) -> None:
    """Give the parameters in ``module`` the values that the plain model would get.

    With equal seeds it gives the values of ``plain.apply(fn)``, and leaves the same
    state of the random number generator, on any number of ranks. Call on every rank,
    with the same seed. Tensors on meta get memory first, on their compute device.

    Args:
        module: A sharded model, or a module in one (a new head).
        fn: Called with every module, children before parents, as by ``module.apply``.
            The parameters that it touches are full. Wrappers are left out. Default
            None: ``reset_parameters()``, or else ``_reset_parameters()``, of every
            module that has one, which draws as the constructors of torch's modules do.
            Pass ``model._init_weights`` for a model of transformers. For a method that
            initializes a whole model (torchtitan's ``init_weights()``) enter
            ``unshard_params(model)``, which holds the whole model, and call it there.

    Collective: all ranks must call. Per unit an all-gather, and an all-reduce of an
        integer per shard and replicate group; again for each time that the calls return
        to a unit. At most one unit is full, unless ``fn`` touches several in a call.
    Raises: PlanError, before any change, if ``fn`` is None and a module on meta has no
        method to initialize it; PhaseError, inside forward, backward or
        ``unshard_params``; the exception of ``fn``, and DesyncError on the other ranks:
        the units in which it raised keep their old values.

    >>> init_weights(model)
    >>> init_weights(model, lambda m: isinstance(m, nn.Linear) and m.reset_parameters())
    """
    require_module(module, "init_weights")
    if _get_module_fsdp_state(module) is None:
        units_of(module, "init_weights", recurse=True)
    # Before memory is given, so that the model is unchanged after a refusal.
    for name, each in module.named_modules() if fn is None else ():
        tensors = chain(each._parameters.items(), each._buffers.items())
        on_meta = [key for key, t in tensors if t is not None and t.is_meta]
        if on_meta and _initializer(each) is None:
            raise PlanError(
                f"{type(each).__name__} {quoted(name)} holds "
                f"{listed(map(repr, on_meta))} on meta and has no reset_parameters() "
                "to initialise it. Give it one, or call init_weights(model, fn)."
            )
    _give_memory(module)
    apply_whole(module, fn or _reset, "init_weights", wrappers=False)


def apply_whole(module: nn.Module, fn: Init, what: str, *, wrappers: bool) -> None:
    """Call ``fn`` as ``module.apply`` would, with full parameters; writes are kept."""
    own = _get_module_fsdp_state(module)
    states = [*_get_fsdp_states(module), *([] if own is None else [own])]
    tops = {id(top): top for top in map(outermost, states)}
    with ExitStack() as stack:
        for top in tops.values():
            # A tree that was not initialized must stay so: units above may be made yet.
            if top.context is None:
                stack.callback(forget_root, ensure_root(top))
        # Inside a block of ``unshard_params`` a tree has its mark.
        # Asleep is no block of ``unshard_params`` that others may join.
        marks = [(top, ensure_root(top).summoned) for top in tops.values()]
        free = [top for top, mark in marks if not mark or mark.record is not None]
        stack.enter_context(_summoned(free, rank0_only=False, what=what))
        units = [u for top in tops.values() for u in _get_fsdp_states(top.module)]
        shown = _FullOnTouch(units, stack.enter_context(ExitStack()), what)
        for each in _children_first(module):
            # The plain model has no wrappers, which answer for the module inside.
            if wrappers or wrapped_in(each) is None:
                shown.show(each)
                with shown:
                    fn(each)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules in the order of ``module.apply``."""
    for child in module.children():
        yield from _children_first(child)
    yield module


class _FullOnTouch(TorchFunctionMode):
    """Shows a unit in full when a torch function gets one of its parameters."""

    def __init__(
        self, units: Sequence[_FSDPState], stack: ExitStack, what: str
    ) -> None:
        super().__init__()
        self._units = {state.handle: state for state in units}
        self._stack = stack
        """The blocks of the units that are full now."""
        self._full: dict[FlatParamHandle, None] = {}
        self._what = what

    def show(self, module: nn.Module) -> None:
        """Show the units of the parameters of ``module``; hide others, if there are."""
        # Before the call and not on touch alone: ``fn`` may assign a new parameter.
        shown = [each for each in module._parameters.values() if each is not None]
        found = [self._home(each) for each in shown]
        wanted = dict.fromkeys(handle for handle in found if handle is not None)
        # A parameter that is full already is no sharded one, and has no home.
        # A container keeps the unit of its last child, which ``fn`` may touch next.
        if wanted or (not shown and len(self._full) > 1):
            # Writes back, so that at most one unit is full.
            self._stack.close()
            self._full = {}
            for handle in wanted:
                self._open(handle)

    def _home(self, value: object) -> FlatParamHandle | None:
        """Return the unit of a sharded parameter, if it is one of these units."""
        found = find_leaf(value)
        return found[0] if found and found[0] in self._units else None

    def _open(self, handle: FlatParamHandle) -> None:
        """Show a unit in full, if no block shows it."""
        # A part that belongs to two units may touch one of them twice in a call.
        if handle.phase is Phase.SUMMON:
            return
        self._full[handle] = None
        block = _unshard_states(
            [self._units[handle]], writeback=True, rank0_only=False, what=self._what
        )
        self._stack.enter_context(block)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Python leaves the mode meanwhile, so the package's own calls do not get here.
        given = {key: self._whole(value) for key, value in (kwargs or {}).items()}
        return func(*map(self._whole, args), **given)

    def _whole(self, value: Any) -> Any:
        """Return the full parameter for a sharded one, in lists, too."""
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(map(self._whole, value))
        handle = self._home(value)
        if handle is None:
            return value
        # All ranks run ``fn``, so all touch the parameter, and gather.
        self._open(handle)
        # The caller may hold the sharded object from before the unit became full.
        places = zip(
            handle.layout.tables,
            handle.layout.keys,
            handle.layout.sharded_placed,
            strict=True,
        )
        return next(table[key] for table, key, leaf in places if leaf is value)


def _initializer(module: nn.Module) -> Any:
    """Return the method of ``module`` that initializes its parameters, or None."""
    # The name with an underscore is that of ``nn.MultiheadAttention``.
    found = (getattr(module, f"{_}reset_parameters", None) for _ in ("", "_"))
    return next(filter(callable, found), None)


def _reset(module: nn.Module) -> None:
    """Call the method of ``module`` that initializes its parameters, if any."""
    if (method := _initializer(module)) is not None:
        method()


def _give_memory(top: nn.Module) -> None:
    """Give tensors on meta memory where ``to_empty`` would; ties stay ties."""
    # Pairs, because a tensor that is gone could give its id to another.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in top.modules():
        state = _get_module_fsdp_state(module)
        device = torch.device("cpu") if state is None else state.device
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    found = find_leaf(tensor)
                    # Shards stay in host memory; the compute device gets them in full.
                    offload = found is not None and found[0].layout.offload
                    at = torch.device("cpu") if offload else device
                    pair = made.setdefault(id(tensor), (tensor, empty_like(tensor, at)))
                    table[key] = pair[1]
