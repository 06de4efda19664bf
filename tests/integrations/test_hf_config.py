"""Claims on settings that users of accelerate and of the Trainer write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    checkpoint,
    plan,
)
from composable_fsdp.errors import PlanError
from composable_fsdp.hugging_face import NoSplitPolicy, from_hf_config
from composable_fsdp.state_dict import get_state_dict_type
from composable_fsdp.wrap import SizePolicy
from tests.architectures.zoo import ARCHITECTURES, build, needs_transformers
from tests.support.on_ranks import on_ranks
from tests.support.world import World

LAYERS = {
    "gpt2": 2,
    "llama": 2,
    "mixtral": 2,
    "t5": 4,
    "bert": 2,
    "vit": 2,
    "whisper": 4,
    "mamba": 2,
    "clip": 4,
}


@pytest.mark.req("N-12")
@needs_transformers
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_that_a_model_names_are_units_and_ties_stay_together(name: str) -> None:
    """Each architecture is planned, and each tied parameter is in a single unit."""
    built = build(name)

    planned = plan(built.model, world_size=2, policy=NoSplitPolicy())

    layers = [m for m in built.model.modules() if isinstance(m, built.layers)]
    units = NoSplitPolicy()._run_policy(built.model, set(), {})
    assert len(layers) == LAYERS[name]
    assert set(layers) <= set(units)
    held = [s for u in planned.units for r in u.regions for s in r.parameters]
    assert len(held) == len(list(built.model.parameters()))


class Tied(nn.Module):
    """Two layers by name, one of which shares its weight with the head."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Embedding(4, 4)
        self.head.weight = self.tied.weight


def test_a_layer_with_a_parameter_that_is_tied_outside_is_no_unit() -> None:
    """The root holds the layer, also by names that the caller gives; so of a model in
    another."""
    model = Tied()

    for root in (model, nn.Sequential(model)):
        for policy in (NoSplitPolicy(), NoSplitPolicy(["Linear"])):
            assert list(policy._run_policy(root, set(), {})) == [model.alone]


def test_a_class_that_the_model_does_not_have_is_told() -> None:
    """The message names the nearest class."""
    with pytest.raises(PlanError, match=r"class Linea, .*did you mean Linear\?"):
        NoSplitPolicy(["Linea"])._run_policy(Tied(), set(), {})
    with pytest.raises(TypeError, match="names of classes, got <class"):
        NoSplitPolicy([nn.Linear])  # type: ignore[list-item]  # the mistake


BF16 = torch.bfloat16


@pytest.mark.req("N-12")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fsdp_sharding_strategy": 2}, {"strategy": ShardingStrategy.SHARD_GRAD_OP}),
        (
            {"sharding_strategy": "HYBRID_SHARD_ZERO2"},
            {"strategy": ShardingStrategy._HYBRID_SHARD_ZERO2},
        ),
        (
            {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
            {"strategy": ShardingStrategy.SHARD_GRAD_OP},
        ),
        (
            {"reshard_after_forward": "full_shard"},
            {"strategy": ShardingStrategy.FULL_SHARD},
        ),
        (
            {"fsdp_backward_prefetch": "backward_post"},
            {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        ),
        ({"backward_prefetch": "NO_PREFETCH"}, {"backward_prefetch": None}),
        ({"fsdp_forward_prefetch": "true"}, {"forward_prefetch": True}),
        ({"fsdp_offload_params": "true"}, {"cpu_offload": CPUOffload(True)}),
        ({"cpu_offload": False}, {"cpu_offload": CPUOffload(False)}),
        ({"fsdp_cpu_ram_efficient_loading": True}, {"sync_module_states": True}),
        ({"cpu_ram_efficient_loading": False, "xla": False}, {}),
        ({"fsdp_use_orig_params": "True"}, {"use_orig_params": True}),
        (
            {"mixed_precision_policy": "bf16"},
            {"mixed_precision": MixedPrecision(BF16, BF16, BF16)},
        ),
        (
            {"mixed_precision_policy": {"param_dtype": "bfloat16"}},
            {"mixed_precision": MixedPrecision(BF16)},
        ),
        ({"mixed_precision": "no"}, {}),
    ],
)
def test_settings_become_arguments_of_fully_shard(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    """With a prefix or without, and as text, too; nothing else is set."""
    options = dict(from_hf_config(config).options)

    assert repr(options.pop("policy")) == "NoSplitPolicy()"
    assert options == expected


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, "None"),
        ({"fsdp_min_num_params": 7}, repr(SizePolicy(7))),
        (
            {"auto_wrap_policy": "size_based_wrap", "min_num_params": "7"},
            "SizePolicy(7)",
        ),
        ({"transformer_layer_cls_to_wrap": "A, B"}, "NoSplitPolicy(['A', 'B'])"),
        ({"transformer_cls_names_to_wrap": ["A"]}, "NoSplitPolicy(['A'])"),
    ],
)
def test_three_settings_choose_the_units(config: dict[str, Any], policy: str) -> None:
    """By class, by size, or none."""
    assert repr(from_hf_config(config).options.get("policy")) == policy


