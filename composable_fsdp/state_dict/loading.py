"""``load_state_dict`` of units and parts: write this rank's part of each entry.

torch loads module by module, ``module._load_from_state_dict``, and so does this file::

    no code of the user runs     the module shows sharded values over the shards, whose
                                 ``copy_`` takes this rank's part
    hooks, overridden methods    the unit shows full parameters (or sharded values), all
                                 runs as on the plain model, and this rank's part of
                                 the values written goes into the shards
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.access.other_parts import refuse_forms
from composable_fsdp.comm.meeting import Call
from composable_fsdp.config import StateDictType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef, find_param, param_refs
from composable_fsdp.naming import quoted
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.recover import before_shard_write, require_between_steps
from composable_fsdp.state_dict.full import (
    Shown,
    forget_values,
    full_values,
    mismatch,
    placed,
    sharded_value,
)
from composable_fsdp.state_dict.settings import effective_settings
from composable_fsdp.state_dict.sharded import ShardedValue
from composable_fsdp.tree.root import meet_over
from composable_fsdp.tree.state import OWNERS, _FSDPState


def load_from_state_dict(
    self: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load the module's own entries, as ``nn.Module._load_from_state_dict`` does.

    Collective: if code of the user runs, an all-gather per module with such code over
        the shard group, for full values; else none, but all ranks must call.
    """
    given = state_dict, prefix, local_metadata, strict
    own: Any = type(self)
    load: Callable[..., None] = own._load_from_state_dict
    lists = missing_keys, unexpected_keys
    state = OWNERS.get(self)
    if state is None:  # a deep copy of a part without its unit
        return load(self, *given, *lists, error_msgs)
    handle = state.handle
    if handle.phase is Phase.SUMMON and handle.is_full:
        refuse_forms([handle], "load_state_dict inside unshard_params")
        # torch copies into the full parameters itself.
        return load(self, *given, *lists, error_msgs)
    kind = effective_settings(state).state_dict_type
    # Of a unit on meta some parameters may have values already and others not.
    on_meta = handle.layout.on_meta and any(
        p is not None and p.is_meta
        for p in [table.get(key) for table, key, _, _ in handle.swaps]
    )
    if not on_meta:
        require_between_steps(state, "load_state_dict")
    if _meet_to_load(state, prefix, error_msgs):
        forget_values(state)
    # An unsharded unit would keep showing the old values.
    before_shard_write(state)
    # torch calls these hooks after the children have loaded, so each is given the full
    # parameters by itself. The handle that removes the hook knows the key alone.
    for key, hook in self._load_state_dict_post_hooks.items():
        if not _is_known(hook):
            self._load_state_dict_post_hooks[key] = partial(_on_whole_values, hook)
    code = chain(self._load_state_dict_pre_hooks.values(), [load, own.set_extra_state])
    only = self if all(map(_is_known, code)) else None
    sharded = only is not None or _gives_sharded(
        {type(v) for key, v in state_dict.items() if key.startswith(prefix)}, kind
    )
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    with _values_shown(state, sharded=sharded, only=only, assign=assign):
        return load(self, *given, *lists, error_msgs)


def _gives_sharded(kinds: set[type], kind: StateDictType) -> bool:
    """Return whether code of the user sees sharded values, by classes of entries."""
    # Under any type of state dict either may be given.
    is_plain = kind is StateDictType.FULL_STATE_DICT or kinds & {Tensor, nn.Parameter}
    return not is_plain or ShardedValue in kinds


_LOAD_EVERYWHERE = (
    "Each rank writes only the rank's own shards: call load_state_dict on every rank, "
    "with the same values."
)
_open: tuple[object, dict[int, list[str]]] = None, {}
"""torch's list of errors of the ``load_state_dict`` that runs now, or ran last, and by
identity of a unit the prefixes of the modules that have begun to load."""


def _meet_to_load(state: _FSDPState, prefix: str, error_msgs: list[str]) -> bool:
    """Wait until all ranks that hold the unit load the module at ``prefix``."""
    global _open
    # torch passes the same list to all hooks of a call, and a new list to those of the
    # next call. The reference keeps the list alive, so that its identity stays its own.
    if _open[0] is not error_msgs:
        _open = error_msgs, {}
    begun = _open[1].setdefault(id(state), [])
    if any(prefix.startswith(each) for each in begun):
        return False
    begun.append(prefix)
    # A unit below a unit loads in the same call.
    if state.parent is None or id(state.parent) not in _open[1]:
        call = Call("load_state_dict", state.title, way_out=_LOAD_EVERYWHERE)
        meet_over([state], call, replicas=True)
    return True


