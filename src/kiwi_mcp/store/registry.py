"""The registry: published versions in a store, as one actor sees and changes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn, cast

from kiwi_mcp.domain.errors import IntegrityMismatch, InvalidRequest, MissingLink, NotFound, ToolNotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.paths import is_safe_path, is_tool_id
from kiwi_mcp.domain.registry import (
    START,
    Actor,
    Cursor,
    Event,
    Link,
    Listed,
    Published,
    Release,
    VersionName,
    Visibility,
    is_digest,
)
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store import marks, publishing, verify
from kiwi_mcp.store.contents import read_contents
from kiwi_mcp.store.database import Database, Value
from kiwi_mcp.store.drafts import drafts_of
from kiwi_mcp.store.order import MAX_LINKS
from kiwi_mcp.store.rows import (
    BY_ITEM,
    BY_VERSION,
    LATEST_ORDER,
    LISTED,
    Sight,
    chunks,
    filled,
    is_id,
    marks_for,
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
  v.manifest, v.yanked_at, v.deprecated_at, v.depth
from chain cross join tool_versions v cross join tools t
where v.id = chain.id and t.id = v.tool_id and $sees order by chain.depth"""
_TOP = """select v.id, v.executor_version_id, 1 from tool_versions v cross join tools t
  where v.id = ? and t.id = v.tool_id and $sees"""
_TOP_LATEST = """select * from (select v.id, v.executor_version_id, 1 from tools t cross join tool_versions v
  where t.tool_id = ? and t.namespace in ($order) and $sees and v.tool_id = t.id and v.is_latest = true
  order by case t.namespace $cases end limit 1) as top"""
