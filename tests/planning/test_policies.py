"""Policies and options: what they choose, what they refuse, and torch's own ones."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import wrap as fsdp1

from composable_fsdp.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.doors.wrapping import post_order_apply
from composable_fsdp.errors import PlanError
from composable_fsdp.planning.options import UnitOptions, override
from composable_fsdp.planning.policies import evaluate_policy
from composable_fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    SizePolicy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.support.models import TinyBlock, TinyGPT

Options = dict[str, Any]


def units_of(policy: object, root: nn.Module, **left_out: Any) -> dict[str, Options]:
    """The names of the units that ``policy`` chooses, with their options."""
    names = {module: name for name, module in root.named_modules()}
    targets = evaluate_policy(policy, root, root_kwargs={"strategy": "R"}, **left_out)
    return {names[module]: options for module, options in targets.items()}


def layers(count: int = 3, width: int = 2) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


def chain(depth: int) -> nn.Module:
    """One module inside the other, deeper than Python can recurse."""
    module: nn.Module = nn.Linear(1, 1)
    for _ in range(depth):
        module = nn.Sequential(module)
    return module


BLOCKS = {"blocks.0": {"strategy": "R"}, "blocks.1": {"strategy": "R"}}


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({TinyBlock}),
        fsdp1.ModuleWrapPolicy({TinyBlock}),
        CustomPolicy(lambda m: isinstance(m, TinyBlock)),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={TinyBlock}),
        partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, TinyBlock)),
        partial(_or_policy, policies=[ModuleWrapPolicy({TinyBlock})]),
        lambda root, ignored, root_kwargs: {m: {} for m in root.blocks},
        lambda module, recurse, nonwrapped_numel: recurse or type(module) is TinyBlock,
        lambda module, *, recurse, **rest: recurse or type(module) is TinyBlock,
    ],
)
@pytest.mark.req("S0-01")
def test_each_form_of_policy_finds_the_blocks(policy: object) -> None:
    """Policy objects, maps and callables end in one kind of answer."""
    assert units_of(policy, TinyGPT()) == BLOCKS


@pytest.mark.req("D-04", "S0-05")
def test_writing_to_one_units_options_reaches_no_other_dict() -> None:
    """Each unit has a dict of its own, also where a policy gave one dict to all."""
    shared = {"strategy": "own"}
    root_kwargs = {"strategy": "R"}
    first, second, _ = evaluate_policy(
        CustomPolicy(lambda m: shared), layers(), root_kwargs=root_kwargs
    ).values()

    first["strategy"] = "changed"

    assert (second, shared) == ({"strategy": "own"}, {"strategy": "own"})
    assert root_kwargs == {"strategy": "R"}


@pytest.mark.parametrize("name", ["EXCLUDE_WRAP_MODULES", "FORCE_LEAF_MODULES"])
def test_defaults_of_the_size_policy_are_those_of_fsdp1(name: str) -> None:
    """The attributes have FSDP1's names and values."""
    theirs = getattr(fsdp1.size_based_auto_wrap_policy, name)

    assert getattr(size_based_auto_wrap_policy, name) == theirs


def test_a_class_policy_that_finds_nothing_says_so() -> None:
    """With the classes it looked for, and those that are there."""
    policy = ModuleWrapPolicy({TinyBlock, nn.Conv1d})

    with pytest.warns(UserWarning, match="matches no module") as warned:
        assert units_of(policy, layers()) == {}

    assert [str(each.message) for each in warned] == [
        "ModuleWrapPolicy({Conv1d, TinyBlock}) matches no module of this Sequential, "
        "so all of it is one unit. Its modules are Linear, Sequential; name those that "
        "repeat."
    ]


@pytest.mark.parametrize(
    "policy", [SizePolicy(1), ModuleWrapPolicy({nn.Linear}), always_wrap_policy]
)
def test_depth_is_no_limit(policy: object) -> None:
    """Five thousand levels are evaluated and applied without recursion."""
    model, count = chain(5000), [0]

    def fn(module: nn.Module, options: Options) -> None:
        count[0] += 1

    targets = evaluate_policy(policy, model, root_kwargs={})
    post_order_apply(model, targets, fn)

    assert count == [len(targets)]
    assert targets


class Wrapped(nn.Module):
    """Remembers how it was made."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = module, options


def test_blocks_of_enable_wrap_nest_and_end_with_exceptions() -> None:
    """The inner block stands alone; after it, and after an error, the outer is back."""
    with enable_wrap(wrapper_cls=Wrapped, a=1):
        with suppress(KeyError), enable_wrap(wrapper_cls=Wrapped, b=2):
            inner = wrap(nn.ReLU())
            raise KeyError
        outer = wrap(nn.ReLU())

    assert [made.options for made in (inner, outer)] == [{"b": 2}, {"a": 1}]
    assert isinstance(wrap(nn.ReLU()), nn.ReLU)


@pytest.mark.req("S0-03")
def test_a_policy_may_walk_the_tree_twice() -> None:
    """It counts first, and then chooses by what it counted."""

    def larger_than_mean(root: nn.Module, ignored: Any, kwargs: Any) -> Any:
        numels = {m: sum(p.numel() for p in m.parameters()) for m in root.children()}
        mean = sum(numels.values()) / len(numels)
        return {m: {} for m, numel in numels.items() if numel > mean}

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(8, 8), nn.Linear(2, 2))

    assert list(units_of(larger_than_mean, model)) == ["1"]


def test_torchs_options_become_our_own() -> None:
    """Every field is copied, and equal options are equal whoever made them."""
    theirs: dict[str, Any] = {
        "strategy": torch_fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2,
        "backward_prefetch": torch_fsdp.BackwardPrefetch.BACKWARD_POST,
        "cpu_offload": torch_fsdp.CPUOffload(True),
        "mixed_precision": torch_fsdp.MixedPrecision(
            torch.float16, torch.float32, torch.bfloat16, True, True, False, [nn.GRU]
        ),
    }

    options = UnitOptions(**theirs)

    assert options == UnitOptions(
        strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        cpu_offload=CPUOffload(True),
        mixed_precision=MixedPrecision(
            torch.float16, torch.float32, torch.bfloat16, True, True, False, [nn.GRU]
        ),
    )
    assert hash(options) == hash(override(UnitOptions(), theirs, fqn=""))


@pytest.mark.req("U-02")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"mixed_precision": torch.float16},
            r"mixed_precision expects a MixedPrecision\(param_dtype, .*, "
            r"got torch\.float16",
        ),
        (
            {"cpu_offload": True},
            r"cpu_offload expects a CPUOffload\(offload_params, offload_states\), "
            r"got True\. Import .* "
            r"CPUOffload\(offload_params=True\)\.$",
        ),
        (
            {"mixed_precision": torch_fsdp.CPUOffload(True)},
            r"got CPUOffload\(offload_params=True\)",
        ),
        (
            {"strategy": torch_fsdp.BackwardPrefetch.BACKWARD_PRE},
            r"strategy expects one of ShardingStrategy\.FULL_SHARD",
        ),
    ],
)
def test_a_value_of_another_kind_is_refused(options: Any, text: str) -> None:
    """The message says what was expected and what came."""
    with pytest.raises(TypeError, match=text):
        UnitOptions(**options)


def test_full_precision_in_evaluation_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP1's variable would change numbers, and nobody would see that it does not."""
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    with pytest.raises(PlanError, match="FSDP_USE_FULL_PREC_IN_EVAL=1 of FSDP1 has no"):
        MixedPrecision(torch.bfloat16)
