"""How values enter and leave a forward of a unit.

Each call has one whole passage, chosen when the call begins; passages are not combined,
because values enter in an order of their own (moved, cast, aliased, held) and leave in
another (cast, checked, copied, found, given back)::

    PLAIN     tensors and tuples of tensors
    QUIET     the same without a graph: the values stay as they are
    FULL      casts, containers, several modules, what the first forwards found
    FIRST     FULL, for the first forwards of a unit, which search
    MOVING    FULL, for the outermost call on a GPU, which moves the inputs there

A passage may hand a call on to a wider one, and only the end of the first forwards
chooses a narrower one.
"""

from __future__ import annotations

from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, ClassVar

from torch import Tensor, nn

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.forward_writes import (
    copy_all_to_shards,
    copy_writes_to_shards,
    is_unchanged,
    snapshot,
    was_written,
)
from composable_fsdp.flat.residency import UNSHARDED, version_of
from composable_fsdp.runtime.container_copies import (
    Arguments,
    Copies,
    apply_changes,
    sort_copies,
    write_casts_back,
)
from composable_fsdp.runtime.escaped_tensors import (
    copy_kept_weights,
    copy_weights,
    find_kept_weights,
    first_number,
    is_weight,
    made_since,
    sequence_number,
    tensors_on_attributes,
    written_in_place,
)
from composable_fsdp.runtime.nested_tensors import map_tensors, tensors_in, to_device
from composable_fsdp.runtime.precision import cast_floating, cast_inputs, casts_values
from composable_fsdp.runtime.unit_forward import UnitForward
from composable_fsdp.runtime.unshard import shard_versions, wait_unsharded
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.unit_settings import count_down

_LAZY_OUTPUTS = frozenset(
    (AsyncGeneratorType, CoroutineType, GeneratorType, map, filter)
)
"""Types of outputs whose computation has not begun when the forward returns."""
_NO_CONTAINERS = frozenset(
    {Tensor, nn.Parameter, tuple, bool, int, float, str, type(None)}
)
"""Types of arguments into which a forward cannot put a tensor."""

Left = tuple[Any, list[Tensor]]
"""An output, and the tensors through which a backward may enter the unit."""


