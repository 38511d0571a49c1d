"""Admission: an item from elsewhere needs a signature of a publisher that the owner trusts, or the owner's consent.

Keys are trusted on first use, a version below the highest known one is refused, and a publisher with a name that looks
like a known one is pointed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from kiwi_mcp.domain.calls import Caller, Question
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, SignatureRefused, Unacknowledged, Unanswered
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Release, VersionName
from kiwi_mcp.manifest.signatures import fingerprint, matches_key
from kiwi_mcp.manifest.trust import ReleaseTrust, Trusted, TrustedKey, TrustFile, rotated, scope_of
from kiwi_mcp.policy.policy_files import refuse_unlisted

_LISTED, _MOST = 20, 100
"""The maximum number of versions in a sentence, and in a response."""
_SHORT = 4
_ALIKE = (("rn", "m"), ("vv", "w"), ("cl", "d"), ("0", "o"), ("1", "l"), ("i", "l"), ("5", "s"), ("-", ""), ("_", ""))
"""Letters that look alike in most typefaces; names are lower-case ASCII, so there are no others."""
_ANSWER: JsonObject = {
    "type": "object",
    "properties": {"approve": {"type": "boolean", "title": "Install it all the same", "default": False}},
    "required": ["approve"],
}


class PullConsent(Struct, frozen=True):
    """What the owner accepted in advance: unsigned versions, a key to trust, and a rollback."""

    unsigned: bool = False
    key: str = ""
    rollback: bool = False

    def demand_owner(self, *, is_owner: bool) -> None:
        """Refuse these options from any caller but the owner."""
        if not is_owner and (self.unsigned or self.key or self.rollback):
            raise PolicyDenied(
                "Only the owner can accept a version without a trusted signature.",
                suggestion="Leave out `accept_unsigned`, `trust_key` and `allow_rollback`, and ask the owner.",
            )


class IncomingVersion(Struct, frozen=True):
    """A version from elsewhere, and who signed it."""

    release: Release
    signed: ReleaseTrust

    @property
    def name(self) -> VersionName:
        """Its name."""
        return self.release.name

    @property
    def scope(self) -> str:
        """What its publisher's key is pinned for."""
        return scope_of(*self.name.item)

    @property
    def key(self) -> str:
        """The key that it is signed with; empty where it is not."""
        return self.signed.signature.key if self.signed.signature else ""

    @property
    def is_unsigned(self) -> bool:
        """Whether it has no signature."""
        return self.signed.trust in {"unsigned", "integrity"}

    @property
    def item(self) -> str:
        """The name of its item."""
        return "/".join(self.name.item)

    @property
    def option(self) -> str:
        """The option by which the owner accepts it."""
        return "`--accept-unsigned`" if self.is_unsigned else f"`--trust-key {fingerprint(self.key)}`"

    def to_json(self) -> JsonObject:
        """Return the version and its signer, for responses."""
        signer: JsonObject = {"signer": fingerprint(self.key)} if self.key else {}
        return {"item": str(self.name), "trust": self.signed.trust, **signer}


