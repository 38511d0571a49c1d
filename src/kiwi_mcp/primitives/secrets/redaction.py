"""Redaction of secrets in output, and values that are too weak to redact."""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from json import dumps
from urllib.parse import quote_from_bytes

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import NO_CALLER, Answers, Caller, Questions, no_answers, unheard
from kiwi_mcp.domain.json import Json, JsonObject, as_object, map_texts
from kiwi_mcp.domain.outcome import Outcome, Progress, silent
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.secret import Secret

SHORTEST_REDACTED = 4
"""Values of fewer characters are not redacted."""
_COMMON = frozenset(
    {"true", "false", "none", "null", "test", "tests", "debug", "info", "warn", "error", "root"}
    | {"admin", "user", "local", "localhost", "production", "staging", "development", "default", "main", "master"}
    | {"utf8", "utf-8", "http", "https", "json", "text"}
)
_PUBLIC = frozenset({"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "TZ", "USER"})
_LINE = 16
"""Shorter lines of a value that has several are not redacted by themselves."""
_SMALL_NUMBER = lazy_pattern(r"[+-]?[0-9.]{1,7}")
SHORTEST_SECRET = 8
"""Values of fewer characters occur in ordinary text."""
LONGEST = 65_536
_BUT = "Use a longer one. If it is what it is, say `--weak`: tools may then show it"


def redacted(outcome: Outcome, secrets: Mapping[str, str]) -> Outcome:
    """Return the outcome without the value of any secret in it."""
    if not secrets:
        return outcome
    cleaner, logs = Redactor(secrets), outcome.logs
    return replace(
        outcome,
        result=cleaner.json(outcome.result),
        message=cleaner.text(outcome.message),
        logs=replace(logs, stdout=cleaner.text(logs.stdout), stderr=cleaner.text(logs.stderr)),
        details={name: cleaner.json(value) for name, value in outcome.details.items()},
        warnings=tuple(map(cleaner.text, outcome.warnings)),
        passed=None if outcome.passed is None else as_object(cleaner.json(outcome.passed)),
    )


def without_secrets(caller: Caller, secrets: Mapping[str, str]) -> Caller:
    """Return a caller that receives no secret values in progress reports, questions and log lines."""
    if not secrets or caller == NO_CALLER:
        return caller
    cleaner = Redactor(secrets)

    def report(progress: Progress) -> None:
        caller.report(replace(progress, message=cleaner.text(progress.message)))

    async def ask(questions: Questions) -> Answers:
        return await caller.ask(
            {key: replace(one, params=as_object(cleaner.json(one.params))) for key, one in questions.items()}
        )

    def note(line: JsonObject) -> None:
        caller.note(as_object(cleaner.json(line)))

    # Keep the default callbacks: they show that no one listens, so a server is not asked to report or to ask.
    return replace(
        caller,
        report=silent if caller.report is silent else report,
        ask=no_answers if caller.ask is no_answers else ask,
        note=unheard if caller.note is unheard else note,
    )


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """Return the text with each secret value replaced by `[redacted:NAME]`."""
    return Redactor(secrets).text(text) if secrets else text


def unredactable(secrets: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the values that are too short or too common to redact, so that the owner can be warned."""
    return tuple(name for name, value in secrets.items() if value and not _is_redactable(name, value))


class Redactor:
    """The forms of a set of secrets, and their removal from texts and bytes."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._marks: dict[bytes, bytes] = {}
        for name, value in secrets.items():
            if _is_redactable(name, value):
                for form in _forms(value.encode(errors="surrogatepass"), value):
                    self._marks.setdefault(form, f"[redacted:{name}]".encode())
        self._forms = sorted(self._marks, key=len, reverse=True)  # the longest first, where one begins with another
        self.longest = len(self._forms[0]) if self._forms else 0

    def text(self, text: str) -> str:
        """Return a text without the secrets."""
        if not self._forms:
            return text
        return self.clean(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def json(self, value: Json) -> Json:
        """Return a JSON value without the secrets."""
        return map_texts(value, self.text)

    def clean(self, data: bytes) -> bytes:
        """Return bytes without the secrets."""
        if not self._forms:
            return data
        # Looking for each form first is several times faster than one large expression over clean data.
        present = [form for form in self._forms if form in data]
        if not present:
            return data
        return re.sub(b"|".join(map(re.escape, present)), lambda found: self._marks[found[0]], data)

    def beginning(self, data: bytes) -> bytes:
        """Return the safe part of data that was cut off; a tail that may be the start of a secret is left out."""
        cut = max(0, len(data) - max(0, self.longest - 1))  # before it, no secret continues after the end of the data
        if self._forms:
            for found in re.finditer(b"|".join(map(re.escape, self._forms)), data):
                if found.start() >= cut:
                    break
                cut = max(cut, found.end())
        return self.clean(data[:cut])


def _is_redactable(name: str, value: str) -> bool:
    is_common = value.lower() in _COMMON or _SMALL_NUMBER.fullmatch(value) is not None
    return len(value) >= SHORTEST_REDACTED and name not in _PUBLIC and not is_common


def _forms(value: bytes, text: str) -> Iterator[bytes]:
    yield value
    yield value[::-1]
    yield text[::-1].encode(errors="surrogatepass")
    yield value.hex().encode()
    yield value.hex().upper().encode()
    for safe in ("", "/", "/:@!$&'()*+,;="):
        quoted = quote_from_bytes(value, safe=safe)
        yield quoted.encode()
        yield quoted.replace("%20", "+").encode()
        yield re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), quoted).encode()
    for is_ascii in (True, False):
        escaped = dumps(text, ensure_ascii=is_ascii)[1:-1]
        yield escaped.encode(errors="surrogatepass")
        yield escaped.replace("/", "\\/").encode(errors="surrogatepass")
    # The base64 forms of the value at each alignment among other bytes. The first and last character may share bits
    # with the neighbours, so they are left out.
    for offset, skipped in ((0, 0), (1, 2), (2, 3)):
        padded = bytes(offset) + value
        certain = len(padded) * 8 // 6
        yield b64encode(padded)[skipped:certain]
        yield urlsafe_b64encode(padded)[skipped:certain]
    # A key of several lines comes back line by line as well.
    lines = text.splitlines()
    if len(lines) > 1:
        yield from (line.encode(errors="surrogatepass") for line in lines if len(line) >= _LINE)


class Weakness(Struct, frozen=True):
    """Why a value is no good secret, and what to do; an unusable one is none at all."""

    reason: str
    fix: str
    is_unusable: bool = False


def weakness(name: str, secret: Secret) -> Weakness | None:
    """Return the weakness of a value, without quoting the value; None if it is strong enough."""
    value = secret.reveal()
    if not value:
        return Weakness("is empty", "Send it on standard input, or type it when asked.", is_unusable=True)
    if len(value) > LONGEST:
        return Weakness(f"has more than {LONGEST:,} characters", "Keep a file of that size apart.", is_unusable=True)
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        return Weakness("holds what no variable can hold", "Send text; encode bytes as base64.", is_unusable=True)
    if len(value) < SHORTEST_SECRET:
        return Weakness(
            f"has fewer than {SHORTEST_SECRET} characters, and cannot be taken out of what tools say", f"{_BUT}."
        )
    if unredactable({name: value}):
        return Weakness("is too common to be taken out of what tools say", f"{_BUT}.")
    return None
