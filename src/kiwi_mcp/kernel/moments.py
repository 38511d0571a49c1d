"""Times as people write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.issues import Issue

_AGO = re.compile(r"(\d{1,6})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment_in(word: str, text: str | None, now: datetime) -> int | None:
    """Return the time in a word of a request, ISO 8601 or so long ago, in milliseconds since 1970."""
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


def milliseconds(moment: datetime) -> int:
    """Return a time in milliseconds since 1970."""
    return int(moment.timestamp() * 1_000)
