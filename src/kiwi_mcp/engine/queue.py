"""The queue: which threads a worker takes next, by priority, fair between those who started them, within limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct, field

from kiwi_mcp.store.queue import LiveThread, StartedThread

Limit = Annotated[int, Meta(ge=1, le=100_000)]


class QueueLimit(Struct, frozen=True, forbid_unknown_fields=True):
    """How many threads may run at the same time, and how many may begin in a minute; None sets no limit."""

    concurrency: Limit | None = None
    per_minute: Limit | None = None


class QueueLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of `queues.yaml`, by name; `*` is for every name that is not listed."""

    queues: Mapping[str, QueueLimit] = field(default_factory=dict)
    providers: Mapping[str, QueueLimit] = field(default_factory=dict)
    actors: Mapping[str, QueueLimit] = field(default_factory=dict)


def scopes(thread: LiveThread | StartedThread, limits: QueueLimits) -> Iterator[tuple[tuple[str, str], QueueLimit]]:
    """Yield what a thread counts for, and the limit of it."""
    for kind, name, known in (
        ("queue", thread.queue, limits.queues),
        ("provider", thread.provider, limits.providers),
        ("actor", thread.starter or "owner", limits.actors),
    ):
        if (limit := known.get(name) or known.get("*")) is not None:
            yield (kind, name), limit


def choose(
    waiting: Sequence[LiveThread],
    limits: QueueLimits,
    most: int,
    running: Sequence[LiveThread],
    started: Sequence[StartedThread],
) -> list[LiveThread]:
    """Return the threads to take, at most `most`; `started` are those of the last minute.

    The highest priority comes first, then the starter with the fewest threads that run or were started, then the oldest
    thread.
    """
    at_once = Counter(scope for one in running for scope, _ in scopes(one, limits))
    in_minute = Counter(scope for one in started for scope, _ in scopes(one, limits))
    busy = Counter([*(one.starter for one in running), *(one.starter for one in started)])
    left, chosen = [*waiting], list[LiveThread]()
    while left and len(chosen) < most:
        one = min(left, key=lambda each: (-each.priority, busy[each.starter], each.id))
        full = {
            scope
            for scope, limit in scopes(one, limits)
            if _is_full(at_once[scope], limit.concurrency) or _is_full(in_minute[scope], limit.per_minute)
        }
        if full:
            left = [each for each in left if full.isdisjoint(scope for scope, _ in scopes(each, limits))]
            continue
        left.remove(one)
        chosen.append(one)
        busy[one.starter] += 1
        for scope, _ in scopes(one, limits):
            at_once[scope] += 1
            in_minute[scope] += 1
    return chosen


def _is_full(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit
