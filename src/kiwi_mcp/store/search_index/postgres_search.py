"""PostgreSQL finds candidates by words (`tsvector`) and by vectors (pgvector), in an index that kernels fill."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, cast

from msgspec import Struct, field

from kiwi_mcp.domain.names import is_tool_id
from kiwi_mcp.domain.registry import Actor, VersionInfo
from kiwi_mcp.store.database import Database, Transaction, Value, within
from kiwi_mcp.store.registry.rows import (
    BY_ITEM,
    FIRST_ID,
    LISTED,
    VisibilityFilter,
    chunks,
    filled,
    placeholders,
    to_listed,
)
from kiwi_mcp.store.search_index.feature_cache import UNUSED_DAYS, days_now

MAX_STEMS = 32  # how many stems of a query are used: those with the largest weights
MAX_MATCHES = 4_000  # how many items the server scores by default; each is read from the table

_LABELS = "DCBA"
_IMPACTS = (0.35, 0.5, 0.6)  # the minimum impact of each label after the first
_USUAL = (0.22, 0.42, 0.55, 0.71)  # the usual impact under each label
_STRONG = 2  # the label from which a stem gets a second lexeme

WEIGHTS = "{" + ", ".join(map(str, _USUAL)) + "}"  # the weight of each label in PostgreSQL


def strong(stem: str) -> str:
    """Return the second lexeme of a stem with a high impact; no stem ends with `+`."""
    return f"{stem}+"


def lexemes_of(impacts: Mapping[str, float]) -> Mapping[str, str]:
    """Return the lexemes of an item from the impacts of its stems, and the label of each."""
    labelled: dict[str, str] = {}
    for stem, impact in impacts.items():
        level = bisect_right(_IMPACTS, impact)
        labelled[stem] = _LABELS[level]
        if level >= _STRONG:
            labelled[strong(stem)] = _LABELS[level]
    return labelled


def quoted(lexeme: str) -> str:
    """Return a lexeme, quoted for a `tsvector` or a `tsquery`."""
    escaped = lexeme.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def choose_lexemes(stems: Mapping[str, float], held: Mapping[str, int], most: int) -> Sequence[str]:
    """Return the lexemes that find the best matches: the most significant first, as long as few items contain them.

    `held` says how many items contain each lexeme. An item that only contains very common words is not found by them,
    unless the request has no other words.
    """
    choices = [(weight * _USUAL[-1], strong(stem)) for stem, weight in stems.items()]
    choices += [(weight * _USUAL[0], stem) for stem, weight in stems.items()]
    worth = [(value, lexeme) for value, lexeme in choices if held.get(lexeme)]
    chosen: list[str] = []
    left = most
    for _, lexeme in sorted(worth, reverse=True):
        # The items of the second lexeme are among those of the first, so both cost no more than one.
        again = held[strong(lexeme)] if strong(lexeme) in chosen else 0
        if held[lexeme] - again <= left:
            chosen.append(lexeme)
            left -= held[lexeme] - again
    return chosen or sorted((lexeme for _, lexeme in worth), key=lambda lexeme: held[lexeme])[:1]


COORDINATES = 384
"""The length of the vectors that the server compares: a signed byte for each coordinate, then their scale."""

_TIMEOUT = 10.0
_MIN_NEAR = 30  # the minimum number of items found by each part of a query
_BY_WORDS = """select e.tool_id from (
    select e.tool_id, e.fts from tool_embeddings e where e.model = ? and e.fts @@ ?::tsquery and $wanted limit ?
  ) as e order by $score desc limit ?"""
_SCORE = f"?::float8 * ts_rank('{WEIGHTS}', e.fts, ?::tsquery)"
_BY_MEANING = f"""select near.tool_id from unnest(?::text[]) as asked (vector) cross join lateral (
    select e.tool_id from tool_embeddings e
    where e.model = ? and e.dim = {COORDINATES} and $wanted
    order by e.embedding::halfvec({COORDINATES}) <=> asked.vector::halfvec({COORDINATES}) limit ?
  ) as near"""  # noqa: S608 - a number of ours
_BY_NAME = "select t.id from tools t where t.tool_id = any(?::text[])"
# Visibility and yanks are read from the item itself: the index may be seconds behind.
_FOUND = (
    filled(LISTED, tables="tool_embeddings e cross join tools t cross join tool_versions v").replace(
        "v.manifest,", "'{}' as manifest,"
    )
    + """t.id = e.tool_id and e.model = ? and e.tool_id in ($found) and v.is_latest = true and v.yanked_at is null
  and t.is_builtin = false and $sees"""
).replace("\nfrom", ", e.text_hash, e.words, e.vector\nfrom")
# What was published last may not be in the index yet: the last rows of the log name those items.
_UNINDEXED = """v.is_latest = true and v.yanked_at is null and t.is_builtin = false and $sees
  and (t.namespace, t.tool_id) in (
    select l.namespace, l.tool_id from registry_log l order by l.seq desc limit ?)
  and not exists (
    select 1 from tool_embeddings e where e.tool_id = t.id and e.model = ? and e.version_id = v.id)"""
_FRESH = filled(LISTED, tables=BY_ITEM) + _UNINDEXED
_HELD = "select lexeme, held from embedding_lexemes where model = ? and lexeme = any(?::text[]) and held > 0"
_COUNTED = """select m.total, m.lengths::text[], l.lexeme, l.held from embedding_models m
left join embedding_lexemes l on l.model = m.model and l.lexeme = any(?::text[]) and l.held > 0 where m.model = ?"""
_BEGINNING = """select lexeme, held from embedding_lexemes
where model = ? and lexeme >= ? and starts_with(lexeme, ?) and right(lexeme, 1) <> '+' and held > 0
order by lexeme limit ?"""
_IS_COMPARED = """select 1 from pg_attribute
where attrelid = 'tool_embeddings'::regclass and attname = 'embedding' and atttypid = to_regtype('halfvec')"""


class CandidateFilter(Struct, frozen=True):
    """Which items are candidates; an empty list does not filter."""

    namespaces: Sequence[str] = ()
    tool_types: Sequence[str] = ()
    tags: Sequence[str] = ()
    categories: Sequence[str] = ()  # a category covers the categories below it


EVERYTHING = CandidateFilter()


class TermCounts(NamedTuple):
    """How many items the index holds for all actors, how many contain each stem, and the average field lengths."""

    total: int = 0
    held: Mapping[str, int] = MappingProxyType({})
    usual: tuple[float, ...] = ()  # how many words each field of a text has, on average


class SearchCandidate(NamedTuple):
    """An item that may match a request, with the stored features of its text; its manifest is left out."""

    listed: VersionInfo
    digest: bytes
    words: bytes
    vector: bytes


class PostgresSearch:
    """What one actor may find in a registry on PostgreSQL; several threads may use it."""

    def __init__(self, database: Database, actor: Actor, model: str, *, max_matches: int = MAX_MATCHES) -> None:
        self._database = database
        self._visibility = VisibilityFilter(actor)
        self._model = model
        self._max_matches = max_matches

    @cached_property
    def _compares(self) -> bool:
        """Whether the server can search by vectors; without pgvector it finds words only."""
        return bool(self._database.read(_IS_COMPARED))

    def counts(self, stems: Sequence[str] = ()) -> TermCounts:
        """Return the counts that show how rare each stem is, and the usual text lengths."""
        with within(_TIMEOUT):
            rows = self._database.read(_COUNTED, (self._database.encode_list(stems), self._model))
        if not rows:
            return TermCounts()
        total, lengths = int(str(rows[0][0])), self._database.decode_list(rows[0][1])
        held = {str(lexeme): int(str(held)) for *_, lexeme, held in rows if lexeme is not None}
        return TermCounts(total, held, tuple(int(length) / max(total, 1) for length in lengths))

    def beginning_with(self, word: str, most: int) -> Mapping[str, int]:
        """Return some stems with a prefix, and how many items hold each."""
        with within(_TIMEOUT):
            rows = self._database.read(_BEGINNING, (self._model, word, word, most))
        return {str(lexeme): int(str(held)) for lexeme, held in rows}

    def find(
        self,
        stems: Mapping[str, float],
        vectors: Sequence[bytes],
        *,
        limit: int = 300,
        wanted: CandidateFilter = EVERYTHING,
        names: Sequence[str] = (),
    ) -> Sequence[SearchCandidate]:
        """Return about `limit` items: the best by weighted stems, the nearest to the vectors, and those in `names`."""
        parts = [*self._by_words(stems, limit, wanted), *self._by_meaning(vectors, limit, wanted)]
        if known := [*filter(is_tool_id, names)]:
            parts.append((_BY_NAME, [self._database.encode_list(known)]))
        if not parts:
            return ()
        found = " union ".join(f"({statement})" for statement, _ in parts)
        values = [value for _, some in parts for value in some]
        statement = filled(_FOUND, found=found, sees=self._visibility.listed)
        with within(_TIMEOUT):
            rows = self._database.read(statement, (self._model, *values, *self._visibility.members))
        return [
            SearchCandidate(to_listed(tuple(listed), self._database), bytes.fromhex(str(text_hash)), words, vector)
            for *listed, text_hash, words, vector in cast("Sequence[tuple[str, str, bytes, bytes]]", rows)
        ]

    def fresh(self, most: int) -> Sequence[VersionInfo]:
        """Return the items published last that are not in the index yet."""
        with within(_TIMEOUT):
            rows = self._database.read(
                filled(_FRESH, sees=self._visibility.listed), (*self._visibility.members, most, self._model)
            )
        return [to_listed(row, self._database) for row in rows]

    def _by_words(
        self, stems: Mapping[str, float], limit: int, wanted: CandidateFilter
    ) -> Sequence[tuple[str, Sequence[Value]]]:
        heavy = dict(sorted(stems.items(), key=lambda one: -one[1])[:MAX_STEMS])
        held: Mapping[str, int] = {}
        if heavy:
            lexemes = self._database.encode_list([*heavy, *map(strong, heavy)])
            with within(_TIMEOUT):
                rows = self._database.read(_HELD, (self._model, lexemes))
            held = {str(lexeme): int(str(count)) for lexeme, count in rows}
        asked = choose_lexemes(heavy, held, self._max_matches)
        if not asked:
            return ()
        condition, filters = self._wanted(wanted)
        score = " + ".join([_SCORE] * len(heavy))
        weights: list[Value] = [value for stem, weight in heavy.items() for value in (weight, quoted(stem))]
        query = " | ".join(map(quoted, asked))
        values = (self._model, query, *filters, 2 * self._max_matches, *weights, max(limit // 2, 1))
        return [(filled(_BY_WORDS, wanted=condition, score=score), values)]

    def _by_meaning(
        self, vectors: Sequence[bytes], limit: int, wanted: CandidateFilter
    ) -> Sequence[tuple[str, Sequence[Value]]]:
        asked = [text for vector in vectors if (text := as_text(vector))]
        if not asked or not self._compares:
            return ()
        condition, filters = self._wanted(wanted)
        each = max(limit // (2 * len(asked)), _MIN_NEAR)
        values = (self._database.encode_list(asked), self._model, *filters, each)
        return [(filled(_BY_MEANING, wanted=condition), values)]

    def _wanted(self, wanted: CandidateFilter) -> tuple[str, Sequence[Value]]:
        """Return the SQL condition for a filter, and its values."""
        # The index stores who may see an item; the far larger table of items is read at the end.
        conditions, values = [self._visibility.listed.replace("t.", "e.")], [*self._visibility.members]
        for column, some in (("e.namespace", wanted.namespaces), ("e.tool_type", wanted.tool_types)):
            if some:
                conditions.append(f"{column} in ({placeholders(some)})")
                values += some
        if wanted.tags:
            conditions.append("e.tags && ?::text[]")
            values.append(self._database.encode_list(wanted.tags))
        if wanted.categories:
            below = " or ".join(["starts_with(e.category || '/', ?)"] * len(wanted.categories))
            conditions.append(f"({below})")
            values += (f"{category}/" for category in wanted.categories)
        return " and ".join(conditions), values


def as_text(vector: bytes) -> str:
    """Return a packed vector as the server reads it, without its scale; "" if it has another length."""
    return str(memoryview(vector)[:COORDINATES].cast("b").tolist()) if len(vector) == COORDINATES + 4 else ""


_Lengths: TypeAlias = Sequence[int]

_LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_AT_ONCE = 50  # how many items are written at a time: other writers wait for it, and a vector takes milliseconds
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
    impacts: Mapping[str, float]  # the impact of each stem on its score, from 0 to 1
    lengths: _Lengths  # the number of words of each field
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

    least: int  # the minimum length of a vector; 0 where words are enough
    ranges: list[tuple[str, str]] = field(default_factory=list)  # the ranges of item ids that are not scanned yet
    head: int = -1  # the last entry of the log when the scan began
    before: int = -1  # the last entry of the log when the previous scan began, which covered everything before

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
        return bool(self._database.read(_IS_COMPARED))

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
        statement = filled(_ADD, **(_COMPARED if self._compares else _KEPT_ONLY))
        for version in versions:
            lexemes = lexemes_of(version.impacts)
            fts = " ".join(f"{quoted(lexeme)}:1{label}" for lexeme, label in lexemes.items())
            embedding = [as_text(version.vector) or None] if self._compares else []
            values = (
                max(len(version.vector) - 4, 0),
                version.digest.hex(),
                self._database.encode_list([*map(str, version.lengths)]),
                fts,
                version.words,
                version.vector,
            )
            if transaction.write(statement, (self._model, *values, *embedding, version.version_id)):
                change.add(1, [*lexemes], version.lengths)
                if version.version_id in known:
                    change.add(-1, *known[version.version_id])
        self._count(transaction, change)

    def _known(self, transaction: Transaction, ids: Sequence[str]) -> Mapping[str, tuple[Sequence[str], _Lengths]]:
        """Return the indexed lexemes and lengths of the items of some versions, from whichever version is indexed."""
        rows = transaction.read(f"{_KNOWN} ({placeholders(ids)})", (self._model, *ids))
        read = self._database.decode_list
        return {str(id_): (read(lexemes), [*map(int, read(lengths))]) for id_, lexemes, lengths in rows}

    def _count(self, transaction: Transaction, change: _Change) -> None:
        rows = transaction.read(_MODEL, (self._model,))
        before = [*map(int, self._database.decode_list(rows[0][1]))] if rows else []
        lengths = [sum(pair) for pair in zip_longest(before, change.lengths, fillvalue=0)]
        total = (int(str(rows[0][0])) if rows else 0) + change.total
        as_list = self._database.encode_list
        transaction.write(_COUNT, (self._model, total, as_list([*map(str, lengths)]), days_now()))
        if held := {lexeme: str(count) for lexeme, count in change.held.items() if count}:
            transaction.write(_HOLD, (self._model, as_list([*held]), as_list([*held.values()])))
