"""Changes of the trust file, which lists the trusted keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kiwi_mcp.domain.errors import SignatureRefused
from kiwi_mcp.domain.json import Json, as_list, text_of
from kiwi_mcp.domain.names import Version
from kiwi_mcp.manifest.owner_yaml import rewrite
from kiwi_mcp.manifest.signatures import Rotation
from kiwi_mcp.manifest.trust import FILE_NAME, Trusted, TrustedKey, owner_trust, parse_trust

_Section = dict[str, Json]


class TrustFile:
    """The owner's file of trust, changed one entry at a time and by one process at a time."""

    def __init__(self, user: Path) -> None:
        self._path = user / FILE_NAME

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    def now(self) -> Trusted:
        """Return its content."""
        return owner_trust(self._path)

    def keep_own(self, key: TrustedKey) -> None:
        """Keep one of the owner's keys as it is now."""
        self._change("own", lambda entries: entries.update({key.public: _entry(key, _OWN)}))

    def published(self, key: TrustedKey, namespace: str) -> None:
        """Note that one of the owner's keys published in a namespace."""

        def add(entries: _Section) -> None:
            known = entries.get(key.public)
            if isinstance(known, Mapping):  # the current entry: it may have been revoked in the meantime
                entries[key.public] = {**known, "namespaces": [*as_list(known.get("namespaces")), namespace]}

        if namespace not in key.namespaces:
            self._change("own", add)

    def pin(self, scope: str, keys: Iterable[TrustedKey], *, is_first: bool = False) -> None:
        """Let keys vouch for a scope; one that is pinned as the first must find none there."""

        def add(entries: _Section) -> None:
            known = entries.get(scope)
            held: _Section = dict(known) if isinstance(known, Mapping) else {}
            if is_first and held:
                raise SignatureRefused(
                    f"Another key for {scope} became known meanwhile.", suggestion="Look at it: `kiwi key list`."
                )
            entries[scope] = held | {key.public: _entry(key, _PUBLISHED) for key in keys}

        self._change("publishers", add)

    def note_versions(self, versions: Mapping[str, str]) -> None:
        """Remember the highest version that was seen of signed items."""

        def raise_to(entries: _Section) -> None:
            entries.update({name: one for name, one in versions.items() if _is_above(one, text_of(entries.get(name)))})

        known = self.now().versions
        if any(_is_above(one, known.get(name, "")) for name, one in versions.items()):
            self._change("versions", raise_to)

    def accept(self, versions: Mapping[str, str]) -> None:
        """Remember what the owner accepted without a trusted signature: names of versions, each with its digest."""
        if versions.items() - self.now().accepted.items():
            self._change("accepted", lambda entries: entries.update(versions))

    def _change(self, section: str, change: Callable[[_Section], object]) -> None:
        rewrite(self._path, section, change, check=lambda: parse_trust(self._path) if self._path.exists() else None)


def rotated(keys: Mapping[str, TrustedKey], new: str, statements: Iterable[Rotation]) -> tuple[Rotation, ...]:
    """Return the statements that lead from a key that counts to a new one; none where they do not."""
    found = {one.new: one for one in statements}
    way: list[Rotation] = []
    at = new
    while (step := found.pop(at, None)) is not None and step.is_sound:
        way.insert(0, step)
        if (old := keys.get(step.old)) is not None:
            return () if old.is_void else tuple(way)
        at = step.old
    return ()


def _is_above(version: str, known: str) -> bool:
    one, other = Version.parse(version), Version.parse(known)
    return one is not None and (other is None or one > other)


_OWN = ("name", "since", "namespaces", "rotation", "expires", "revoked", "reason")
_PUBLISHED = ("fingerprint", "since", "how", "expires", "revoked", "reason")


def _entry(key: TrustedKey, words: Iterable[str]) -> dict[str, Json]:
    values = ((word, getattr(key, word)) for word in words)
    return {word: list(value) if isinstance(value, tuple) else value for word, value in values if value}
