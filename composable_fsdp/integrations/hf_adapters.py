"""Adapters of PEFT in a sharded model: their values, merging, and the names around.

Reading adapters gathers no base weights. Checked with peft 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.access.gather import gather_slot
from composable_fsdp.features.init_weights import apply_whole
from composable_fsdp.naming import listed
from composable_fsdp.storage.contents import HeldParam, contents_of
from composable_fsdp.storage.tensors import whole_value

_PREFIX = "base_model.model."
"""What PEFT puts in front of the names of the base model."""


def has_adapters(model: nn.Module) -> bool:
    """Return whether ``model`` is a ``PeftModel``."""
    # By attributes, because peft need not be installed.
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_values(model: nn.Module, *, keeps: bool) -> dict[str, Tensor]:
    """Return the full adapter and trained parameters by name, if this rank ``keeps``.

    Collective: ``gather_slot`` of each of them; all ranks must call.
    """
    made: dict[str, Tensor] = {}
    is_adapter = _adapter_test(model)
    for each in contents_of(model, "save_pretrained").each():
        # Equal on all ranks: names and ``requires_grad`` are compared at the first
        # gather.
        if each.tensor.requires_grad or any(map(is_adapter, each.names)):
            # No unit holds buffers, and parameters of ignored modules.
            if isinstance(each, HeldParam):
                value = gather_slot(each.ref, each.ref.leaf.detach())
            else:
                value = whole_value(each.tensor)
            if keeps:
                made.update(dict.fromkeys(each.names, value.cpu()))
    return made


def _adapter_test(model: Any) -> Callable[[str], bool]:
    """Return a function that tells names of adapters from names of the base model."""
    # Each method of PEFT has a prefix of its own; prompts have an encoder.
    prefix = getattr(model.base_model, "prefix", None) or "prompt_encoder"
    pattern = re.compile(rf"(^|\.)({re.escape(prefix)}\w*|modules_to_save)(\.|$)")
    return lambda name: pattern.search(name) is not None


def merge_adapters(model: nn.Module) -> None:
    """Add the active adapters to the base weights of a sharded model, unit by unit.

    ``merge_and_unload`` of PEFT would compute with this rank's rows. Afterwards
    ``save_pretrained(model, directory, merged=True)`` writes the base model. Layers
    that are merged already stay as they are; PEFT's ``unmerge_adapter`` inside of
    ``unshard_params`` takes the adapters out again.

    Args:
        model: a ``PeftModel``, sharded or plain.

    Collective: per unit an all-gather, and an exchange of outcomes; all ranks must
        call.
    Raises: PhaseError, inside a step; as PEFT's ``merge``.

    ::

        merge_adapters(model)
        save_pretrained(model, "merged", merged=True)
    """
    # PEFT warns of a second merge.
    layers = {id(layer) for _, layer in _adapter_layers(model)}

    def merge(module: Any) -> None:
        if id(module) in layers:
            module.merge()

    with torch.no_grad():
        apply_whole(model, merge, "merge_adapters", wrappers=False)


def _adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that PEFT has put around the base model's and not merged."""
    for name, module in model.named_modules():
        # Other layers around a base layer, as of trained tokens, cannot be merged.
        can_merge = hasattr(module, "base_layer") and hasattr(module, "merged_adapters")
        if can_merge and not module.merged:
            yield name, module


def require_merged(model: nn.Module) -> None:
    """Raise ValueError if an adapter of ``model`` is not merged."""
    if left := [name for name, _ in _adapter_layers(model)]:
        raise ValueError(
            f"save_pretrained(merged=True) expects merged adapters, and {listed(left)} "
            "are not. Call merge_adapters(model) before."
        )


def base_names(model: nn.Module) -> Callable[[str], str | None]:
    """Return a function to names of the base model; None for parts of adapters."""
    if not has_adapters(model):
        return lambda name: name
    is_adapter = _adapter_test(model)

    def inner(name: str) -> str | None:
        # Merged values are in the base weight.
        plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        return None if is_adapter(name) else plain

    return inner
