"""`Registry`: the versions that one actor sees and changes; items changed since a log entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, cast

from kiwi_mcp.domain.errors import IntegrityMismatch, InvalidRequest, MissingLink, NotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.names import is_safe_path, is_tool_id
from kiwi_mcp.domain.registry import (
    START,
    Actor,
    ChainRow,
    Cursor,
    ItemName,
    PublishResult,
    RegistryEvent,
    VersionInfo,
    VersionName,
    is_digest,
)
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store.database import Database, Value
from kiwi_mcp.store.registry import publish, verify
from kiwi_mcp.store.registry.publish import StatusOp, version_drafts
from kiwi_mcp.store.registry.release_check import MAX_LINKS, CheckedRelease
from kiwi_mcp.store.registry.rows import (
    BY_ITEM,
    BY_VERSION,
    LATEST_ORDER,
    LISTED,
    VisibilityFilter,
    chunks,
    filled,
    is_id,
    placeholders,
    read_contents,
    to_event,
    to_listed,
)

MAX_EVENTS = 10_000
"""How many entries of the log are given at a time, unless fewer are asked for."""

# Joins are written as CROSS JOIN … WHERE: SQLite then keeps their order, where newer versions of it would rather
# read a whole table first, and PostgreSQL does not mind.
_CHAIN = """with recursive chain (id, next, depth) as (
  $top
  union all
  select v.id, v.executor_version_id, chain.depth + 1
  from chain cross join tool_versions v where v.id = chain.next and chain.depth < $limit
)
select v.id, t.namespace, t.tool_id, v.version, v.content_hash, v.closure_hash, v.place, t.tool_type, v.executor_ref,
  v.manifest, v.yanked_at, v.deprecated_at, v.item_references, v.depth
from chain cross join tool_versions v cross join tools t
where v.id = chain.id and t.id = v.tool_id and $sees order by chain.depth"""
_TOP = """select v.id, v.executor_version_id, 1 from tool_versions v cross join tools t
  where v.id = ? and t.id = v.tool_id and $sees"""
_HOW_MANY = "select count(*) from tool_versions v cross join tools t where t.id = v.tool_id and $sees"
_NAMESPACES = """select t.namespace from tools t cross join tool_versions v
where v.tool_id = t.id and v.is_latest = true and v.yanked_at is null and $sees
group by t.namespace order by count(*) desc, t.namespace limit ?"""
_PRIVATE = "select namespace, tool_id from tools where visibility = 'private'"
_HEAD = "select seq from registry_log order by seq desc limit 1"
_EVENTS = """select l.seq, l.op, l.namespace, l.tool_id, l.version, l.content_hash, l.closure_hash, l.actor,
  l.created_at, l.reason, t.visibility, l.hash
