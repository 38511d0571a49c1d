"""What the registry's rows mean: the columns that are read, what an actor sees of them, and the values they become."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from random import getrandbits
from time import time_ns
from typing import TypeVar, cast

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Actor, Event, Listed, Mark, Op, Pin, VersionName, Visibility
from kiwi_mcp.store.database import Database, Row, Value

CHUNK = 500
"""How many names or ids one query asks for."""

LISTED = """select v.id, t.namespace, t.tool_id, v.version, v.content_hash, v.closure_hash, v.place, t.tool_type,
  t.name, t.description, t.category, t.tags, v.manifest, v.executor_ref, v.executor_namespace, v.executor_tool_id,
  v.executor_version, v.executor_hash, t.visibility, v.is_latest, t.is_official, t.is_builtin, v.changelog,
  v.published_by, v.created_at,
  v.yanked_at, v.yanked_reason, v.deprecated_at, v.deprecated_reason
from $tables where v.tool_id = t.id and """
"""Everything that is told of a version; a condition on it follows."""

# SQLite keeps the order of a CROSS JOIN, so the table that the condition is about stands first.
BY_ITEM = "tools t cross join tool_versions v"
BY_VERSION = "tool_versions v cross join tools t"

FIRST_ID = "00000000-0000-0000-0000-000000000000"
"""An id before all others."""

LATEST_ORDER = " order by t.namespace, t.tool_id, v.version_key desc"

_Any = TypeVar("_Any")


class Sight:
    """What an actor sees: conditions for the WHERE of every query, and the values they take."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.members: tuple[Value, ...] = actor.namespaces or ("",)
        marks = marks_for(self.members)
        self.named = f"(t.visibility <> 'private' or t.namespace in ({marks}))"
        """Holds for what the actor may use once they know its name."""
        self.listed = f"(t.visibility = 'public' or t.namespace in ({marks}))"
        """Holds for what lists show to the actor."""

    def sees(self, namespace: str, visibility: str) -> bool:
        """Whether the actor may use an item once they know its name."""
        return visibility != "private" or namespace in self.members


def marks_for(values: Sequence[Value]) -> str:
    """Return one `?` for each value."""
    return ", ".join("?" * len(values))


def filled(statement: str, **parts: str) -> str:
    """Return a statement whose `$words` are replaced by SQL of our own; callers' values never come this way."""
    for word, part in parts.items():
        statement = statement.replace(f"${word}", part)
    return statement


def chunks(values: Iterable[_Any], size: int = CHUNK) -> Iterator[list[_Any]]:
    """Give values in lists that fit into one query."""
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


def new_id() -> str:
    """Return a new id that stands behind all older ones, so that rows of one time lie side by side."""
    time, chance = f"{time_ns() // 1_000_000:012x}", f"{getrandbits(72):018x}"
    return f"{time[:8]}-{time[8:]}-7{chance[:3]}-a{chance[3:6]}-{chance[6:]}"


def is_id(text: str) -> bool:
    """Whether the text can be the id of a row."""
    parts = text.split("-")
    return [len(part) for part in parts] == [8, 4, 4, 4, 12] and not text.strip("-0123456789abcdef")


def to_listed(row: Row, database: Database) -> Listed:
    """Return what a row of LISTED says."""
    (
        id_, namespace, tool_id, version, digest, closure, place, tool_type, title, description, category, tags,
        manifest, ref, below, below_id, below_version, below_digest, visibility, is_latest, is_official, is_builtin,
        changelog, published_by, created_at, yanked_at, yanked_reason, deprecated_at, deprecated_reason,
    ) = cast("tuple[str, ...]", row)  # fmt: skip
    listed_tags: tuple[str, ...]
    if is_latest:
        listed_tags = database.decode_list(tags)
    else:  # the item's own columns speak of its latest version
        written = _written(manifest)
        tool_type, title = as_text(written.get("tool_type")), as_text(written.get("name"))
        description, category = as_text(written.get("description")), as_text(written.get("category"))
        listed_tags = tags_in(written)
    return Listed(
        id=id_,
        name=VersionName(namespace, tool_id, version),
        digest=digest,
        closure=closure,
        place=place,
        tool_type=tool_type,
        title=title or "",
        description=description or "",
        category=category or "",
        tags=listed_tags,
        manifest_text=manifest,
        executor=Pin(ref, VersionName(below, below_id, below_version), below_digest) if below_digest else None,
        visibility=cast("Visibility", visibility),
        is_latest=bool(is_latest),
        is_official=bool(is_official),
        is_builtin=bool(is_builtin),
        changelog=changelog or "",
        published_by=published_by,
        created_at=created_at,
        yanked=Mark(yanked_at, yanked_reason or "") if yanked_at else None,
        deprecated=Mark(deprecated_at, deprecated_reason or "") if deprecated_at else None,
    )


def _written(manifest: str) -> JsonObject:
    try:
        return as_object(json.loads(manifest))
    except ValueError:  # it was changed in the store, which `verify` tells
        return {}


def to_event(row: Row) -> Event:
    """Return the log's entry in a row: seq, op, name, hashes, actor, time, reason, the item's visibility, seal."""
    seq, *texts = row
    op, namespace, tool_id, version, digest, closure, actor, at, reason, visibility, seal = map(str, texts)
    return Event(
        int(str(seq)),
        cast("Op", op),
        VersionName(namespace, tool_id, version),
        digest,
        closure,
        actor,
        at,
        reason,
        cast("Visibility", visibility),
        seal,
    )


def tags_in(manifest: JsonObject) -> tuple[str, ...]:
    """Return the tags of a manifest."""
    return tuple(tag for tag in as_list(manifest.get("tags")) if isinstance(tag, str))
