"""Strict parsing of JSON from outside, and canonical JSON for hashes."""

from __future__ import annotations

import json
from typing import NoReturn

from kiwi_mcp.domain.json import Json

_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class NotJson(ValueError):
    """The bytes are not acceptable JSON; the message gives the reason."""


def read_json(data: bytes, *, max_bytes: int, max_values: int) -> Json:
    """Return the one value in some bytes: no duplicate keys, no NaN, within limits of size, count and depth."""
    if len(data) > max_bytes:
        raise NotJson(f"it is larger than {max_bytes:,} bytes")
    if most_values(data) > max_values:
        raise NotJson(f"it holds more than {max_values:,} values")
    try:
        value: Json = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise NotJson("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise NotJson(f"it is not JSON: {error.msg} at line {error.lineno}") from None
    except NotJson:
        raise
    except ValueError:
        raise NotJson("it holds a number of thousands of digits") from None
    return value


def most_values(data: bytes) -> int:
    """Return the maximum number of values in a text, to detect a JSON bomb before it is parsed."""
    # Every value but the first follows one of these.
    return sum(map(data.count, (b",", b"[", b"{")))


def canonical(value: Json) -> bytes:
    """Return a value of texts, whole numbers and ASCII keys as RFC 8785 writes it."""
    return _encode(value).encode()


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotJson("a key stands twice in one object")
    return found


def _refuse(word: str) -> NoReturn:
    raise NotJson(f"{word} is not JSON")
