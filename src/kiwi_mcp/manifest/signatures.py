"""Signatures of items: the statement, its digest, the signature line, and the proof by a key."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]  # the stubs lack the first
from pathlib import PurePath
from typing import Literal

import rfc8785
from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import SKILL_FILE, Manifest, Signature, ToolFile
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.patterns import lazy_pattern

_EXACT = 2**53
KIND = "kiwi.item/1"
"""Which statement is hashed, so that a later one can never be taken for it."""


def canonical(value: Json) -> bytes:
    """Return a value as RFC 8785 writes it: the same bytes for the same value, everywhere."""
    try:
        # `JSONEncoder.encode` makes an encoder at every call, which takes longer than writing most values does.
        return "".join(_chunks(_simple(value), 0)).encode()
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
    statement: JsonObject = {
        "kind": KIND,
        "tool_id": tool_id,
        "version": version,
        "executor": executor,
        # A checkout may turn line ends over; nothing else about the bytes is forgiven.
        "manifest": sha256_hex(manifest_body.replace(b"\r\n", b"\n")),
        "files": [
            {"path": file.path, "sha256": file.sha256, "executable": file.is_executable}
            for file in sorted(files, key=lambda file: file.path)
        ],
    }
    return canonical(statement)


class _Unusual(ValueError):
    """A value that the standard library's encoder may not write as RFC 8785 does."""


_chunks = c_make_encoder(None, None, encode_basestring, None, ":", ",", True, False, False)


def _simple(value: Json) -> Json:
    """Return a value that both ways of writing JSON write alike, which nearly all values are."""
    kind = type(value)
    if kind is str:
        if not value.isascii():  # type: ignore[union-attr]  # its type was asked, in the quickest way there is
            raise _Unusual
        return value
    if kind is dict:
        simple: dict[str, Json] = {}
        for key, inner in value.items():  # type: ignore[union-attr]  # as above
            if not key.isascii():  # the two sort keys beyond the basic plane differently
                raise _Unusual
            simple[key] = _simple(inner)
        return simple
    if value is None or kind is bool:
        return value
    if isinstance(value, (int, float)):
        # A whole number is written without a fraction; what not every reader keeps exactly is not whole enough.
        if not -_EXACT < value < _EXACT or value != int(value):
            raise _Unusual
        return int(value)
    if isinstance(value, str):
        return _simple(str(value))
    return _simple(dict(value)) if isinstance(value, Mapping) else [_simple(inner) for inner in value]


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


_ITEM, _ROTATION = b"kiwi-sig-v1\0", b"kiwi-key-v1\0"
"""What each statement begins with, so that none can be taken for another."""
_KEY = lazy_pattern(r"[A-Za-z0-9_-]{43}")
_GROUP, _DIGITS = 4, 32
_ROTATED = lazy_pattern(
    r"kiwi-key:rotated:(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z)"
    r":([A-Za-z0-9_-]{43}):([A-Za-z0-9_-]{43}):([A-Za-z0-9_-]{86})",
    re.ASCII,
)


class Rotation(Struct, frozen=True):
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


def matches_key(key: str, word: str) -> bool:
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


_KEY_BYTES, _PROOF_BYTES = 32, 64


def is_signed(key: str, proof: str, data: bytes) -> bool:
    """Whether a key, as text, signed some bytes; each key and each proof has one spelling only."""
    # Few items are signed with a key, and loading this takes longer than most calls.
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    public, signature = _decoded(key, _KEY_BYTES), _decoded(proof, _PROOF_BYTES)
    if public is None or signature is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _decoded(text: str, size: int) -> bytes | None:
    try:
        data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    is_only_spelling = urlsafe_b64encode(data).rstrip(b"=").decode() == text
    return data if len(data) == size and is_only_spelling else None


MAX_LINE = 512
"""The longest line that can be a signature; a longer one is content."""
MAX_SIDECAR = 4_096
"""The most that the file beside a file may hold, in bytes."""


class Style(Struct, frozen=True):
    """How a language writes a comment, and what may stand before the first one."""

    prefix: str
    suffix: str = ""
    after_shebang: bool = True
    opening: str = ""

    def comment(self, text: str) -> str:
        """Return some text as a comment of one line."""
        return f"{self.prefix} {text} {self.suffix}" if self.suffix else f"{self.prefix} {text}"


