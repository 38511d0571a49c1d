"""Times as Kiwi writes them down."""

from __future__ import annotations

from datetime import UTC, datetime

_LENGTH = len("2026-01-28T12:00:00.000Z")


def moment(text: str = "") -> str:
    """Return a time, or the present one, as it is kept everywhere: ISO 8601 in UTC, with milliseconds."""
    if len(text) == _LENGTH and text[19] == "." and text.endswith("Z"):  # already so
        return text
    given = datetime.fromisoformat(text).astimezone(UTC) if text else datetime.now(UTC)
    return f"{given.isoformat(timespec='milliseconds').removesuffix('+00:00')}Z"
