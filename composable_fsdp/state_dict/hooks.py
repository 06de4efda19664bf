"""``state_dict`` and ``load_state_dict`` of units and modules inside units (parts).

While a call runs, the modules of a unit show the values that belong into the dict, so
that hooks of users and overridden methods work on these, as on the plain model::

    model.state_dict()    _begin: gather the unit, show the values in the modules
      hooks of users, _save_to_state_dict, children (units below gather in turn)
                          _end: show the sharded parameters, apply the settings

The first module of a unit that is called begins, and the same module ends. torch loads
module by module, ``module._load_from_state_dict``, and so does this file::

    no code of the user runs     the module shows sharded values over the shards, whose
                                 ``copy_`` takes this rank's part
    hooks, overridden methods    the unit shows full parameters (or sharded values), all
                                 runs as on the plain model, and this rank's part of
                                 the values written goes into the shards
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.access.other_parts import refuse_forms, require_all_data
from composable_fsdp.comm.meeting import Call
from composable_fsdp.config import FullStateDictConfig, StateDictSettings, StateDictType
from composable_fsdp.errors import CheckpointError, CompositionError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef, find_param, param_refs
from composable_fsdp.naming import quoted, strip_wrapper
from composable_fsdp.phases import Phase
from composable_fsdp.runtime.recover import (
    before_shard_write,
    own_buffers,
    require_between_steps,
)
from composable_fsdp.state_dict import dcp_caller
from composable_fsdp.state_dict.full import (
    Shown,
    forget_values,
    full_values,
    mismatch,
    placed,
    sharded_value,
    sharded_values,
    tell_of_lost_writes,
    watch_values,
)
from composable_fsdp.state_dict.settings import LiveStateDictConfig as Live
from composable_fsdp.state_dict.settings import effective_settings
from composable_fsdp.state_dict.sharded import ShardedValue, local_of
from composable_fsdp.tree.root import compare_models, meet_over, outermost
from composable_fsdp.tree.state import OWNERS, _FSDPState
from composable_fsdp.tree.traversal import walk_states

_KEY = -1
"""Key of the hooks of this package: negative, because torch counts from 0 up."""


class _Saving(Shown):
    """A unit's part of a running ``state_dict()``."""

    __slots__ = ("first_only", "module", "prefix", "settings")
    module: nn.Module
    """The module that has begun, and the prefix of the keys there."""
    prefix: str
    settings: StateDictSettings
    first_only: bool
    """Whether the first rank alone returns entries."""


_running: dict[_FSDPState, _Saving] = {}


def install_state_dict_hooks(state: _FSDPState, owned: Iterable[nn.Module]) -> None:
    """Install the hooks on the modules that a unit owns, called once, at build."""
    # DCP's functions must be wrapped before DCP first calls a state dict of this model.
    dcp_caller.install()
    owners = set(map(id, state.handle.layout.owners))
    for module in owned:
        # Other modules have no values of the unit in or below them.
        if module._modules or id(module) in owners or module in state.modules:
            # Direct entries, as torch's functions make them (checked on torch 2.13 and
            # 2.11), whose handles took most of the build time here.
            hooks: Any = module._state_dict_pre_hooks
            has_others = bool(hooks)
            hooks[_KEY] = _begin
            if has_others:
                hooks.move_to_end(_KEY, last=False)
            module._state_dict_hooks[_KEY] = _end
            # torch finds both on the instance, also if a class overrides them.
            own = module.__dict__
            if "state_dict" not in own:
                own["state_dict"] = MethodType(state_dict, module)
            if "_load_from_state_dict" not in own:
                own["_load_from_state_dict"] = MethodType(load_from_state_dict, module)


def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the class's ``state_dict``; after an error show the parameters again."""
    state = OWNERS.get(self)
    before = None if state is None else _running.get(state)
    try:
        return type(self).state_dict(self, *args, **kwargs)
    except BaseException:
        # torch runs no hook of ours after an error. A call inside a running call leaves
        # the unit to the outer one, whose own code may catch the error.
        if state is not None and before is None and state in _running:
            _running.pop(state).hide()
        raise


