"""``FullyShardedDataParallel``: the wrapper door over the code of ``fully_shard``.

The wrapped module carries the state, the handle and the hooks; the wrapper adds one
level to the tree and takes it out of every name it gives.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.access.grads import clip_grad_norm_, no_sync
from composable_fsdp.access.settings import register_comm_hook
from composable_fsdp.access.unshard_params import unshard_own, unshard_params
from composable_fsdp.compose.registry import get_state
from composable_fsdp.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.entries.fully_shard import fully_shard
from composable_fsdp.entries.wrapper_attributes import Attributes, attribute_of
from composable_fsdp.entries.wrapper_states import StateMethods
from composable_fsdp.errors import CompositionError
from composable_fsdp.naming import WRAPPED_MODULE, strip_wrapper, strip_wrapper_in_text
from composable_fsdp.planning import walk
from composable_fsdp.planning.assign import API
from composable_fsdp.planning.wrapping import post_order_apply
from composable_fsdp.runtime.materialize import reset_parameters
from composable_fsdp.state_dict.wrapper_keys import install_wrapper_hooks
from composable_fsdp.tree.state import OWNERS, _FSDPState, _get_module_fsdp_state
from composable_fsdp.tree.traversal import (
    _get_fsdp_states,
    inside_wrappers,
    walk_states,
)


class FullyShardedDataParallel(Attributes, StateMethods, nn.Module):
    """Shard ``module`` over ranks and wrap it; arguments are those of torch's FSDP1.

    Every unit that ``auto_wrap_policy`` chooses is wrapped in its place, as FSDP1 does.
    Names of parameters and buffers are the plain model's: a script that looks for
    ``_fsdp_wrapped_module`` in them finds nothing.
    ``use_orig_params`` is always True here: the parameters are the original objects.
    A model on meta gets values at once, from ``param_init_fn`` or each module's
    ``reset_parameters()``.
    ``tied_params`` is ``fully_shard``'s, beside FSDP1's own: a policy may tear tied
    weights apart on this path, too, and so is ``if_sharded``. A wrapper that is wrapped
    again with equal settings is returned as it is.

    Collective: as ``fully_shard``.
    Raises: as ``fully_shard``; the module is as it was.
    """

    def __new__(
        cls, module: object = None, *args: object, **kwargs: object
    ) -> FullyShardedDataParallel:
        """Return what is wrapped already; ``__init__`` then compares the settings."""
        return module if isinstance(module, cls) else super().__new__(cls)

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: object = None,
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
        tied_params: str = "error",
        if_sharded: str = "error",
    ) -> None:
        again = module is self  # see __new__
        if not again:
            super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"FullyShardedDataParallel expects a module, got a "
                f"{type(module).__name__}. One unit of several modules: fully_shard."
            )
        if isinstance(module, FullyShardedDataParallel) and not again:
            raise CompositionError(
                "FullyShardedDataParallel got a module that is wrapped already. Wrap "
                "the plain module, or pass wrapper.module."
            )
        if not use_orig_params:
            warnings.warn(
                "use_orig_params=False is taken as True: composable_fsdp always keeps "
                "the original parameters. Drop the argument; an optimizer over flat "
                "parameters is made of flat_parameters(model).",
                stacklevel=2,
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
            # A wrapped model on meta gets values at once, as FSDP1 does it.
            param_init_fn=param_init_fn or reset_parameters,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
            tied_params=tied_params,
            if_sharded="skip" if again else if_sharded,
        )
        if not again:
            _wrap_units_below(module)
            self._take(module)

    def _take(self, module: nn.Module) -> None:
        setattr(self, WRAPPED_MODULE, module)
        OWNERS.set(self._state, self)
        install_wrapper_hooks(self)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapped = self._modules[WRAPPED_MODULE]
        assert wrapped is not None
        return wrapped

    @property
    def _state(self) -> _FSDPState:
        # Not of ``module``: a wrapper of activations may have come in between.
        state = get_state(inside_wrappers(self), API)
        assert isinstance(state, _FSDPState)
        return state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, whose hooks gather and reduce."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped module are attributes of the wrapper."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_MODULE:
                raise
            return attribute_of(self, self.module, name)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module, whose hooks are then outside of its graph."""
        self.module.compile(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        # Defined here so that it is never looked up on the wrapped module.
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        OWNERS.set(made._state, made)
        return made

    def __getitem__(self, key: Any) -> Any:
        """Forward indexing, for a wrapped ``nn.Sequential``."""
        return self.module[key]  # type: ignore[index]

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of a plain module: names without the wrapper's components."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield strip_wrapper(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of a plain module: names without the wrapper's components."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield strip_wrapper(name), buffer

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch's state dict functions: these names are behind our component."""
        inner = self.module
        names = (*inner._modules, *inner._parameters, *inner._buffers)
        return dict.fromkeys(names, WRAPPED_MODULE)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of a plain module: names, versions and messages are the plain model's."""
        copied = OrderedDict(state_dict)
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            below = {name: strip_wrapper(name) for name, _ in self.named_modules()}
            renamed = {n: metadata[s] for n, s in below.items() if s in metadata}
            copied._metadata = {**metadata, **renamed}  # type: ignore[attr-defined]  # as torch does
        try:
            return super().load_state_dict(copied, strict=strict, assign=assign)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise  # one of ours, whose names are plain
            raise RuntimeError(strip_wrapper_in_text(str(error))) from None

    def check_is_root(self) -> bool:
        """Whether no other unit holds this one."""
        return self._state.parent is None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those of ``flat_parameters`` included."""
        self.module.zero_grad(set_to_none)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on every module below, with full parameters; its writes are kept.

        Each unit is full while ``fn`` runs in it. Collective: one all-gather per unit,
        and at its end one all-reduce of a number per shard and replicate group.
        Raises: PhaseError, inside forward or backward; what ``fn`` raises, and on the
        other ranks DesyncError: the unit in which it happened keeps its values.
        """
        with unshard_own(self, self._state):
            super().apply(fn)
        return self

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> list[FullyShardedDataParallel]:
        """Return the wrappers in the tree of ``module``, in ``.modules()`` order.

        ``root_only`` keeps those that no other unit holds. Sends nothing.
        """
        owners = {id(owner): state for _, owner, state in walk_states(module)}
        return [
            each
            for each in module.modules()
            if isinstance(each, FullyShardedDataParallel)
            and id(each.module) in owners
            and not (root_only and owners[id(each.module)].parent is not None)
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
        """``unshard_params`` under its FSDP1 name.

        A block around a module that no unit holds a part of does nothing.
        """
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
        """Accumulate gradients without communication; see ``no_sync``."""
        return no_sync(self)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the global norm of all gradients; see ``clip_grad_norm_``."""
        return clip_grad_norm_(self, max_norm, norm_type, error_if_nonfinite, foreach)

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Have ``hook`` reduce this tree's gradients; see ``register_comm_hook``."""
        register_comm_hook(self, state, hook)


# Of the two, inspect would show that of ``__new__``.
FullyShardedDataParallel.__new__.__signature__ = inspect.signature(  # type: ignore[attr-defined]  # as inspect documents it
    FullyShardedDataParallel.__init__
)


def _wrap_units_below(module: nn.Module) -> None:
    """Put a wrapper in the place of every unit below, in all places of a shared one."""
    wrapped = {
        id(each.module): each
        for each in module.modules()
        if isinstance(each, FullyShardedDataParallel)
    }
    for parent in list(walk.modules(module)):
        for _, name, child in list(walk.edges(parent)):
            # Wrapped by hand where one parent holds it: the others get that wrapper.
            if id(child) in wrapped and parent is not wrapped[id(child)]:
                setattr(parent, name, wrapped[id(child)])
    targets: dict[nn.Module, dict[str, Any]] = {
        owner: {}
        for _, owner, state in walk_states(module)
        if owner is not module and id(owner) not in wrapped and len(state.modules) == 1
    }
    post_order_apply(module, targets, _wrap)


def _wrap(module: nn.Module, _: dict[str, Any]) -> nn.Module:
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._take(module)
    return wrapper