_HASH = Style("#")
_HASH_FIRST = Style("#", after_shebang=False)
_MARKUP = Style("<!--", "-->", after_shebang=False)
_STYLES: dict[str, Style] = {
    **dict.fromkeys(("md", "markdown", "html", "htm", "vue", "svelte"), _MARKUP),
    **dict.fromkeys(("yaml", "yml", "toml"), _HASH_FIRST),
    **dict.fromkeys(
        ("js", "mjs", "cjs", "jsx", "ts", "mts", "cts", "tsx", "rs", "go", "c", "cc", "cpp", "h", "hpp", "cs", "d"),
        Style("//"),
    ),
    **dict.fromkeys(("java", "kt", "kts", "swift", "scala", "groovy", "zig", "dart", "fs"), Style("//")),
    "php": Style("//", opening="<?php"),
    **dict.fromkeys(("lua", "sql", "hs", "elm", "adb", "ads"), Style("--")),
    **dict.fromkeys(("lisp", "clj", "cljs", "el", "scm", "rkt", "ini", "asm", "s"), Style(";")),
    **dict.fromkeys(("erl", "hrl", "tex", "sty"), Style("%")),
    **dict.fromkeys(("f90", "f95"), Style("!")),
    **dict.fromkeys(("ml", "mli"), Style("(*", "*)")),
    **dict.fromkeys(("bat", "cmd"), Style("rem", after_shebang=False)),
    "css": Style("/*", "*/", after_shebang=False),
}

DETACHED = frozenset({".json", SKILL_FILE.lower()})
"""The suffixes of files with their signature line in a separate file, and `SKILL.md`, which other programs read."""


def signature_form(path: PurePath) -> str:
    """Return the suffix that decides how a file is signed; `SKILL.md` has a form of its own."""
    return SKILL_FILE if path.name == SKILL_FILE else path.suffix


