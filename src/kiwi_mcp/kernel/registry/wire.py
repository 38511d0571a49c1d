"""The words of a registry over HTTP: how names, events and answers are written as JSON, and read with suspicion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from kiwi_mcp.domain.errors import ArtifactRefused, InvalidManifest, InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Event, Op, Published, Release, VersionName, is_digest
from kiwi_mcp.manifest.json_text import read_json
from kiwi_mcp.store.soundness import bad_name, bad_text, bad_time, bad_visibility

EVENTS, READ, WRITE, HEALTH = "/registry/v1/events", "/registry/v1/read", "/registry/v1/write", "/health"

PAGE = 2_000
"""How many events one answer holds at the most."""
MAX_NAMES = 500
"""How many versions, and how many marks, one request names at the most."""
MAX_BODY = 100_000_000
"""The largest body either side takes, in bytes: the largest version there may be, as JSON."""
MAX_WEIGHT = 8_000_000
"""About how many bytes of files one body carries, where one version alone is not larger."""

_OPS: tuple[Op, ...] = get_args(Op)
_MAX_SEQ = 2**53
_MAX_ACTOR = 400
_FILE_WEIGHT = 400
_ASK = "Ask the owner of the registry it came from."
_NODES = 200_000
_DEPTH = 12


def read_body(body: bytes, *, what: str) -> JsonObject:
    """Return the one JSON object that a body is, within limits."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{what} is not text in UTF-8.", suggestion="Send JSON.") from None
    try:
        value = read_json(text, what=what, max_bytes=MAX_BODY, max_nodes=_NODES, max_depth=_DEPTH).value
    except InvalidManifest as fault:
        raise InvalidRequest(fault.message, suggestion="Send one JSON object, within the limits.") from fault
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} is not a JSON object.", suggestion="Send one JSON object.")
    return value


def weight(release: Release) -> int:
    """Return about how many bytes a version takes on the wire."""
    return sum(len(file.data) + _FILE_WEIGHT for file in release.files)


def name_to_json(name: VersionName) -> JsonObject:
    """Return the name of a version as JSON."""
    return {"namespace": name.namespace, "tool_id": name.tool_id, "version": name.version}


def name_from(value: Json) -> VersionName:
    """Return the name that a JSON object is, or refuse what can name nothing."""
    name = _name(value)
    if issues := [*bad_name(name, "")]:
        raise ArtifactRefused("The name of a version", issues)
    return name


def _name(value: Json) -> VersionName:
    words = as_object(value)
    return VersionName(*(as_text(words.get(word)) for word in ("namespace", "tool_id", "version")))


def names_from(value: Json) -> tuple[VersionName, ...]:
    """Return the names that a JSON array holds."""
    names = as_list(value)
    if not 0 < len(names) <= MAX_NAMES:
        raise InvalidRequest(
            "`names` is not a list of names, or is too long.", suggestion=f"Send 1 to {MAX_NAMES} names."
        )
    return tuple(dict.fromkeys(map(name_from, names)))


def event_to_json(event: Event) -> JsonObject:
    """Return an event as JSON."""
    return {
        "seq": event.seq,
        "op": event.op,
        **name_to_json(event.name),
        "digest": event.digest,
        "closure": event.closure,
        "actor": event.actor,
        "at": event.at,
        "reason": event.reason,
        "visibility": event.visibility,
        "hash": event.hash,
    }


def event_from(value: Json) -> Event:
    """Return the event that a JSON object is, or refuse it with every fault it has."""
    words = as_object(value)
    texts = {word: as_text(words.get(word)) for word in ("op", "digest", "closure", "actor", "at", "reason", "hash")}
    visibility, seq = as_text(words.get("visibility")), words.get("seq")
    event = Event(
        seq=seq if isinstance(seq, int) and 0 <= seq < _MAX_SEQ else -1,
        op=next((op for op in _OPS if op == texts["op"]), "publish"),
        name=_name(words),
        digest=texts["digest"],
        closure=texts["closure"],
        actor=texts["actor"],
        at=texts["at"],
        reason=texts["reason"],
        visibility=visibility,  # type: ignore[arg-type]  # held against the list below
        hash=texts["hash"],
    )
    if issues := [*_faults(event, texts["op"])]:
        raise ArtifactRefused(f"An event of {str(event.name)[:_MAX_ACTOR]}", issues)
    return event


def _faults(event: Event, op: str) -> Iterator[Issue]:
    if event.seq < 0:
        yield Issue("seq", "is not a number", _ASK)
    if op != event.op:
        yield Issue("op", f"{op[:100]!r} is not one of {', '.join(_OPS)}", _ASK)
    # Who sees an item is said of all its versions, and so of none.
    is_of_item = event.op == "visibility" and not event.name.version
    yield from bad_name(replace(event.name, version="0.0.0") if is_of_item else event.name, "")
    for place, digest in (("digest", event.digest), ("closure", event.closure)):
        if not is_digest(digest) and not is_of_item:
            yield Issue(place, f"{digest[:100]!r} is not a digest", _ASK)
    if event.hash and not is_digest(event.hash):
        yield Issue("hash", f"{event.hash[:100]!r} is not a digest", _ASK)
    yield from bad_time(event.at or "never", "at")
    yield from bad_text(event.actor, "actor", limit=_MAX_ACTOR)
    yield from bad_text(event.reason, "reason")
    yield from bad_visibility(event.visibility)
    if event.op == "visibility":
        yield from bad_visibility(event.reason)


def events_from(value: Json) -> tuple[Event, ...]:
    """Return the events that a JSON array holds."""
    events = as_list(value)
    if not isinstance(value, list) or len(events) > PAGE:
        raise InvalidRequest("That is no list of events, or too long a one.", suggestion=f"Send at most {PAGE:,}.")
    return tuple(map(event_from, events))


def published_to_json(published: Sequence[Published]) -> Json:
    """Return what came of publishing as JSON."""
    return [
        {**name_to_json(one.name), "digest": one.digest, "closure": one.closure, "is_new": one.is_new}
        for one in published
    ]


def published_from(value: Json) -> tuple[Published, ...]:
    """Return what came of publishing, as a server tells it."""
    found = []
    for words in map(as_object, as_list(value)[: 2 * MAX_NAMES]):
        digest, closure = as_text(words.get("digest")), as_text(words.get("closure"))
        if not is_digest(digest) or not is_digest(closure):
            raise ArtifactRefused("What the registry says it published", [Issue("digest", "is not a digest", _ASK)])
        found.append(Published(name_from(words), digest, closure, words.get("is_new") is True))
    return tuple(found)