class Admission:
    """Admits versions or refuses them, and stores the owner's decisions."""

    def __init__(
        self,
        user: Path,
        consent: PullConsent,
        trust_of: Callable[[Release, Trusted], ReleaseTrust],
        *,
        own: Sequence[str] = (),
        published: Sequence[str] = (),
        is_latest: bool = False,
        is_planned: bool = False,
    ) -> None:
        self._file = TrustFile(user)
        self._consent = consent
        self._trust_of = trust_of
        """Returns who signed a release, given the trusted keys."""
        self._own, self._published = own, published
        self._is_latest = is_latest
        """Whether the newest version was asked for, so that an older one is a rollback."""
        self._is_planned = is_planned
        self.warnings: list[str] = []
        self.acknowledged: Sequence[JsonObject] = []
        """The versions that the owner accepted, for the response and the receipt."""
        self.refused: dict[VersionName, str] = {}
        self.incoming: list[IncomingVersion] = []

    async def admit(self, releases: Sequence[Release], caller: Caller) -> None:
        """Admit versions together, all of them or none. The owner is asked about versions without a trusted key."""
        self.incoming = await asyncio.to_thread(self._incoming_versions, releases)
        for version in self.incoming:
            if refusal := self._refusal(version):
                raise refusal
        newest = self.incoming[-1]  # the others are its dependencies
        highest = Version.parse(self._file.now().versions.get(newest.item, ""))
        number = Version.parse(newest.name.version)
        is_older = self._is_latest and highest is not None and number is not None and number < highest
        if is_older and not self._consent.rollback:
            reason = f"it is offered as the newest version, but {highest} was installed before"
            raise _refused(newest, reason, "Name the exact version, or add `--allow-rollback`.")
        doubts = [one for one in self.incoming if self._is_doubtful(one)]
        for version in doubts:
            if len({one.key for one in doubts if one.key and one.scope == version.scope}) > 1:
                raise _refused(version, f"several keys sign for {version.scope}, and none is known", "Do not use it.")
        if open_doubts := [one for one in doubts if not self._has_consent(one)]:
            await self._ask(open_doubts, caller)
        await asyncio.to_thread(self._store, doubts)
        await asyncio.to_thread(self.store_versions)

    def filter_releases(self, releases: Sequence[Release]) -> Mapping[VersionName, str]:
        """Return the versions that are refused, each with the reason; the keys of admitted versions are remembered."""
        refused: dict[VersionName, str] = {}
        incoming = self._incoming_versions(releases)
        for version in incoming:
            if refusal := self._refusal(version):
                refused[version.name] = refusal.message
            elif self._is_doubtful(version) and not self._has_consent(version):
                refused[version.name] = f"it {self._doubt(version)} ({version.option})"
        self.refused |= refused
        admitted = [one for one in incoming if one.name not in refused]
        self.incoming += admitted
        self._pin([one for one in admitted if self._is_doubtful(one)])
        return refused

    def store_versions(self) -> None:
        """Store the highest version of each signed item."""
        highest: dict[str, Version] = {}
        for one in self.incoming:
            version = Version.parse(one.name.version)
            if one.key and version is not None:
                highest[one.item] = max(version, highest.get(one.item, version))
        if highest and not self._is_planned:
            self._file.note_versions({item: str(version) for item, version in highest.items()})

    def refusal(self) -> KiwiError:
        """Return the refusal of all versions that were not admitted."""
        reasons = [f"{name}: {reason}" for name, reason in self.refused.items()]
        return Unacknowledged(
            f"Nothing was installed: {'; '.join(reasons[:_LISTED])}.",
            suggestion="To accept them, the owner repeats the command with the option named after each.",
            left_out=[*reasons[:_LISTED]],
        )

    def _incoming_versions(self, releases: Sequence[Release]) -> list[IncomingVersion]:
        """Return versions with their signers. If a trusted key handed over to another key, that one is trusted too."""
        trusted, incoming = self._file.now(), list[IncomingVersion]()
        for release in releases:
            version = IncomingVersion(release, self._trust_of(release, trusted))
            pinned = trusted.pinned(*release.name.item)
            is_unknown = version.signed.trust == "unknown_key" and not self._is_planned
            if is_unknown and (path := rotated(pinned, version.key, version.signed.rotations)):
                self._file.pin(version.scope, [TrustedKey(step.new, _now(), how="rotation") for step in path])
                self.warnings.append(
                    f"{version.scope} signs with another key, {fingerprint(version.key)}, as the old one says"
                )
                version = IncomingVersion(release, self._trust_of(release, self._file.now()))
            incoming.append(version)
        return incoming

    def _refusal(self, version: IncomingVersion) -> KiwiError | None:
        """Return why a version is refused whatever the owner allowed."""
        try:
            refuse_unlisted(f"registry/{version.name}")
        except PolicyDenied as refusal:
            return refusal
        trusted, trust = self._file.now(), version.signed.trust
        pinned, was_signed = trusted.pinned(*version.name.item), version.item in trusted.versions
        if trust == "tampered":
            return _refused(version, "its signature does not fit it", "Take it from its publisher again.")
        if trust == "revoked":
            fix = "Ask its publisher for a version that is signed with a key that counts."
            return _refused(
                version, f"it is signed with {fingerprint(version.key)}, a key that is revoked or expired", fix
            )
        known = ", ".join(key.fingerprint for key in pinned.values()) or "another key"
        if trust == "unknown_key" and (pinned or was_signed):
            reason = f"it is signed with {fingerprint(version.key)}, and {version.scope} is known by {known}"
            fix = f"Ask {version.scope} by a way that you trust; if the key is theirs: `kiwi key trust {version.scope} "
            return _refused(version, reason, f"{fix}{version.key}`.")
        if version.is_unsigned and (pinned or was_signed):
            return _refused(version, f"it is not signed, and {version.scope} signs with {known}", "Do not use it.")
        return None

    def _is_doubtful(self, version: IncomingVersion) -> bool:
        is_accepted = self._file.now().accepted.get(str(version.name)) == version.release.digest
        return version.signed.trust not in {"owner", "verified"} and not (version.is_unsigned and is_accepted)

    def _has_consent(self, version: IncomingVersion) -> bool:
        """Whether the owner accepted this version in advance."""
        if version.is_unsigned:
            return self._consent.unsigned
        return bool(self._consent.key) and matches_key(version.key, self._consent.key)

    async def _ask(self, doubts: Sequence[IncomingVersion], caller: Caller) -> None:
        """Ask the owner if they can be asked; otherwise refuse, and name the options that accept the versions."""
        reasons = [f"{one.name} {self._doubt(one)}" for one in doubts]
        if caller.is_owner:
            message = f"{'; '.join(reasons[:_LISTED])}. Install {'it' if len(doubts) == 1 else 'them'} all the same?"
            params: JsonObject = {"mode": "form", "message": message, "requestedSchema": _ANSWER}
            try:
                answers = await caller.ask({"install": Question("elicitation/create", params, is_own=True)})
            except Unanswered:
                answers = {}
            answer = answers.get("install", {})
            if answer.get("action") == "accept" and as_object(answer.get("content")).get("approve") is True:
                return
        options = " and ".join(dict.fromkeys(one.option for one in doubts))
        raise Unacknowledged(
            f"{'; '.join(reasons[:_LISTED])}. Nothing was installed.",
            suggestion=f"To accept it, the owner repeats the command with {options}.",
            items=[one.to_json() for one in doubts[:_LISTED]],
        )

    def _doubt(self, version: IncomingVersion) -> str:
        """Return why a version is not trusted, and which known names its publisher looks like."""
        near = lookalikes(version.scope, self._file.now(), self._own, self._published)
        warning = f", and its publisher looks like {', '.join(near)}, which is another one" if near else ""
        if version.is_unsigned:
            return f"is not signed{warning}"
        signer = f"a key of {version.scope} that is not known here, {fingerprint(version.key)}"
        return f"is signed with {signer}{warning}"

    def _store(self, doubts: Sequence[IncomingVersion]) -> None:
        """Store the owner's decision about versions that they were shown."""
        self._pin(doubts)
        unsigned = [one for one in doubts if one.is_unsigned]
        self._file.accept({str(one.name): one.release.digest for one in unsigned})
        self.warnings += [f"{one.name} {self._doubt(one)}" for one in unsigned[:_LISTED]]

    def _pin(self, doubts: Sequence[IncomingVersion]) -> None:

        if self._is_planned:
            return
        unknown = {one.scope: one.key for one in doubts if one.key}
        for scope, key in unknown.items():
            self._file.pin(scope, [TrustedKey(key, _now(), how="first use")], is_first=True)
        self.warnings += [f"{scope} is known by {fingerprint(key)} from now on" for scope, key in unknown.items()]
        self.acknowledged = [*self.acknowledged, *(one.to_json() for one in doubts)][:_MOST]


