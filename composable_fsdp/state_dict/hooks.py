"""``module.state_dict()`` of units and of modules inside units (their parts).

While a call runs, the modules of a unit show the values that belong into the dict, so
that hooks of users and overridden methods work on these, as on the plain model::

    model.state_dict()    _begin: gather the unit, show the values in the modules
      hooks of users, _save_to_state_dict, children (units below gather in turn)
                          _end: show the sharded parameters, apply the settings

The first module of a unit that is called begins, and the same module ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from composable_fsdp.access.other_parts import require_all_data
from composable_fsdp.comm.meeting import Call
from composable_fsdp.config import FullStateDictConfig, StateDictSettings, StateDictType
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import join_name, quoted, strip_wrapper
from composable_fsdp.runtime.recover import own_buffers, require_between_steps
from composable_fsdp.state_dict import dcp_caller
from composable_fsdp.state_dict.full import (
    Shown,
    full_values,
    owns_below,
    placed,
    sharded_values,
    tell_of_lost_writes,
    watch_values,
)
from composable_fsdp.state_dict.loading import load_from_state_dict
from composable_fsdp.state_dict.settings import effective_settings
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
    if owns_below(state, module):
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
            saving.show(sharded_values(state.handle, to_cpu=config.offload_to_cpu))
    if state.precision is not None:
        # Buffers have the dtype that they had before mixed precision cast them.
        dtypes = state.precision.buffer_dtypes
        for number, name, buffer in own_buffers(state) if dtypes else ():
            if (number, name) in dtypes:
                saving.show_buffer(buffer, buffer.to(dtypes[number, name]))
    _running[state] = saving


def _end(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    """Show the sharded parameters again; apply the settings to all entries below."""
    state = OWNERS.get(module)
    saving = None if state is None else _running.get(state)
    if saving is None or saving.module is not module or saving.prefix != prefix:
        return
    assert state is not None
    # Before anything that may raise.
    _running.pop(state).hide()
    keys = [*_keys(state, module, prefix, state_dict)]
    # Buffers and ignored parameters, too: all entries below the module.
    below = [key for key in state_dict if key.startswith(prefix)]
    if saving.first_only and not state.handle.groups.is_first:
        for key in below:
            del state_dict[key]
    elif saving.settings.state_dict_config.offload_to_cpu:
        for key in below:
            if isinstance(state_dict[key], Tensor):
                state_dict[key] = state_dict[key].cpu()
    watch_values(state, {key: state_dict.get(key) for key in keys})


def _keys(
    state: _FSDPState, module: nn.Module, prefix: str, state_dict: dict[str, Any]
) -> Iterator[str]:
    """Yield the keys in ``state_dict`` of the unit's parameters below ``module``."""
    layout = state.handle.layout
    held = zip(layout.places, layout.owners, strict=True)
    places = {(id(owner), place.name) for place, owner in held}
    for path, owner in module.named_modules(remove_duplicate=False):
        for name in owner._parameters:
            key = prefix + strip_wrapper(join_name(path, name))
            if (id(owner), name) in places and key in state_dict:
                yield key


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
