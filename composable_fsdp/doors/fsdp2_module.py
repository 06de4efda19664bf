"""``FSDPModule``: FSDP2's methods on modules that the door of FSDP2 has sharded."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from composable_fsdp.access import manual, settings
from composable_fsdp.errors import CompositionError, warn
from composable_fsdp.features.init_weights import apply_whole


class FSDPModule(nn.Module):
    """The base class of modules that ``composable_fsdp.fsdp2.fully_shard`` has sharded.

    The class of such a module, ``FSDPLinear`` for ``Linear``, derives from both.
    """

    _plain_class: type[nn.Module]
    """The class of the module before sharding."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain module: a slice of an ``nn.Sequential`` calls its class."""
        # The result is no instance of ``cls``, so Python does not call ``__init__``
        # again.
        return cls._plain_class(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the plain class: the class of ``self`` has no module."""
        made = super().__reduce_ex__(protocol)
        # A class that the module's author reduces in another way is left alone.
        if isinstance(made, tuple) and made[0] is copyreg.__newobj__:  # type: ignore[attr-defined]  # of pickle
            return (_empty, (self._plain_class,), *made[2:])
        return made

    # Functions of this package with the arguments of FSDP2's methods are methods.
    unshard = manual.unshard
    reshard = manual.reshard

    def apply(self, fn: Callable[[nn.Module], object]) -> FSDPModule:
        """Call ``fn`` on every module below, with full parameters.

        As on FSDP2's DTensors, ``fn`` sees whole shapes. See ``init_weights``.
        """
        apply_whole(self, fn, "apply", wrappers=True)
        return self

    reset_iter_state = manual.reset_iter_state
    set_is_last_backward = settings.set_is_last_backward
    set_requires_gradient_sync = settings.set_requires_gradient_sync
    set_requires_all_reduce = settings.set_requires_all_reduce

    # ``recurse`` is positional here and a keyword in the others, as in FSDP2.
    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True
    ) -> None:
        """Set whether full parameters are freed between forward and backward."""
        settings.set_reshard_after_forward(self, reshard_after_forward, recurse=recurse)

    set_reshard_after_backward = settings.set_reshard_after_backward
    set_modules_to_forward_prefetch = settings.set_modules_to_forward_prefetch
    set_modules_to_backward_prefetch = settings.set_modules_to_backward_prefetch

    set_all_reduce_hook = settings.set_all_reduce_hook
    set_gradient_divide_factor = settings.set_gradient_divide_factor
    set_force_sum_reduction_for_comms = settings.set_force_sum_reduction
    set_reduce_scatter_unused_params = settings.set_reduce_scatter_unused_params
    set_separate_reduce_scatter_group = settings.set_separate_reduce_scatter_group

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next all-gathers wait for ``event``, as the current stream does.

        The current stream waits for ``event``, too, so other work on this stream may
        begin later than under FSDP2.
        """
        # The gather stream waits for the current stream when the next forward begins.
        if settings.state_of_unit(self, "set_post_optim_event").device.type != "cpu":
            event.wait()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do as ``set_gradient_divide_factor``, which replaces this name."""
        warn(
            "set_reduce_scatter_divide_factor is deprecated, as in FSDP2. Use "
            "set_gradient_divide_factor.",
            DeprecationWarning,
        )
        self.set_gradient_divide_factor(factor)

    # An argument that asks for the state that there is anyway is accepted.

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accept 1, the number of reduce buffers in flight; refuse a larger number.

        Raises: CompositionError; ValueError, for no positive integer.
        """
        name = "set_reduce_scatter_max_input_buffers"
        # Other methods find the units, too, and refuse a module that lost its unit.
        settings.units_of(self, name, recurse=recurse)
        # True is an int in Python, and would silently mean 1.
        if type(max_input_buffers) is not int or max_input_buffers < 1:
            raise ValueError(
                f"{name} expects an integer of at least 1, got {max_input_buffers!r}."
            )
        if max_input_buffers > 1:
            _refuse(f"{name}({max_input_buffers})")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accept True; warn for False, because backward gathers the unit all the same.

        The gradients are the same: False saves an all-gather in FSDP2, for a unit whose
        backward reads no parameter.
        """
        state = settings.state_of_unit(self, "set_unshard_in_backward")
        # Hooks of backward read the full leaves, which a sharded unit does not show.
        if not unshard_in_backward:
            warn(
                f"set_unshard_in_backward(False) is ignored for {state.handle.name}: "
                "backward reads the full parameters of a unit, if only to place their "
                "gradients. To save the all-gather, call "
                "set_reshard_after_forward(False, recurse=False) on this module.",
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse buffers in memory of the process group; accept False."""
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm(True)")

    def set_custom_all_gather(self, comm: object) -> None:
        """Refuse a collective by an object of the caller."""
        _refuse("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Refuse a collective by an object of the caller."""
        _refuse("set_custom_reduce_scatter")

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Refuse symmetric memory."""
        _refuse(f"set_symm_mem_for_comm({backend!r})")


def _refuse(call: str) -> NoReturn:
    """Raise CompositionError for a method that this package cannot honor."""
    raise CompositionError(
        f"{call} is a setting of FSDP2 without an equal here: collectives use the flat "
        "buffers of parameters and gradients themselves, which each step allocates and "
        "frees. Leave the call out: no value depends on it."
    )


def _empty(plain: type[nn.Module]) -> nn.Module:
    """Return a module without attributes, for ``copy`` and ``pickle`` to fill."""
    # Not ``plain()``: the constructor may have arguments, and would allocate.
    module = plain.__new__(plain)
    module.__class__ = sharded_class(plain)
    return module


_classes: dict[type[nn.Module], type[FSDPModule]] = {}
"""The class of sharded modules by the plain class."""


def sharded_class(plain: type[nn.Module]) -> type[FSDPModule]:
    """Return the class ``FSDP<name>`` that derives from FSDPModule and ``plain``."""
    # A copied unit has the class already.
    if issubclass(plain, FSDPModule):
        return plain
    if plain not in _classes:
        # FSDPModule comes first, so that its methods win over equal names, as in FSDP2.
        # The name of the plain class's own file makes reprs and errors readable.
        _classes[plain] = type(
            f"FSDP{plain.__name__}",
            (FSDPModule, plain),
            {"_plain_class": plain, "__module__": plain.__module__},
        )
    return _classes[plain]
