from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.surfaces.mcp.running_call import ahead_of, progress_relay

AMOUNTS = st.floats(0, 1_000, allow_nan=False)
REPORTS = st.builds(Progress, st.just("working"), AMOUNTS, st.none() | st.floats(1, 1_000))


@dataclass
class Client:
    """A client that records its progress notifications, and can be waited for."""

    notes: list[tuple[float, float | None, str | None]] = field(default_factory=list)
    notified: asyncio.Event = field(default_factory=asyncio.Event)

    async def hear(self, done: float, total: float | None, message: str | None) -> None:
        self.notes.append((done, total, message))
        self.notified.set()


@given(st.lists(REPORTS, max_size=30))
@settings(deadline=None, max_examples=60)
def test_progress_only_grows(reports: list[Progress]) -> None:
    response: list[float] = []
    for progress in reports:
        response.append(ahead_of(response[-1] if response else None, progress))
    assert all(later > earlier for earlier, later in pairwise(response))
    assert all(map(math.isfinite, response))


def test_progress_without_a_number_grows_by_a_small_step_below_the_total() -> None:
    assert ahead_of(1.0, Progress("still at it", 1.0, 3.0)) == pytest.approx(1.002)
    assert ahead_of(1.0, Progress("still at it")) == 2.0


@pytest.mark.req("K-PR-04")
async def test_a_flood_of_reports_becomes_the_first_and_the_last() -> None:
    client = Client()
    async with progress_relay(client.hear, interval=30) as report:
        report(Progress("first", 1, 1_000))
        await client.notified.wait()
        for number in range(2, 1_000):
            report(Progress("more", number, 1_000))
        report(Progress("last", 1_000, 1_000))
    assert client.notes == [(1, 1_000, "first"), (1_000, 1_000, "last")]


async def test_a_cancelled_call_reports_nothing_more() -> None:
    client = Client()
    with suppress(RuntimeError):
        async with progress_relay(client.hear) as report:
            report(Progress("too late"))
            raise RuntimeError
    assert client.notes == []


async def test_progress_without_a_message_is_reported_without_one() -> None:
    client = Client()
    async with progress_relay(client.hear) as report:
        report(Progress("", 1, 4))
    assert client.notes == [(1, 4, None)]
