"""How an error of one rank reaches the others: class, text, and which rank is named."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import PhaseError
from composable_fsdp.comm.consensus import (
    exchange,
    failed_rank,
    first_failure,
    raise_on_all_ranks,
    require_success_on_all_ranks,
    send_failure,
)
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


def check_ways(world: World) -> tuple[str, str, int | None]:
    mesh = init_device_mesh("cpu", (2, 2))
    row, column = mesh.get_group(1), mesh.get_group(0)

    def wait_in_exchange() -> None:
        with raise_on_all_ranks([row]):
            if world.rank == 3:
                raise PhaseError("wrong moment.")
        failure = first_failure(each.failure for each in exchange(None, 1, row))
        if failure is not None:
            raise failure.rebuilt()

    def wait_for_all() -> None:
        with require_success_on_all_ranks([row, column]):
            if world.rank == 3:
                raise PhaseError("wrong moment.")

    texts = message_of(wait_in_exchange), message_of(wait_for_all)
    if world.rank == 3:
        send_failure([row, column], torch.device("cpu"))
        return *texts, None
    return *texts, failed_rank([row, column], torch.device("cpu"))


def test_the_rank_is_named_by_its_global_number(ranks: RankCount) -> None:
    """Also where it is the second of its group; one way or another all learn of it."""
    *others, last = ranks(4).run(check_ways, timeout=20)

    own, told = "PhaseError: wrong moment.", "PhaseError: On rank 3: wrong moment."
    assert last[:2] == (own, own)
    assert [text for _, text, _ in others] == [told] * 3
    assert [text for text, *_ in others] == [*["nothing was raised"] * 2, told]
    assert [rank for *_, rank in others] == [3, 3, 3]
