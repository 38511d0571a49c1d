"""Admission: what comes from elsewhere is let in by the word of somebody whom the owner trusts, or of the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kiwi_mcp.catalog.release import Vouched, vouched
from kiwi_mcp.domain.caller import Caller, Question
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, SignatureRefused, Unacknowledged, Unanswered
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.domain.registry import Release, VersionName
from kiwi_mcp.domain.version import Version
from kiwi_mcp.kernel.keys.lookalikes import alike
from kiwi_mcp.kernel.keys.store import TrustFile, rotated
from kiwi_mcp.manifest.keys import fingerprint, is_meant
from kiwi_mcp.manifest.sheets import Sheets, load_sheets
from kiwi_mcp.manifest.trust import Key, Trusted, scope_of
from kiwi_mcp.policy.deployment import refuse_unlisted

_TOLD, _MOST = 20, 100
"""How many versions a sentence tells of, and an answer at most."""
_ANSWER: JsonObject = {
    "type": "object",
    "properties": {"approve": {"type": "boolean", "title": "Install it all the same", "default": False}},
    "required": ["approve"],
}
_TRUSTED = frozenset({"owner", "verified"})


@dataclass(frozen=True, slots=True)
class Leave:
    """What the owner said beforehand: to take what nobody vouches for, whose key to trust, and to go back."""

    unsigned: bool = False
    key: str = ""
    rollback: bool = False

    def demand_owner(self, *, is_owner: bool) -> None:
        """Refuse these words from anybody else."""
        if not is_owner and (self.unsigned or self.key or self.rollback):
            raise PolicyDenied(
                "Only the owner says what is installed although nobody vouches for it.",
                suggestion="Leave out `accept_unsigned`, `trust_key` and `allow_rollback`, and ask the owner.",
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version that is to be let in, and who vouches for it."""

    release: Release
    vouched: Vouched

    @property
    def name(self) -> VersionName:
        """Its name."""
        return self.release.name

    @property
    def scope(self) -> str:
        """What its publisher's key is pinned for."""
        return scope_of(self.name.namespace, self.name.tool_id)

    @property
    def key(self) -> str:
        """The key that it is signed with; empty where it is not."""
        return self.vouched.signature.key if self.vouched.signature else ""

    @property
    def is_unsigned(self) -> bool:
        """Whether nobody vouches for it."""
        return self.vouched.trust in {"unsigned", "integrity"}

    def to_json(self) -> JsonObject:
        """Return who vouches for it, as answers tell it."""
        signer: JsonObject = {"signer": fingerprint(self.key)} if self.key else {}
        return {"item": str(self.name), "trust": self.vouched.trust, **signer}


