"""Digests: one hash that names an item, its executor and every byte it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]  # the stubs lack the first

import rfc8785

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import Json

_EXACT = 2**53
KIND = "kiwi.item/1"
"""Which statement is hashed, so that a later one can never be taken for it."""


def canonical(value: Json) -> bytes:
    """Return a value as RFC 8785 writes it: the same bytes for the same value, everywhere."""
    try:
        return _encode(_simple(value)).encode()
    except _Unusual:
        pass  # the standard library writes the rest in another way than RFC 8785, so the slower library does
    try:
        return rfc8785.dumps(_plain(value))
    except (rfc8785.CanonicalizationError, UnicodeEncodeError, RecursionError) as fault:
        raise InvalidRequest(
            "The value has no canonical JSON form: a number beyond 2^53, one that is not finite, or broken text.",
            suggestion="Send large numbers as strings, and text as valid Unicode.",
        ) from fault


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of some bytes as 64 hexadecimal digits."""
    return sha256(data).hexdigest()


def digest_of(
    *, tool_id: str, version: str, executor: str | None, manifest_body: bytes, files: Iterable[ToolFile]
) -> str:
    """Return the digest of an item: the hash of its statement."""
    return sha256_hex(
        statement_of(tool_id=tool_id, version=version, executor=executor, manifest_body=manifest_body, files=files)
    )


def statement_of(
    *, tool_id: str, version: str, executor: str | None, manifest_body: bytes, files: Iterable[ToolFile]
) -> bytes:
    """Return the canonical JSON that states what an item is.

    `manifest_body` is the file that bears the manifest, without its signature line; `files` are all the others. A
    signature holds the digest, so the file it stands in can only be counted without it.
    """
    listed: list[Json] = [
        {"path": file.path, "sha256": file.sha256, "executable": file.is_executable}
        for file in sorted(files, key=lambda file: file.path)
    ]
    statement: dict[str, Json] = {
        "kind": KIND,
        "tool_id": tool_id,
        "version": version,
        "executor": executor,
        # A checkout may turn line ends over; nothing else about the bytes is forgiven.
        "manifest": sha256_hex(manifest_body.replace(b"\r\n", b"\n")),
        "files": listed,
    }
    return canonical(statement)


class _Unusual(ValueError):
    """A value that the standard library's encoder may not write as RFC 8785 does."""


# `JSONEncoder.encode` makes one of these at every call, which takes longer than writing most values does.
_chunks = c_make_encoder(None, None, encode_basestring, None, ":", ",", True, False, False)


def _encode(value: Json) -> str:
    return "".join(_chunks(value, 0))


def _simple(value: Json) -> Json:
    """Return a value that both ways of writing JSON write alike, which nearly all values are."""
    kind = type(value)
    if kind is str:
        if not value.isascii():  # type: ignore[union-attr]  # its type was asked, in the quickest way there is
            raise _Unusual
        return value
    if kind is dict:
        return {_simple_key(key): _simple(inner) for key, inner in value.items()}  # type: ignore[union-attr]  # as above
    if value is None or kind is bool:
        return value
    return _simple_number(value) if isinstance(value, (int, float)) else _simple_inside(value)


def _simple_number(value: float) -> int:
    # A whole number is written without a fraction; what not every reader keeps exactly is not whole enough.
    if not -_EXACT < value < _EXACT or value != int(value):
        raise _Unusual
    return int(value)


def _simple_inside(value: str | Sequence[Json] | Mapping[str, Json]) -> Json:
    match value:
        case str():
            return _simple(str(value))
        case Mapping():
            return _simple(dict(value))
        case _:
            return [_simple(inner) for inner in value]


def _simple_key(key: str) -> str:
    if not key.isascii():  # the two sort keys beyond the basic plane differently
        raise _Unusual
    return key


def _plain(value: Json) -> Json:
    # The library knows dict and list only; ours are read-only views as well.
    match value:
        case str():
            return value
        case Mapping():
            return {key: _plain(inner) for key, inner in value.items()}
        case Sequence():
            return [_plain(inner) for inner in value]
        case _:
            return value
