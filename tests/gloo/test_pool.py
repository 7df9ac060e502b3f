"""The pool itself: what other tests trust it to report. Its ranks share no group here, and so start at once."""

import os
import time
from collections.abc import Iterator

import pytest

from tests.gloo.pool import GlooPool, TaskFailed

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def loose() -> Iterator[GlooPool]:
    pool = GlooPool(2, connected=False)
    yield pool
    pool.close()


def process_id(of_rank: int, base: int) -> tuple[int, int]:
    return os.getpid(), base + of_rank


def raise_on(rank: int, unlucky: int) -> None:
    if rank == unlucky:
        raise ValueError("of no use")


def die_on(rank: int, unlucky: int) -> None:
    if rank == unlucky:
        os._exit(3)


def sleep_on(rank: int, unlucky: int) -> None:
    if rank == unlucky:
        time.sleep(60)


def test_processes_are_reused_and_each_gets_its_own_argument(loose: GlooPool) -> None:
    first = loose.run(process_id, 10, of_rank=[1, 2])
    again = loose.run(process_id, 20, of_rank=[3, 4])
    assert [number for _, number in first + again] == [11, 12, 23, 24]
    assert [pid for pid, _ in first] == [pid for pid, _ in again]
    assert len({os.getpid(), *(pid for pid, _ in first)}) == 3


def test_the_first_ranks_alone(loose: GlooPool) -> None:
    assert len(loose.run(process_id, 0, ranks=1, of_rank=[5])) == 1


def test_a_rank_that_raises_fails_the_task_with_its_traceback(loose: GlooPool) -> None:
    with pytest.raises(TaskFailed, match=r"(?s)raise_on failed.*rank 1 of 2: .*ValueError: of no use"):
        loose.run(raise_on, 1, of_rank=[0, 1])
    assert loose.run(process_id, 0, of_rank=[0, 1])  # the pool recovers


def test_a_rank_that_dies_fails_the_task_at_once(loose: GlooPool) -> None:
    started = time.monotonic()
    with pytest.raises(TaskFailed, match="rank 0 of 2: died with exit code 3"):
        loose.run(die_on, 0, of_rank=[0, 1])
    assert time.monotonic() - started < 20  # far from the 30 seconds of a task that hangs
    assert loose.run(process_id, 0, of_rank=[0, 1])


def test_a_rank_that_hangs_fails_the_task_and_is_ended(loose: GlooPool) -> None:
    pids = [pid for pid, _ in loose.run(process_id, 0, of_rank=[0, 1])]
    with pytest.raises(TaskFailed, match=r"rank 1 of 2: no answer in 0\.5 s"):
        loose.run(sleep_on, 1, of_rank=[0, 1], timeout=0.5)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_after_some_failures_nothing_is_tried_any_more() -> None:
    pool = GlooPool(1, connected=False)
    for _ in range(5):
        with pytest.raises(TaskFailed, match="raise_on failed"):
            pool.run(raise_on, 0, of_rank=[0])
    with pytest.raises(TaskFailed, match="not tried after 5 failures; the first: raise_on failed"):
        pool.run(process_id, 0, of_rank=[0])
