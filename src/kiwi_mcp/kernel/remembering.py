"""Remembering: what was wanted by which request, as far as the owner wants that, and what of a request may be kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Protocol

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel.delivery import every_value
from kiwi_mcp.kernel.memory import Listing, tell_memory
from kiwi_mcp.kernel.recent import Recent, Wanted, Who
from kiwi_mcp.kernel.redaction import cleaned
from kiwi_mcp.kernel.requests import MemoryRequest
from kiwi_mcp.kernel.store import Store

LONGEST = 300
"""How many characters of a request are kept."""

_MARK = "…"
_WORD = re.compile(r"\w")
# What looks like no word of a language helps no later search, and may be a password, a key or the number of a card.
_ODD = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[^\s,;:()\"'?!]{9,}|[^\s]{41,}|\d[\d\s.-]{5,}\d|\S+@\S+|\w+://\S+")
_NAMES = (
    r"(?:(?:password|passwort|kennwort|passwd|passphrase|passcode|contraseña|secret|token|credential|bearer|authorization)"
    r"|(?<![^\W_])(?:pass|passe|passport|pwd|pw|pin|otp|cvv|cvc|ssn|iban)"
    r"|(?:(?<![^\W_])|api|access|private|secret|ssh|pass)key)s?(?![^\W\d_])"
)
# A secret may be any words at all. Whatever is said after it was named is not kept, nor what is said to be one.
_TOLD = re.compile(rf"(?i){_NAMES}(?=.*\w)")
_SAID_TO_BE = re.compile(rf"(?i)(?<!\S)\S++(?=\s+(?:is|was|as|for)\s+(?:\w+\s+){{0,3}}{_NAMES})")


class Memories(Listing, Protocol):
    """What the store remembers; it is loaded when it is first needed."""

    def recall(self, actor: str, space: Space, request: object) -> object:
        """Return what is remembered of requests like one."""

    def note(self, actor: str, identity: str, wanted: Wanted, space: Space, *, is_run: bool) -> None:
        """Let it be remembered that an item was used after a request, or for a part of it."""

    def settle(self, seconds: float) -> bool:
        """Wait, for so long at the most, until all of it is known; return whether that is so."""

    def close(self) -> None:
        """End what is done in the background."""


class Remembering:
    """What a kernel remembers of the searches it answers, unless its owner does not want that.

    `file` is where searches are noted for the next process, where each command is one of its own.
    """

    def __init__(self, store: Store, file: Path | None = None) -> None:
        self._store = store
        self._is_noted = file is not None
        self._recent = Recent(file)
        self._lock = Lock()
        self._opened: Memories | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the owner wants it."""
        try:
            return self._store.settings.remember
        except KiwiError:  # whatever needs the settings tells of it
            return False

    def recall(self, space: Space, caller: Caller) -> Callable[[object], object]:
        """Return what gives all that is remembered of requests like one."""
        return partial(self._memories().recall, caller.name, space) if self.is_wanted else lambda _: None

    def asked(self, request: str, told: JsonObject, space: Space, caller: Caller) -> None:
        """Note a search and its answer; one without words says nothing of what is wanted."""
        if not self.is_wanted or not _WORD.search(request):
            return
        shown, parts = [_shown(as_object(one)) for one in as_list(told.get("results"))], _parts(told)
        try:
            if self._is_noted:
                secrets = every_value(space)
                kept = {part: kept_of(Wanted(request, part), secrets) for part in {*parts.values()}}
                parts = {one: kept[part] for one, part in parts.items()}
                request = kept_text(request, secrets)
        except KiwiError:  # what cannot be told from a secret is not written down
            return
        self._recent.asked(_who(space, caller), request, shown, parts)

    def used(self, identity: str, space: Space, caller: Caller, *, is_run: bool) -> None:
        """Remember the search by which an item was found that is used now, if there was one."""
        wanted = self._recent.used(_who(space, caller), identity, is_run=is_run)
        if wanted and wanted.request:
            self._note(identity, wanted, space, caller, is_run=is_run)

    def note(self, identity: str, request: str, space: Space, caller: Caller, *, is_run: bool) -> None:
        """Remember that an item was used after a request, if that is wanted."""
        self._note(identity, Wanted(request), space, caller, is_run=is_run)

    def settle(self, seconds: float) -> bool:
        """Wait, for so long at the most, until what was noted counts in full; return whether that is so."""
        return self._memories().settle(seconds)

    def tell(self, request: MemoryRequest, caller: Caller, *, is_own: bool) -> JsonObject:
        """Answer a request about what is remembered of a caller."""
        if is_own and request.action == "forget":
            self._recent.forget(caller.name)
        return tell_memory(request, self._memories(), caller.name, is_own=is_own, is_wanted=self.is_wanted)

    def close(self) -> None:
        """Write down what was used, and end what is done in the background."""
        if self._opened is not None:
            self._opened.close()

    def _note(self, identity: str, wanted: Wanted, space: Space, caller: Caller, *, is_run: bool) -> None:
        if self.is_wanted:
            self._memories().note(caller.name, identity, wanted, space, is_run=is_run)

    def _memories(self) -> Memories:
        with self._lock:
            if self._opened is None:
                make: Callable[[Store], Memories]
                make = import_module("kiwi_mcp.kernel.searching.opening").open_memories
                self._opened = make(self._store)
            return self._opened


def _shown(card: JsonObject) -> tuple[str, float]:
    score = card.get("score")
    return as_text(card.get("identity")), float(score) if isinstance(score, int | float) else 0.0


def _parts(told: JsonObject) -> Mapping[str, str]:
    """Return the part of a request that each item of an answer answers, where the request has several."""
    texts = dict(enumerate(map(as_text, as_list(told.get("parts"))), 1))
    results = [as_object(one) for one in as_list(told.get("results"))]
    numbers = {as_text(one.get("identity")): one.get("part") for one in reversed(results)}
    return {name: texts[number] for name, number in numbers.items() if isinstance(number, int) and number in texts}


def _who(space: Space, caller: Caller) -> Who:
    return Who(caller.name, caller.client, str(space.project))


def kept_text(request: str, secrets: Mapping[str, str]) -> str:
    """Return what is kept of a request: its words, without what is secret, looks so, or says who or where."""
    text = _without_secrets(request, secrets)
    if len(text) > LONGEST:
        text = text[:LONGEST].rpartition(" ")[0] or text[:LONGEST]
    return text if _WORD.search(text) else ""


def kept_of(wanted: Wanted, secrets: Mapping[str, str]) -> str:
    """Return what is kept of the part that was wanted: never more than of the whole, which may say what is secret."""
    part = kept_text(wanted.part, secrets)
    return part if part and part in _without_secrets(wanted.request, secrets) else kept_text(wanted.request, secrets)


def _without_secrets(request: str, secrets: Mapping[str, str]) -> str:
    return " ".join(_ODD.sub(_MARK, _untold(" ".join(cleaned(request, secrets).split()))).split())


def _untold(request: str) -> str:
    """Return a request up to where it names a kind of secret; nothing where it says nothing before that."""
    text = _SAID_TO_BE.sub(_MARK, request)
    if (found := _TOLD.search(text)) is None:
        return text
    return f"{text[: found.end()]} {_MARK}" if re.search(r"\w", text[: found.start()]) else ""
