"""Timestamps, and ids that sort by time."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.patterns import lazy_pattern

_LENGTH = len("2026-01-28T12:00:00.000Z")
_AGO = lazy_pattern(r"(\d{1,6})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_ID = lazy_pattern(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_LATEST = (1 << 48) - 1


def moment(text: str = "") -> str:
    """Return a time, by default now, as ISO 8601 in UTC with milliseconds."""
    if len(text) == _LENGTH and text[19] == "." and text.endswith("Z"):  # already so
        return text
    given = datetime.fromisoformat(text).astimezone(UTC) if text else datetime.now(UTC)
    return f"{given.isoformat(timespec='milliseconds').removesuffix('+00:00')}Z"


def moment_in(word: str, text: str | None, now: datetime) -> int | None:
    """Return the time in an argument of a request, ISO 8601 or a duration before `now`, in milliseconds since 1970."""
    if text is None:
        return None
    try:
        if (ago := _AGO.fullmatch(text.strip())) is not None:
            return milliseconds(now - timedelta(**{_UNITS[ago[2]]: int(ago[1])}))
        moment = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError) as error:
        fix = "Write ISO 8601, such as `2026-01-28T12:00:00Z`, or how long ago: `30m`, `2h`, `3d`."
        issue = Issue(word, f"{text[:60]!r} is not a time", fix)
        raise InvalidRequest(f"`{word}`: {issue.reason}.", suggestion=issue.fix, issues=[issue.to_json()]) from error
    return milliseconds(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def now_ms() -> int:
    """Return the time now, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def milliseconds(moment: datetime) -> int:
    """Return a time in milliseconds since 1970."""
    return int(moment.timestamp() * 1_000)


def run_id(milliseconds: int, noise: int) -> str:
    """Return the id of a run that began at a time: 26 letters and digits that sort in the order of time."""
    return encode_id((min(max(milliseconds, 0), _LATEST) << 80) | noise)


def encode_id(number: int) -> str:
    """Return a number of 128 bits as an id."""
    text = ""
    for shift in range(120, -10, -10):
        text += _PAIRS[(number >> shift) & 1023]
    return text


def is_run_id(text: str) -> bool:
    """Whether a text has the form of an id."""
    return _ID.fullmatch(text) is not None


def iso(milliseconds: int) -> str:
    """Return a time in milliseconds since 1970 as ISO 8601 in UTC."""
    return f"{_second(milliseconds // 1_000)}.{milliseconds % 1_000:03}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