def _begin(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Show the values of the unit, unless a call further out does.

    Collective: an all-gather over the shard group (with ``rank0_only`` a gather per
        region); none for sharded values, local shards and inside ``unshard_params``.
    """
    state = OWNERS.get(module)
    if state is None:  # a deep copy of a part without its unit
        return
    # After hooks that users have registered since.
    module._state_dict_hooks.move_to_end(_KEY)  # type: ignore[attr-defined]  # an OrderedDict
    if state in _running:
        return
    settings = effective_settings(state)
    # A request of DCP is the same for all units; the units' own settings may differ.
    if settings is state.settings.state_dict:
        _require_one_type(module, settings.state_dict_type)
    config = settings.state_dict_config
    saving = _Saving(placed(state.handle))
    saving.module, saving.prefix, saving.settings = module, prefix, settings
    saving.first_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    # A part without parameters of the unit does not gather.
    if _owns_below(state, module):
        tell_of_lost_writes(state)
        # Any rank may ask for local values alone.
        if settings.state_dict_type is not StateDictType.LOCAL_STATE_DICT:
            require_all_data(state.handle, outermost(state).handle, "state_dict")
        _meet_to_gather(state, module, settings)
        if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            first, to_cpu = saving.first_only, config.offload_to_cpu
            saving.show(full_values(state, first_only=first, to_cpu=to_cpu))
        else:
            require_between_steps(state, "state_dict")
            to_cpu, copy = config.offload_to_cpu, not isinstance(config, Live)
            saving.show(sharded_values(state.handle, to_cpu=to_cpu, copy=copy))
    if state.precision is not None:
        # Buffers have the dtype that they had before mixed precision cast them.
        dtypes = state.precision.buffer_dtypes
        for number, name, buffer in own_buffers(state) if dtypes else ():
            if (number, name) in dtypes:
                saving.show_buffer(buffer, buffer.to(dtypes[number, name]))
    _running[state] = saving


def _owns_below(state: _FSDPState, module: nn.Module) -> bool:
    """Return whether ``module``, of the unit, holds parameters of the unit."""
    if module is state.module and len(state.modules) == 1:
        return True
    inside = set(map(id, module.modules()))
    return any(id(owner) in inside for owner in state.handle.layout.owners)


def _end(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    """Show the sharded parameters again; apply the settings to all entries below."""
    state = OWNERS.get(module)
    saving = None if state is None else _running.get(state)
    if saving is None or saving.module is not module or saving.prefix != prefix:
        return
    assert state is not None
    # Before anything that may raise.
    _running.pop(state).hide()
    # Buffers and ignored parameters, too: all entries below the module.
    below = [key for key in state_dict if key.startswith(prefix)]
    if saving.first_only and not state.handle.groups.is_first:
        for key in below:
            del state_dict[key]
    elif saving.settings.state_dict_config.offload_to_cpu:
        for key in below:
            if isinstance(state_dict[key], Tensor):
                state_dict[key] = state_dict[key].cpu()
    if isinstance(saving.settings.state_dict_config, Live):
        return
    shown = {_storage(value) for value in saving.parameters.values()}
    given = {key: state_dict[key] for key in below if key in state_dict}
    watch_values(state, {k: v for k, v in given.items() if _storage(v) in shown})


def _storage(value: Any) -> int | None:
    """Return the identity of the memory of a plain tensor or of a sharded value."""
    found = local_of(value)
    # Sparse buffers have no storage.
    if type(found) not in (Tensor, nn.Parameter) or found.layout is not torch.strided:
        return None
    key: int = found.untyped_storage()._cdata
    return key


def _require_one_type(module: nn.Module, kind: StateDictType) -> None:
    """Refuse a state dict of two types, which could not be loaded under any type."""
    for fqn, _, below in walk_states(module):
        other = below.settings.state_dict.state_dict_type
        if other is not kind:
            raise CompositionError(
                f"state_dict expects one type for all units; {quoted(fqn)} is set to "
                f"{other.name}, the unit it is in to {kind.name}. Call "
                "set_state_dict_type on the whole model, or state_dict on each unit "
                "alone."
            )


_SAVE_EVERYWHERE = (
    "Full values are gathered from all ranks: call state_dict() on every rank, outside "
    "of any 'if rank == 0', and write the result on one. "
    "FullStateDictConfig(rank0_only=True) spares the others the memory."
)


def _meet_to_gather(
    state: _FSDPState, module: nn.Module, settings: StateDictSettings
) -> None:
    """Wait until all ranks call a full ``state_dict()``; compare models once."""
    # Sharded values and local shards are not gathered, so a rank may be alone.
    if (
        state.handle.groups.shard is None
        or settings.state_dict_type is not StateDictType.FULL_STATE_DICT
    ):
        return
    if state.context is not None and state.context.summoned is not None:
        return  # inside unshard_params values are shown or refused, not gathered
    # Lower units are gathered inside the same call; a lower unit that the user saves
    # alone does not wait.
    if state.parent is None:
        config = settings.state_dict_config
        first_only = isinstance(config, FullStateDictConfig) and config.rank0_only
        details = ("rank0_only=True",) if first_only else ()
        # The parts of tensor parallelism are gathered, too, by torch and unseen by the
        # watch: ranks that are still in a step there must not pair with this call.
        cut = [each for _, _, each in walk_states(module) if each.handle.layout.forms]
        call = Call("state_dict", state.title, details, _SAVE_EVERYWHERE)
        meet_over(dict.fromkeys([state, *cut]), call)
    compare_models(state, replicas=False)


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
    # Not before each module, because values of another dtype are taken up together.
    if _begins(state, prefix, error_msgs):
        # Of a unit on meta some parameters may have values already and others not.
        held = [table.get(key) for table, key, _, _ in handle.swaps]
        if not any(p is not None and p.is_meta for p in held):
            require_between_steps(state, "load_state_dict")
        # A unit below a unit loads in the same call.
        if state.parent is None or id(state.parent) not in _open[1]:
            call = Call("load_state_dict", state.title, way_out=_LOAD_EVERYWHERE)
            meet_over([state], call, replicas=True)
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


def _begins(state: _FSDPState, prefix: str, error_msgs: list[str]) -> bool:
    """Return whether the unit's load begins with the module at ``prefix``."""
    global _open
    # torch passes the same list to all hooks of a call, and a new list to those of the
    # next call. The reference keeps the list alive, so that its identity stays its own.
    if _open[0] is not error_msgs:
        _open = error_msgs, {}
    begun = _open[1].setdefault(id(state), [])
    if any(prefix.startswith(each) for each in begun):
        return False
    begun.append(prefix)
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


def install_wrapper_hooks(wrapper: nn.Module, component: str) -> None:
    """Install hooks: remove ``component`` on save, insert ``component`` on load.

    ::

        state_dict        a._fsdp_wrapped_module.weight  ->  a.weight
        load_state_dict   a.weight  ->  a._fsdp_wrapped_module.weight
    """
    hooks: Any = wrapper  # torch does not annotate these methods
    hooks._register_state_dict_hook(partial(_strip_keys, component))
    hooks.register_load_state_dict_pre_hook(partial(_add_component, component))
    hooks.register_load_state_dict_post_hook(_strip_reports)


def _strip_keys(
    component: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Rename the wrapped module's keys and metadata to the wrapper's names."""
    inner = f"{prefix}{component}"
    # The wrapped module's entries were added last, so the order stays.
    _rename(state_dict, inner + ".", prefix)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # The wrapped module's metadata (its version) moves to the wrapper's path.
        metadata[prefix[:-1]] = metadata.pop(inner, metadata.get(prefix[:-1]))
        _rename(metadata, inner + ".", prefix)


def _rename(table: dict[str, Any], old: str, new: str) -> None:
    """Replace the prefix ``old`` of keys by ``new``, in place."""
    for key in [key for key in table if key.startswith(old)]:
        table[new + key[len(old) :]] = table.pop(key)


def _add_component(
    component: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Insert the component into the keys below the wrapper, before torch loads them."""
    _rename(state_dict, prefix, f"{prefix}{component}.")


def _strip_reports(module: nn.Module, incompatible_keys: Any) -> None:
    """Remove components from the reported missing and unexpected keys."""
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = [strip_wrapper(key) for key in keys]