class Passage:
    """The passage of tensors and tuples of tensors."""

    __slots__ = ()

    def enter(
        self, call: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Return new ``(args, kwargs)`` with aliases if an input requires grad."""
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            alias = call.alias(args[0])
            return None if alias is args[0] else ((alias,), kwargs)
        if _have_containers(args, kwargs):
            call.passage = FULL
            return FULL.enter(call, args, kwargs)
        copies: Copies = []
        replaced = _alias_all(call, args, kwargs, copies)
        if copies:  # of a list inside a tuple
            call.passage = FULL
            call.copies = sort_copies(copies, (args, kwargs), replaced)
        return replaced

    def leave(self, state: _FSDPState, call: UnitForward, output: Any) -> Left:
        """Return the output, and the tensors through which backward may enter the unit.

        Parameters of the unit in the output become copies, and writes to parameters go
        to the shards.

        Raises: PhaseError, if the output is a generator or a coroutine, or as
            ``copy_weights`` and ``copy_writes_to_shards``.
        """
        handle = state.handle
        if type(output) is Tensor:
            tensors = [output]
        else:
            if type(output) in _LAZY_OUTPUTS:
                raise _lazy_output(state, output)
            tensors = tensors_in(output)
        for tensor in tensors:
            # Check only tensors that can share memory with the full parameters: the
            # result of an operation has a grad_fn and no base.
            if (tensor.grad_fn is None or tensor._base is not None) and is_weight(
                handle, tensor
            ):
                output = copy_weights(state, output)
                tensors = tensors_in(output)
                break
        # ``was_written``, inlined for speed.
        if tuple(map(version_of, handle.form.placed)) != handle.form.readable:
            copy_writes(state)
        # Backward may enter by an input that was changed in place.
        for tensor, version in call.inputs:
            if tensor._version != version:
                since = first_number(call.aliases)
                tensors = [*tensors, *written_in_place(call.inputs, since)]
                break
        return output, tensors


class QuietPassage(Passage):
    """The passage of a forward without a graph, which stands for the call as well.

    Such a call has nothing to remember, so one object serves all calls of all units.
    """

    __slots__ = ()
    taped, inputs, copies = False, (), None
    passage: ClassVar[Passage]

    def enter(self, *_: object) -> None:
        """Leave the arguments as they are."""

    def forget_inputs(self) -> None:
        """Do nothing: the call holds no inputs."""


class FullPassage(Passage):
    """The passage of everything; ``moves``: inputs to the compute device, too."""

    __slots__ = ("moves",)

    def __init__(self, *, moves: bool = False) -> None:
        self.moves = moves

    def enter(
        self, call: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Move, cast and alias the inputs; begin the searches of a first forward."""
        state = call.state
        copies: Copies = []
        replaced = None
        if self.moves:
            replaced = to_device(args, kwargs, state.device, copies)
            args, kwargs = replaced or (args, kwargs)
        if state.precision is not None:
            cast = cast_inputs(state, args, kwargs, copies)
            if cast is not None:
                args, kwargs = replaced = cast
        assert state.context is not None
        if call.tape is state.context.tape:  # not recomputed
            if state.searches.looks and len(state.handle.running.calls) == 1:
                _look_for_writes(state, call.module)
            if len(state.modules) > 1 and not state.remaining:
                state.remaining = frozenset(map(id, state.modules))
        given = args, kwargs
        if call.taped:
            replaced = _alias_all(call, args, kwargs, copies) or replaced
        if copies:
            call.copies = sort_copies(copies, given, replaced)
        return replaced

    def leave(self, state: _FSDPState, call: UnitForward, output: Any) -> Left:
        """Add what left by attributes and containers; give the caller's containers."""
        searches, precision = state.searches, state.precision
        if precision is not None and precision.output_dtype is not None:
            output = cast_floating(output, precision.output_dtype)
        if call.copies is not None or searches.acts:
            keep_writes(state, call)
        output, tensors = super().leave(state, call, output)
        if call.taped and (searches.scans or searches.kept_at):
            tensors = [*tensors, *tensors_on_attributes(state, call.module, call.since)]
        if call.held is not None:
            tensors = [*tensors, *made_since(tensors_in(call.held), call.since)]
        if call.copies is not None:
            output = apply_changes(call.copies, output)
            call.copies = None
        if self is FIRST and not (searches.looks or searches.scans):
            state.passage = choose_passage(state, taped=True)
        return output, tensors


PLAIN, QUIET = Passage(), QuietPassage()
QuietPassage.passage = QUIET
FIRST, FULL, MOVING = FullPassage(), FullPassage(), FullPassage(moves=True)


def choose_passage(state: _FSDPState, *, taped: bool) -> Passage:
    """Return the passage of forwards of the unit; ``taped``: of those with a graph."""
    searches = state.searches
    if searches.looks or (taped and searches.scans):
        return FIRST
    found = searches.acts or searches.kept_at
    return FULL if found or len(state.modules) > 1 or casts_values(state) else PLAIN


def _have_containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a forward can put a tensor into an argument."""
    return not _NO_CONTAINERS.issuperset(map(type, (*args, *kwargs.values())))


def _alias_all(
    call: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any], copies: Copies
) -> Arguments | None:
    """Return the arguments with aliases; None if no argument requires grad."""
    call.since = sequence_number()
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:
        alias = call.alias(args[0])
        return None if alias is args[0] else ((alias,), kwargs)
    new_args = tuple([map_tensors(value, call.alias, copies) for value in args])
    new_kwargs = {
        key: map_tensors(value, call.alias, copies) for key, value in kwargs.items()
    }
    # Backward may enter the unit through a tensor that the forward stores in a
    # container of the caller.
    if _have_containers(args, kwargs):
        call.since = sequence_number()
        call.hold((new_args, new_kwargs))
    return (new_args, new_kwargs) if call.aliases else None


def _look_for_writes(state: _FSDPState, module: nn.Module) -> None:
    """Begin to find writes through ``.data`` in this forward; see ``keep_writes``."""
    handle, searches = state.handle, state.searches
    if handle.residency is not UNSHARDED:
        wait_unsharded(handle)
    # A write to tensors of ``functional_call``, which are in the places of weights,
    # says nothing of a forward with the weights.
    looks = handle.running.foreign or count_down(searches.looks, module)
    if looks and handle.form.needs_gather:
        searches.before, searches.acts = snapshot(handle), True
    else:
        searches.before = None


def keep_writes(state: _FSDPState, call: UnitForward) -> None:
    """Copy what the forward wrote to parameters and inputs, or keeps of parameters.

    Raises: PhaseError, as ``copy_writes_to_shards``; RuntimeError, as
        ``write_casts_back``.
    """
    handle, searches = state.handle, state.searches
    if call.copies is not None:
        write_casts_back(call.copies)
    # Writes through ``.data`` leave the version counter unchanged. Two forwards compare
    # all values; if either finds a write, every later forward copies all parameters.
    if searches.before is not None and len(handle.running.calls) == 1:
        searches.writes_data |= not is_unchanged(handle, searches.before)
        searches.weights_at = find_kept_weights(state)
        searches.end_forward()
    copy_kept_weights(state)
    if searches.writes_data:
        copy_writes(state)


def copy_writes(state: _FSDPState) -> None:
    """Copy full parameters that the forward wrote to into the shards.

    Raises: PhaseError, as ``copy_writes_to_shards``.
    """
    context, handle = state.context, state.handle
    assert context is not None
    in_place = was_written(handle)
    if not in_place and not state.searches.writes_data:
        return
    before = handle.writes.gathered_at
    was_current = before and before == shard_versions(handle)
    if in_place:
        copy_writes_to_shards(handle)
    if state.searches.writes_data:
        copy_all_to_shards(handle)
    if was_current:
        # The shards changed to what the full parameters are.
        handle.writes.gathered_at = shard_versions(handle)
    # The gather stream may gather this unit again in the same forward.
    context.streams.wait_for_caller()


def _lazy_output(state: _FSDPState, output: Any) -> PhaseError:
    """Return the error of an output that would compute after the forward."""
    if isinstance(output, (CoroutineType, GeneratorType)):
        output.close()  # else Python warns that the coroutine was never awaited
    return PhaseError(
        f"The forward of fully sharded module {state.name} returned a "
        f"{type(output).__name__}, which computes when the unit is sharded again. "
        "Return tensors; a list of them, or a method that computes one result, for "
        "register_forward_method, serves a caller that iterates."
    )
