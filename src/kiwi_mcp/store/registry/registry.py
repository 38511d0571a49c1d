"""`Registry`: the versions that one actor sees and changes; items changed since an entry; a check of everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import NoReturn, cast

from kiwi_mcp.domain.errors import IntegrityMismatch, InvalidRequest, MissingLink, NotFound, StoreDamaged
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.names import Version, is_safe_path, is_tool_id
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
    closure_in,
    is_digest,
)
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store.database import Database, Row, Value
from kiwi_mcp.store.registry import publish as publishing
from kiwi_mcp.store.registry.release_check import MAX_LINKS, CheckedRelease
from kiwi_mcp.store.registry.rows import (
    BY_ITEM,
    BY_VERSION,
    FIRST_ID,
    LATEST_ORDER,
    LISTED,
    SealedVersion,
    VersionRank,
    VisibilityFilter,
    as_bytes,
    chunks,
    filled,
    is_id,
    latest_of,
    look_up,
    placeholders,
    read_by,
    read_contents,
    to_event,
    to_listed,
)

MAX_EVENTS = 10_000  # how many entries of the log are given at a time, unless fewer are asked for

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
        drafts = publishing.version_drafts(releases, self.actor, is_seeding=is_seeding)
        database, sight = self._database, self._sight
        with database.transaction() as transaction:
            # Set visibilities first: a version may use a private executor only if its own item is private.
            rest = publishing.apply_visibilities(transaction, sight, events)
            published = publishing.publish(transaction, database, sight, drafts)
            publishing.replay_status(transaction, database, sight, rest)
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
        self, names: Sequence[VersionName], op: publishing.StatusOp, reason: str = "", at: str = ""
    ) -> tuple[VersionInfo, ...]:
        """Yank or deprecate versions, or take it back, and return them with their new status."""
        with self._database.transaction() as transaction:
            publishing.set_status(transaction, self._database, self._sight, names, op, reason=reason, at=at)
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
            return verify_store(self._database, self._sight)
        return verify_versions(self._database, self._by_ids(version_ids))

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


MOST = 500  # how many items are looked at one by one; where more changed, all are listed again

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


_PAGE = "v.id > ? order by v.id limit 100"
_SEALED = """select v.id, v.version, v.version_key, v.is_prerelease, v.closure_hash, v.depth,
  et.namespace, et.tool_id, e.version, e.content_hash, e.closure_hash, e.depth
from tool_versions v left join tool_versions e on e.id = v.executor_version_id left join tools et on et.id = e.tool_id
where v.id in ($marks)"""
_TOOLS = """select t.id, t.namespace, t.tool_id, t.visibility, t.latest_version, v.id, v.version, v.version_key,
  v.is_prerelease, v.yanked_at, v.is_latest
