"""JSON values: types, conversions that replace a wrong shape by an empty value, strict parsing, canonical text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from json import JSONDecodeError, JSONEncoder, loads
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]  # the stubs lack the first
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

if TYPE_CHECKING:
    Json: TypeAlias = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
else:  # decoders do not know recursive types
    Json = Any
JsonObject: TypeAlias = Mapping[str, Json]

# `JSONEncoder.encode` makes one of these at every call, which takes longer than writing most values does.
_compact = c_make_encoder(None, JSONEncoder().default, encode_basestring, None, ":", ",", False, False, False)
_canonical = c_make_encoder(None, JSONEncoder().default, encode_basestring, None, ":", ",", True, False, False)


def text_of(value: Json) -> str:
    """Return a value as it is written in a URL, a header or an argument: strings bare, the rest as JSON."""
    match value:
        case str():
            return value
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case _:
            return compact(value)


def map_texts(value: Json, change: Callable[[str], str]) -> Json:
    """Return a JSON value with each of its texts changed, those of keys too."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(name): map_texts(inner, change) for name, inner in value.items()}
        case list() | tuple():
            return [map_texts(inner, change) for inner in value]
        case _:
            return value


def compact(value: Json) -> str:
    """Return a value as one line of JSON."""
    return "".join(_compact(value, 0))


def as_object(value: Json) -> JsonObject:
    """Return a JSON object, or an empty one where the value is something else."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Json) -> Sequence[Json]:
    """Return a JSON array, or an empty one where the value is something else."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def as_text(value: Json) -> str:
    """Return a JSON string, or an empty one where the value is something else."""
    return value if isinstance(value, str) else ""


class NotJson(ValueError):
    """The bytes are not acceptable JSON; the message gives the reason."""


def read_json(data: bytes, *, max_bytes: int, max_values: int) -> Json:
    """Return the one value in some bytes: no duplicate keys, no NaN, within limits of size, count and depth."""
    if len(data) > max_bytes:
        raise NotJson(f"it is larger than {max_bytes:,} bytes")
    if most_values(data) > max_values:
        raise NotJson(f"it holds more than {max_values:,} values")
    try:
        value: Json = loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise NotJson("it is not UTF-8 text") from None
    except JSONDecodeError as error:
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
    return "".join(_canonical(value, 0)).encode()


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotJson("a key stands twice in one object")
    return found


def _refuse(word: str) -> NoReturn:
    raise NotJson(f"{word} is not JSON")
