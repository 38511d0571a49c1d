"""Offers: what clients of a space see without searching, made again once anything that it was made from has changed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from threading import Lock

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.files import stamp_of
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.offers import Offers
from kiwi_mcp.kernel.gathering import Gathering
from kiwi_mcp.policy import owner, preferences
from kiwi_mcp.policy.preferences import owner_preferences


@dataclass(frozen=True, slots=True)
class _Made:
    """Offers, what they were made from, and how that looked then."""

    offers: Offers
    digest: str
    sources: Collection[Source]
    paths: Iterable[str]
    look: str


class Offering:
    """The offers of one space. It may be used from several threads, with a catalog that nobody else uses."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = Lock()
        self._made: _Made | None = None
        self._mark = ""

    def now(self) -> Offers:
        """Return the offers; the same object as long as nothing changed."""
        with self._lock:
            made = self._made
            if made is None or made.look != self._look(made.sources, made.paths):
                made = self._made = self._make()
            self._mark = made.digest
            return made.offers

    def mark(self) -> str:
        """Return a text that stays the same as long as the offers do; it is empty before they were first asked for.

        Nothing is made for it. Where another thread is at work on the offers, it is the one that was true before.
        """
        if self._made is not None and self._lock.acquire(blocking=False):
            try:
                look = self._look(self._made.sources, self._made.paths)
                self._mark = self._made.digest + ("" if look == self._made.look else f"+{look}")
            finally:
                self._lock.release()
        return self._mark

    def _make(self) -> _Made:
        gathering = Gathering(self._catalog, owner_preferences(self._catalog.space.user))
        offers = gathering.offers()
        sources, paths = frozenset(gathering.sources), tuple(gathering.paths)
        digest = _digest(repr(replace(offers, notices=())))
        return _Made(offers, digest, sources, paths, self._look(sources, paths))

    def _look(self, sources: Collection[Source], paths: Iterable[str]) -> str:
        """Return how everything looks that offers were made from."""
        user = self._catalog.space.user
        chosen = [_stat(f"{user}/{name}") for name in (preferences.FILE_NAME, owner.FILE_NAME)]
        seen = self._catalog.generation(sources) if sources else ()
        return _digest(repr((chosen, seen, [stamp_of(path) for path in paths])))


def _stat(path: str) -> tuple[int, int, int] | None:
    """Return what tells one state of an owner's file from another; it may be a link, which is followed."""
    try:
        found = os.stat(path)  # noqa: PTH116 - text, as all that is on the way of every call
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
