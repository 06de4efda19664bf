"""Reads the FSDP settings that users of accelerate and of the Trainer write."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn

from composable_fsdp.access.manual import register_forward_method
from composable_fsdp.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from composable_fsdp.doors.fsdp2 import cpu_offload_of, mixed_precision_of
from composable_fsdp.entries.fully_shard import fully_shard
from composable_fsdp.features.checkpoint import checkpoint
from composable_fsdp.integrations.hf_adapters import has_adapters
from composable_fsdp.naming import did_you_mean
from composable_fsdp.planning import walk
from composable_fsdp.planning.policies import SizePolicy, evaluate_policy
from composable_fsdp.state_dict.settings import set_state_dict_type
from composable_fsdp.tools.models import NoSplitPolicy
from composable_fsdp.tools.texts import SHORT_DTYPES

M = TypeVar("M", bound=nn.Module)
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True)
class HFSharding:
    """The sharding that a configuration asks for; ``from_hf_config`` makes it.

    Args:
        options: the keyword arguments of ``fully_shard``. Default: a policy by
            ``_no_split_modules`` of the model.
        activation_checkpointing: whether each unit below the root recomputes its
            forward in backward. Default False.
        state_dict_type: the type of state dicts after sharding. Default None: full.
        ignored: a regular expression; modules whose whole name matches stay unsharded.
            Default None.

    >>> HFSharding().options
    {'policy': NoSplitPolicy()}
    """

    options: Mapping[str, Any] = field(
        default_factory=lambda: {"policy": NoSplitPolicy()}
    )
    activation_checkpointing: bool = False
    state_dict_type: StateDictType | None = None
    ignored: str | None = None

    def shard(self, model: M, **more: Any) -> M:
        """Shard ``model`` in place as the configuration asks.

        Args:
            model: a model that is not sharded.
            more: further arguments of ``fully_shard``, such as ``device_mesh``; they
                have priority over the configuration.

        Returns: ``model``, the same object.
        Collective: as ``fully_shard``.
        Raises: as ``fully_shard``; ValueError, for activation checkpointing without
            units below the root.
        """
        options = {**self.options, **more}
        if self.ignored is not None:
            options["ignored_modules"] = [
                module
                for name, module in walk.named(model)
                if re.fullmatch(self.ignored, name)
            ]
        units: Any = ()
        if self.activation_checkpointing:
            # The policy runs before anything is changed, and must see what
            # ``fully_shard`` lets it see.
            ignored = set(options.get("ignored_modules") or ())
            policy = options.get("policy")
            units = policy and evaluate_policy(
                policy, model, ignored_modules=ignored, root_kwargs={}
            )
            if not units:
                raise ValueError(
                    "fsdp_activation_checkpointing recomputes units, and the policy "
                    f"finds none below this {type(model).__name__}. Set fsdp_auto_wrap"
                    "_policy='TRANSFORMER_BASED_WRAP', or apply checkpoint(module)."
                )
        fully_shard(model, **options)
        # ``generate`` of a PeftModel calls the base model, which is no unit.
        if has_adapters(model) and hasattr(model, "generate"):
            register_forward_method(model, "generate")
        # After the sharding: recomputing then gathers the parameters of the unit again.
        for unit in units:
            checkpoint(unit)
        if self.state_dict_type is not None:
            set_state_dict_type(model, self.state_dict_type)
        return model


def from_hf_config(config: Mapping[str, Any]) -> HFSharding:
    """Return the sharding that settings of accelerate or of the Trainer describe.

    Names may have the prefix ``fsdp_``. Values may be text, as in the files of
    ``accelerate config``. Without ``fsdp_auto_wrap_policy`` the units are those of the
    Trainer's default: the layers that the model names in ``_no_split_modules``, or
    units by size if ``fsdp_min_num_params`` is above 0.

    Args:
        config: the settings.

    Returns: the sharding; its ``shard(model)`` applies it.
    Raises: ValueError, for an unknown name, a value that the name does not take, two
        names that contradict each other, or a setting that only another backend has.

    >>> sharding = from_hf_config({"fsdp_sharding_strategy": "SHARD_GRAD_OP"})
    >>> sharding.options["strategy"]
    <ShardingStrategy.SHARD_GRAD_OP: 2>
    """
    given: dict[str, Any] = {}
    for key, value in config.items():
        # The files of ``accelerate config`` have the prefix; the plugin has none.
        name = str(key).removeprefix("fsdp_")
        name = _SAME.get(name, name)
        # Two spellings of a name would otherwise hide each other, by their order.
        if name in given and given[name] != value:
            raise _contradiction(name, repr(given[name]), repr(value))
        given[name] = value
    unknown = [name for name in given if name not in _READERS]
    if unknown:
        # All unknown names at once, so that a user corrects the file once.
        told = [name + did_you_mean(name, _READERS) for name in unknown]
        raise ValueError(
            f"from_hf_config got unknown settings: {', '.join(told)}. It takes, with "
            f"the prefix fsdp_ or without, {', '.join([*_READERS, *_SAME])}."
        )
    found: dict[str, Any] = {}
    for name, value in given.items():
        # None stands for the default in a plugin's fields and in YAML.
        read = {} if value is None else _READERS[name](name, value)
        for key, each in read.items():
            # ``sharding_strategy`` and ``reshard_after_forward`` choose the strategy.
            if found.setdefault(key, each) != each:
                raise _contradiction(key, found[key], f"{each} ({name!r})")
    # Three names choose the units together, so no reader of one name can.
    policy = _policy(given)
    if policy is not None:
        found["policy"] = policy
    # A field of HFSharding is no argument of ``fully_shard``.
    own = {k: found.pop(k) for k in HFSharding.__dataclass_fields__ if k in found}
    return HFSharding(options=found, **own)


def _contradiction(name: str, first: object, second: object) -> ValueError:
    return ValueError(
        f"from_hf_config got settings of {name} twice that contradict each other: "
        f"{first} and {second}. Leave one of the two out."
    )


def _refused(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"fsdp_{name} expects {expected}, got {value!r}.")


def _policy(given: Mapping[str, Any]) -> object:
    """Return the policy that three settings describe; None stands for no units."""
    size = given.get("min_num_params") or 0
    # True is a number for Python; ``isdigit`` refuses a sign and a fraction.
    if isinstance(size, bool) or not str(size).isdigit():
        raise _refused("min_num_params", size, "a whole number of at least 0")
    classes = given.get("transformer_layer_cls_to_wrap") or None
    kind = given.get("auto_wrap_policy")
    # The plugin takes a function; the files have one of three texts.
    if callable(kind):
        return kind
    # The Trainer's default ignores a size without a word; here a size has its effect.
    if kind is None:
        kind = (
            "SIZE_BASED_WRAP" if int(size) and not classes else "TRANSFORMER_BASED_WRAP"
        )
    # Files list classes in one text, with commas.
    if isinstance(classes, str):
        classes = [name.strip() for name in classes.split(",") if name.strip()]
    policies: dict[str, Callable[[], object]] = {
        "TRANSFORMER_BASED_WRAP": lambda: NoSplitPolicy(classes),
        "SIZE_BASED_WRAP": lambda: SizePolicy(int(size)),
        "NO_WRAP": lambda: None,
    }
    if str(kind).upper() not in policies:
        expected = f"a function or one of {tuple(policies)}"
        raise _refused("auto_wrap_policy", kind, expected)
    return policies[str(kind).upper()]()


def _flag(name: str, value: object) -> bool:
    """Return a bool, which may be written as text."""
    # YAML and environment variables give texts, and numbers for truth values.
    texts = {"true": True, "false": False, "1": True, "0": False}
    if str(value).lower() not in texts:
        raise _refused(name, value, "True or False")
    return texts[str(value).lower()]


def _member(kind: type[E], name: str, value: object) -> E:
    """Return the member of ``kind`` with the name or the number ``value``."""
    # An enumeration of torch's FSDP has members of the same names.
    text = str(getattr(value, "name", value)).upper().removeprefix("_")
    # Without the underscore that FSDP1 has in one name, as accelerate writes it.
    members = {member.name.removeprefix("_"): member for member in kind}
    # Files of older versions have the number of a member, counted from 1.
    numbers = {str(at): member for at, member in enumerate(kind, start=1)}
    if text not in members | numbers:
        raise _refused(name, value, f"one of {', '.join(members)}")
    return (members | numbers)[text]


def _strategy(name: str, value: object) -> dict[str, Any]:
    """Return the strategy; True and False are FSDP2's ``reshard_after_forward``."""
    text = str(value).lower()
    if name == "reshard_after_forward" and text in ("true", "false"):
        value = "FULL_SHARD" if text == "true" else "SHARD_GRAD_OP"
    return {"strategy": _member(ShardingStrategy, name, value)}


