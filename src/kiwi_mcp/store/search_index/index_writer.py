"""PostgreSQL: fills and prunes the index of a registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from kiwi_mcp.domain.registry import VersionInfo
from kiwi_mcp.store.database import Database, Transaction, Value
from kiwi_mcp.store.registry.rows import BY_ITEM, FIRST_ID, LISTED, chunks, filled, placeholders, to_listed
from kiwi_mcp.store.search_index.candidates import as_text, compares_vectors, lexemes_of, vector_of
from kiwi_mcp.store.search_index.feature_cache import UNUSED_DAYS, days_now

_Lengths: TypeAlias = Sequence[int]

_LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_AT_ONCE = 50
"""How many items are written at a time: other writers wait for it, and a vector takes milliseconds."""
_MAX_REMOVED = 1_000
_HEAD = "select coalesce(max(seq), 0) from registry_log"
_SOMEWHERE = "select id from tools order by id offset (select floor(random() * count(*))::bigint from tools) limit 1"
_MISSES = """v.is_latest = true and v.yanked_at is null and t.is_builtin = false and t.id > ? and t.id <= ?
  and not exists (select 1 from tool_embeddings e where e.tool_id = t.id and e.model = ? and e.version_id = v.id
    and e.dim >= ?) and $changed order by t.id limit ?"""
_MISSING = filled(LISTED, tables=BY_ITEM).replace("\nfrom", ", t.id\nfrom") + _MISSES
_CHANGED = """exists (
    select 1 from registry_log l where l.tool_id = t.tool_id and l.namespace = t.namespace and l.seq > ?)"""
_KNOWN = """select v.id, tsvector_to_array(e.fts), e.lengths::text[]
from tool_versions v join tool_embeddings e on e.tool_id = v.tool_id
where e.model = ? and v.id in"""
_ADD = """insert into tool_embeddings (tool_id, version_id, namespace, visibility, tool_type, category, tags, model,
  dim, text_hash, lengths, fts, words, vector$column)
select t.id, v.id, t.namespace, t.visibility, t.tool_type, coalesce(t.category, ''), t.tags, ?, ?, ?, ?::integer[],
  ?::tsvector, ?, ?$value
from tool_versions v join tools t on t.id = v.tool_id where v.id = ? and v.is_latest = true
on conflict (tool_id, model) do update set version_id = excluded.version_id, tool_type = excluded.tool_type,
  category = excluded.category, tags = excluded.tags, dim = excluded.dim, text_hash = excluded.text_hash,
  lengths = excluded.lengths, fts = excluded.fts, words = excluded.words, vector = excluded.vector$change
