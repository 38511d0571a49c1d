"""Signature lines: the one comment at the top of a file that says when it was validated, and as what.

A line counts where it stands first, or second after a shebang (PHP: after `<?php`); a second one is content.
JSON has no comments, so the line of a JSON file stands alone in `<name>.sig` beside it. A line may say more than a
hash: who signed it, as `:ed25519:{key}:{proof}`. Readers of old find no hash where such a line ends with a mark that
closes the comment, so there the line stays short, and the long one stands in `<name>.sig` too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import Signature
from kiwi_mcp.manifest.keys import Rotation

MAX_LINE = 512
"""The longest line that can be a signature; a longer one is content."""
MAX_SIDECAR = 4_096
"""The most that the file beside a file may hold, in bytes."""


@dataclass(frozen=True, slots=True)
class Style:
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

DETACHED = frozenset({".json"})
"""The suffixes whose signature line stands in a file of its own."""

_SHEBANG = re.compile(r"#!(?!\[)[^\n]*\n")  # `#![…]` opens a Rust attribute
_TIMESTAMP = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_VALIDATED = re.compile(
    r"(kiwi-mcp|rye):(?:validated|signed):([ -~]{1,64}):([0-9a-f]{64}|[0-9a-f]{12})(?:\|[\w@-]{1,128})?"
)
_RYE_SIGNED = re.compile(
    r"rye:signed:(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z):([0-9a-f]{64})"
    r":[A-Za-z0-9_-]{1,256}={0,2}:[0-9a-f]{16}(?:\|[\w-]{1,64}@[\w-]{1,64})?"
)
_KEYED = re.compile(
    r"kiwi-mcp:validated:(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z):([0-9a-f]{64})"
    r":ed25519:([A-Za-z0-9_-]{43}):([A-Za-z0-9_-]{86})",
    re.ASCII,
)
_EMPTY_SLOT = re.compile(r"(?:kiwi-mcp|rye):(?:validated|signed):[ -~]{1,64}:(?:placeholder|\{HASH\}|0+)")
_FRONT_TIMESTAMP = re.compile(r"^validated_at:[ \t]*['\"]?([^'\"\n]{1,64}?)['\"]?[ \t]*$", re.MULTILINE)
_FRONT_HASH = re.compile(r"^content_hash:[ \t]*['\"]?([0-9a-f]{64}|[0-9a-f]{12})['\"]?[ \t]*$", re.MULTILINE)


def comment_style(suffix: str) -> Style:
    """Return how files of that suffix write comments; `#` where nothing is known."""
    return _STYLES.get(suffix.lower().lstrip("."), _HASH)


def is_apart(suffix: str) -> bool:
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

    A line whose hash is still a placeholder is no signature, and is taken off all the same: signing fills it.
    Old knowledge entries keep theirs as two keys of the frontmatter, which stay in place.
    """
    style = comment_style(suffix)
    start = _place(text, style)
    found = None if suffix.lower() in DETACHED else _read(text, start, style)
    if found is None:
        return (_in_frontmatter(text) if style is _MARKUP else None), text
    signature, end = found
    return signature, text[:start] + text[end:]


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
    body = _without_line(text, style)
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


def completed(short: Signature | None, beside: Signature | None) -> Signature | None:
    """Return the signature of a file whose line is short, with who signed it as the file beside it tells."""
    is_same = short and beside and (short.timestamp, short.hash) == (beside.timestamp, beside.hash)
    return beside if is_same else short


def _without_line(text: str, style: Style) -> str:
    start = _place(text, style)
    found = _read(text, start, style)
    return text if found is None else text[:start] + text[found[1] :]


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


def _in_frontmatter(text: str) -> Signature | None:
    if not text.startswith("---"):
        return None
    front = text[: max(text.find("\n---", 3), 0)].replace("\r\n", "\n")
    timestamp, digest = _FRONT_TIMESTAMP.search(front), _FRONT_HASH.search(front)
    if timestamp is None or digest is None or not digest[1].strip("0"):
        return None
    return Signature(timestamp[1], digest[1])
