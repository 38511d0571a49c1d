"""The key verb: the owner's own keys, and those of publishers; shown to everybody, changed by the owner alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kiwi_mcp.domain.errors import InvalidRequest, NotFound, PolicyDenied, SignatureRefused
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.paths import is_namespace, is_tool_id
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, DEFAULT_NAMESPACE
from kiwi_mcp.kernel.keys.lookalikes import alike
from kiwi_mcp.kernel.keys.signer import Signer, pairs_of
from kiwi_mcp.kernel.keys.store import TrustFile, rotated
from kiwi_mcp.kernel.requests import KeyRequest
from kiwi_mcp.manifest.keys import Rotation, is_key, is_meant
from kiwi_mcp.manifest.trust import Key, Trusted

_DAYS = re.compile(r"(\d{1,5})d", re.ASCII)


def act(request: KeyRequest, user: Path, *, is_owner: bool) -> JsonObject:
    """Answer one request about keys."""
    file = TrustFile(user)
    if request.action == "list":
        return _listed(file.now(), file.path)
    if request.action == "show":
        return _shown(request, file.now())
    if not is_owner:
        typed = f"kiwi key {request.action} {request.publisher or ''} {request.key or ''}".strip()[:200]
        raise PolicyDenied("Only the owner says whose keys count.", suggestion=f"Ask them to type `{typed}`.")
    match request.action:
        case "new":
            return _made(request, file, user)
        case "rotate":
            return _rotated(request, file, user)
        case "trust":
            return _trusted(request, file)
        case _:
            return _revoked(request, file)


def _made(request: KeyRequest, file: TrustFile, user: Path) -> JsonObject:
    if (signer := Signer.of(user)) is not None:
        raise InvalidRequest(
            f"You sign with {signer.key.fingerprint} already.",
            suggestion="To sign with another, type `kiwi key rotate`: who trusts the one then learns of the other.",
        )
    key = Key(pairs_of(user).make(), _now(), request.name or "", expires=_expiry(request.expires))
    file.keep_own(key)
    message = "This is your key; `kiwi sign` and `kiwi publish` use it from now on"
    return {**_told("new", "made", message, key), "next": "Back up ~/.ai/state: whoever loses the key rotates in vain."}


def _rotated(request: KeyRequest, file: TrustFile, user: Path) -> JsonObject:
    signer = Signer.of(user)
    if signer is None:
        raise NotFound("You have no key that counts.", suggestion="Make one with `kiwi key new`.")
    old = signer.key
    public, now = signer.pairs.make(), _now()
    draft = Rotation(now, old.public, public)
    statement = str(replace(draft, proof=signer.pairs.sign(old.public, draft.data)))
    key = Key(public, now, request.name or old.name, rotation=statement, expires=_expiry(request.expires))
    file.keep_own(key)
    message = f"You sign with another key from now on; {old.fingerprint} handed over to it"
    following = f"What you publish tells of it. If the old key got lost or stolen: `kiwi key revoke {old.fingerprint}`."
    return {**_told("rotate", "rotated", message, key), "rotation": statement, "next": following}


def _trusted(request: KeyRequest, file: TrustFile) -> JsonObject:
    scope, trusted = _scope(request), file.now()
    known = trusted.publishers.get(scope, {})
    if request.rotation:
        return _handed_over(request.rotation, scope, file, known)
    public = request.key or ""
    if not is_key(public):
        raise InvalidRequest(
            "To trust somebody takes their whole public key, 43 characters.",
            suggestion="Ask them for what `kiwi key show` prints, by a way that you trust. At a first install the key "
            "comes along: `kiwi pull NAME --from REMOTE --trust-key FINGERPRINT`.",
        )
    key = Key(public, _now(), how="trusted", expires=_expiry(request.expires))
    file.pin(scope, [key])
    doubts: list[Json] = [f"{scope} looks like {one}, which is another publisher" for one in alike(scope, trusted)]
    if others := [one.fingerprint for one in known.values() if one.public != public and not one.is_void]:
        doubts.append(f"{scope} is also trusted with {', '.join(others)}: revoke what is not in use any more")
    return {
        **_told("trust", "trusted", f"{scope} is trusted with this key", key),
        "publisher": scope,
        "warnings": doubts,
    }


def _handed_over(text: str, scope: str, file: TrustFile, known: Mapping[str, Key]) -> JsonObject:
    statement = Rotation.parse(text.strip())
    if statement is None:
        raise InvalidRequest("That is no statement of a rotation.", suggestion="Give the line `kiwi-key:rotated:…`.")
    if not rotated(known, statement.new, [statement]):
        raise SignatureRefused(
            f"The statement is not by a key that {scope} is trusted with.",
            suggestion=f"Ask {scope} for their new key by a way that you trust, then `kiwi key trust {scope} KEY`.",
        )
    key = Key(statement.new, _now(), how="rotation")
    file.pin(scope, [key])
    return {**_told("trust", "trusted", f"{scope} signs with this key from now on", key), "publisher": scope}


def _revoked(request: KeyRequest, file: TrustFile) -> JsonObject:
    trusted, word = file.now(), request.key or ""
    now, reason = _now(), request.reason or ""
    gone: list[Key] = []
    for key in trusted.own.values():
        if is_meant(key.public, word) and not request.publisher:
            gone.append(replace(key, revoked=now, reason=reason))
            file.keep_own(gone[-1])
    for scope, keys in trusted.publishers.items():
        meant = [key for key in keys.values() if is_meant(key.public, word) and request.publisher in {None, scope}]
        gone += [replace(key, revoked=now, reason=reason) for key in meant]
        if meant:
            file.pin(scope, gone[-len(meant) :])
    if not gone:
        raise _unknown(word)
    message = "The key vouches for nothing any more: what it signed is not installed, and what is here says so"
    return _told("revoke", "revoked", message, gone[0])


def _shown(request: KeyRequest, trusted: Trusted) -> JsonObject:
    every = [*trusted.own.values(), *(key for keys in trusted.publishers.values() for key in keys.values())]
    if request.key:
        found = [key for key in every if is_meant(key.public, request.key)]
    elif request.publisher:
        found = [*trusted.publishers.get(request.publisher, {}).values()]
    else:
        found = [key for key in trusted.own.values() if not key.is_void][-1:]
    if not found:
        raise _unknown(request.key or request.publisher or "")
    key = found[-1]
    scopes: list[Json] = [scope for scope, keys in trusted.publishers.items() if key.public in keys]
    told: JsonObject = {"action": "show", "key": _row(key), "is_own": key.public in trusted.own, "publishers": scopes}
    return {**told, **({"rotation": key.rotation} if key.rotation else {})}


def _listed(trusted: Trusted, path: Path) -> JsonObject:
    publishers: list[Json] = [
        {"publisher": scope, **_row(key), **({"looks_like": [*near]} if (near := alike(scope, trusted)) else {})}
        for scope, keys in trusted.publishers.items()
        for key in keys.values()
    ]
    own: list[Json] = [_row(key) for key in trusted.own.values()]
    return {"action": "list", "own": own, "publishers": publishers, "path": str(path)}


def _row(key: Key) -> JsonObject:
    facts: dict[str, Json] = {"name": key.name, "since": key.since, "how": key.how, "expires": key.expires}
    facts |= {"revoked": key.revoked, "reason": key.reason, "namespaces": list(key.namespaces)}
    shown = {word: value for word, value in facts.items() if value}
    return {"fingerprint": key.fingerprint, "key": key.public, "state": key.state, **shown}


def _told(action: str, status: str, message: str, key: Key) -> dict[str, Json]:
    return {"action": action, "status": status, "message": f"{key.fingerprint}: {message}", "key": _row(key)}


def _scope(request: KeyRequest) -> str:
    scope = request.publisher or ""
    namespace, slash, tool_id = scope.partition("/")
    is_item = namespace == DEFAULT_NAMESPACE and bool(slash) and is_tool_id(tool_id)
    is_whole = not slash and is_namespace(namespace) and namespace not in {DEFAULT_NAMESPACE, BUILTIN_NAMESPACE}
    if not is_item and not is_whole:
        raise InvalidRequest(
            f"{scope[:100]!r} is not a publisher." if scope else "The request names no publisher.",
            suggestion=f"Name a namespace such as `acme`, or `{DEFAULT_NAMESPACE}/NAME` where everybody publishes.",
        )
    return scope


def _unknown(word: str) -> NotFound:
    return NotFound(
        f"No key is known by {word[:100]!r}." if word else "You have no key that counts.",
        suggestion="`kiwi key list` shows all of them." if word else "Make one with `kiwi key new`.",
    )


def _expiry(text: str | None) -> str:
    """Return until when a key counts, as it is written down; empty for always."""
    if not text:
        return ""
    if days := _DAYS.fullmatch(text):
        return _written(datetime.now(UTC) + timedelta(days=int(days[1])))
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{text[:60]!r} is no date.", suggestion="Write 2027-01-31, or 90d.") from None
    return _written(given if given.tzinfo else given.replace(tzinfo=UTC))


def _now() -> str:
    return _written(datetime.now(UTC))


def _written(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
