"""Claims on the worlds that other tests stand on, failing ones above all."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist

from tests.support.world import (
    RankFailure,
    RankPool,
    RankTimeout,
    World,
    backend,
    fake_world,
    rank_pool,
    shutdown_pools,
    single_rank_group,
)

Ranks = Callable[[int], RankPool]


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Two ranks on gloo that a test may break."""
    with RankPool(2, "gloo") as pool:
        yield pool


def own_rank(world: World, offset: int = 0) -> int:
    return world.rank + offset


def own_rank_with_zero_last(world: World) -> int:
    time.sleep(0.2 if world.rank == 0 else 0.0)
    return world.rank


def summed(world: World, value: float) -> float:
    total = torch.full((3,), value * (world.rank + 1), device=world.device)
    dist.all_reduce(total, group=world.group)
    return float(total[0])


def backward_gradient(world: World | None) -> float:
    weight = torch.ones(64, 64, requires_grad=True)
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return float(weight.grad[0, 0])


def raise_on_rank_one(world: World) -> None:
    if world.rank == 1:
        print("about to fail")  # noqa: T201
        left, right = 3, 4
        assert left == right, "sizes differ"


def raise_everywhere(world: World) -> None:
    raise ValueError(f"bad value on {world.rank}")


def sleep_on_rank_one(world: World) -> None:
    if world.rank == 1:
        time.sleep(60)


def wait_for_a_peer_that_returned(world: World) -> None:
    if world.rank == 0:
        dist.barrier()


def start_and_forget_a_reduction(world: World) -> None:
    if world.rank == 0:
        dist.all_reduce(torch.ones(2), async_op=True)


def kill_rank_one(world: World) -> str:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def leave_with_status(world: World) -> None:
    os._exit(7)