_SHEBANG = lazy_pattern(r"#!(?!\[)[^\n]*\n")  # `#![…]` opens a Rust attribute
_TIMESTAMP = lazy_pattern(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")
_DIGEST = lazy_pattern(r"[0-9a-f]{64}")
_VALIDATED = lazy_pattern(
    r"(kiwi-mcp|rye):(?:validated|signed):([ -~]{1,64}):([0-9a-f]{64}|[0-9a-f]{12})(?:\|[\w@-]{1,128})?"
)
_RYE_SIGNED = lazy_pattern(
    r"rye:signed:(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z):([0-9a-f]{64})"
    r":[A-Za-z0-9_-]{1,256}={0,2}:[0-9a-f]{16}(?:\|[\w-]{1,64}@[\w-]{1,64})?"
)
_KEYED = lazy_pattern(
    r"kiwi-mcp:validated:(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z):([0-9a-f]{64})"
    r":ed25519:([A-Za-z0-9_-]{43}):([A-Za-z0-9_-]{86})",
    re.ASCII,
)
_EMPTY_SLOT = lazy_pattern(r"(?:kiwi-mcp|rye):(?:validated|signed):[ -~]{1,64}:(?:placeholder|\{HASH\}|0+)")
_FRONT_TIMESTAMP = lazy_pattern(r"^validated_at:[ \t]*['\"]?([^'\"\n]{1,64}?)['\"]?[ \t]*$", re.MULTILINE)
_FRONT_HASH = lazy_pattern(r"^content_hash:[ \t]*['\"]?([0-9a-f]{64}|[0-9a-f]{12})['\"]?[ \t]*$", re.MULTILINE)


def comment_style(suffix: str) -> Style:
    """Return how files of that suffix write comments; `#` where nothing is known."""
    return _STYLES.get(suffix.lower().lstrip("."), _HASH)


def has_sidecar(suffix: str) -> bool:
    """Whether files of that suffix keep who signed them in a file of its own."""
    return suffix.lower() in DETACHED or bool(comment_style(suffix).suffix)


def line(timestamp: str, digest: str, key: str = "", proof: str = "") -> str:
    """Return the text of a signature line, without comment marks; with a key and its proof, it says who signed."""
    if not (_TIMESTAMP.fullmatch(timestamp) and _DIGEST.fullmatch(digest)):
        raise InvalidRequest(
            f"{timestamp!r} and {digest!r} do not make a signature line.",
            suggestion="Give the time as YYYY-MM-DDTHH:MM:SSZ and the digest as 64 hexadecimal digits.",
        )
    return f"kiwi-mcp:validated:{timestamp}:{digest}{f':ed25519:{key}:{proof}' if key else ''}"


def split(text: str, suffix: str) -> tuple[Signature | None, str]:
    """Return the signature of a file, if it has one, and the file without that line.

    A line with a placeholder for its hash is not a signature. It is removed all the same: signing fills it in. Old
    knowledge entries store theirs as two keys of the frontmatter, which stay in place.
    """
    style = comment_style(suffix)
    start = _place(text, style)
    found = None if suffix.lower() in DETACHED else _read(text, start, style)
    if found is not None:
        return found[0], text[:start] + text[found[1] :]
    if style is not _MARKUP or not text.startswith("---"):
        return None, text
    front = text[: max(text.find("\n---", 3), 0)].replace("\r\n", "\n")
    timestamp, digest = _FRONT_TIMESTAMP.search(front), _FRONT_HASH.search(front)
    if timestamp is None or digest is None or not digest[1].strip("0"):
        return None, text
    return Signature(timestamp[1], digest[1]), text


def sign(text: str, suffix: str, *, timestamp: str, digest: str, key: str = "", proof: str = "") -> str:
    """Return the file with exactly one signature line, and all else as it was."""
    if suffix.lower() in DETACHED:
        raise InvalidRequest(
            f"A {suffix} file has no comments to hold a signature line.",
            suggestion=f"Write the line into a file of the same name with `{sidecar('')}` added.",
        )
    if text.startswith("\ufeff"):
        raise InvalidRequest(
            "The file begins with a byte-order mark, which would end up behind the signature line.",
            suggestion="Save the file as UTF-8 without a byte-order mark, then sign it.",
        )
    style = comment_style(suffix)
    start = _place(text, style)
    found = _read(text, start, style)
    body = text if found is None else text[:start] + text[found[1] :]
    start = _place(body, style)
    first, newline, _ = body.partition("\n")
    ending = "\r\n" if newline and first.endswith("\r") else "\n"
    written = line(timestamp, digest) if style.suffix else line(timestamp, digest, key, proof)
    return f"{body[:start]}{style.comment(written)}{ending}{body[start:]}"


def sidecar(name: str) -> str:
    """Return the name of the file that holds the signature line of a file without comments."""
    return f"{name}.sig"


def read_detached(text: str) -> Signature | None:
    """Return the signature in a file that holds its line, and perhaps how its key came to be, and nothing else."""
    if len(text) > MAX_SIDECAR:
        return None
    first, *rest = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    return _parse(first) if len(first) <= MAX_LINE and all(map(Rotation.parse, rest)) else None


def read_rotations(text: str) -> tuple[Rotation, ...]:
    """Return how the key of a signature came to be, as the file beside a signed file tells it, the oldest first."""
    return tuple(filter(None, map(Rotation.parse, text[:MAX_SIDECAR].splitlines())))


def with_sidecar(short: Signature | None, beside: Signature | None) -> Signature | None:
    """Return the signature of a file with a short line, completed with the signer from the file beside it."""
    is_same = short and beside and (short.timestamp, short.hash) == (beside.timestamp, beside.hash)
    return beside if is_same else short


def _place(text: str, style: Style) -> int:
    start = 0
    if style.after_shebang and (shebang := _SHEBANG.match(text)):
        start = shebang.end()
    if style.opening and text.startswith(style.opening, start) and "\n" in text:
        start = text.index("\n", start) + 1
    return start


def _read(text: str, start: int, style: Style) -> tuple[Signature | None, int] | None:
    """Return the signature (None for an empty slot) in the line that begins at `start`, and where that line ends."""
    newline = text.find("\n", start, start + MAX_LINE)
    if newline < 0:
        return None
    written = text[start:newline].removesuffix("\r")
    opening, closing = f"{style.prefix} ", f" {style.suffix}" if style.suffix else ""
    if not (written.startswith(opening) and written.endswith(closing)):
        return None
    inner = written[len(opening) : len(written) - len(closing)]
    if _EMPTY_SLOT.fullmatch(inner):
        return None, newline + 1
    signature = _parse(inner)
    # What closes a comment stands behind a short line only, so that there is one way to write each signature.
    return None if signature is None or (signature.key and style.suffix) else (signature, newline + 1)


def _parse(inner: str) -> Signature | None:
    if found := _KEYED.fullmatch(inner):
        return Signature(found[1], found[2], key=found[3], proof=found[4])
    if found := _RYE_SIGNED.fullmatch(inner):
        return Signature(found[1], found[2], "rye")
    if _EMPTY_SLOT.fullmatch(inner) or not (found := _VALIDATED.fullmatch(inner)):
        return None
    scheme: Literal["kiwi", "rye"] = "rye" if found[1] == "rye" else "kiwi"
    return Signature(found[2], found[3], scheme)