def _refused(version: IncomingVersion, reason: str, fix: str) -> SignatureRefused:
    return SignatureRefused(f"{version.name} was not installed: {reason}.", suggestion=fix, **version.to_json())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def lookalikes(scope: str, trusted: Trusted, own: Iterable[str] = (), published: Iterable[str] = ()) -> tuple[str, ...]:
    """Return other publishers with a similar name; a trusted one is not compared with all who `published`."""
    name = scope.partition("/")[0]
    known = {known.partition("/")[0] for known in (*trusted.publishers, *own, BUILTIN_NAMESPACE)}
    others = known if name in known else {*known, *published}
    return tuple(sorted(one for one in others if one != name and looks_like(name, one)))


def looks_like(one: str, other: str) -> bool:
    """Whether two names look alike: equal but for similar letters, for one letter, or for two that changed places."""
    short, long = sorted((_simplified(one), _simplified(other)), key=len)
    if short == long:
        return True
    if len(short) < _SHORT or len(long) - len(short) > 1:
        return False
    at = next((place for place, letter in enumerate(short) if letter != long[place]), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    is_swapped = short[at : at + 2] == long[at : at + 2][::-1] and short[at + 2 :] == long[at + 2 :]
    return short[at + 1 :] == long[at + 1 :] or is_swapped


def _simplified(name: str) -> str:
    for letters, simple in _ALIKE:
        name = name.replace(letters, simple)
    return name
