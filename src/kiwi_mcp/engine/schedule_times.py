"""The times of a schedule: cron expressions in a time zone, delays, and the times that passed unserved."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.threads import Schedule
from kiwi_mcp.domain.times import milliseconds

GRACE_MS = 60_000
"""A start that is less late than this was not missed."""
MOST_MISSED = 100
"""How many missed times are made up for at most, the newest of them."""


def next_time(cron: str, zone: str, after: int) -> int:
    """Return the first time of a cron expression behind a time; refuse an expression that has none.

    At a change of the clock, a time that the day does not have is the first minute after the gap, and one that it has
    twice is served once.
    """
    return milliseconds(next(_times(cron, zone, after)))


def due_time(schedule: Schedule, at: int) -> int:
    """Return a time with its delay, which every worker computes alike."""
    if not schedule.jitter:
        return at
    number = int.from_bytes(sha256(f"{schedule.name}@{at}".encode()).digest()[:8])
    return at + number % (schedule.jitter * 1_000)


def due_times(schedule: Schedule, now: int) -> tuple[list[int], int]:
    """Return the times that are to be served now, by the rule for missed ones, and the next time."""
    before = _times(schedule.cron, schedule.zone, now + 1, is_reverse=True)
    passed = takewhile(lambda at: at >= schedule.next_at, map(milliseconds, before))
    times = sorted(islice(passed, MOST_MISSED))
    due = [*takewhile(lambda at: due_time(schedule, at) <= now, times)]
    following = times[len(due)] if len(due) < len(times) else next_time(schedule.cron, schedule.zone, now)
    match schedule.misfire:
        case "skip":
            due = [at for at in due if now - due_time(schedule, at) < GRACE_MS]
        case "latest":
            due = due[-1:]
        case "all":
            pass
    return due, following


def _times(cron: str, zone: str, at: int, *, is_reverse: bool = False) -> CronSim:
    try:
        local = datetime.fromtimestamp(at / 1_000, UTC).astimezone(ZoneInfo(zone))
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidRequest(
            f"{zone[:60]!r} is not a time zone.", suggestion="Write one such as `Europe/Zurich` or `UTC`."
        ) from error
    try:
        next(CronSim(cron, local))  # an expression such as `0 0 30 2 *` has no time at all
        return CronSim(cron, local, reverse=is_reverse)
    except (CronSimError, StopIteration) as error:
        reason = str(error).removeprefix("Bad ") or "no day has that date"
        raise InvalidRequest(
            f"{cron[:60]!r} is not a cron expression: {reason}.",
            suggestion="Write minute, hour, day of month, month, day of week, such as `30 7 * * 1-5`.",
        ) from error
