"""Full parameters outside the step, as a context manager.

The block sees new parameters over new buffers; the units stay sharded underneath.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, zip_longest
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composable_fsdp.access.block import block
from composable_fsdp.access.gather import gather_flat_values, shards_of
from composable_fsdp.access.other_parts import Route
from composable_fsdp.access.settings import units_of, units_with_parts
from composable_fsdp.comm import collectives
from composable_fsdp.comm.meeting import Call, failed_rank, send_failure
from composable_fsdp.errors import DesyncError, PhaseError
from composable_fsdp.flat import memory, part_guards, residency
from composable_fsdp.flat.build import full_leaves, full_views
from composable_fsdp.flat.flat_parameter import leaf_gradients, set_leaf_gradient
from composable_fsdp.flat.gradients import shard_views
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.flat.param_ref import param_refs, place_path
from composable_fsdp.flat.region import part_of
from composable_fsdp.flat.residency import version_of, written
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.runtime.offload import synchronize_copy_stream
from composable_fsdp.runtime.recover import settle_tree
from composable_fsdp.runtime.unshard import free_oldest, reshard
from composable_fsdp.tree.root import (
    compare_models,
    ensure_root,
    meet_over,
    outermost,
)
from composable_fsdp.tree.state import Summon, _FSDPState

NO_STEPS: WeakKeyDictionary[FlatParamHandle, str] = WeakKeyDictionary()
"""Why optimizers may not step on a unit now; ``{}`` is the name of a parameter."""
_SHOWN = (
    "inside unshard_params, which shows {} full; the end of the block would write the "
    "full values over the step. Call it after the block."
)


def require_awake(handles: Iterable[FlatParamHandle], call: str) -> None:
    """Refuse a call that would take the empty parameters of a sleeping unit for its."""
    for handle in handles if NO_STEPS else ():
        if (why := NO_STEPS.get(handle, _SHOWN)) is not _SHOWN:
            raise PhaseError(f"{call} was called {why.format(handle.name)}")


@block
def unshard_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    check_same: bool = False,
) -> Iterator[None]:
    """Show full parameters in ``module`` while the block runs.

    They are other objects than the sharded parameters, the same in each block, and show
    this rank's rows after it.

    Args:
        module: A module that is or holds a fully sharded module, or that is a part of a
            unit; the whole unit is then shown.
        recurse: Show the units below, too. False: only the unit ``module`` itself.
        writeback: Keep the block's writes to the parameters. Each rank writes back the
            part that it holds, so the block must write the same values on all ranks;
            with ``rank0_only`` rank 0's go to every shard.
        rank0_only: Only rank 0 of each shard group gets full parameters; the modules of
            other ranks keep sharded parameters.
        offload_to_cpu: The full parameters are copies in host memory, made unit by
            unit, so device memory holds at most a single full unit.
        with_grads: Set ``.grad`` of the full parameters to the full gradients, if any
            rank has a gradient; with ``writeback`` changes of ``.grad`` are kept.
        check_same: Compare the values over ranks before they are written back; ignored
            with ``rank0_only``.

    Collective: all ranks must enter. Per unit an all-gather over the shard group; with
        ``rank0_only`` a gather per region instead, and with ``writeback`` a scatter per
        region on exit (and a broadcast over the replicate group). ``with_grads`` adds
        an all-reduce of a byte per parameter, the same gather, and with ``rank0_only``
        and ``writeback`` a broadcast per gradient. With
        ``writeback`` the ranks agree on exit that no rank raised: an all-reduce of an
        integer per group. ``check_same`` adds an all-gather of objects.
    Raises: PhaseError, inside forward, backward or another such block; the exception of
        the block, and DesyncError on the other ranks: all keep their old values;
        DesyncError, naming a parameter that ``check_same`` found to differ, or, before
        anything is sent, if another rank makes another call.

    >>> with unshard_params(model, writeback=True):
    ...     model.head.weight.data.zero_()
    """
    if recurse:
        states = units_with_parts(module, "unshard_params")
    else:
        states = units_of(module, "unshard_params(recurse=False)", recurse=False)
    with (
        _summoned(states, rank0_only=rank0_only),
        _unshard_states(
            states,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
            check_same=check_same and not rank0_only,
        ),
    ):
        yield


@contextmanager
def _summoned(
    states: Sequence[_FSDPState], *, rank0_only: bool, what: str = "unshard_params"
) -> Iterator[None]:
    """Mark the trees of ``states`` as in a block. Raises: PhaseError, inside a step."""
    firsts: dict[int, _FSDPState] = {}
    for state in states:
        firsts.setdefault(id(outermost(state)), state)
    # All trees are settled before the first is marked, so that a refusal marks none.
    trees = [(settle_tree(state, what), state) for state in firsts.values()]
    for context, state in trees:
        context.summoned = Summon(state, rank0_only, what=what)
    try:
        yield
    finally:
        for context, _ in trees:
            context.summoned = None
        for context, _ in trees:
            # Free all deferred memory, and wait for copies of the block between host
            # and device: the caller may write shards in host memory next.
            free_oldest(context, keep=0)
            synchronize_copy_stream(context)


_ENTER_EVERYWHERE = (
    "Full values are gathered from all ranks: enter the block on every rank, outside "
    "of any 'if rank == 0'. rank0_only=True spares the others the memory."
)
"""The end of an error of a rank that enters a block alone."""


@contextmanager
def _unshard_states(
    states: list[_FSDPState],
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    check_same: bool = False,
    what: str = "unshard_params(writeback=True)",
) -> Iterator[None]:
    """Show full parameters of ``states``; write back on all ranks of a unit or none."""
    # ``offload_to_cpu`` copies on this rank alone, and may differ between ranks.
    decide = {"writeback": writeback, "rank0_only": rank0_only}
    decide |= {"with_grads": with_grads, "check_same": check_same}
    details = tuple(f"{name}=True" for name, is_set in decide.items() if is_set)
    title = "".join(state.title for state in states[:1])
    call = Call(what.partition("(")[0], title, details, _ENTER_EVERYWHERE)
    # A block in a training loop repeats, and an expected call visits no store.
    meet_over(states, call, replicas=writeback, always=False)
    for state in states:
        compare_models(state, replicas=writeback, written=writeback)
    routes = {_route(state): state.handle.layout.device for state in states}
    with ExitStack() as stack:
        shown: list[_ShownUnit] = []
        for state in states:
            shown.append(_ShownUnit(state, rank0_only=rank0_only))
            # Also after an exception, so that the unit is sharded and can run again.
            stack.callback(shown[-1].close, with_grads=with_grads)
            shown[-1].show(to_cpu=offload_to_cpu)
            if with_grads:
                shown[-1].show_gradients(to_cpu=offload_to_cpu)
        try:
            yield
            if writeback:
                # All units before any write, so that a refusal changes no shard.
                for unit in shown:
                    unit.take_assigned()
        except GeneratorExit:
            # Closed by the garbage collector, at another time on each rank.
            raise
        except BaseException:
            if writeback:
                # The other ranks wait for this rank's flag before they write.
                for groups, device in routes.items():
                    send_failure(groups, device)
            raise
        if writeback:
            _write(shown, routes, what, with_grads=with_grads, check_same=check_same)


def _write(
    shown: list[_ShownUnit],
    routes: dict[Route, torch.device],
    what: str,
    *,
    with_grads: bool,
    check_same: bool,
) -> None:
    """Write full values back into the shards of units of which no rank has raised."""
    failed = {route: failed_rank(route, device) for route, device in routes.items()}
    agreed = [unit for unit in shown if failed[_route(unit.state)] is None]
    for unit in agreed if check_same else ():
        unit.require_same_values()
    for unit in reversed(agreed):
        unit.write()
        if with_grads:
            unit.write_gradients()
    rank = next((each for each in failed.values() if each is not None), None)
    if rank is not None:
        raise DesyncError(
            f"Rank {rank} raised inside {what}, so nothing was written here either, "
            "and all ranks have the values from before the block. Look at the error of "
            f"rank {rank}."
        )


class _ShownUnit:
    """The full parameters of a unit that a block shows; none where it shows shards."""

    __slots__ = (
        *("context", "fulls", "handle", "leaves", "rank0_only", "state"),
        *("versions", "views"),
    )

    def __init__(self, state: _FSDPState, *, rank0_only: bool) -> None:
        self.state, self.rank0_only = state, rank0_only
        self.context, self.handle = ensure_root(state), state.handle
        self.fulls: list[Tensor] = []
        self.views: list[Tensor] = []
        """Per parameter, as in ``handle.leaves``: its elements in ``fulls``."""
        self.leaves: list[nn.Parameter] = []
        """The full parameters, in each block the same, over ``views``."""
        self.versions: list[int] = []
        """Version counters of ``leaves`` before the block."""
        if self.handle.phase is Phase.SUMMON:
            raise PhaseError(
                f"Fully sharded module {self.handle.name} is shown by another block of "
                "unshard_params; its end would take the parameters from both. Use one."
            )
        self.handle.phase = Phase.SUMMON
        NO_STEPS[self.handle] = _SHOWN

    def close(self, *, with_grads: bool) -> None:
        """Show the sharded parameters again, also in what the block has kept."""
        self.handle.phase = Phase.IDLE
        NO_STEPS.pop(self.handle, None)
        # The full parameters outlive the block.
        for leaf in self.leaves if with_grads else ():
            leaf.grad = None
        reshard(self.context, self.handle)
        regions = self.handle.layout.regions
        views = (shard_views(region.cuts, region.shard)[0] for region in regions)
        for parameter, home in zip(self.leaves, chain(*views), strict=False):
            # A DTensor keeps its values, because the shard is no DTensor.
            if not is_dtensor(parameter):
                parameter.data = home

    def show(self, *, to_cpu: bool) -> None:
        """Gather into new buffers of the parameter dtype; show leaves over them."""
        handle, layout = self.handle, self.handle.layout
        # The optimizer wrote the shards on the caller's stream.
        self.context.streams.wait_for_caller()
        shards = [region.shard.to(layout.device) for region in layout.regions]
        fulls = gather_flat_values(handle, shards, first_only=self.rank0_only)
        if layout.regions and not fulls:
            return
        # Tensors made in inference mode could not be written to outside of that mode.
        with torch.inference_mode(False), torch.no_grad():
            # Without a shard group ``fulls`` are the shards, to which the block must
            # not write yet: copy.
            alone = handle.groups.shard is None
            home = torch.device("cpu") if to_cpu else layout.device
            self.fulls = [full.to(home, copy=alone) for full in fulls]
            is_first = not handle.block_leaves
            for region, full in zip(layout.regions, self.fulls, strict=True):
                views, _ = full_views(region.layout, full)
                self.views += views
                if is_first:
                    handle.block_leaves += full_leaves(
                        region.layout, views, region.leaves, layout.forms
                    )
            self.leaves = handle.block_leaves
            for leaf, view, own in zip(
                self.leaves, self.views, handle.leaves, strict=True
            ):
                local_of(leaf).data = view
                leaf.requires_grad = own.requires_grad
        made = dict(zip(map(id, handle.leaves), self.leaves, strict=True))
        for parameters, name, sharded, _ in handle.swaps:
            parameters[name] = made[id(sharded)]
        # Modules inside the unit may be called on full parameters.
        part_guards.allow_part_calls(handle)
        residency.move(handle, residency.COPIES_SHOWN)
        self.versions = [*map(version_of, self.leaves)]

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Copy parameters that the block assigned into the buffers; refuse misfits."""
        handle, pairs = self.handle, zip(self.leaves, self.views, strict=True)
        places = dict(zip(map(id, handle.leaves), pairs, strict=False))
        for at, (parameters, name, sharded, _) in enumerate(handle.swaps):
            if id(sharded) not in places:
                # Of ``rank0_only`` elsewhere, where rank 0's values will be.
                parameters[name] = sharded
                continue
            expected, home = places[id(sharded)]
            shown = parameters.get(name)
            # Of a DTensor the plain tensor inside, which must be a view of ``full``.
            found = local_of(shown) if isinstance(shown, Tensor) else shown
            got, want = type(found).__name__, f"{tuple(home.shape)} {home.dtype}"
            if isinstance(found, Tensor):
                got = f"{tuple(found.shape)} {found.dtype}"
            if found is None or got != want:
                raise PhaseError(
                    "Inside unshard_params parameter "
                    f"{quoted(place_path(handle, at))} was replaced by {got}; expected "
                    f"{want}. Write into it in place, for example "
                    "parameter.data.copy_(values)."
                )
            if found.dtype != home.dtype or not found.is_set_to(home):
                # Cloned: the assigned tensor may be another view of the full buffer.
                home.copy_(found.clone())
            parameters[name] = expected

    @torch.no_grad()
    def require_same_values(self) -> None:
        """Refuse values that differ between ranks, by an all-gather of objects."""
        names = [ref.name for ref in param_refs(self.handle)]
        told = [hash_values(self.views).tolist()] if names else []
        for group in self.handle.groups.present:
            # After the first group a rank passes on what the whole group has.
            told = [*chain(*collectives.all_gather_object(told, group))]
        pairs = zip(names, *told, strict=True)
        unlike = [name for name, *each in pairs if len(set(each)) > 1]
        if unlike:
            more = f" and {len(unlike) - 1} more of its unit" if unlike[1:] else ""
            raise DesyncError(
                f"Parameter {quoted(unlike[0])}{more} was written differently on the "
                "ranks inside unshard_params, where each rank keeps the part that it "
                "holds; nothing was written. Write the same on every rank, or pass "
                "rank0_only=True to give all of them rank 0's values."
            )

    @torch.no_grad()
    def write(self) -> None:
        """Copy this rank's part of the full values into the shards.

        Collective: with ``rank0_only`` per region a scatter, and a broadcast.
        """
        handle, groups = self.handle, self.handle.groups
        for region, full in zip_longest(handle.layout.regions, self.fulls):
            shard: Tensor = region.shard
            if not shard.numel():
                continue
            # The backend sends from the compute device; both may be in host memory.
            here = shard.to(handle.layout.device)
            if self.rank0_only and groups.shard is not None:
                whole = None if full is None else full.to(handle.layout.device)
                collectives.at_first_rank("scatter", whole, here, groups.shard)
            else:
                # Shards of all ranks have equal length: padding fills up the last one.
                start = groups.rank * shard.numel()
                here.copy_(full[start : start + shard.numel()])
            if self.rank0_only and groups.replicate is not None:
                collectives.broadcast(here, groups.replicate)
            if here is not shard:
                shard.copy_(here)
        now, before = [*map(version_of, self.leaves)], written(handle.layout)
        if self.rank0_only or now == self.versions:
            return
        counts = zip(handle.leaves, now, self.versions, strict=True)
        # A backward of a forward from before the block then raises, as in plain torch.
        torch.autograd.graph.increment_version(
            [leaf for leaf, version, earlier in counts if version != earlier]
        )
        # ``at_build`` detects torch's init functions on bare shards. The block wrote
        # full values, which is legal: move the mark along.
        if handle.writes.at_build == before:
            handle.writes.at_build = written(handle.layout)

    @torch.no_grad()
    def show_gradients(self, *, to_cpu: bool) -> None:
        """Set ``.grad`` of the full parameters to the full gradients.

        Collective: an all-reduce of a byte each; if any has one, a gather per region.
        """
        handle, regions = self.handle, self.handle.layout.regions
        refs = [*param_refs(handle)]
        own = [*chain(*map(leaf_gradients, regions))]
        # A rank without elements of a parameter has no gradient, but must send alike:
        # agree first which parameters have one.
        has = self._flags(own)
        if handle.groups.shard is not None and has.numel():
            collectives.all_reduce(has, handle.groups.shard, maximum=True)
        flags = has.tolist()
        found = [
            (ref, None if gradient is None else gradient.to(ref.region.layout.dtype))
            for ref, gradient, flag in zip(refs, own, flags, strict=True)
            if flag
        ]
        # A copy, because ``.grad`` of single parameters may be tensors of the user.
        shards = shards_of(handle, found)
        if not any(shard.numel() for shard in shards):
            return
        views: list[Tensor] = []
        fulls = gather_flat_values(handle, shards, first_only=self.rank0_only)
        for region, full in zip(regions, fulls, strict=False):
            # As the full parameters with offload_to_cpu.
            here = full.cpu() if to_cpu else full
            views += (
                full_views(region.layout, here)[0] if full.numel() else region.leaves
            )
        pairs = zip(refs, self.leaves, views, flags, strict=False)
        for ref, leaf, view, flag in pairs:
            # A DTensor takes no plain tensor as ``.grad``.
            leaf.grad = ref.form.shown(view) if flag else None

    @torch.no_grad()
    def write_gradients(self) -> None:
        """Set the sharded gradients to this rank's part of the block's full gradients.

        Collective: with ``rank0_only`` broadcasts of a byte each, and per gradient.
        """
        handle, device = self.handle, self.handle.layout.device
        refs = [*param_refs(handle)]
        # The block may have set gradients of other placements, or sparse ones, which
        # would raise later and leave the other ranks waiting.
        given = [
            None if leaf.grad is None else ref.form.gradient(leaf.grad).to_dense()
            for ref, leaf in zip(refs, self.leaves, strict=False)
        ]
        has = self._flags(given)
        # Only rank 0 knows which gradients the block left.
        sends = handle.groups.present if self.rank0_only else ()
        for group in sends:
            collectives.broadcast(has, group)
        flags = has.tolist()
        graded = {id(ref.region) for ref, flag in zip(refs, flags, strict=True) if flag}
        for region in handle.layout.regions:
            for parameter in () if id(region) in graded else region.graded:
                parameter.grad = None
        values = given or [None] * len(refs)
        for ref, flag, value in zip(refs, flags, values, strict=True):
            part, numel = None, prod(ref.slot.shape)
            if flag:
                if value is None:
                    value = memory.new_buffer(numel, ref.region.layout.dtype, device)
                whole = value.to(device).contiguous()
                for group in sends if numel else ():
                    collectives.broadcast(whole, group)
                part = part_of(ref.region, ref.slot, whole, like=ref.leaf)
            set_leaf_gradient(handle, ref.region, ref.index, part)

    def _flags(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return a byte per parameter on the compute device: 1 with a gradient."""
        held = [g is not None for g in gradients] or [False] * len(self.handle.leaves)
        device = self.handle.layout.device
        return torch.tensor(held, dtype=torch.uint8, device=device)


def _route(state: _FSDPState) -> Route:
    """Return the groups over which an outcome reaches all ranks of a unit."""
    # Ranks of tensor parallelism hold other parts of the parameters that the block
    # writes: all of them write, or none.
    handle = state.handle
    return (*handle.groups.present, *groups_of(handle.layout.forms))