def _prefetch(name: str, value: object) -> dict[str, Any]:
    # The third choice of accelerate has no member in torch's enumeration.
    if str(value).upper() in ("NO_PREFETCH", "3"):
        return {"backward_prefetch": None}
    return {"backward_prefetch": _member(BackwardPrefetch, name, value)}


def _offload(name: str, value: object) -> dict[str, Any]:
    if isinstance(value, (bool, str)):
        return {"cpu_offload": CPUOffload(offload_params=_flag(name, value))}
    # CPUOffload, of this package or of torch's FSDP1, which ``fully_shard`` copies.
    if isinstance(getattr(value, "offload_params", None), bool):
        return {"cpu_offload": value}
    # FSDP2's policy is checked against the device: memory is pinned beside a GPU.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"cpu_offload": cpu_offload_of(value, device)}


def _precision(name: str, value: object) -> dict[str, Any]:
    """Return the mixed precision of a text, a dict, or an object of torch's FSDP."""
    if isinstance(value, str):
        # What ``accelerate config`` writes if the user wants no mixed precision.
        if value.lower() == "no":
            return {}
        # A text means all three dtypes, as for the plugin.
        dtype = _dtype(name, value)
        return {"mixed_precision": MixedPrecision(dtype, dtype, dtype)}
    if isinstance(value, Mapping):
        known = sorted(MixedPrecision.__dataclass_fields__)
        if not value.keys() <= {*known}:
            raise _refused(name, value, f"a dict with the keys {known}")
        dtypes = {
            key: _dtype(name, each) if key.endswith("dtype") else each
            for key, each in value.items()
        }
        return {"mixed_precision": MixedPrecision(**dtypes)}
    # By name, because scripts import the class from torch.
    if "MixedPrecisionPolicy" in [base.__name__ for base in type(value).__mro__]:
        return {"mixed_precision": mixed_precision_of(value)}
    return {"mixed_precision": value}