def stop_rank_one(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def disturb_globals(world: World) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.rand(3)
    dist.new_group([0, 1])


def see_globals(world: World) -> tuple[torch.dtype, bool, float, bool, int]:
    group_count = len(dist.distributed_c10d._world.pg_map)
    draw = float(torch.rand(()))
    dtype, grads = torch.get_default_dtype(), torch.is_grad_enabled()
    return dtype, grads, draw, group_count == 1, torch.get_num_threads()


def destroy_default_group(world: World) -> bool:
    dist.destroy_process_group()
    return dist.is_initialized()


def compare(world: World) -> tuple[bool, bool, bool]:
    nan = {"a": [torch.tensor([1.0, float("nan")])], "b": "text"}
    signed_zero = torch.tensor(0.0) * (-1 if world.rank else 1)
    return (
        world.all_equal(nan),
        world.all_equal(signed_zero),
        world.all_equal(world.rank),
    )


def warn(world: World) -> None:
    warnings.warn("old name", DeprecationWarning, stacklevel=1)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.req("S2-07")
def test_results_come_in_rank_order_over_a_real_group(ranks: Ranks) -> None:
    """A run returns one result per rank, in rank order, and its collectives add up."""
    pool = ranks(2)

    assert pool.run(own_rank, 10) == [10, 11]
    assert pool.run(own_rank_with_zero_last) == [0, 1]
    assert pool.run(summed, 2.0) == [6.0, 6.0]


@pytest.mark.req("S2-07")
def test_the_backend_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo unless the variable says otherwise; an unknown name is refused."""
    monkeypatch.delenv("COMPOSABLE_FSDP_TEST_BACKEND", raising=False)
    assert backend() == "gloo"
    monkeypatch.setenv("COMPOSABLE_FSDP_TEST_BACKEND", "nccl")
    assert backend() == "nccl"
    monkeypatch.setenv("COMPOSABLE_FSDP_TEST_BACKEND", "mpi")
    with pytest.raises(ValueError, match="'gloo' or 'nccl', not 'mpi'"):
        backend()


@pytest.mark.req("S2-07")
def test_too_few_gpus_skip_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL a pool larger than the GPUs skips and says how many there are."""
    monkeypatch.setenv("COMPOSABLE_FSDP_TEST_BACKEND", "nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(BaseException, match="2 ranks on NCCL need 2 GPUs; 1 found"):
        rank_pool(2)


def patch_and_set(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the environment and a module of the rank, and undo nothing."""
    monkeypatch.setenv("COMPOSABLE_FSDP_TEST_LEFT", "by monkeypatch")
    monkeypatch.setattr(time, "left_by_a_test", True, raising=False)
    os.environ["COMPOSABLE_FSDP_TEST_SET"] = "by hand"


def left_over(world: World) -> list[str]:
    """What `patch_and_set` left on this rank."""
    left = [name for name in os.environ if name.startswith("COMPOSABLE_FSDP_TEST_")]
    return left + ["module"] * hasattr(time, "left_by_a_test")


def test_a_job_gets_the_environment_of_before_the_last_one(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest undoes its own monkeypatch, but not the copies that ranks have."""
    before = pool.run(left_over)

    pool.run(patch_and_set, monkeypatch)

    assert pool.run(left_over) == before


def test_two_world_sizes_live_side_by_side(ranks: Ranks) -> None:
    """Pools of two and three ranks answer in turn without disturbing each other."""
    two, three = ranks(2), ranks(3)

    assert two.run(summed, 1.0) == [3.0] * 2
    assert three.run(summed, 1.0) == [6.0] * 3
    assert two.run(summed, 1.0) == [3.0] * 2
    assert ranks(2) is two


def test_twenty_runs_take_under_two_seconds(ranks: Ranks) -> None:
    """A run on a started pool costs milliseconds, and keeps its processes."""
    pool = ranks(2)
    pool.run(own_rank)
    pids, began = pool.pids, time.monotonic()

    for _ in range(20):
        pool.run(summed, 1.0)

    assert time.monotonic() - began < 2
    assert pool.pids == pids


def cpu_seconds(world: World) -> float:
    """CPU time of this rank since it was forked."""
    return time.process_time()


def test_a_fresh_pool_starts_in_half_a_second(pool: RankPool) -> None:
    """New ranks are quick to come: they are forked with torch imported, which takes
    seconds. Of CPU time, since the machine is shared."""
    assert max(pool.run(cpu_seconds)) < 0.5


def test_backward_in_the_parent_does_not_spoil_new_ranks(pool: RankPool) -> None:
    """Ranks run backward although autograd has run in this process before them."""
    here = backward_gradient(None)

    assert pool.run(backward_gradient) == [here, here]


def test_an_error_shows_the_rank_its_traceback_values_and_output(
    pool: RankPool,
) -> None:
    """One failing rank fails the run: its traceback, values and output are shown."""
    with pytest.raises(RankFailure) as caught:
        pool.run(raise_on_rank_one)

    assert list(caught.value.errors) == [1]
    assert caught.value.results == {0: None}
    text = str(caught.value)
    assert "raise_on_rank_one failed on 1 of 2 ranks" in text
    assert "--- rank 0 ---\nsucceeded" in text
    assert 'assert left == right, "sizes differ"' in text
    assert "right = 4" in text
    assert "--- output of rank 1 ---\nabout to fail" in text


def test_the_run_after_an_error_has_fresh_ranks(pool: RankPool) -> None:
    """A failed run kills all its ranks; the next one works on new processes."""
    pool.run(own_rank)
    before = pool.pids
    with pytest.raises(RankFailure) as caught:
        pool.run(raise_everywhere)
    gone = [not is_alive(pid) for pid in before]

    assert pool.run(summed, 1.0) == [3.0, 3.0]
    assert [f"bad value on {r}" in caught.value.errors[r] for r in (0, 1)] == [True] * 2
    assert gone == [True, True]
    assert not set(before) & set(pool.pids)


def test_a_hanging_rank_is_ended_in_time_and_shows_its_stack(pool: RankPool) -> None:
    """A silent rank is killed at the time limit, and its stack says where it was."""
    pool.run(own_rank)
    pids, began = pool.pids, time.monotonic()

    with pytest.raises(RankTimeout) as caught:
        pool.run(sleep_on_rank_one, timeout=0.5)

    assert time.monotonic() - began < 3
    assert list(caught.value.errors) == [1]
    assert "the time limit is 0.5 s" in caught.value.errors[1]
    assert "in sleep_on_rank_one" in caught.value.errors[1]
    assert not any(is_alive(pid) for pid in pids)


def test_a_stopped_rank_is_ended_too(pool: RankPool) -> None:
    """A rank that cannot even write its stack is killed, and the report says so."""
    with pytest.raises(RankTimeout, match="does not react") as caught:
        pool.run(stop_rank_one, patience=0.2)

    assert "0.2 s after rank 0 returned" in caught.value.errors[1]


def test_a_rank_that_waits_for_a_returned_peer_is_noticed(pool: RankPool) -> None:
    """A collective that one rank skips ends the run soon after that rank returned."""
    with pytest.raises(RankTimeout, match="left unfinished") as caught:
        pool.run(wait_for_a_peer_that_returned, patience=0.5)

    assert list(caught.value.errors) == [0]
    assert "in barrier" in caught.value.errors[0]


def test_a_collective_that_nobody_waits_for_is_noticed(pool: RankPool) -> None:
    """A call issued by one rank only fails the run even though every rank returned."""
    with pytest.raises(RankFailure, match="left unfinished") as caught:
        pool.run(start_and_forget_a_reduction)

    assert "{0: 1, 1: 0}" in caught.value.errors[0]
    assert pool.run(summed, 1.0) == [3.0, 3.0]


def test_a_retired_run_may_leave_collectives_unfinished(pool: RankPool) -> None:
    """``retire`` skips the check and ends the pool, so that no later run is spoilt."""
    assert pool.run(start_and_forget_a_reduction, retire=True) == [None, None]
    assert pool.pids == []


def test_a_killed_rank_is_reported_with_its_signal(pool: RankPool) -> None:
    """SIGKILL on a rank fails the run at once; what the other returned is kept."""
    with pytest.raises(RankFailure) as caught:
        pool.run(kill_rank_one)

    assert caught.value.errors == {1: "died of SIGKILL"}
    assert caught.value.results == {0: "alive"}


def test_a_rank_that_exits_is_reported_with_its_status(pool: RankPool) -> None:
    """A rank that leaves without an answer is no success."""
    with pytest.raises(RankFailure) as caught:
        pool.run(leave_with_status)

    assert caught.value.errors == dict.fromkeys((0, 1), "ended with exit status 7")


def test_a_rank_killed_between_runs_does_not_fail_the_next(pool: RankPool) -> None:
    """A pool that lost a rank while idle starts again on its next run."""
    pool.run(own_rank)
    victim = pool._ranks[1].process
    os.kill(pool.pids[1], signal.SIGKILL)
    # Through the fork server, which is the one to hear of it first.
    victim.join(10)

    assert pool.run(own_rank) == [0, 1]


def test_a_run_sees_nothing_of_the_run_before(pool: RankPool) -> None:
    """Dtype, grad mode, seed and groups of one run do not reach the next."""
    untouched = pool.run(see_globals)
    pool.run(disturb_globals)

    after = pool.run(see_globals)

    assert after == untouched
    assert after[0][:2] == (torch.float32, True)
    assert after[0][3:] == (True, 1)


def test_a_destroyed_default_group_retires_the_pool(pool: RankPool) -> None:
    """Ranks may all destroy their group; the next run gets new ranks with a group."""
    assert pool.run(destroy_default_group) == [False, False]
    assert pool.run(summed, 1.0) == [3.0, 3.0]


def test_all_equal_compares_bits(ranks: Ranks) -> None:
    """NaN equals NaN inside containers; -0.0 and unequal values differ."""
    assert ranks(2).run(compare) == [(True, False, False)] * 2


def test_warning_rules_of_the_test_hold_on_ranks(pool: RankPool) -> None:
    """A warning that is an error here is an error there, and an ignored one is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.run(warn)

    with pytest.raises(RankFailure, match="DeprecationWarning: old name"):
        pool.run(warn)


def test_a_partial_of_a_module_function_can_be_sent(ranks: Ranks) -> None:
    """Any picklable callable runs on the ranks."""
    assert ranks(2).run(functools.partial(own_rank, offset=5)) == [5, 6]


def test_a_closure_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    """A lambda as function or argument is a TypeError that says what to pass."""
    pool = ranks(2)
    pool.run(own_rank)
    pids = pool.pids

    with pytest.raises(TypeError, match="pass a function at module level"):
        pool.run(lambda world: None)
    with pytest.raises(TypeError, match="pass a recipe"):
        pool.run(own_rank, lambda: 3)
    assert pool.pids == pids


def test_shut_down_pools_leave_no_process(ranks: Ranks) -> None:
    """Shutting down kills the ranks of every kept pool; they can start again."""
    ranks(2).run(own_rank)
    pids = ranks(2).pids

    shutdown_pools()

    assert not any(is_alive(pid) for pid in pids)
    assert ranks(2).run(own_rank) == [0, 1]


PARENT = """
import sys
from tests.support.world import ranks
from tests.support_tests.test_world import own_rank, sleep_on_rank_one

if __name__ == "__main__":
    ranks(2).run(own_rank)
    print(*ranks(2).pids, flush=True)
    ranks(2).run(sleep_on_rank_one, patience=60)
"""


def test_ranks_die_with_their_parent(tmp_path: os.PathLike[str]) -> None:
    """Killing the parent ends its ranks, the idle one and the busy one."""
    script = os.path.join(tmp_path, "parent.py")
    with open(script, "w") as file:
        file.write(PARENT)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        alive = [is_alive(pid) for pid in pids]
        parent.kill()
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)

    assert alive == [True, True]
    assert not any(is_alive(pid) for pid in pids)


def test_one_rank_is_a_world_of_its_own(one_rank: World) -> None:
    """The in-process group of one rank sums to the same numbers."""
    assert summed(one_rank, 4.0) == 4.0
    assert (one_rank.rank, one_rank.world_size) == (0, 1)


def test_a_fake_world_has_any_size_and_the_real_shapes() -> None:
    """Rank 700 of 1000 can be asked about, and subgroups form, in one process."""
    with fake_world(1000, rank=700) as world:
        outputs = [torch.empty(2) for _ in range(1000)]
        dist.all_gather(outputs, torch.ones(2), group=world.group)
        pair = dist.new_group([700, 701])

        assert (dist.get_rank(), dist.get_world_size()) == (700, 1000)
        assert pair.size() == 2


@pytest.mark.parametrize("inner", [single_rank_group, lambda: fake_world(4)])
def test_worlds_of_one_process_do_not_nest(
    inner: Callable[[], AbstractContextManager[World]],
) -> None:
    """A second world is refused, the first stays whole, and leaves nothing behind."""
    with single_rank_group() as world:
        with pytest.raises(RuntimeError, match="worlds do not nest"), inner():
            pass

        assert summed(world, 1.0) == 1.0

    assert not dist.is_initialized()
