"""Keys: how they are written, the statements that they sign, and whether they did."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module

from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.manifest.digest import canonical

_ITEM, _ROTATION = b"kiwi-sig-v1\0", b"kiwi-key-v1\0"
"""What each statement begins with, so that none can be taken for another."""
_KEY = re.compile(r"[A-Za-z0-9_-]{43}")
_GROUP, _DIGITS = 4, 32
_ROTATED = re.compile(
    r"kiwi-key:rotated:(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z)"
    r":([A-Za-z0-9_-]{43}):([A-Za-z0-9_-]{43}):([A-Za-z0-9_-]{86})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Rotation:
    """A statement by which a key hands over to another."""

    timestamp: str
    old: str
    new: str
    proof: str = ""

    @classmethod
    def parse(cls, text: str) -> Rotation | None:
        """Return the statement in a line; None where it is none."""
        found = _ROTATED.fullmatch(text)
        return cls(found[1], found[2], found[3], found[4]) if found else None

    @property
    def data(self) -> bytes:
        """The bytes that the old key signs."""
        return _ROTATION + canonical({"old": self.old, "new": self.new, "ts": self.timestamp})

    @property
    def is_sound(self) -> bool:
        """Whether the old key signed it."""
        return is_signed(self.old, self.proof, self.data)

    def __str__(self) -> str:
        return f"kiwi-key:rotated:{self.timestamp}:{self.old}:{self.new}:{self.proof}"


def is_key(text: str) -> bool:
    """Whether a text has the form of a public key."""
    return _KEY.fullmatch(text) is not None


def fingerprint(key: str) -> str:
    """Return the short name of a key, which people compare: 32 hexadecimal digits in groups of four."""
    digits = sha256(urlsafe_b64decode(f"{key}=")).hexdigest()[:_DIGITS]
    return "-".join(digits[at : at + _GROUP] for at in range(0, _DIGITS, _GROUP))


def is_meant(key: str, word: str) -> bool:
    """Whether a word is a key or its fingerprint, in whichever groups that was typed."""
    bare = word.strip().lower().replace("-", "").replace(":", "").replace(" ", "")
    return word == key or bare == fingerprint(key).replace("-", "")


def statement_for(manifest: Manifest, *, namespace: str, digest: str, timestamp: str, key: str) -> bytes:
    """Return the bytes that a publisher signs: which item of which namespace is what, since when, and by which key."""
    stated: JsonObject = {
        "namespace": namespace,
        "tool_id": manifest.tool_id,
        "version": manifest.version,
        "tool_type": manifest.tool_type,
        "executor": manifest.executor,
        "content_hash": digest,
        "ts": timestamp,
        "keyid": key,
    }
    return _ITEM + canonical(stated)


def is_signed(key: str, proof: str, data: bytes) -> bool:
    """Whether a key signed some bytes."""
    check: Callable[[str, str, bytes], bool] = import_module("kiwi_mcp.manifest.ed25519").is_signed
    return check(key, proof, data)
