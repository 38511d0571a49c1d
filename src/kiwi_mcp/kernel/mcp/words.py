"""The words of a server: how its manifest says it is reached, kept without secrets, compared and shown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import unified_diff

from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, text_of
from kiwi_mcp.domain.mcp import ServerRecord
from kiwi_mcp.kernel.mcp.spotting import is_secret, looks_secret

_LAUNCH = ("transport", "command", "args", "env", "cwd", "url", "headers", "auth")
"""What of a config says how a server is reached; the rest are limits."""
_REFERENCE = re.compile(r"\$\{[^{}]*\}")
_MASK = "…"


def launch_of(config: JsonObject) -> JsonObject:
    """Return how a server is reached, of all that its config says: two servers that are reached alike are one."""
    return {word: config[word] for word in _LAUNCH if config.get(word) not in (None, {}, [])}


def words_of(server: Tool) -> JsonObject:
    """Return what is kept of a manifest that the owner accepts: how the server is reached, with secrets masked."""
    words = {
        word: _masked(word, value) for word, value in server.manifest.config.items() if word in _LAUNCH
    }  # in the order of the manifest, as its owner reads it
    needs = server.manifest.needs.to_json()
    return {**words, "needs": needs} if needs else words


def difference(server: Tool, record: ServerRecord) -> str:
    """Return how a server is reached otherwise than when its manifest was accepted, as a person reads it."""
    if not record.words:
        return f"What it said before is not known. Look at {server.origin.path}."
    before, after = (json.dumps(words, indent=2, ensure_ascii=False) for words in (record.words, words_of(server)))
    lines = unified_diff(before.splitlines(), after.splitlines(), "accepted", "now", lineterm="", n=2)
    return "\n".join(lines) or f"It is reached as before; something else changed. Look at {server.origin.path}."


def _masked(name: str, value: Json) -> Json:
    match value:
        case str():
            return _MASK if _is_secret(name, value) else value
        case Mapping():
            return {word: _masked(word, inner) for word, inner in value.items()}
        case list() | tuple():
            return _masked_words(value)
        case _:
            return value


def _masked_words(words: Sequence[Json]) -> list[Json]:
    """Return the words of a command; the one that follows on `--token` is a secret."""
    pairs = zip(["", *map(text_of, words)], words, strict=False)
    return [_masked(before if _is_flag(before) and not _is_flag(text_of(word)) else "", word) for before, word in pairs]


def _is_flag(word: str) -> bool:
    return word.startswith("-") and "=" not in word


def _is_secret(name: str, value: str) -> bool:
    literal = _REFERENCE.sub("", value)
    return is_secret(name, value) if literal == value else looks_secret(literal)