@pytest.mark.req("N-12")
@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"fsdp_sharding_stratgy": 1}, "sharding_stratgy .did you mean sharding_str"),
        ({"fsdp_sharding_strategy": "HALF"}, "expects one of FULL_SHARD, .*got 'HALF'"),
        ({"fsdp_offload_params": "maybe"}, "expects True or False, got 'maybe'"),
        ({"fsdp_min_num_params": -1}, "whole number of at least 0, got -1"),
        ({"auto_wrap_policy": "WRAP"}, "TRANSFORMER_BASED_WRAP.*got 'WRAP'"),
        ({"mixed_precision_policy": "fp8"}, "a dtype such as bf16.*got 'fp8'"),
        ({"mixed_precision_policy": {"dtype": "bf16"}}, "a dict with the keys"),
        ({"xla": True}, "fsdp_xla=True is a setting that this package has no equal"),
        ({"version": 3}, "fsdp_version expects 1 or 2, got 3"),
        (
            {"fsdp_cpu_offload": True, "offload_params": False},
            "settings of offload_params twice",
        ),
        (
            {"sharding_strategy": "NO_SHARD", "reshard_after_forward": True},
            r"settings of strategy twice .*\('reshard_after_forward'\)",
        ),
    ],
)
def test_a_setting_that_cannot_be_honored_is_refused_by_name(
    config: dict[str, Any], text: str
) -> None:
    """No setting is dropped without an error."""
    with pytest.raises(ValueError, match=text):
        from_hf_config(config)


class Named(nn.Module):
    """Two blocks by name, and a norm."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(n, 4)`` to ``(n, 4)``."""
        y: torch.Tensor = self.norm(self.blocks(x))
        return y


@on_ranks(2)
def test_a_configuration_shards_recomputes_and_sets_state_dicts(world: World) -> None:
    """Every setting that is no argument of ``fully_shard`` has its effect, too."""
    model = Named()
    sharding = from_hf_config(
        {
            "fsdp_activation_checkpointing": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_ignored_modules": "norm",
        }
    )

    assert sharding.shard(model) is model
    model(torch.ones(2, 4)).sum().backward()

    assert [checkpoint.state(m) is not None for m in model.blocks] == [True] * 2
    assert model.norm.weight.shape == (4,)
    kind = get_state_dict_type(model).state_dict_type
    assert kind is StateDictType.SHARDED_STATE_DICT


@on_ranks(1)
def test_recomputing_without_units_is_refused(world: World) -> None:
    """The model stays as it was."""
    model = nn.Sequential(nn.Linear(2, 2))
    config = {"activation_checkpointing": True, "auto_wrap_policy": "NO_WRAP"}

    with pytest.raises(ValueError, match="recomputes units, and the policy finds none"):
        from_hf_config(config).shard(model)

    assert model[0].weight.shape == (2, 2)