from tools t left join tool_versions v on v.tool_id = t.id
where t.id in (select id from tools where id > ? order by id limit 500) order by t.id"""
_CONTRADICTIONS = {
    "the log does not say that it was published as it is": """select t.namespace, t.tool_id, v.version, t.visibility
      from tool_versions v join tools t on t.id = v.tool_id
      left join registry_log l on l.op = 'publish' and l.namespace = t.namespace and l.tool_id = t.tool_id
        and l.version = v.version and l.content_hash = v.content_hash and l.closure_hash = v.closure_hash
      where l.seq is null""",
    "the log says that it was published, and it is missing": """
      select l.namespace, l.tool_id, l.version, coalesce(t.visibility, 'private')
      from registry_log l left join tools t on t.namespace = l.namespace and t.tool_id = l.tool_id
      left join tool_versions v on v.tool_id = t.id and v.version = l.version
      where l.op = 'publish' and v.id is null""",
    "it is visible to some who cannot see what it depends on": """
      select t.namespace, t.tool_id, v.version, t.visibility
      from tools et join tool_versions e on e.tool_id = et.id join tool_versions v on v.executor_version_id = e.id
      join tools t on t.id = v.tool_id
      where et.visibility = 'private' and (t.visibility <> 'private' or t.namespace <> et.namespace)""",
}
_ORPHANS = {
    "versions without an item": "tool_versions x left join tools y on y.id = x.tool_id where y.id is null",
    "files without a version": """tool_version_files x left join tool_versions y on y.id = x.tool_version_id
      where y.id is null""",
    "versions without what they depend on": """tool_versions x left join tool_versions y on y.id = x.executor_version_id
      where x.executor_version_id is not null and y.id is null""",
    "items without a namespace": """tools x left join namespaces y on y.namespace = x.namespace
      where y.namespace is null""",
}
_LOOSE_BLOBS = """select sha256, size_bytes, content from blobs where sha256 > ? and not exists
  (select 1 from tool_version_files where storage_key = 'sha256:' || blobs.sha256) order by sha256 limit 20"""
_RESTORE = "Restore the store from a backup, or pull from a remote into a new store."
_HIDDEN = Issue("a private version", "it is not what was published", "Let a member of its namespace verify it.")


def verify_store(database: Database, sight: VisibilityFilter) -> Iterator[Issue]:
    """Yield every fault in a store. Faults in items that the actor cannot see are reported without details."""
    try:
        if database.dialect == "sqlite":
            faults = (str(row[0]) for row in database.read("PRAGMA integrity_check"))
            yield from (Issue("store", fault[:400], _RESTORE) for fault in faults if fault != "ok")
        yield from publishing.broken_log(database)
        for what, rows in _ORPHANS.items():
            ((count,),) = database.read(f"select count(*) from {rows}")  # noqa: S608 - our own words
            if count:
                yield Issue("store", f"{count!s} {what}", _RESTORE)
        after = FIRST_ID
        while found := database.read(filled(LISTED, tables=BY_VERSION) + _PAGE, (after,)):
            page = [to_listed(row, database) for row in found]
            after = page[-1].id
            visible = {str(one.name): sight.sees(one.name.namespace, one.visibility) for one in page}
            for issue in verify_versions(database, page):
                yield issue if visible.get(issue.place, True) else _HIDDEN
        yield from _wrong_latest(database, sight)
        for fault, statement in _CONTRADICTIONS.items():
            for namespace, tool_id, version, visibility in database.read(statement):
                name = VersionName(str(namespace), str(tool_id), str(version))
                is_seen = sight.sees(name.namespace, str(visibility))
                yield Issue(str(name), fault, _RESTORE) if is_seen else _HIDDEN
        blob = ""
        while found := database.read(_LOOSE_BLOBS, (blob,)):
            for hashed, size, content in found:
                blob, data = str(hashed), as_bytes(content)
                if (sha256(data).hexdigest(), len(data)) != (hashed, size):
                    yield Issue(f"blob {blob}", "its bytes are not those it is named for", _RESTORE)
    except StoreDamaged as damage:
        yield Issue("store", damage.message, damage.suggestion)


def verify_versions(database: Database, listed: Sequence[VersionInfo]) -> Iterator[Issue]:
    """Yield every fault of some versions: in their files, their hashes, and their executors."""
    for contents in read_contents(database, listed):
        yield from contents.issues
    by_id = {one.id: one for one in listed}
    named = look_up(database, (pin.name.item for one in listed for pin in one.references)).versions
    for row in read_by(database, _SEALED, by_id):
        one = by_id[str(row[0])]
        yield from (Issue(str(one.name), fault, _RESTORE) for fault in _row_faults(row, one, named))


def _row_faults(row: Row, listed: VersionInfo, named: Mapping[VersionName, SealedVersion]) -> Iterator[str]:
    _, text, key, is_prerelease, closure, depth, *name, below_digest, below_closure, below_depth = cast(
        "tuple[str, str, str, bool, str, int, str, str, str, str | None, str | None, int | None]", row
    )
    pin, closures = listed.executor, {name: one.closure for name, one in named.items()}
    version = Version.parse(text)
    if version is None or (version.key, bool(version.pre)) != (key, bool(is_prerelease)):
        yield "its place in the order of versions is wrong"
    below = VersionName(*map(str, name))
    if any(not one.is_builtin and one.name not in named for one in listed.references) or (
        pin is not None and below_closure is None and not pin.is_builtin
    ):
        yield "what it depends on is missing"
    elif (
        (below_closure is not None and (pin is None or (pin.name, pin.digest) != (below, below_digest)))
        or any(not one.is_builtin and named[one.name].digest != one.digest for one in listed.references)
        or closure_in(listed, {**closures, below: below_closure or ""}) != closure
        or (below_depth or 0) + 1 != depth
    ):
        yield "it does not depend on what it was published with"


def _wrong_latest(database: Database, sight: VisibilityFilter) -> Iterator[Issue]:
    """Yield the items whose latest version is not the one that it should be."""
    after = FIRST_ID
    while found := database.read(_TOOLS, (after,)):
        for tool, group in groupby(found, key=lambda row: row[0]):
            after = str(tool)
            rows = [*group]
            _, namespace, tool_id, visibility, stated = map(str, rows[0][:5])
            ranks = {
                VersionRank(str(id_), str(key), bool(is_pre), yanked is not None, bool(is_latest)): str(version)
                for *_, id_, version, key, is_pre, yanked, is_latest in rows
                if id_ is not None
            }
            marked = [one for one in ranks if one.is_latest]
            if not ranks:
                fault = "it has no version"
            elif marked != [latest_of(ranks)]:
                fault = f"{len(marked)} of its versions are marked as the latest, or another one should be"
            elif ranks[marked[0]] != stated:
                fault = f"its latest version is given as {stated}"
            else:
                continue
            fix = "Yank and unyank one of its versions: the latest is then chosen again."
            yield Issue(f"{namespace}/{tool_id}", fault, fix) if sight.sees(namespace, visibility) else _HIDDEN
