"""Trust: the keys of the owner and of trusted publishers, the trust state of an item, and changes of the trust file.

It is one readable file in the user's space, which nothing but the owner's own commands writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from msgspec import Struct, field

from kiwi_mcp.domain.errors import InvalidManifest, KiwiError, SignatureRefused
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest, Signature
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.registry import DEFAULT_NAMESPACE
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.owner_file import rewrite
from kiwi_mcp.manifest.signatures import Rotation, fingerprint, is_key, is_signed, statement_for

Trust = Literal["verified", "owner", "integrity", "unsigned", "tampered", "revoked", "unknown_key"]

FILE_NAME = "trust.yaml"
LOCAL = "local"
"""The namespace of items that are in a folder and not published."""
_WORDS: Mapping[str, tuple[str, ...]] = {
    "own": ("name", "since", "namespaces", "rotation", "expires", "revoked", "reason"),
    "publishers": ("fingerprint", "since", "how", "expires", "revoked", "reason"),
    "versions": (),
    "accepted": (),
}
"""The sections, and in those of keys what is said of each, in the order in which it is written."""
_LARGEST = 4_000_000

_Stat = tuple[int, int, int] | None
_read: dict[str, tuple[_Stat, Trusted]] = {}


class TrustedKey(Struct, frozen=True):
    """A known key, and the owner's settings for it."""

    public: str
    since: str = ""
    name: str = ""
    how: str = ""
    """How a publisher's key became known: at its first use, by the owner's approval, or by a rotation."""
    namespaces: tuple[str, ...] = ()
    """Where an own key published."""
    rotation: str = ""
    """The statement by which the key before it handed over to it."""
    expires: str = ""
    revoked: str = ""
    reason: str = ""

    @property
    def fingerprint(self) -> str:
        """Its short name, which people compare."""
        return fingerprint(self.public)

    @property
    def is_void(self) -> bool:
        """Whether it vouches for nothing any more."""
        return bool(self.revoked) or has_passed(self.expires)

    @property
    def state(self) -> str:
        """What holds of it now."""
        return "revoked" if self.revoked else "expired" if self.is_void else "trusted"


class Trusted(Struct, frozen=True):
    """Every key that is known here, the highest version seen of each signed item, and what was accepted unsigned."""

    own: Mapping[str, TrustedKey] = field(default_factory=dict)
    publishers: Mapping[str, Mapping[str, TrustedKey]] = field(default_factory=dict)
    """The keys of each scope: a namespace, or one item of the namespace that all publishers share."""
    versions: Mapping[str, str] = field(default_factory=dict)
    accepted: Mapping[str, str] = field(default_factory=dict)

    def pinned(self, namespace: str, tool_id: str) -> Mapping[str, TrustedKey]:
        """Return the keys that may sign an item; none where its publisher is not known yet."""
        return self.publishers.get(scope_of(namespace, tool_id), {})

    def namespaces_of(self, key: str) -> Sequence[str]:
        """Return the namespaces in which a key may have signed."""
        scopes = [scope for scope, keys in self.publishers.items() if key in keys]
        own = self.own[key].namespaces if key in self.own else ()
        return tuple(dict.fromkeys([*own, *(scope.partition("/")[0] for scope in scopes)]))

    def valid_until(self, key: str) -> str:
        """Return when a key expires that vouches for something now; empty where it does not."""
        return min((one.expires for one in self.entries(key) if one.expires and not one.is_void), default="")

    def entries(self, key: str) -> Sequence[TrustedKey]:
        """Return everything that is said of a key."""
        known = [self.own.get(key), *(keys.get(key) for keys in self.publishers.values())]
        return [one for one in known if one is not None]


NO_TRUST = Trusted()


class ReleaseTrust(Struct, frozen=True):
    """Who signed a release from elsewhere, whether that key is trusted, and the keys that it replaced."""

    trust: Trust
    signature: Signature | None = None
    rotations: tuple[Rotation, ...] = ()


def scope_of(namespace: str, tool_id: str) -> str:
    """Return the scope of a key: a namespace, or an item if many publishers share one namespace."""
    return f"{namespace}/{tool_id}" if namespace == DEFAULT_NAMESPACE else namespace


def owner_trust(path: Path) -> Trusted:
    """Return the content of a trust file; read again only when it changed."""
    stat = _stat(path)
    known = _read.get(str(path))
    if known is None or known[0] != stat:
        known = _read[str(path)] = (stat, parse_trust(path) if stat else NO_TRUST)
    return known[1]


def parse_trust(path: Path) -> Trusted:
    """Return the content of a trust file. An invalid file is refused, because an entry in it may revoke trust."""
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST).decode()
        value = read_yaml(text, what=FILE_NAME).value
    except (OSError, UnicodeDecodeError) as error:
        raise _refused([Issue("", f"cannot be read: {error}", "Make it a text file that you can read.")]) from error
    if issues := [*_faults(value)]:
        raise _refused(issues)
    own, publishers, versions, accepted = (as_object(as_object(value).get(word)) for word in _WORDS)
    return Trusted(
        _keys(own),
        MappingProxyType({scope: _keys(as_object(keys)) for scope, keys in publishers.items()}),
        MappingProxyType({name: as_text(version) for name, version in versions.items()}),
        MappingProxyType({name: as_text(digest) for name, digest in accepted.items()}),
    )


