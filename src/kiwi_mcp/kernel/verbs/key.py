"""key: list, show, new, trust, revoke, rotate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.release import trust_of_release
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NotFound, SignatureRefused
from kiwi_mcp.domain.names import is_namespace, is_tool_id
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, DEFAULT_NAMESPACE
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.signer import Signer, pairs_of
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OWNER,
    Argument,
    LongText,
    NameText,
    NoArguments,
    Option,
    Request,
    Response,
    filled,
    verb,
)
from kiwi_mcp.kernel.view import Data, Hint, Notice, TableRow, ViewItem, message_items
from kiwi_mcp.manifest.signatures import Rotation, is_key, matches_key
from kiwi_mcp.manifest.trust import TrustedKey, TrustFile, rotated
from kiwi_mcp.manifest.type_specs import load_type_specs
from kiwi_mcp.policy.admission import lookalikes
from kiwi_mcp.store.remote.sync import read_named

_SEARCHED = 200
"""In how many items of a publisher a key is looked for."""
_DAYS = re.compile(r"(\d{1,5})d", re.ASCII)

NewName = Annotated[NameText | None, Option("The key's name.")]
Expires = Annotated[NameText | None, Option("The last day of its validity: 2027-01-31, or 90d.", metavar="WHEN")]


class KeyLine(Response, frozen=True, kw_only=True):
    """One key; `publisher` where lists say who is trusted with it, `looks_like` where that name is easily confused."""

    publisher: str | UnsetType = UNSET
    fingerprint: str
    key: str
    state: str
    name: str | UnsetType = UNSET
    since: str | UnsetType = UNSET
    how: str | UnsetType = UNSET
    expires: str | UnsetType = UNSET
    revoked: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    namespaces: list[str] | UnsetType = UNSET
    looks_like: list[str] | UnsetType = UNSET


class KeyListResponse(Response, frozen=True, kw_only=True):
    """The keys of the owner, and those of the publishers that the owner trusts."""

    action: str = "list"
    own: list[KeyLine]
    publishers: list[KeyLine]
    path: str


def _list_view(response: KeyListResponse) -> Iterator[ViewItem]:
    yield from (TableRow(_text(key, key.publisher or "you")) for key in (*response.own, *response.publishers))
    if not response.own:
        yield Notice("You have no key.")
        yield Hint("kiwi key new")


def _text(key: KeyLine, owner: str) -> str:
    """Return a key as one line of a table."""
    facts = [
        key.name or "",
        key.how or "",
        f"since {(key.since or '')[:10]}",
        f"expires {key.expires[:10]}" if key.expires else "",
        f"revoked {key.revoked[:10]}" if key.revoked else "",
        *(f"looks like {one}" for one in key.looks_like or ()),
    ]
    return f"{owner:<20} {key.fingerprint}  {key.state:<8} {', '.join(filter(None, facts))}"


@verb("list", group="key", access=ANYONE, records=False, is_local=True, shows=_list_view)
def list_keys(request: NoArguments, context: VerbContext) -> KeyListResponse:  # noqa: ARG001 - a verb
    """List your keys, and those of the publishers that you trust."""
    file = TrustFile(context.services.user)
    trusted = file.now()
    publishers = [
        replace(_line(key), publisher=scope, looks_like=[*lookalikes(scope, trusted)] or UNSET)
        for scope, keys in trusted.publishers.items()
        for key in keys.values()
    ]
    return KeyListResponse(own=[_line(key) for key in trusted.own.values()], publishers=publishers, path=str(file.path))


class KeyShowRequest(Request, frozen=True, kw_only=True):
    """Which key to show."""

    key: Annotated[NameText | None, Argument("A key or its fingerprint; your own otherwise.", "KEY")] = None
    publisher: Annotated[NameText | None, Option("The key of this publisher.")] = None


class KeyShowResponse(Response, frozen=True, kw_only=True):
    """One whole key, and the publishers that it is trusted for."""

    action: str = "show"
    key: KeyLine
    is_own: bool
    publishers: list[str]
    rotation: str | UnsetType = UNSET


def _show_view(response: KeyShowResponse) -> Iterator[ViewItem]:
    yield Notice(_text(response.key, "you" if response.is_own else ", ".join(response.publishers)))
    yield Data(response.key.key)
    if response.rotation:
        yield Data(response.rotation)


@verb("show", group="key", access=ANYONE, records=False, is_local=True, shows=_show_view)
def show_key(request: KeyShowRequest, context: VerbContext) -> KeyShowResponse:
    """Show one whole key, to give it to others."""
    trusted = TrustFile(context.services.user).now()
    every = [*trusted.own.values(), *(key for keys in trusted.publishers.values() for key in keys.values())]
    if request.key:
        found = [key for key in every if matches_key(key.public, request.key)]
    elif request.publisher:
        found = [*trusted.publishers.get(request.publisher, {}).values()]
    else:
        found = [key for key in trusted.own.values() if not key.is_void][-1:]
    if not found:
        raise _unknown(request.key or request.publisher or "")
    key = found[-1]
    return KeyShowResponse(
        key=_line(key),
        is_own=key.public in trusted.own,
        publishers=[scope for scope, keys in trusted.publishers.items() if key.public in keys],
        rotation=key.rotation or UNSET,
    )


class NewKeyRequest(Request, frozen=True, kw_only=True):
    """The name of the new key, and until when it counts."""

    name: NewName = None
    expires: Expires = None


class KeyChangeResponse(Response, frozen=True, kw_only=True):
    """What was changed, and the key that it is about."""

    action: str
    status: str
    message: str
    key: KeyLine
    rotation: str | UnsetType = UNSET
    publisher: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    next: str | UnsetType = UNSET


def _change_view(response: KeyChangeResponse) -> Iterator[ViewItem]:
    yield from message_items(response.to_json())
    yield Notice(f"  key: {response.key.key}")
    if response.rotation:
        yield Notice(f"  rotation: {response.rotation}")


@verb("new", group="key", access=OWNER, needs_receipt=True, is_local=True, shows=_change_view)
def new_key(request: NewKeyRequest, context: VerbContext) -> KeyChangeResponse:
    """Make your key; what you sign and publish afterwards bears it."""
    user = context.services.user
    if (signer := Signer.of(user)) is not None:
        raise InvalidRequest(
            f"You sign with {signer.key.fingerprint} already.",
            suggestion="To sign with another, type `kiwi key rotate`: who trusts the one then learns of the other.",
        )
    key = TrustedKey(pairs_of(user).make(), _now(), request.name or "", expires=_expiry(request.expires))
    TrustFile(user).keep_own(key)
    message = "This is your key; `kiwi sign` and `kiwi publish` use it from now on"
    return replace(_changed("new", "made", message, key), next="Back up ~/.ai/state: a lost key cannot be rotated.")


@verb("rotate", group="key", access=OWNER, needs_receipt=True, is_local=True, shows=_change_view)
def rotate_key(request: NewKeyRequest, context: VerbContext) -> KeyChangeResponse:
    """Sign with another key; a statement of the old key names the new one."""
    user = context.services.user
    signer = Signer.of(user)
    if signer is None:
        raise NotFound("You have no key that counts.", suggestion="Make one with `kiwi key new`.")
    old = signer.key
    public, now = signer.pairs.make(), _now()
    draft = Rotation(now, old.public, public)
    statement = str(replace(draft, proof=signer.pairs.sign(old.public, draft.data)))
    key = TrustedKey(public, now, request.name or old.name, rotation=statement, expires=_expiry(request.expires))
    TrustFile(user).keep_own(key)
    message = f"You sign with another key from now on; {old.fingerprint} handed over to it"
    following = f"What you publish tells of it. If the old key got lost or stolen: `kiwi key revoke {old.fingerprint}`."
    return replace(_changed("rotate", "rotated", message, key), rotation=statement, next=following)


class KeyTrustRequest(Request, frozen=True, kw_only=True):
    """A publisher, and their key or the statement by which a trusted key names it."""

    publisher: Annotated[NameText, Argument("A namespace, or public/NAME for one item of it.", "PUBLISHER")]
    key: Annotated[
        NameText | None, Argument("Their public key, or its fingerprint as `kiwi registry list` shows it.", "KEY")
    ] = None
    rotation: Annotated[
        LongText | None, Option("The line by which their old key names its successor.", metavar="LINE")
    ] = None
    expires: Expires = None


@verb("trust", group="key", access=OWNER, needs_receipt=True, is_local=True, shows=_change_view)
def trust_key(request: KeyTrustRequest, context: VerbContext) -> KeyChangeResponse:
    """Trust a publisher's key: items that it signs there are verified."""
    file = TrustFile(context.services.user)
    scope, trusted = _scope(request.publisher), file.now()
    known = trusted.publishers.get(scope, {})
    if request.rotation:
        statement = Rotation.parse(request.rotation.strip())
        if statement is None:
            raise InvalidRequest(
                "That is no statement of a rotation.", suggestion="Give the line `kiwi-key:rotated:…`."
            )
        if not rotated(known, statement.new, [statement]):
            raise SignatureRefused(
                f"The statement is not by a key that {scope} is trusted with.",
                suggestion=f"Ask {scope} for their new key by a way that you trust, then `kiwi key trust {scope} KEY`.",
            )
        key = TrustedKey(statement.new, _now(), how="rotation")
        file.pin(scope, [key])
        return replace(_changed("trust", "trusted", f"{scope} signs with this key from now on", key), publisher=scope)
    public = request.key or ""
    if not is_key(public):
        public = _published_key(scope, public, context)
    key = TrustedKey(public, _now(), how="trusted", expires=_expiry(request.expires))
    file.pin(scope, [key])
    doubts = [f"{scope} looks like {one}, which is another publisher" for one in lookalikes(scope, trusted)]
    if others := [one.fingerprint for one in known.values() if one.public != public and not one.is_void]:
        doubts.append(f"{scope} is also trusted with {', '.join(others)}: revoke what is not in use any more")
    return replace(
        _changed("trust", "trusted", f"{scope} is trusted with this key", key), publisher=scope, warnings=doubts
    )


