"""Every operation at real sizes, with ``fully_shard``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_sizes.operations import PARTS, UNITS, make_pair, run_all
from tests.support.on_ranks import on_ranks
from tests.support.place import World
from tests.support.reference import apply_units


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("part", PARTS)
def test_every_operation_is_that_of_the_plain_model(
    world: World, part: str, tmp_path: Path
) -> None:
    """State dicts, optimizer state, single tensors, files, copies, clip."""
    run_all(part, make_pair(world, tmp_path, lambda m: apply_units(m, UNITS)))