def vouch(
    manifest: Manifest, digest: str, signature: Signature | None, integrity: str, *, namespace: str, trusted: Trusted
) -> Trust:
    """Return who vouches for an item in a namespace; an item in a folder may be a copy from another place."""
    if integrity == "modified":
        return "tampered"
    if signature is None or integrity in {"unsigned", "legacy-unverifiable"}:
        return "unsigned"
    key = signature.key
    if not key:
        return "integrity"
    homes = (LOCAL, *trusted.namespaces_of(key)) if namespace == LOCAL else (namespace,)
    home = next((home for home in homes if _is_by(manifest, digest, signature, home)), None)
    entries = trusted.entries(key)
    if home is None:
        return "tampered" if entries or namespace != LOCAL else "unknown_key"
    if any(one.is_void for one in entries):
        return "revoked"
    if key in trusted.own:
        return "owner"
    return "verified" if key in trusted.pinned(home, manifest.tool_id) else "unknown_key"


def _is_by(manifest: Manifest, digest: str, signature: Signature, namespace: str) -> bool:
    key, timestamp = signature.key, signature.timestamp
    try:
        data = statement_for(manifest, namespace=namespace, digest=digest, timestamp=timestamp, key=key)
    except KiwiError:  # a value of the manifest has no canonical form, so it cannot have been signed
        return False
    return signature.hash == digest and is_signed(key, signature.proof, data)


def _stat(path: Path) -> _Stat:
    try:
        found = os.stat(path)  # noqa: PTH116 - text and paths alike, as in the owner's policy
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
            return None
        raise _refused([Issue("", f"cannot be read: {error}", "Make it a file that you can read.")]) from error
    return found.st_mtime_ns, found.st_size, found.st_ino


def has_passed(moment: str) -> bool:
    """Whether a time in UTC has come; an empty one never does."""
    return bool(moment) and moment <= datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _keys(written: JsonObject) -> Mapping[str, TrustedKey]:
    keys: dict[str, TrustedKey] = {}
    for public, facts in ((public, as_object(facts)) for public, facts in written.items()):
        words = {word: text_of(value) for word, value in facts.items() if word not in {"namespaces", "fingerprint"}}
        namespaces = tuple(map(text_of, as_list(facts.get("namespaces"))))
        keys[public] = TrustedKey(public, namespaces=namespaces, **words)
    return MappingProxyType(keys)


def _faults(value: Json) -> Iterable[Issue]:
    known, written = f"Use one of: {', '.join(_WORDS)}.", as_object(value)
    if value is not None and not isinstance(value, Mapping):
        yield Issue("", "is not a mapping", known)
    for word, section in written.items():
        if word not in _WORDS:
            yield Issue(word, "is not a known key", known)
        elif section is not None and not isinstance(section, Mapping):
            yield Issue(word, "is not a mapping", "Write one entry below it for each name.")
    yield from _key_faults("own", as_object(written.get("own")))
    for scope, keys in as_object(written.get("publishers")).items():
        yield from _key_faults("publishers", as_object(keys), f".{scope}")


def _key_faults(section: Literal["own", "publishers"], keys: JsonObject, scope: str = "") -> Iterable[Issue]:
    known = _WORDS[section]
    for public, facts in keys.items():
        place = f"{section}{scope}.{public[:50]}"
        if not is_key(public):
            yield Issue(place, "is not a public key", "Let `kiwi key trust` write it.")
        for word in as_object(facts).keys() - known:
            yield Issue(f"{place}.{word}", "is not said of a key", f"Use one of: {', '.join(sorted(known))}.")


def _refused(issues: Sequence[Issue]) -> InvalidManifest:
    return InvalidManifest(f"The owner's {FILE_NAME}", issues)


_Section = dict[str, Json]


class TrustFile:
    """The owner's file of trust, changed one entry at a time and by one process at a time."""

    def __init__(self, user: Path) -> None:
        self.path = user / FILE_NAME

    def now(self) -> Trusted:
        """Return its content."""
        return owner_trust(self.path)

    def keep_own(self, key: TrustedKey) -> None:
        """Keep one of the owner's keys as it is now."""
        self._change("own", lambda entries: entries.update({key.public: _entry(key, "own")}))

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
            pinned: _Section = dict(known) if isinstance(known, Mapping) else {}
            if is_first and pinned:
                raise SignatureRefused(
                    f"Another key for {scope} became known meanwhile.", suggestion="Look at it: `kiwi key list`."
                )
            entries[scope] = pinned | {key.public: _entry(key, "publishers") for key in keys}

        self._change("publishers", add)

    def note_versions(self, versions: Mapping[str, str]) -> None:
        """Remember the highest version that was seen of signed items."""

        def above(known: Mapping[str, Json]) -> Mapping[str, str]:
            return {name: one for name, one in versions.items() if _is_above(one, text_of(known.get(name, "")))}

        if above(self.now().versions):
            self._change("versions", lambda entries: entries.update(above(entries)))

    def accept(self, versions: Mapping[str, str]) -> None:
        """Remember what the owner accepted without a trusted signature: names of versions, each with its digest."""
        if versions.items() - self.now().accepted.items():
            self._change("accepted", lambda entries: entries.update(versions))

    def _change(self, section: str, change: Callable[[_Section], object]) -> None:
        rewrite(self.path, section, change, check=lambda: parse_trust(self.path) if self.path.exists() else None)


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


def _entry(key: TrustedKey, section: Literal["own", "publishers"]) -> dict[str, Json]:
    values = ((word, getattr(key, word)) for word in _WORDS[section])
    return {word: list(value) if isinstance(value, tuple) else value for word, value in values if value}
