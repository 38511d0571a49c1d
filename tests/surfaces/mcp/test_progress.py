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
from kiwi_mcp.surfaces.mcp.progress import Relay, ahead_of

AMOUNTS = st.floats(0, 1_000, allow_nan=False)
REPORTS = st.builds(Progress, st.just("working"), AMOUNTS, st.none() | st.floats(1, 1_000))


@dataclass
class Client:
    """A client that keeps what it was told, and can be waited for."""

    notes: list[tuple[float, float | None, str | None]] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    async def hear(self, done: float, total: float | None, message: str | None) -> None:
        self.notes.append((done, total, message))
        self.told.set()


@given(st.lists(REPORTS, max_size=30))
@settings(deadline=None, max_examples=200)
def test_progress_only_grows(reports: list[Progress]) -> None:
    told: list[float] = []
    for progress in reports:
        told.append(ahead_of(told[-1] if told else None, progress))
    assert all(later > earlier for earlier, later in pairwise(told))
    assert all(map(math.isfinite, told))


def test_news_without_progress_moves_a_small_step_and_stays_below_the_total() -> None:
    assert ahead_of(1.0, Progress("still at it", 1.0, 3.0)) == pytest.approx(1.002)
    assert ahead_of(1.0, Progress("still at it")) == 2.0


@pytest.mark.req("K-PR-04")
def test_a_flood_of_reports_becomes_the_first_and_the_last() -> None:
    async def story() -> Client:
        client = Client()
        async with Relay(client.hear, interval=30) as relay:
            relay.report(Progress("first", 1, 1_000))
            await client.told.wait()
            for number in range(2, 1_000):
                relay.report(Progress("more", number, 1_000))
            relay.report(Progress("last", 1_000, 1_000))
        return client

    assert asyncio.run(story()).notes == [(1, 1_000, "first"), (1_000, 1_000, "last")]


def test_a_cancelled_call_tells_nothing_more() -> None:
    async def story() -> Client:
        client = Client()
        with suppress(RuntimeError):
            async with Relay(client.hear) as relay:
                relay.report(Progress("too late"))
                raise RuntimeError
        return client

    assert asyncio.run(story()).notes == []


def test_progress_without_words_is_told_without_any() -> None:
    async def story() -> Client:
        client = Client()
        async with Relay(client.hear) as relay:
            relay.report(Progress("", 1, 4))
        return client

    assert asyncio.run(story()).notes == [(1, 4, None)]