def _is_known(function: Any) -> bool:
    """Return whether a hook or method is torch's or this package's."""
    # torch wraps load hooks, and hooks may be partial functions.
    while (
        inner := getattr(function, "hook", getattr(function, "func", None))
    ) is not None:
        function = inner
    name = getattr(function, "__module__", None) or ""
    return name.partition(".")[0] in ("torch", "composable_fsdp")


def _on_whole_values(hook: Any, module: nn.Module, incompatible_keys: Any) -> Any:
    """Call a load post-hook of the user, which sees full parameters.

    Collective: as ``load_from_state_dict``.
    """
    state = OWNERS.get(module)
    if state is None or state.handle.phase is Phase.SUMMON:
        return hook(module, incompatible_keys)
    kind = effective_settings(state).state_dict_type
    with _values_shown(state, sharded=kind is not StateDictType.FULL_STATE_DICT):
        return hook(module, incompatible_keys)


@contextmanager
def _values_shown(
    state: _FSDPState,
    *,
    sharded: bool,
    only: nn.Module | None = None,
    assign: bool = False,
) -> Iterator[None]:
    """Show values as the unit's parameters, or ``only`` a module's; keep writes.

    Sharded values lie over the shards, so that writes reach these at once; those to
    full values are kept if nothing raises.
    """
    refs, shown = _places(state.handle, only)
    # Tensors made in inference mode count no versions.
    with torch.inference_mode(False):
        if sharded:
            indices = {index for index, *_ in shown.places}
            shown.show(
                {i: sharded_value(refs[i], refs[i].leaf.detach()) for i in indices}
            )
        else:
            shown.show(full_values(state))
    try:
        yield
        # A parameter that the code has replaced counts, too (``assign=True``).
        changed = dict(shown.changed())
        for index, value in changed.items():
            got = None if value is None else tuple(value.shape)
            if got != refs[index].shape:
                raise CheckpointError(
                    f"load_state_dict expects parameter {quoted(refs[index].name)} of "
                    f"shape {refs[index].shape}, and a hook or an overridden method "
                    f"has made it {got}. Change the shape before fully_shard."
                )
    finally:
        shown.hide()
    # Only now, so that an error of the user's code leaves all shards unchanged.
    for index, value in changed.items():
        assert value is not None
        if sharded and value is shown.parameters[index]:
            # Operators of a tensor subclass do not count.
            torch.autograd.graph.increment_version(refs[index].leaf)
        else:
            _keep(refs[index], value, assign=assign)


def _places(
    handle: FlatParamHandle, only: nn.Module | None
) -> tuple[dict[int, ParamRef], Shown]:
    """Return the unit's parameters, or those of a module, by slot, and their places."""
    if only is None or handle.layout.on_meta:
        refs = {ref.slot.index: ref for ref in param_refs(handle)}
        at = None if only is None else only._parameters
        shown = Shown(each for each in placed(handle) if at is None or at is each[1])
    else:
        # By the parameters, because a unit may have thousands of modules.
        own = [(key, find_param(leaf)) for key, leaf in only._parameters.items()]
        held = [(k, ref) for k, ref in own if ref is not None and ref.handle is handle]
        refs = {ref.slot.index: ref for _, ref in held}
        shown = Shown((r.slot.index, only._parameters, k, r.leaf) for k, r in held)
    return refs, shown


@torch.no_grad()
def _keep(ref: ParamRef, value: Tensor, *, assign: bool) -> None:
    """Write this rank's part of ``value`` into the shard."""
    leaf = ref.leaf
    if isinstance(value, ShardedValue):
        if problem := mismatch(ref, value):
            raise CheckpointError(f"{quoted(ref.name)}: {problem}")
        part = value.local
    else:
        part = ref.part_of(value)
    if not leaf.is_meta:
        # A user may hold the old memory. All ranks adopt the change at the next use,
        # also ranks with an empty part (``features.changes.adopt``).
        if assign or part.dtype != leaf.dtype:
            leaf.data = torch.empty_like(leaf, dtype=part.dtype).copy_(part)
            torch.autograd.graph.increment_version(leaf)
        else:
            leaf.copy_(part)
    elif not part.is_meta:
        # The unit adopts the parameter later.
        made = nn.Parameter(part.clone(), requires_grad=leaf.requires_grad)
        for table, key, own, _ in ref.handle.swaps:
            if own is leaf:
                table[key] = made