def _published_key(scope: str, word: str, context: VerbContext) -> str:
    """Return the key with a fingerprint that signed an item of the publisher in this registry."""
    registry, (namespace, _, name) = context.registry(), scope.partition("/")
    listed = registry.find(namespace=namespace) if word else ()
    for item in [one for one in listed if name in {"", one.name.tool_id}][:_SEARCHED]:
        with suppress(KiwiError):  # `kiwi verify` reports an item that is damaged
            release = read_named(registry, [item.name])[0]
            signature = trust_of_release(release, TrustFile(context.services.user).now(), load_type_specs()).signature
            if signature and signature.key and matches_key(signature.key, word):
                return signature.key
    raise InvalidRequest(
        f"Nothing that {scope} published here is signed with that key; give the whole public key, 43 characters.",
        suggestion="Ask them for what `kiwi key show` prints, by a way that you trust. At a first install the key "
        "comes along: `kiwi pull NAME --from REMOTE --trust-key FINGERPRINT`.",
    )


class KeyRevokeRequest(Request, frozen=True, kw_only=True):
    """Which key is trusted no longer, and why."""

    key: Annotated[NameText, Argument("A public key, or its fingerprint.", "KEY")]
    publisher: Annotated[NameText | None, Option("Only as the key of this publisher.")] = None
    reason: Annotated[NameText | None, Option("Why.", "--reason", "-m")] = None