class Admission:
    """Lets versions in, or refuses them, and remembers what the owner said."""

    def __init__(
        self, user: Path, leave: Leave, *, own: Sequence[str] = (), is_latest: bool = False, is_planned: bool = False
    ) -> None:
        self._file = TrustFile(user)
        self._leave = leave
        self._own = own
        self._is_latest = is_latest
        """Whether the newest version was asked for, so that an old one is not what was meant."""
        self._is_planned = is_planned
        self.warnings: list[str] = []
        self.acknowledged: list[JsonObject] = []
        self.kept_out: dict[VersionName, str] = {}
        self.arrivals: list[Arrival] = []

    async def admit(self, releases: Sequence[Release], caller: Caller) -> None:
        """Let versions in together, all of them or none; what is doubtful the owner is asked about."""
        self.arrivals = await asyncio.to_thread(self._judged, releases)
        for arrival in self.arrivals:
            if refusal := self._refusal(arrival):
                raise refusal
        if refusal := self._rollback(self.arrivals[-1]):  # the version that was asked for; the others it stands on
            raise refusal
        doubts = [one for one in self.arrivals if self._is_doubtful(one)]
        for arrival in doubts:
            if len({one.key for one in doubts if one.key and one.scope == arrival.scope}) > 1:
                raise _refused(arrival, f"several keys sign for {arrival.scope}, and none is known", "Do not use it.")
        if open_doubts := [one for one in doubts if not self._is_left(one)]:
            await self._ask(open_doubts, caller)
        await asyncio.to_thread(self._keep, doubts)
        await asyncio.to_thread(self.settle)

    @property
    def told(self) -> JsonObject:
        """Return what the owner has to know, and what they acknowledged, as answers and receipts tell it."""
        return {"acknowledged": [*self.acknowledged[:_MOST]]} if self.acknowledged else {}

    def sieve(self, releases: Sequence[Release]) -> Mapping[VersionName, str]:
        """Return which versions are not let in, each with the reason; whose key is let in is remembered."""
        kept_out: dict[VersionName, str] = {}
        arrivals = self._judged(releases)
        for arrival in arrivals:
            if refusal := self._refusal(arrival):
                kept_out[arrival.name] = refusal.message
            elif self._is_doubtful(arrival) and not self._is_left(arrival):
                kept_out[arrival.name] = f"it {self._doubt(arrival)} ({self._way(arrival)})"
        self.kept_out |= kept_out
        let_in = [one for one in arrivals if one.name not in kept_out]
        self.arrivals += let_in
        self._pin([one for one in let_in if self._is_doubtful(one)])
        return kept_out

    def settle(self) -> None:
        """Remember the highest version of what came in signed."""
        highest: dict[str, Version] = {}
        for one in self.arrivals:
            version = Version.parse(one.name.version)
            if one.key and version is not None:
                highest[_item(one.name)] = max(version, highest.get(_item(one.name), version))
        if highest and not self._is_planned:
            self._file.note_versions({item: str(version) for item, version in highest.items()})

    def refusal(self) -> KiwiError:
        """Return the refusal of all that was kept out."""
        reasons = [f"{name}: {reason}" for name, reason in self.kept_out.items()]
        return Unacknowledged(
            f"Nothing was installed: {'; '.join(reasons[:_TOLD])}.",
            suggestion="If the owner means it, they type the command with what is named behind each.",
            left_out=[*reasons[:_TOLD]],
        )

    def _judged(self, releases: Sequence[Release]) -> list[Arrival]:
        trusted, sheets = self._file.now(), load_sheets()
        return [self._judge(release, trusted, sheets) for release in releases]

    def _judge(self, release: Release, trusted: Trusted, sheets: Sheets) -> Arrival:
        """Return who vouches for a version; a key to which a trusted one handed over is trusted from now on."""
        arrival = Arrival(release, vouched(release, trusted, sheets))
        pinned = trusted.pinned(release.name.namespace, release.name.tool_id)
        is_strange = arrival.vouched.trust == "unknown_key" and not self._is_planned
        if is_strange and (way := rotated(pinned, arrival.key, arrival.vouched.rotations)):
            now = _now()
            self._file.pin(arrival.scope, [Key(step.new, now, how="rotation") for step in way])
            self.warnings.append(
                f"{arrival.scope} signs with another key, {fingerprint(arrival.key)}, as the old one says"
            )
            return Arrival(release, vouched(release, self._file.now(), sheets))
        return arrival

    def _refusal(self, arrival: Arrival) -> KiwiError | None:
        """Return why a version is let in by nobody's word."""
        try:
            refuse_unlisted(f"registry/{arrival.name}")
        except PolicyDenied as refusal:
            return refusal
        trusted, name, trust = self._file.now(), arrival.name, arrival.vouched.trust
        pinned, was_signed = trusted.pinned(name.namespace, name.tool_id), _item(name) in trusted.versions
        if trust == "tampered":
            return _refused(arrival, "its signature does not fit it", "Take it from its publisher again.")
        if trust == "revoked":
            fix = "Ask its publisher for a version that is signed with a key that counts."
            return _refused(
                arrival, f"it is signed with {fingerprint(arrival.key)}, a key that is revoked or expired", fix
            )
        known = ", ".join(key.fingerprint for key in pinned.values()) or "another key"
        if trust == "unknown_key" and (pinned or was_signed):
            reason = f"it is signed with {fingerprint(arrival.key)}, and {arrival.scope} is known by {known}"
            fix = f"Ask {arrival.scope} by a way that you trust; if the key is theirs: `kiwi key trust {arrival.scope} "
            return _refused(arrival, reason, f"{fix}{arrival.key}`.")
        if arrival.is_unsigned and (pinned or was_signed):
            return _refused(arrival, f"it is not signed, and {arrival.scope} signs with {known}", "Do not use it.")
        return None

    def _rollback(self, arrival: Arrival) -> KiwiError | None:
        known = Version.parse(self._file.now().versions.get(_item(arrival.name), ""))
        version = Version.parse(arrival.name.version)
        is_back = self._is_latest and known is not None and version is not None and version < known
        if not is_back or self._leave.rollback:
            return None
        fix = "Name the version exactly if you mean it, or say `--allow-rollback`."
        return _refused(arrival, f"it is given as the newest, and {known} was here before", fix)

    def _is_doubtful(self, arrival: Arrival) -> bool:
        is_accepted = self._file.now().accepted.get(str(arrival.name)) == arrival.release.digest
        return arrival.vouched.trust not in _TRUSTED and not (arrival.is_unsigned and is_accepted)

    def _is_left(self, arrival: Arrival) -> bool:
        """Whether the owner said beforehand that this one may come in."""
        if arrival.is_unsigned:
            return self._leave.unsigned
        return bool(self._leave.key) and is_meant(arrival.key, self._leave.key)

    async def _ask(self, doubts: Sequence[Arrival], caller: Caller) -> None:
        """Ask the owner, where they are there; otherwise say what they would have to say."""
        told = [f"{one.name} {self._doubt(one)}" for one in doubts]
        if caller.is_owner:
            message = f"{'; '.join(told[:_TOLD])}. Install {'it' if len(doubts) == 1 else 'them'} all the same?"
            params: JsonObject = {"mode": "form", "message": message, "requestedSchema": _ANSWER}
            try:
                answers = await caller.ask({"install": Question("elicitation/create", params, is_own=True)})
            except Unanswered:
                answers = {}
            answer = answers.get("install", {})
            if answer.get("action") == "accept" and as_object(answer.get("content")).get("approve") is True:
                return
        raise Unacknowledged(
            f"{'; '.join(told[:_TOLD])}. Nothing was installed.",
            suggestion=f"If the owner means it, they type the command with {' and '.join(self._ways(doubts))}.",
            items=[one.to_json() for one in doubts[:_TOLD]],
        )

    def _doubt(self, arrival: Arrival) -> str:
        """Return why nobody who is trusted vouches for a version, and whom its publisher may be taken for."""
        near = alike(arrival.scope, self._file.now(), self._own)
        warning = f", and its publisher looks like {', '.join(near)}, which is another one" if near else ""
        if arrival.is_unsigned:
            return f"is not signed{warning}"
        signer = f"a key of {arrival.scope} that is not known here, {fingerprint(arrival.key)}"
        return f"is signed with {signer}{warning}"

    def _way(self, arrival: Arrival) -> str:
        return "`--accept-unsigned`" if arrival.is_unsigned else f"`--trust-key {fingerprint(arrival.key)}`"

    def _ways(self, doubts: Sequence[Arrival]) -> Sequence[str]:
        return list(dict.fromkeys(map(self._way, doubts)))

    def _keep(self, doubts: Sequence[Arrival]) -> None:
        """Remember what the owner said of versions, each of which they saw."""
        self._pin(doubts)
        unsigned = [one for one in doubts if one.is_unsigned]
        self._file.accept({str(one.name): one.release.digest for one in unsigned})
        self.warnings += [f"{one.name} {self._doubt(one)}" for one in unsigned[:_TOLD]]

    def _pin(self, doubts: Sequence[Arrival]) -> None:
        """Remember whose key the owner trusts."""
        if self._is_planned:
            return
        strangers = {one.scope: one.key for one in doubts if one.key}
        for scope, key in strangers.items():
            self._file.pin(scope, [Key(key, _now(), how="first use")], is_first=True)
        self.warnings += [f"{scope} is known by {fingerprint(key)} from now on" for scope, key in strangers.items()]
        self.acknowledged += [one.to_json() for one in doubts]


def _item(name: VersionName) -> str:
    return f"{name.namespace}/{name.tool_id}"


def _refused(arrival: Arrival, reason: str, fix: str) -> SignatureRefused:
    return SignatureRefused(f"{arrival.name} was not installed: {reason}.", suggestion=fix, **arrival.to_json())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
