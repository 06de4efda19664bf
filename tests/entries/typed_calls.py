"""Calls that type checkers take or refuse: mypy reads this file, and nobody runs it.

An error that mypy no longer finds leaves its ``type: ignore`` unused, which is an error
as well.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import assert_type

import composable_fsdp
from composable_fsdp import CPUOffload, ShardingStrategy, fsdp2, fully_shard, replicate


class Net(nn.Module):
    """A module with a class of its own."""

    width: int = 3


@composable_fsdp.contract()
def label(module: nn.Module, text: str, *, number: int = 0) -> None:
    """Be a composable API of a user."""


def taken(net: Net) -> None:
    """Modules keep their type."""
    assert_type(fully_shard(net), Net)
    assert_type(fully_shard([net, net]), list[Net])
    assert_type(fully_shard((net, net)), tuple[Net, Net])
    assert_type(fully_shard(net, strategy=ShardingStrategy.NO_SHARD).width, int)
    assert_type(replicate(net, init_sync=False), Net)
    fully_shard(module=net, cpu_offload=CPUOffload(True), if_sharded="skip")
    assert_type(fsdp2.fully_shard(net, reshard_after_forward=2), fsdp2.FSDPModule)
    fsdp2.fully_shard(net).set_requires_gradient_sync(False)
    assert_type(label(net, "a", number=2), Net)
    # No private class is revealed.
    assert_type(fully_shard.state(net), Any | None)
    assert_type(fsdp2.fully_shard.state(net), Any | None)
    assert_type(replicate.state(net), Any | None)
    assert_type(composable_fsdp.checkpoint.state(net), Any | None)


def refused(net: Net) -> None:
    """A wrong name or type is an error."""
    fully_shard(net, strategi=3)  # type: ignore[call-arg]
    fully_shard(net, strategy="FULL_SHARD")  # type: ignore[arg-type]
    fully_shard(net, cpu_offload=True)  # type: ignore[arg-type]
    fully_shard(net, if_sharded="replace")  # type: ignore[arg-type]
    fully_shard(net, policy=Net)  # type: ignore[arg-type]
    fully_shard(net, None)  # type: ignore[call-arg]
    fully_shard()  # type: ignore[call-arg]
    fully_shard(net, reshard_after_forward=True)  # type: ignore[call-arg]
    fsdp2.fully_shard(net, msh=None)  # type: ignore[call-overload]
    fsdp2.fully_shard(net, mp_policy=3)  # type: ignore[call-overload]
    fsdp2.fully_shard(net).unshard(asynchronous=True)  # type: ignore[call-arg]
    replicate(net, strategy=3)  # type: ignore[call-arg]
    replicate(net, init_sync=[])  # type: ignore[arg-type]
    label(net)  # type: ignore[call-arg]
    label(net, 3)  # type: ignore[arg-type]
    label(net, "a", numbr=2)  # type: ignore[call-arg]