def _dtype(name: str, value: object) -> Any:
    # ``str(torch.bfloat16)`` has the module's name in front.
    text = str(value).removeprefix("torch.").lower()
    found = getattr(torch, SHORT_DTYPES.get(text, text), None)
    if value is not None and not isinstance(found, torch.dtype):
        raise _refused(name, value, f"a dtype such as {', '.join(SHORT_DTYPES)}")
    return found


def _version(name: str, value: object) -> dict[str, Any]:
    # Both versions mean the same sharding here; a later one may mean another.
    if str(value) not in ("1", "2"):
        raise _refused(name, value, "1 or 2")
    return {}


def _unless_set(name: str, value: object) -> dict[str, Any]:
    """Raise ValueError for a setting of another backend that is not off."""
    # Trainer arguments that were saved have these names with the value for "off".
    if str(value).lower() not in ("false", "0", "{}"):
        raise ValueError(
            f"fsdp_{name}={value!r} is a setting that this package has no equal for. "
            "Leave it out."
        )
    return {}


_SAME = {
    "cpu_offload": "offload_params",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "mixed_precision": "mixed_precision_policy",
}
"""Names of the plugin, and the names of the same settings in ``fsdp_config``."""

_FLAGS = (
    *("activation_checkpointing", "forward_prefetch", "limit_all_gathers"),
    *("sync_module_states", "use_orig_params"),
)
_OTHERS = (
    *("activation_checkpointing_offload", "xla", "xla_fsdp_grad_ckpt"),
    *("xla_fsdp_settings", "xla_fsdp_v2"),
)
_UNITS = ("auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap")

_READERS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(_FLAGS, lambda name, value: {name: _flag(name, value)}),
    **dict.fromkeys(_OTHERS, _unless_set),
    **dict.fromkeys(_UNITS, lambda name, value: {}),  # see ``_policy``
    "backward_prefetch": _prefetch,
    # Only the first rank has read the weights, so they are sent to the others.
    "cpu_ram_efficient_loading": lambda name, value: (
        {"sync_module_states": True} if _flag(name, value) else {}
    ),
    # A text needs the names of a model, so ``shard`` reads the text.
    "ignored_modules": lambda name, value: {
        "ignored" if isinstance(value, str) else name: value
    },
    "mixed_precision_policy": _precision,
    "offload_params": _offload,
    "param_init_fn": lambda name, value: {name: value},
    "reshard_after_forward": _strategy,
    "sharding_strategy": _strategy,
    "state_dict_type": lambda name, value: {name: _member(StateDictType, name, value)},
    "version": _version,
}
"""Every name, without prefix, and the function that reads the value."""
