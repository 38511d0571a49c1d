"""Types of JSON values, and conversions that replace a wrong shape by an empty value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import JSONEncoder
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    Json: TypeAlias = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
else:  # decoders do not know recursive types
    Json = Any
JsonObject: TypeAlias = Mapping[str, Json]

_ENCODER = JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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


def compact(value: Json) -> str:
    """Return a value as one line of JSON."""
    return _ENCODER.encode(value)


def as_object(value: Json) -> JsonObject:
    """Return a JSON object, or an empty one where the value is something else."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Json) -> Sequence[Json]:
    """Return a JSON array, or an empty one where the value is something else."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def as_text(value: Json) -> str:
    """Return a JSON string, or an empty one where the value is something else."""
    return value if isinstance(value, str) else ""