@verb("revoke", group="key", access=OWNER, is_local=True, shows=_change_view)
def revoke_key(request: KeyRevokeRequest, context: VerbContext) -> KeyChangeResponse:
    """Stop trusting a key."""
    file = TrustFile(context.services.user)
    trusted, wanted = file.now(), request.key
    now, reason = _now(), request.reason or ""
    gone: list[TrustedKey] = []
    for key in trusted.own.values():
        if matches_key(key.public, wanted) and not request.publisher:
            gone.append(replace(key, revoked=now, reason=reason))
            file.keep_own(gone[-1])
    for scope, keys in trusted.publishers.items():
        meant = [key for key in keys.values() if matches_key(key.public, wanted) and request.publisher in {None, scope}]
        gone += [replace(key, revoked=now, reason=reason) for key in meant]
        if meant:
            file.pin(scope, gone[-len(meant) :])
    if not gone:
        raise _unknown(wanted)
    message = "The key vouches for nothing any more: what it signed is not installed, and what is here says so"
    return _changed("revoke", "revoked", message, gone[0])


def _line(key: TrustedKey) -> KeyLine:
    return filled(KeyLine, key, key=key.public)


def _changed(action: str, status: str, message: str, key: TrustedKey) -> KeyChangeResponse:
    message = f"{key.fingerprint}: {message}"
    return KeyChangeResponse(action=action, status=status, message=message, key=_line(key))


def _scope(scope: str) -> str:
    """Return the publisher that a request names; refuse what is none."""
    namespace, slash, tool_id = scope.partition("/")
    is_item = namespace == DEFAULT_NAMESPACE and bool(slash) and is_tool_id(tool_id)
    is_whole = not slash and is_namespace(namespace) and namespace not in {DEFAULT_NAMESPACE, BUILTIN_NAMESPACE}
    if not is_item and not is_whole:
        raise InvalidRequest(
            f"{scope[:100]!r} is not a publisher.",
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
