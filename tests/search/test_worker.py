"""The index worker: at most one thread, started on demand and ended when idle."""

from __future__ import annotations

import threading
from threading import Event
from time import monotonic

import pytest

from kiwi_mcp.search.worker import BackgroundWorker


def threads() -> int:
    return sum(thread.name == "kiwi-search" for thread in threading.enumerate())


def test_the_worker_runs_until_no_work_is_left_and_ends() -> None:
    left = [3]

    def work(_: float) -> bool:
        left[0] -= 1
        return left[0] > 0

    worker = BackgroundWorker(work)
    assert threads() == 0
    worker.wake()
    assert worker.wait_until_idle(10)
    assert left == [0]
    assert threads() == 0


def test_there_is_never_a_second_worker() -> None:
    begun, end, most = Event(), Event(), [0]

    def work(_: float) -> bool:
        begun.set()
        end.wait(10)
        most[0] = max(most[0], threads())
        return False

    worker = BackgroundWorker(work)
    callers = [threading.Thread(target=worker.wake) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert begun.wait(120)
    worker.wake()
    end.set()
    assert worker.wait_until_idle(10)
    assert most == [1]


def test_a_wake_up_during_work_is_not_lost() -> None:
    begun, go_on, times = Event(), Event(), [0]

    def work(_: float) -> bool:
        times[0] += 1
        begun.set()
        go_on.wait(10)
        return False

    worker = BackgroundWorker(work)
    worker.wake()
    assert begun.wait(120)
    worker.wake()
    go_on.set()
    assert worker.wait_until_idle(10)
    assert times == [2]


def test_an_error_ends_one_step_only(caplog: pytest.LogCaptureFixture) -> None:
    faults = [ValueError("broken")]
    done: list[bool] = []

    def work(_: float) -> bool:
        if faults:
            raise faults.pop()
        done.append(True)
        return False

    worker = BackgroundWorker(work)
    worker.wake()
    assert worker.wait_until_idle(10)
    assert "broken" in caplog.text
    worker.wake()
    assert worker.wait_until_idle(10)
    assert done == [True]


def test_the_worker_stops_between_two_steps_and_can_be_restarted() -> None:
    worker = BackgroundWorker(lambda _: True)  # there is always more to do
    worker.wake()
    worker.close(0.01, 10)
    assert threads() == 0
    worker.wake()
    assert threads() == 1
    worker.close(0, 10)
    assert threads() == 0


def test_a_caller_waits_no_longer_than_requested() -> None:
    end = Event()

    def work(_: float) -> bool:
        end.wait(60)
        return False

    worker = BackgroundWorker(work)
    worker.wake()
    began = monotonic()
    assert not worker.wait(lambda: False, 0.05)
    worker.close(0.05, 0.05)
    assert monotonic() - began < 40
    end.set()
    assert worker.wait_until_idle(10)
