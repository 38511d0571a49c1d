"""Digests: one hash that names an item, its executor and every byte it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import rfc8785

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import Json

KIND = "kiwi.item/1"
"""Which statement is hashed, so that a later one can never be taken for it."""


def canonical(value: Json) -> bytes:
    """Return a value as RFC 8785 writes it: the same bytes for the same value, everywhere."""
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
    """Return the digest of an item.

    `manifest_body` is the file that bears the manifest, without its signature line; `files` are all the others. A
    signature holds this digest, so the file it stands in can only be counted without it.
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
    return sha256_hex(canonical(statement))


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
