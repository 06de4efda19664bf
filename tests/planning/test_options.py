"""Options from elsewhere: torch's enums and dataclasses are taken by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from composable_fsdp.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.errors import PlanError
from composable_fsdp.planning.options import UnitOptions, override


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
