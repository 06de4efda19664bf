"""Hashes of values: small tensors are hashed together, with the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from composable_fsdp.flat import value_hash


@pytest.mark.req("U-15")
@pytest.mark.parametrize(
    "values",
    [
        pytest.param([torch.randn(8), torch.randn(3, 4), torch.empty(0)], id="joined"),
        pytest.param([torch.empty(0), torch.randn(2)], id="empty-first"),
        pytest.param([torch.randn(8, 6).t(), torch.randn(6)], id="transposed"),
        pytest.param([torch.randn(7), torch.randn(8)], id="odd"),
        pytest.param([torch.randn(8), torch.randn(8).bfloat16()], id="two-dtypes"),
        pytest.param([torch.randn(1 << 15), torch.randn(8)], id="large"),
    ],
)
def test_a_hash_does_not_depend_on_the_tensors_beside(values: list[Tensor]) -> None:
    """Each value alone, and cut into rows, has the hash that all have together."""
    together = value_hash.hash_values(values)

    alone = [value_hash._hash_words(value_hash._words(value)) for value in values]
    assert together.tolist() == [int(each) for each in alone]
    assert len(set(together.tolist())) == len(values)