from registry_log l cross join tools t
where l.seq > ? and t.namespace = l.namespace and t.tool_id = l.tool_id and $sees order by l.seq limit ?"""
_HISTORY = _EVENTS.replace("where ", "where l.tool_id = ? and ")
_COUNT = (
    "update tools set download_count = download_count + 1 where id = (select tool_id from tool_versions where id = ?)"
)
_CURSOR = """insert into remotes (url, cursor_seq, cursor_hash, updated_at) values (?, ?, ?, ?)
on conflict (url) do update set cursor_seq = excluded.cursor_seq, cursor_hash = excluded.cursor_hash,
  updated_at = excluded.updated_at"""


class Registry:
    """What a store holds, for one actor; it may be used from several threads."""

    def __init__(self, database: Database, actor: Actor) -> None:
        self.actor = actor
        self.database = self._database = database
        self._sight = sight = VisibilityFilter(actor)
        self._seen_head: tuple[int, int] | None = None
        self._private: tuple[int, list[tuple[str, str]]] | None = None
        self._resolve = filled(filled(_CHAIN, top=_TOP), limit=str(MAX_LINKS), sees=sight.named)

    def count(self) -> int:
        """Return how many versions the store holds that lists may show to the actor."""
        rows = self._database.read(filled(_HOW_MANY, sees=self._sight.listed), self._sight.members)
        return int(str(rows[0][0]))

    def namespaces(self, limit: int = 1_000) -> tuple[str, ...]:
        """Return the namespaces of which lists may show something to the actor, those with most items first."""
        asked = filled(_NAMESPACES, sees=self._sight.listed)
        return tuple(str(name) for (name,) in self._database.read(asked, (*self._sight.members, limit)))

    def hidden_from(self, actor: Actor) -> frozenset[tuple[str, str]]:
        """Return the namespace and the name of each private item that an actor may not see."""
        head, known = self.head(), self._private
        if known is None or known[0] != head:
            rows = self._database.read(_PRIVATE)
            known = self._private = head, [(str(namespace), str(tool_id)) for namespace, tool_id in rows]
        return frozenset(one for one in known[1] if not actor.is_member(one[0]))

    def as_seen_by(self, actor: Actor) -> Registry:
        """Return the same registry as another actor sees it."""
        return Registry(self._database, actor)

    def publish(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent] = (), *, is_seeding: bool = False
    ) -> tuple[PublishResult, ...]:
        """Seal releases and set the status of versions, in one transaction; what is stored already stays."""
        drafts = version_drafts(releases, self.actor, is_seeding=is_seeding)
        database, sight = self._database, self._sight
        with database.transaction() as transaction:
            # Set visibilities first: a version may use a private executor only if its own item is private.
            rest = publish.apply_visibilities(transaction, sight, events)
            published = publish.publish(transaction, database, sight, drafts)
            publish.replay_status(transaction, database, sight, rest)
        return tuple(published[release.name] for release in releases)

    def named(self, tool_id: str, namespace: str | None = None) -> tuple[VersionInfo, ...]:
        """Return every version of a short name, in one namespace or in the actor's in their order; newest first."""
        spaces = self.actor.order if namespace is None else (namespace,)
        if not is_tool_id(tool_id) or not all(map(is_safe_path, spaces)):
            return ()
        where = f"t.tool_id = ? and t.namespace in ({placeholders(spaces)}) and {self._sight.named}{LATEST_ORDER}"
        found = self._listed(where, (tool_id, *spaces, *self._sight.members))
        return tuple(sorted(found, key=lambda one: spaces.index(one.name.namespace)))

    def named_anywhere(self, tool_id: str) -> tuple[VersionInfo, ...]:
        """Return every version of a short name that the actor may see, in every namespace."""
        where = f"t.tool_id = ? and {self._sight.named}{LATEST_ORDER}"
        return self._listed(where, (tool_id, *self._sight.members)) if is_tool_id(tool_id) else ()

    def find(
        self,
        *,
        namespace: str | None = None,
        tool_type: str | None = None,
        is_all_versions: bool = False,
        limit: int | None = None,
    ) -> tuple[VersionInfo, ...]:
        """Return the versions that lists show to the actor, in the order of names: latest versions, or all of them."""
        where, values = [self._sight.listed], [*self._sight.members]
        for column, value in (("t.namespace", namespace), ("t.tool_type", tool_type)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if not is_all_versions:
            where.append("v.is_latest = true")
        if limit is not None:
            values.append(max(limit, 0))
        return self._listed(f"{' and '.join(where)}{LATEST_ORDER}{' limit ?' if limit is not None else ''}", values)

    def by_digest(self, digest: str) -> tuple[VersionInfo, ...]:
        """Return the versions with exactly that content."""
        if not is_digest(digest):
            raise InvalidRequest(
                f"{digest[:100]!r} is not a digest.", suggestion="Write `sha256:` and 64 hexadecimal digits."
            )
        where = f"v.content_hash = ? and {self._sight.named}{LATEST_ORDER}"
        return self._listed(where, (digest, *self._sight.members), BY_VERSION)

    def get(self, version_id: str) -> VersionInfo:
        """Return the version of a row."""
        return self._by_ids([version_id])[0]

    def resolve(self, version_id: str) -> tuple[ChainRow, ...]:
        """Return a version and its executors, top first."""
        if not is_id(version_id):
            _nothing(version_id)
        rows = self._database.read(self._resolve, (version_id, *self._sight.members, *self._sight.members))
        if not rows:
            _nothing(version_id)
        links = tuple(map(ChainRow._make, cast("Sequence[tuple[str, ...]]", rows)))
        if len(links) != links[0].depth:  # a link is not there for this actor
            raise MissingLink(links[0].executor_ref or "", chain=[links[0].tool_id])
        return links

    def read(self, version_ids: Sequence[str]) -> tuple[CheckedRelease, ...]:
        """Return versions with all of their bytes, after checking every hash."""
        releases = []
        for contents in read_contents(self._database, self._by_ids(version_ids)):
            release = contents.release
            if contents.issues:
                where = "; ".join(issue.reason for issue in contents.issues[:3])
                raise IntegrityMismatch(
                    release.name.tool_id, expected=contents.digest, actual=release.digest, where=where
                )
            releases.append(CheckedRelease.of(release))
        return tuple(releases)

    def set_status(
        self, names: Sequence[VersionName], op: StatusOp, reason: str = "", at: str = ""
    ) -> tuple[VersionInfo, ...]:
        """Yank or deprecate versions, or take it back, and return them with their new status."""
        with self._database.transaction() as transaction:
            publish.set_status(transaction, self._database, self._sight, names, op, reason=reason, at=at)
        by_name = {one.name: one for name in {*names} for one in self.named(name.tool_id, name.namespace)}
        return tuple(by_name[name] for name in names)

    def count_download(self, version_id: str) -> None:
        """Remember that a version was taken."""
        self.get(version_id)
        with self._database.transaction() as transaction:
            transaction.write(_COUNT, (version_id,))

    def head(self) -> int:
        """Return the number of the log's last entry, which changes with every change."""
        stamp = self._database.stamp()
        if self._seen_head is None or self._seen_head[0] != stamp:
            rows = self._database.read(_HEAD)
            self._seen_head = (stamp, int(str(rows[0][0])) if rows else 0)
        return self._seen_head[1]

    def events(self, after: int = 0, limit: int = MAX_EVENTS) -> tuple[RegistryEvent, ...]:
        """Return the log's entries behind one, oldest first, about what lists may show to the actor."""
        statement = filled(_EVENTS, sees=self._sight.listed)
        rows = self._database.read(statement, (after, *self._sight.members, max(limit, 0)))
        return tuple(map(to_event, rows))

    def history(self, tool_id: str, after: int = 0, limit: int = MAX_EVENTS) -> tuple[RegistryEvent, ...]:
        """Return the log entries about the items of one name, including unlisted items."""
        statement = filled(_HISTORY, sees=self._sight.named)
        rows = self._database.read(statement, (tool_id, after, *self._sight.members, max(limit, 0)))
        return tuple(map(to_event, rows))

    def verify(self, version_ids: Sequence[str] | None = None) -> Iterator[Issue]:
        """Yield every difference from the sealed content: in some versions, or in the whole store."""
        if version_ids is None:
            return verify.store(self._database, self._sight)
        return verify.versions(self._database, self._by_ids(version_ids))

    def cursor(self, remote_key: str) -> Cursor:
        """Return up to which entry the log of a remote has been followed."""
        rows = self._database.read("select cursor_seq, cursor_hash from remotes where url = ?", (remote_key,))
        return Cursor(int(str(rows[0][0])), str(rows[0][1] or "")) if rows else START

    def set_cursor(self, remote_key: str, cursor: Cursor) -> None:
        """Remember up to which entry the log of a remote has been followed."""
        with self._database.transaction() as transaction:
            transaction.write(_CURSOR, (remote_key, *cursor, moment()))

    def _listed(self, where: str, values: Sequence[Value], tables: str = BY_ITEM) -> tuple[VersionInfo, ...]:
        database = self._database
        return tuple(to_listed(row, database) for row in database.read(filled(LISTED, tables=tables) + where, values))

    def _by_ids(self, version_ids: Sequence[str]) -> Sequence[VersionInfo]:
        found: dict[str, VersionInfo] = {}
        for some in chunks({id_: None for id_ in version_ids if is_id(id_)}):
            where = f"v.id in ({placeholders(some)}) and {self._sight.named}"
            found |= {one.id: one for one in self._listed(where, (*some, *self._sight.members), BY_VERSION)}
        return [found.get(id_) or _nothing(id_) for id_ in version_ids]


def _nothing(version_id: str) -> NoReturn:
    raise NotFound(
        f"There is no version {version_id[:64]!r} here.", suggestion="List the versions of an item to see their ids."
    )


MOST = 500
"""How many items are looked at one by one; where more changed, all are listed again."""

# Without the visibility filter: the log no longer shows the actor anything about an item that was hidden from them.
_CHANGED = "select distinct namespace, tool_id from registry_log where seq > ? limit ?"


def changed_items(registry: Registry, after: int) -> frozenset[ItemName] | None:
    """Return the items that the log names behind an entry, or None where they are too many."""
    rows = registry.database.read(_CHANGED, (after, MOST + 1))
    return None if len(rows) > MOST else frozenset((str(namespace), str(tool_id)) for namespace, tool_id in rows)


def listed_now(registry: Registry, items: Iterable[ItemName]) -> Mapping[ItemName, VersionInfo]:
    """Return the latest versions of items, of those that lists may show to the actor."""
    found = (one for namespace, tool_id in items for one in registry.named(tool_id, namespace=namespace))
    return {
        one.name.item: one
        for one in found
        if one.is_latest and (one.visibility == "public" or registry.actor.is_member(one.name.namespace))
    }
