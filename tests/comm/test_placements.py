"""Placements: what is refused and why, and that one table knows the strategies."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_fsdp
from composable_fsdp import Placement, ShardingStrategy, fully_shard, replicate
from composable_fsdp.comm.placements import ROWS
from composable_fsdp.errors import FSDPError, PlanError
from composable_fsdp.features import Int8Wire, register_comm_hook
from tests.support.world import fake_world

S, R = ("shard",), ("replicate", "shard")
HFSDP = Placement(S, S, R, R)
ILLEGAL: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"states": "shard"}, TypeError, "expects tuples of names"),
    ({"states": ("shard", 1)}, TypeError, "tuples of names"),
    ({"states": ("shard", "shard")}, PlanError, "divides a thing once"),
    ({"states": ("shard:2",)}, PlanError, "over a part of a dim"),
    ({"between": S}, PlanError, "whole at rest"),
    ({"parameters": S, "states": S}, PlanError, "gradients of parameters"),
    ({"gradients": S}, PlanError, "without their gradients"),
    (
        {"between": S, "parameters": R, "gradients": R, "states": (*R, "c")},
        PlanError,
        "two pieces",
    ),
]


@pytest.mark.req("L-02")
@pytest.mark.parametrize(("given", "error", "match"), ILLEGAL)
def test_a_placement_without_a_legal_step_is_refused(
    given: dict[str, Any], error: type[Exception], match: str
) -> None:
    """With the reason, by the constructor."""
    with pytest.raises(error, match=match):
        Placement(**given)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"placement": "zero1"}, "expects None or a Placement"),
    ({"placement": HFSDP, "strategy": ShardingStrategy.ZERO1}, "not both"),
    ({"placement": Placement(states=("dp",))}, "mesh with dim 'dp'; the dims are"),
    ({"placement": Placement(S, ("shard:3",), S, S)}, "divisor n of the 2 ranks"),
    ({"placement": Placement(S, ("shard:0",), S, S)}, "divisor n of the 2 ranks"),
    ({"placement": Placement(S, ("shard:x",), S, S)}, "divisor n of the 2 ranks"),
    ({"placement": HFSDP, "wire": Int8Wire()}, "Leave wire out"),
]


@pytest.mark.req("L-02")
@pytest.mark.parametrize(("options", "match"), REFUSED)
def test_a_placement_that_does_not_fit_is_refused(
    options: dict[str, Any], match: str
) -> None:
    """The mesh or another option excludes it; the module stays as it was."""
    model = nn.Linear(8, 8)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=R)
        with pytest.raises((FSDPError, TypeError), match=match):
            fully_shard(model, device_mesh=mesh, **options)
    assert model.weight.shape == (8, 8)


@pytest.mark.req("L-02")
def test_calls_for_units_with_one_reduction_refuse_other_placements() -> None:
    """Communication hooks, and ``replicate`` over further ranks."""
    model = nn.Sequential(nn.Linear(8, 8))
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=R)
        fully_shard(
            model[0], device_mesh=mesh["shard"], strategy=ShardingStrategy.ZERO1
        )

        with pytest.raises(FSDPError, match="to this rank's part"):
            register_comm_hook(model, None, lambda state, gradient: None)
        with pytest.raises(FSDPError, match="would not be averaged over the others"):
            replicate(model, device_mesh=mesh["replicate"], init_sync=False)


@pytest.mark.req("L-02")
def test_no_other_code_names_a_strategy() -> None:
    """Members of ``ShardingStrategy`` are read in config, the table and the doors."""
    assert set(ROWS) == set(ShardingStrategy)
    package = Path(composable_fsdp.__file__).parent
    allowed = {package / "config.py", package / "comm" / "placements.py"}
    for path in package.rglob("*.py"):
        if path in allowed or "doors" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "ShardingStrategy", f"{path}:{node.lineno}"
