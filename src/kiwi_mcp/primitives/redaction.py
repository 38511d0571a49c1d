"""Redaction: secret values out of whatever a tool or a server gave back.

A value is found as it is and in the forms in which values plausibly come back: quoted for URLs, escaped for JSON,
base64 at any alignment (both alphabets), hexadecimal, reversed. Other encodings are not promised: what contains a
secret is the jail and the grant; redaction is hygiene. Values of fewer than four characters, small numbers, everyday
words and the names every process has are left alone, since replacing them would spoil ordinary text and numbers in
JSON; `exempt` lists them.
"""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from json import dumps
from urllib.parse import quote_from_bytes

SHORTEST = 4
"""Values of fewer characters are not redacted."""
_COMMON = frozenset(
    {"true", "false", "none", "null", "test", "tests", "debug", "info", "warn", "error", "root"}
    | {"admin", "user", "local", "localhost", "production", "staging", "development", "default", "main", "master"}
    | {"utf8", "utf-8", "http", "https", "json", "text"}
)
_PUBLIC = frozenset({"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "TZ", "USER"})
_LINE = 16
"""Shorter lines of a value that has several are not redacted by themselves."""
_SMALL_NUMBER = re.compile(r"[+-]?[0-9.]{1,7}")
_URL_SAFE = "/:@!$&'()*+,;="


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """Return the text with each secret value replaced by `[redacted:NAME]`."""
    return Redactor(secrets).text(text) if secrets else text


def exempt(secrets: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names whose values are too short or too common to be redacted, so that the owner can be warned."""
    return tuple(name for name, value in secrets.items() if value and not _is_redactable(name, value))


class Redactor:
    """The forms of a set of secrets, and their removal from texts, bytes and streams of bytes."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._marks: dict[bytes, bytes] = {}
        for name, value in secrets.items():
            if _is_redactable(name, value):
                for form in _forms(value.encode(errors="surrogatepass"), value):
                    self._marks.setdefault(form, f"[redacted:{name}]".encode())
        self._forms = sorted(self._marks, key=len, reverse=True)  # the longest first, where one begins with another
        self.longest = len(self._forms[0]) if self._forms else 0
        self._held = b""

    def text(self, text: str) -> str:
        """Return a text without the secrets."""
        if not self._forms:
            return text
        return self.clean(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def clean(self, data: bytes) -> bytes:
        """Return bytes without the secrets."""
        # Looking for each form first is several times faster than one large expression over clean data.
        present = [form for form in self._forms if form in data]
        if not present:
            return data
        return re.sub(b"|".join(map(re.escape, present)), lambda found: self._marks[found[0]], data)

    def feed(self, chunk: bytes) -> bytes:
        """Return what is certain of a stream so far; an end that may be the start of a secret is held back."""
        data = self._held + chunk
        cut = self._certain(data)
        self._held = data[cut:]
        return self.clean(data[:cut])

    def beginning(self, data: bytes) -> bytes:
        """Return what is certain of data that was cut off; an end that may be the start of a secret is left out."""
        return self.clean(data[: self._certain(data)])

    def finish(self) -> bytes:
        """Return what was held back of a stream that has ended."""
        rest, self._held = self._held, b""
        return self.clean(rest)

    def _certain(self, data: bytes) -> int:
        """Return how much of data holds no secret that goes on after its end."""
        cut = max(0, len(data) - max(0, self.longest - 1))
        if self._forms:
            for found in re.finditer(b"|".join(map(re.escape, self._forms)), data):
                if found.start() >= cut:
                    break
                cut = max(cut, found.end())
        return cut


def _is_redactable(name: str, value: str) -> bool:
    is_common = value.lower() in _COMMON or _SMALL_NUMBER.fullmatch(value) is not None
    return len(value) >= SHORTEST and name not in _PUBLIC and not is_common


def _forms(value: bytes, text: str) -> Iterator[bytes]:
    yield value
    yield value[::-1]
    yield text[::-1].encode(errors="surrogatepass")
    yield value.hex().encode()
    yield value.hex().upper().encode()
    for safe in ("", "/", _URL_SAFE):
        quoted = quote_from_bytes(value, safe=safe)
        yield quoted.encode()
        yield quoted.replace("%20", "+").encode()
        yield re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), quoted).encode()
    for is_ascii in (True, False):
        escaped = dumps(text, ensure_ascii=is_ascii)[1:-1]
        yield escaped.encode(errors="surrogatepass")
        yield escaped.replace("/", "\\/").encode(errors="surrogatepass")
    yield from _base64(value)
    # A key of several lines comes back line by line as well.
    lines = text.splitlines()
    if len(lines) > 1:
        yield from (line.encode(errors="surrogatepass") for line in lines if len(line) >= _LINE)


def _base64(value: bytes) -> Iterator[bytes]:
    """Yield what base64 writes for the value wherever it stands among other bytes.

    The first and last character may share bits with the neighbours, so they are left out.
    """
    for offset, skipped in ((0, 0), (1, 2), (2, 3)):
        padded = bytes(offset) + value
        certain = len(padded) * 8 // 6
        yield b64encode(padded)[skipped:certain]
        yield urlsafe_b64encode(padded)[skipped:certain]