_HOW_MANY = "select count(*) from tool_versions v cross join tools t where t.id = v.tool_id and $sees"
_NAMESPACES = """select t.namespace from tools t cross join tool_versions v
where v.tool_id = t.id and v.is_latest = true and v.yanked_at is null and $sees
group by t.namespace order by count(*) desc, t.namespace limit ?"""
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
        self._database = database
        self._sight = sight = Sight(actor)
        self._seen_head: tuple[int, int] | None = None
        cases = " ".join(f"when ? then {place}" for place, _ in enumerate(actor.order))
        parts = {"limit": str(MAX_LINKS), "sees": sight.named, "order": marks_for(actor.order), "cases": cases}
        self._resolve = filled(filled(_CHAIN, top=_TOP), **parts)
        self._resolve_latest = filled(filled(_CHAIN, top=_TOP_LATEST), **parts)
        self._latest_values = (*actor.order, *sight.members, *actor.order, *sight.members)

    @property
    def actor(self) -> Actor:
        """Whoever uses this registry."""
        return self._sight.actor

    @property
    def database(self) -> Database:
        """Where the versions are kept."""
        return self._database

    def count(self) -> int:
        """Return how many versions the store holds that lists may show to the actor."""
        rows = self._database.read(filled(_HOW_MANY, sees=self._sight.listed), self._sight.members)
        return int(str(rows[0][0]))

    def namespaces(self, limit: int) -> tuple[str, ...]:
        """Return the namespaces of which lists may show something to the actor, those with most items first."""
        asked = filled(_NAMESPACES, sees=self._sight.listed)
        return tuple(str(name) for (name,) in self._database.read(asked, (*self._sight.members, limit)))

    def as_seen_by(self, actor: Actor) -> Registry:
        """Return the same registry for somebody else."""
        return Registry(self._database, actor)

    def publish(
        self, releases: Sequence[Release], said: Sequence[Event] = (), *, is_seeding: bool = False
    ) -> tuple[Published, ...]:
        """Seal releases as versions and mark versions as was said of them: all of it, or nothing.

        What is there already with the same content stays as it is.
        """
        drafts = drafts_of(releases, self.actor, is_seeding=is_seeding)
        database, sight = self._database, self._sight
        with database.transaction() as transaction:
            # Who sees an item is settled first: a version may stand on what is private only where its item is.
            rest = marks.settle_visibilities(transaction, sight, said)
            published = publishing.publish(transaction, database, sight, drafts)
            marks.repeat(transaction, database, sight, rest)
        return tuple(published[release.name] for release in releases)

    def named(self, tool_id: str, namespace: str | None = None) -> tuple[Listed, ...]:
        """Return every version of a short name, by the order of the actor's namespaces, newest first.

        With a namespace its versions only, whoever it belongs to.
        """
        spaces = self.actor.order if namespace is None else (namespace,)
        if not is_tool_id(tool_id) or not all(map(is_safe_path, spaces)):
            return ()
        where = f"t.tool_id = ? and t.namespace in ({marks_for(spaces)}) and {self._sight.named}{LATEST_ORDER}"
        found = self._listed(where, (tool_id, *spaces, *self._sight.members))
        return tuple(sorted(found, key=lambda one: spaces.index(one.name.namespace)))

    def find(
        self,
        *,
        namespace: str | None = None,
        tool_type: str | None = None,
        is_all_versions: bool = False,
        limit: int | None = None,
    ) -> tuple[Listed, ...]:
        """Return what lists may show to the actor, in the order of names: latest versions, or all of them."""
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

    def by_digest(self, digest: str) -> tuple[Listed, ...]:
        """Return the versions with exactly that content."""
        if not is_digest(digest):
            raise InvalidRequest(
                f"{digest[:100]!r} is not a digest.", suggestion="Write `sha256:` and 64 hexadecimal digits."
            )
        where = f"v.content_hash = ? and {self._sight.named}{LATEST_ORDER}"
        return self._listed(where, (digest, *self._sight.members), BY_VERSION)

    def get(self, version_id: str) -> Listed:
        """Return the version of a row."""
        return self._by_ids([version_id])[0]

    def resolve(self, version_id: str) -> tuple[Link, ...]:
        """Return a version and all it stands on, top first."""
        if not is_id(version_id):
            _nothing(version_id)
        rows = self._database.read(self._resolve, (version_id, *self._sight.members, *self._sight.members))
        return _chain(rows) if rows else _nothing(version_id)

    def resolve_latest(self, tool_id: str) -> tuple[Link, ...]:
        """Return the latest version of a short name and all it stands on, top first."""
        known = is_tool_id(tool_id)
        rows = self._database.read(self._resolve_latest, (tool_id, *self._latest_values)) if known else ()
        if not rows:
            raise ToolNotFound(tool_id)
        return _chain(rows)

    def read(self, version_ids: Sequence[str]) -> tuple[Release, ...]:
        """Return versions with all of their bytes, held against every hash."""
        releases = []
        for contents in read_contents(self._database, self._by_ids(version_ids)):
            release = contents.release
            if contents.issues:
                where = "; ".join(issue.reason for issue in contents.issues[:3])
                raise IntegrityMismatch(
                    release.name.tool_id, expected=contents.digest, actual=release.digest, where=where
                )
            releases.append(release)
        return tuple(releases)

    def mark(
        self, names: Sequence[VersionName], op: marks.MarkOp, reason: str = "", at: str = ""
    ) -> tuple[Listed, ...]:
        """Yank or deprecate versions, or take it back, and return how they stand then."""
        marks.mark(self._database, self._sight, names, op, reason=reason, at=at)
        by_name = {one.name: one for name in {*names} for one in self.named(name.tool_id, name.namespace)}
        return tuple(by_name[name] for name in names)

    def set_visibility(self, namespace: str, tool_id: str, visibility: Visibility) -> None:
        """Let an item be seen by everybody, by whoever knows its name, or by members only."""
        marks.set_visibility(self._database, self._sight, namespace, tool_id, visibility)

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

    def events(self, after: int = 0, limit: int = MAX_EVENTS) -> tuple[Event, ...]:
        """Return the log's entries behind one, oldest first, about what lists may show to the actor."""
        statement = filled(_EVENTS, sees=self._sight.listed)
        rows = self._database.read(statement, (after, *self._sight.members, max(limit, 0)))
        return tuple(map(to_event, rows))

    def history(self, tool_id: str, after: int = 0, limit: int = MAX_EVENTS) -> tuple[Event, ...]:
        """Return the log's entries about the items of one name, which whoever knows the name may see."""
        statement = filled(_HISTORY, sees=self._sight.named)
        rows = self._database.read(statement, (tool_id, after, *self._sight.members, max(limit, 0)))
        return tuple(map(to_event, rows))

    def verify(self, version_ids: Sequence[str] | None = None) -> Iterator[Issue]:
        """Yield whatever is not as it was sealed: in some versions, or in all of the store."""
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

    def _listed(self, where: str, values: Sequence[Value], tables: str = BY_ITEM) -> tuple[Listed, ...]:
        database = self._database
        return tuple(to_listed(row, database) for row in database.read(filled(LISTED, tables=tables) + where, values))

    def _by_ids(self, version_ids: Sequence[str]) -> Sequence[Listed]:
        found: dict[str, Listed] = {}
        for some in chunks({id_: None for id_ in version_ids if is_id(id_)}):
            where = f"v.id in ({marks_for(some)}) and {self._sight.named}"
            found |= {one.id: one for one in self._listed(where, (*some, *self._sight.members), BY_VERSION)}
        return [found.get(id_) or _nothing(id_) for id_ in version_ids]


def _chain(rows: Sequence[Sequence[Value]]) -> tuple[Link, ...]:
    links = tuple(map(Link._make, cast("Sequence[tuple[str, ...]]", rows)))
    if len(links) != links[0].depth:  # a link is not there for this actor
        raise MissingLink(links[0].executor_ref or "", chain=[links[0].tool_id])
    return links


def _nothing(version_id: str) -> NoReturn:
    raise NotFound(
        f"There is no version {version_id[:64]!r} here.", suggestion="List the versions of an item to see their ids."
    )
