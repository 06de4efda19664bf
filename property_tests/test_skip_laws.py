"""``if_sharded="skip"``: an equal call changes nothing, another is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests.live import examples
from tests.support.models import build, legal_units, module_at
from tests.support.recipes import ModelRecipe
from tests.support.reference import PATHS, apply_units
from tests.support.sharded import message_of
from tests.support.strategies import FEATURES, model_recipes
from tests.support.world import fake_world

DEFAULTS: dict[str, list[Any]] = {
    "strategy": [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
    "backward_prefetch": [BackwardPrefetch.BACKWARD_PRE, None],
    "forward_prefetch": [False, True],
    "limit_all_gathers": [True, False],
    "mixed_precision": [
        MixedPrecision(),
        MixedPrecision(keep_low_precision_grads=True),
    ],
    "cpu_offload": [CPUOffload(), CPUOffload(offload_params=True)],
    "block": [Block.ROW, Block.ELEMENT],
}
"""Per option its default, said aloud, and another value."""
NAMES = {"strategy": "sharding_strategy"}
SILENT = ("mixed_precision",)
"""Options whose other value has no effect either."""


@examples(40)
@pytest.mark.req("P-18")
@given(
    recipe=model_recipes(2, 2, FEATURES - {"replicate"}),
    path=st.sampled_from(PATHS),
    said=st.sets(st.sampled_from(sorted(DEFAULTS))),
    other=st.sampled_from(sorted(DEFAULTS)),
    extra=st.booleans(),
    by_wrapper=st.booleans(),
)
def test_an_equal_call_is_skipped_and_another_refused(
    recipe: ModelRecipe,
    path: str,
    said: set[str],
    other: str,
    extra: bool,
    by_wrapper: bool,
) -> None:
    """Defaults said or not, a fresh policy object; then one change."""
    by_wrapper = by_wrapper and path == "wrapper"
    if path == "wrapper":
        said, other = said - {"block"}, "strategy" if other == "block" else other
    spelled = {name: DEFAULTS[name][0] for name in said}
    changed = {**spelled, other: DEFAULTS[other][1]}
    with fake_world(2):
        plain = build(recipe)
        units = legal_units(plain, recipe.sharded)
        chosen = [module_at(plain, unit) for unit in units]
        how: dict[str, Any] = {"path": path, "style": "auto"}
        model: Any = apply_units(plain, units, **how, **({} if extra else spelled))
        if by_wrapper:
            found = FullyShardedDataParallel.fsdp_modules(model)
            chosen = [m for m in found if any(m.module is each for each in chosen)]
        states = _get_fsdp_states(model)
        shapes = [(p.shape, p.data_ptr()) for p in model.parameters()]

        def again(options: dict[str, Any]) -> Any:
            policy = CustomPolicy(lambda module: any(module is m for m in chosen))
            if path == "composable":
                return fully_shard(model, policy=policy, if_sharded="skip", **options)
            named = {NAMES.get(key, key): value for key, value in options.items()}
            return FullyShardedDataParallel(model, auto_wrap_policy=policy, **named)

        assert again(spelled if extra else {}) is model
        text = message_of(lambda: again(changed))

        if other in SILENT:
            assert text == "nothing was raised"
        else:
            assert text.startswith("CompositionError: fully_shard(if_sharded='skip')")
            assert f" has {other}=" in text
        assert _get_fsdp_states(model) == states
        assert [(p.shape, p.data_ptr()) for p in model.parameters()] == shapes
