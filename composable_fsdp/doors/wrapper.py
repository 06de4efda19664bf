"""``FullyShardedDataParallel``: FSDP1's wrapper API over ``fully_shard``.

The wrapped module holds the state, the handle and the hooks.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.access.grads import clip_grad_norm_, no_sync
from composable_fsdp.access.settings import register_comm_hook
from composable_fsdp.access.unshard_params import unshard_params
from composable_fsdp.comm.meshes import require_process_group
from composable_fsdp.comm.wire_format import WireFormat
from composable_fsdp.compose.registry import API, get_state
from composable_fsdp.config import (
    Arena,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    Report,
    ShardingStrategy,
    TiedParams,
)
from composable_fsdp.doors.wrapping import PlainNames, post_order_apply
from composable_fsdp.entries.fully_shard import fully_shard, unknown_text
from composable_fsdp.entries.initial_values import reset_parameters
from composable_fsdp.errors import CompositionError, warn
from composable_fsdp.features.init_weights import apply_whole
from composable_fsdp.naming import WRAPPED_MODULE, strip_wrapper, strip_wrapper_in_text
from composable_fsdp.optim import load, names, save
from composable_fsdp.planning import walk
from composable_fsdp.state_dict import settings
from composable_fsdp.tree.state import (
    OWNERS,
    _FSDPState,
    _get_module_fsdp_state,
    make_precision,
)
from composable_fsdp.tree.traversal import (
    _get_fsdp_states,
    inside_wrappers,
    walk_states,
)

if TYPE_CHECKING:
    from composable_fsdp.planning.policies import AnyPolicy


def _option(name: str, doc: str, default: object = None) -> Any:
    """Return a property: the option ``name`` of the unit, or ``default`` for None."""

    def read(wrapper: FullyShardedDataParallel) -> object:
        found = getattr(wrapper._state.options, name)
        return default if found is None else found

    return property(read, doc=doc)


class FullyShardedDataParallel(PlainNames):
    """Shard ``module`` over ranks inside a wrapper; arguments as in torch's FSDP1.

    Every unit that ``auto_wrap_policy`` selects is replaced by a wrapper, as in FSDP1.
    Parameters and buffers have the plain model's names. Wrapping a wrapper again with
    equal settings returns the same wrapper.

    Args:
        module: The module to shard and wrap.
        process_group: The shard group, or a pair (shard group, replicate group).
            Default: the default process group.
        sharding_strategy: ``strategy`` of ``fully_shard``. Default None: FULL_SHARD.
        auto_wrap_policy: Selects the units below. Default None: no unit below.
        backward_prefetch: When backward all-gathers the next unit. Default
            BACKWARD_PRE.
        param_init_fn: Initializes modules on meta, at construction. Default None: each
            module's ``reset_parameters()``.
        use_orig_params: Always treated as True, the default: the parameters are the
            original objects. False gives a warning.
        cpu_offload, mixed_precision, ignored_modules, ignored_states, device_id,
            device_mesh, sync_module_states, forward_prefetch, limit_all_gathers: As in
            ``fully_shard``, with its defaults.
        tied_params, check_weights, wire, arena, if_sharded: The same; FSDP1 does not
            have these arguments.

    Collective: as ``fully_shard``.
    Raises: as ``fully_shard``; the module is then unchanged.
    """

    _component = WRAPPED_MODULE

    def __new__(
        cls, module: object = None, *args: object, **kwargs: object
    ) -> FullyShardedDataParallel:
        """Return a wrapper unchanged; ``__init__`` then compares the settings."""
        own = [*inspect.signature(FullyShardedDataParallel).parameters]
        # Python's own TypeError would not translate names of ``fully_shard``. A
        # subclass may have arguments of its own.
        if cls is FullyShardedDataParallel and (unknown := sorted({*kwargs} - {*own})):
            names = {"policy": "auto_wrap_policy", "strategy": "sharding_strategy"}
            api, origin = cls.__name__, "these are names of fully_shard: {}"
            raise TypeError(unknown_text(unknown, own, api, names, origin))
        return module if isinstance(module, cls) else super().__new__(cls)

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: AnyPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        tied_params: TiedParams = "error",
        check_weights: Report = "warn",
        wire: WireFormat | None = None,
        arena: Arena | None = None,
        if_sharded: Literal["error", "skip"] = "error",
    ) -> None:
        # __new__ returned the existing wrapper: compare by if_sharded="skip"; and
        # nn.Module.__init__ would drop the wrapper's children.
        again = module is self
        if not again:
            super().__init__()
        given: object = module
        if not isinstance(given, nn.Module):
            raise TypeError(
                f"FullyShardedDataParallel expects a module, got a "
                f"{type(given).__name__}. One unit of several modules: fully_shard."
            )
        require_process_group("FullyShardedDataParallel")
        # Only a subclass gets here: __new__ has returned a wrapper of the same class.
        if isinstance(module, FullyShardedDataParallel) and not again:
            raise CompositionError(
                "FullyShardedDataParallel got a module that is wrapped already. Wrap "
                "the plain module, or pass wrapper.module."
            )
        # A warning and no error, so that FSDP1 scripts which pass False run unchanged.
        if not use_orig_params:
            warn(
                "use_orig_params=False is taken as True: composable_fsdp always keeps "
                "the original parameters. Drop the argument; an optimizer over flat "
                "ones is made of composable_fsdp.features.flat_parameters(model).",
            )
        fully_shard(
            self.module if again else module,
            process_group=process_group,
            strategy=sharding_strategy or ShardingStrategy.FULL_SHARD,
            cpu_offload=cpu_offload,
            policy=auto_wrap_policy,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            ignored_modules=ignored_modules,
            # As FSDP1, which initializes a model on meta at construction.
            param_init_fn=param_init_fn or reset_parameters,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
            tied_params=tied_params,
            check_weights=check_weights,
            wire=wire,
            arena=arena,
            if_sharded="skip" if again else if_sharded,
        )
        if not again:
            _wrap_units_below(module)
            self._take(module)
            # In FSDP1 only the outermost wrapper casts inputs, not each wrapper.
            state = self._state
            state.precision = make_precision(state.handle, is_local_root=False)

    def _take(self, module: nn.Module) -> None:
        """Hold ``module``, and become an owner of the unit for lookups by module."""
        self._hold(module)
        # Functions that look up the unit of a module accept the wrapper, too.
        OWNERS.set(self._state, self)

    module = PlainNames._wrapped
    """The wrapped module."""

    @property
    def _state(self) -> _FSDPState:
        # Not get_state(self.module): an activation wrapper may stand between the two.
        state = get_state(inside_wrappers(self), API)
        assert isinstance(state, _FSDPState)
        return state

    # FSDP1's attributes cpu_offload and mixed_precision hold a default, never None.
    cpu_offload: CPUOffload = _option(
        "cpu_offload", "Whether shards are in host memory.", CPUOffload()
    )
    mixed_precision: MixedPrecision = _option(
        "mixed_precision",
        "The dtypes of compute, reduction and buffers.",
        MixedPrecision(),
    )
    backward_prefetch: BackwardPrefetch | None = _option(
        "backward_prefetch", "When backward all-gathers the next unit."
    )
    forward_prefetch: bool = _option(
        "forward_prefetch", "Whether forward all-gathers the next unit early."
    )
    limit_all_gathers: bool = _option(
        "limit_all_gathers", "Whether the memory of waiting units is limited."
    )

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """Return the strategy; NO_SHARD if ``process_group`` has a single rank."""
        # FSDP1 reports NO_SHARD for a group of a single rank, too.
        if self.world_size == 1:
            return ShardingStrategy.NO_SHARD
        return self._state.options.strategy

    @property
    def compute_device(self) -> torch.device:
        """Return the device on which the module computes."""
        return self._state.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the shard group; with NO_SHARD the replicate group."""
        # A group of a single rank is None in ``handle.groups``; the caller's group then
        # remains.
        state = self._state
        if state.options.strategy is ShardingStrategy.NO_SHARD:
            return state.handle.groups.replicate or state.ranks.shard
        return state.handle.groups.shard or state.ranks.shard

    @property
    def rank(self) -> int:
        """Return this rank's index in ``process_group``."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """Return the number of ranks in ``process_group``."""
        return self.process_group.size()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, whose hooks all-gather and reduce."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the wrapped module, if the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # During unpickling and copying the wrapper may have no module yet. Without
            # this check self.module would call __getattr__ again, without end.
            if name == WRAPPED_MODULE:
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            if error.name not in (None, name) or hasattr(type(self.module), name):
                raise  # a property of the module failed on another attribute
        # FSDP2's methods are functions of this package, of the same name.
        homes = ("composable_fsdp", "composable_fsdp.access") if name.islower() else ()
        ways_out = [
            f" Call the function: {home}.{name}(model, ...)."
            for home in homes
            if name in import_module(home).__all__
        ]
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}, and neither has the "
            f"{type(self.module).__name__} that it wraps.{''.join(ways_out)}",
            name=name,
            obj=self,
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module; the hooks of the unit stay outside the graph."""
        self.module.compile(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        # Defined on the wrapper, because copy.deepcopy would otherwise find the wrapped
        # module's __deepcopy__ through __getattr__.
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        # The map is keyed by module, so the copy is not registered yet.
        OWNERS.set(made._state, made)
        return made

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the plain model's names and buffers, without wrapper components."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield strip_wrapper(name), buffer

    def _fqn_modifiers(self) -> dict[str, str]:
        """Map the wrapped module's names to the wrapper component, for torch's DCP."""
        inner = self.module
        names = (*inner._modules, *inner._parameters, *inner._buffers)
        return dict.fromkeys(names, WRAPPED_MODULE)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict keyed by plain names; see ``nn.Module.load_state_dict``.

        Error texts show plain names, too. Raises: the errors of the unit's load hook.
        """
        if type(self.module).load_state_dict is not nn.Module.load_state_dict:
            # torch asks no module below the outermost one for a method of its own.
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        copied = OrderedDict(state_dict)
        # torch looks a module's version up by the module's path, which contains the
        # wrapper component; the saved metadata is keyed by plain names.
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            below = {name: strip_wrapper(name) for name, _ in self.named_modules()}
            renamed = {n: metadata[s] for n, s in below.items() if s in metadata}
            copied._metadata = {**metadata, **renamed}  # type: ignore[attr-defined]  # as torch does
        try:
            return super().load_state_dict(copied, strict=strict, assign=assign)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise  # an error of this package names parameters without components
            raise RuntimeError(strip_wrapper_in_text(str(error))) from None

    def check_is_root(self) -> bool:
        """Return whether no other unit contains this unit."""
        return self._state.parent is None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including the gradients of ``flat_parameters``."""
        self.module.zero_grad(set_to_none)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on every module below, with full parameters; writes are kept.

        Wrappers are called with, too; else as ``init_weights(model, fn)``.
        Returns: the wrapper. Collective, Raises: as ``init_weights``.
        """
        apply_whole(self, fn, "apply", wrappers=True)
        return self

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> list[FullyShardedDataParallel]:
        """Return the wrappers in the tree of ``module``, in ``.modules()`` order.

        With ``root_only`` return only wrappers of units that no other unit contains.
        """
        # walk_states does not enter subtrees of other APIs (DDP, replicate).
        owners = {
            id(owner)
            for _, owner, state in walk_states(module)
            if not root_only or state.parent is None
        }
        return [
            each
            for each in module.modules()
            if isinstance(each, FullyShardedDataParallel) and id(each.module) in owners
        ]

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Show full parameters while a block runs: FSDP1's name of ``unshard_params``.

        The arguments are those of ``unshard_params``. If no unit holds parameters of
        ``module``, the block does nothing.

        Collective, Raises: on entry and exit, as ``unshard_params``.
        """
        # FSDP1 accepts a module without units here; unshard_params refuses such a
        # module.
        if _get_module_fsdp_state(module) is None and not _get_fsdp_states(module):
            return nullcontext()
        return unshard_params(
            module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them; see the function ``no_sync``."""
        return no_sync(self)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the global norm of all gradients; see the function ``clip_grad_norm_``.

        Returns: the norm before clipping, 0-d, equal on all ranks.
        Collective: an all-reduce of one or two numbers per shard group.
        """
        return clip_grad_norm_(self, max_norm, norm_type, error_if_nonfinite, foreach)

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Reduce gradients by ``hook``; see the function ``register_comm_hook``."""
        register_comm_hook(self, state, hook)

    # FSDP1's static methods are the functions of this package, whose names, arguments
    # and defaults are FSDP1's.
    set_state_dict_type = staticmethod(settings.set_state_dict_type)
    get_state_dict_type = staticmethod(settings.get_state_dict_type)
    state_dict_type = staticmethod(settings.state_dict_type)
    optim_state_dict = staticmethod(save.optim_state_dict)
    optim_state_dict_to_load = staticmethod(load.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(load.full_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(load.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(load.scatter_full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(load.sharded_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(
        load.flatten_sharded_optim_state_dict
    )
    rekey_optim_state_dict = staticmethod(names.rekey_optim_state_dict)


# inspect.signature prefers __new__ to __init__; __init__ has the arguments.
FullyShardedDataParallel.__new__.__signature__ = inspect.signature(  # type: ignore[attr-defined]  # as inspect documents it
    FullyShardedDataParallel.__init__
)


def _wrap_units_below(module: nn.Module) -> None:
    """Replace every unit below ``module`` by a wrapper, at all places of a unit."""
    # Wrappers that the user made by hand before this call.
    wrapped = {
        id(each.module): each for each in FullyShardedDataParallel.fsdp_modules(module)
    }
    for parent in list(walk.modules(module)):
        for name, child in list(parent._modules.items()):
            # A shared module that the user wrapped at a single parent only: the other
            # parents get the same wrapper.
            if id(child) in wrapped and parent is not wrapped[id(child)]:
                setattr(parent, name, wrapped[id(child)])
    targets: dict[nn.Module, dict[str, Any]] = {
        owner: {}
        for _, owner, state in walk_states(module)
        # A unit of several modules has no single module that a wrapper could replace.
        if owner is not module and id(owner) not in wrapped and len(state.modules) == 1
    }

    def wrap(module: nn.Module, _: dict[str, Any]) -> nn.Module:
        wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
        # FullyShardedDataParallel.__init__ would shard the module a second time.
        nn.Module.__init__(wrapper)
        wrapper._take(module)
        return wrapper

    # Inner units first, so that each parent still holds the module to be replaced.
    post_order_apply(module, targets, wrap)