where tool_embeddings.version_id <> excluded.version_id or tool_embeddings.dim < excluded.dim"""
_COMPARED = {"column": ", embedding", "value": ", ?::halfvec", "change": ", embedding = excluded.embedding"}
_KEPT_ONLY = dict.fromkeys(_COMPARED, "")
_MODEL = "select total, lengths::text[] from embedding_models where model = ?"
_COUNT = """insert into embedding_models (model, total, lengths, used_on) values (?, ?, ?::bigint[], ?)
on conflict (model) do update set total = excluded.total, lengths = excluded.lengths, used_on = excluded.used_on"""
_USE = "update embedding_models set used_on = ? where model = ?"
_HOLD = """insert into embedding_lexemes (model, lexeme, held)
select ?, added.lexeme, added.held from unnest(?::text[], ?::bigint[]) as added (lexeme, held) order by added.lexeme
on conflict (model, lexeme) do update set held = embedding_lexemes.held + excluded.held"""
_PROGRESS = "select count(*), count(*) filter (where dim > 0) from tool_embeddings where model = ?"
_UNUSED = "select model from embedding_models where used_on < ?"
_REMOVE = """delete from tool_embeddings where model = ?
  and tool_id = (select v.tool_id from tool_versions v where v.id = ?)"""
_FORGET = """delete from tool_embeddings where (tool_id, model) in (
  select tool_id, model from tool_embeddings where model = ? limit ?)"""


class IndexedVersion(NamedTuple):
    """The latest version of an item as the index stores it: the digest of its text, and its features."""

    version_id: str
    digest: bytes
    impacts: Mapping[str, float]
    """The impact of each stem on its score, from 0 to 1."""
    lengths: _Lengths
    """The number of words of each field."""
    words: bytes
    vector: bytes = b""


class _Change(Struct):
    """The changes of a batch to the counts."""

    total: int = 0
    held: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)

    def add(self, sign: int, lexemes: Sequence[str], lengths: _Lengths) -> None:
        """Add an item to the counts, or remove it."""
        self.total += sign
        self.held.update(dict.fromkeys(lexemes, sign))
        self.lengths = [sum(pair) for pair in zip_longest(self.lengths, (sign * one for one in lengths), fillvalue=0)]


class _Scan(Struct):
    """A scan of all items for those with missing features; later scans cover only what changed since."""

    least: int
    """The minimum length of a vector; 0 where words are enough."""
    ranges: list[tuple[str, str]] = field(default_factory=list)
    """The ranges of item ids that are not scanned yet."""
    head: int = -1
    """The last entry of the log when the scan began."""
    before: int = -1
    """The last entry of the log when the previous scan began, which covered everything before."""

    def begin(self, head: int, start: str) -> None:
        """Start a scan at some item; it wraps around and covers all items."""
        self.before, self.head = self.head, head
        self.ranges = [(start, _LAST_ID), (FIRST_ID, start)]

    def restart(self) -> None:
        """Start over the next time: what was found was not written."""
        self.ranges, self.head = [], -1


class Embeddings:
    """The index of one model, shared by all actors; a kernel fills it from one thread."""

    def __init__(self, database: Database, model: str) -> None:
        self._database = database
        self._model = model
        self._words_scan, self._vectors_scan = _Scan(least=0), _Scan(least=1)

    @cached_property
    def _compares(self) -> bool:
        return compares_vectors(self._database)

    def progress(self) -> tuple[int, int]:
        """Return how many items can be found by words, and how many of them by meaning too."""
        ((worded, encoded),) = self._database.read(_PROGRESS, (self._model,))
        return int(str(worded)), int(str(encoded))

    def without_words(self, limit: int) -> Sequence[VersionInfo]:
        """Return latest versions that cannot be found by their words yet; each is returned once."""
        return self._missing(self._words_scan, limit)

    def without_vectors(self, limit: int) -> Sequence[VersionInfo]:
        """Return latest versions that have no vector yet; each is returned once."""
        return self._missing(self._vectors_scan, limit)

    def index(self, versions: Sequence[IndexedVersion]) -> None:
        """Write versions to the index, if they are still the latest; an existing vector is kept."""
        try:
            for some in chunks(versions, _AT_ONCE):
                with self._database.transaction() as transaction:
                    self._write(transaction, some)
        except BaseException:
            self._words_scan.restart()
            self._vectors_scan.restart()
            raise

    def remove(self, version_ids: Sequence[str]) -> None:
        """Remove damaged versions from the index. They count as missing then, and are indexed again."""
        with self._database.transaction() as transaction:
            known, change = self._known(transaction, version_ids), _Change()
            for id_, counted in known.items():
                if transaction.write(_REMOVE, (self._model, id_)):
                    change.add(-1, *counted)
            self._count(transaction, change)
        self._words_scan.restart()
        self._vectors_scan.restart()

    def maintain(self) -> None:
        """Remove part of the index of models that no kernel has used for long. This runs outside of a request."""
        with self._database.transaction() as transaction:
            transaction.write(_USE, (days_now(), self._model))
            transaction.write("delete from embedding_lexemes where held <= 0")
            for (model,) in transaction.read(_UNUSED, (days_now() - UNUSED_DAYS,)):
                if not transaction.write(_FORGET, (model, _MAX_REMOVED)):
                    transaction.write("delete from embedding_lexemes where model = ?", (model,))
                    transaction.write("delete from embedding_models where model = ?", (model,))

    def _missing(self, scan: _Scan, limit: int) -> Sequence[VersionInfo]:
        if not scan.ranges:
            ((head,),) = self._database.read(_HEAD)
            if head == scan.head:
                return ()
            somewhere = self._database.read(_SOMEWHERE)
            scan.begin(int(str(head)), str(somewhere[0][0]) if somewhere else FIRST_ID)
        statement = filled(_MISSING, changed=_CHANGED if scan.before >= 0 else "? < 0")
        while scan.ranges:
            place, end = scan.ranges[0]
            rows = self._database.read(statement, (place, end, self._model, scan.least, scan.before, limit))
            if rows:
                scan.ranges[0] = (str(rows[-1][-1]), end)
                return [to_listed(row[:-1], self._database) for row in rows]
            scan.ranges.pop(0)
        return ()

    def _write(self, transaction: Transaction, versions: Sequence[IndexedVersion]) -> None:
        known, change = self._known(transaction, [version.version_id for version in versions]), _Change()
        for version in versions:
            lexemes = lexemes_of(version.impacts)
            if transaction.write(*self._adding(version, vector_of(lexemes))):
                change.add(1, [*lexemes], version.lengths)
                if version.version_id in known:
                    change.add(-1, *known[version.version_id])
        self._count(transaction, change)

    def _known(self, transaction: Transaction, ids: Sequence[str]) -> Mapping[str, tuple[Sequence[str], _Lengths]]:
        """Return the indexed lexemes and lengths of the items of some versions, from whichever version is indexed."""
        rows = transaction.read(f"{_KNOWN} ({placeholders(ids)})", (self._model, *ids))
        read = self._database.decode_list
        return {str(id_): (read(lexemes), [*map(int, read(lengths))]) for id_, lexemes, lengths in rows}

    def _adding(self, version: IndexedVersion, fts: str) -> tuple[str, Sequence[Value]]:
        statement = filled(_ADD, **(_COMPARED if self._compares else _KEPT_ONLY))
        dimension, embedding = max(len(version.vector) - 4, 0), as_text(version.vector) or None
        lengths = self._database.encode_list([*map(str, version.lengths)])
        values = (self._model, dimension, version.digest.hex(), lengths, fts, version.words, version.vector)
        return statement, (*values, *([embedding] if self._compares else []), version.version_id)

    def _count(self, transaction: Transaction, change: _Change) -> None:
        rows = transaction.read(_MODEL, (self._model,))
        before = [*map(int, self._database.decode_list(rows[0][1]))] if rows else []
        lengths = [sum(pair) for pair in zip_longest(before, change.lengths, fillvalue=0)]
        total = (int(str(rows[0][0])) if rows else 0) + change.total
        as_list = self._database.encode_list
        transaction.write(_COUNT, (self._model, total, as_list([*map(str, lengths)]), days_now()))
        if held := {lexeme: str(count) for lexeme, count in change.held.items() if count}:
            transaction.write(_HOLD, (self._model, as_list([*held]), as_list([*held.values()])))
