"""Runs: the record that every call leaves, and the ids by which records are found and ordered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

from kiwi_mcp.domain.json import JsonObject

RunStatus = Literal["success", "ready", "error", "timeout", "unavailable", "cancelled", "refused"]
"""How a call ended: as its outcome says, or `refused` where a gate let nothing run."""

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_SHIFTS = range(120, -10, -10)
_ID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_NOISE_BITS = 80
_LATEST = (1 << 48) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of one call that was made or refused; neither parameters nor secrets are part of it."""

    id: str
    tool_id: str
    status: RunStatus
    started_at: str
    """ISO 8601 in UTC, with milliseconds."""
    duration_ms: int
    actor: str
    project: str
    """The path of the project in which the call was made."""
    identity: str = ""
    """Empty, as are the two digests, where the call was refused before that was known."""
    digest: str = ""
    plan_digest: str = ""
    code: str = ""
    """Why it did not succeed, as one of the codes that answers have."""
    message: str = ""
    exit_code: int | None = None
    cost_micros: int = 0
    output: str = ""
    """The handle of the output file in the project, empty where there is none."""
    result_sha256: str | None = None
    """The hash of a large result, which is kept once however many runs gave it."""
    result_size: int | None = None
    """The size of a large result in bytes, also when it is no longer kept."""

    def to_json(self) -> JsonObject:
        """Return the whole record, without what is empty."""
        told = {word: getattr(self, word) for word in self.__dataclass_fields__}
        return {word: value for word, value in told.items() if value not in {"", None}}


def run_id(milliseconds: int, noise: int) -> str:
    """Return the id of a run that began at a time: 26 letters and digits whose order is the order of time."""
    return encode_id((min(max(milliseconds, 0), _LATEST) << _NOISE_BITS) | noise)


def encode_id(number: int) -> str:
    """Return a number of 128 bits as an id."""
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in _SHIFTS])


def is_run_id(text: str) -> bool:
    """Whether a text has the form of an id."""
    return _ID.fullmatch(text) is not None


def iso(milliseconds: int) -> str:
    """Return a time in milliseconds since 1970 as ISO 8601 in UTC."""
    return f"{_second(milliseconds // 1_000)}.{milliseconds % 1_000:03}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
