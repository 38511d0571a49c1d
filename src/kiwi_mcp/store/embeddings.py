"""Embeddings: filling the index of a registry on PostgreSQL, by whichever kernel has time for it.

Two kernels at once do no harm: each begins at another place, what the other has done is not done again, and every
batch is written whole, with the counts of its words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from kiwi_mcp.domain.registry import Listed
from kiwi_mcp.store.candidates import as_text, compares_vectors
from kiwi_mcp.store.database import Database, Transaction, Value
from kiwi_mcp.store.lexemes import lexemes_of, vector_of
from kiwi_mcp.store.rows import BY_ITEM, FIRST_ID, LISTED, chunks, filled, marks_for, to_listed
from kiwi_mcp.store.sheets import UNUSED_DAYS, days_now

_Lengths: TypeAlias = Sequence[int]

_LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_AT_ONCE = 50
"""How many items are written at a time: others who write have to wait for it, and a vector takes milliseconds."""
_MOST_FORGOTTEN = 1_000
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
_TAKE_OUT = """delete from tool_embeddings where model = ?
  and tool_id = (select v.tool_id from tool_versions v where v.id = ?)"""
_FORGET = """delete from tool_embeddings where (tool_id, model) in (
  select tool_id, model from tool_embeddings where model = ? limit ?)"""


class Leaf(NamedTuple):
    """The latest version of an item as it enters the index: the digest of its text, and what was worked out of it."""

    version_id: str
    digest: bytes
    impacts: Mapping[str, float]
    """How much each stem says about it, from 0 to 1."""
    lengths: _Lengths
    """How many words each field of it has."""
    words: bytes
    vector: bytes = b""


@dataclass(slots=True)
class _Change:
    """By how much a batch changes what is counted."""

    total: int = 0
    held: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)

    def add(self, sign: int, lexemes: Sequence[str], lengths: _Lengths) -> None:
        """Count an item in, or out."""
        self.total += sign
        self.held.update(dict.fromkeys(lexemes, sign))
        self.lengths = [sum(pair) for pair in zip_longest(self.lengths, (sign * one for one in lengths), fillvalue=0)]


@dataclass(slots=True)
class _Walk:
    """A walk past all items, to find those that miss something; later ones pass only what changed meanwhile."""

    least: int
    """How long a vector has to be; 0 where words are enough."""
    legs: list[tuple[str, str]] = field(default_factory=list)
    """From where to where it still has to go, by the ids of items."""
    head: int = -1
    """The last entry of the log when it began."""
    before: int = -1
    """That of the walk before, which has seen all the rest."""

    def begin(self, head: int, start: str) -> None:
        """Set out from somewhere, all the way round."""
        self.before, self.head = self.head, head
        self.legs = [(start, _LAST_ID), (FIRST_ID, start)]

    def give_up(self) -> None:
        """Begin anew the next time: what was found was not written."""
        self.legs, self.head = [], -1


class Embeddings:
    """Everybody's index of one model; a kernel fills it from one thread."""

    def __init__(self, database: Database, model: str) -> None:
        self._database = database
        self._model = model
        self._stale, self._bare = _Walk(least=0), _Walk(least=1)

    @cached_property
    def _compares(self) -> bool:
        return compares_vectors(self._database)

    def progress(self) -> tuple[int, int]:
        """Return how many items can be found by words, and how many of them by meaning too."""
        ((worded, encoded),) = self._database.read(_PROGRESS, (self._model,))
        return int(str(worded)), int(str(encoded))

    def stale(self, limit: int) -> Sequence[Listed]:
        """Return latest versions that cannot be found by their words yet; none, once each was given out."""
        return self._missing(self._stale, limit)

    def bare(self, limit: int) -> Sequence[Listed]:
        """Return latest versions that have no vector yet; none, once each was given out."""
        return self._missing(self._bare, limit)

    def index(self, leaves: Sequence[Leaf]) -> None:
        """Let versions be found, as long as they are the latest; a vector that is there already is kept."""
        try:
            for some in chunks(leaves, _AT_ONCE):
                with self._database.transaction() as transaction:
                    self._write(transaction, some)
        except BaseException:
            self._stale.give_up()
            self._bare.give_up()
            raise

    def take_out(self, version_ids: Sequence[str]) -> None:
        """Let go of what is kept of some versions, since it is damaged: they are missing then, and are made again."""
        with self._database.transaction() as transaction:
            known, change = self._known(transaction, version_ids), _Change()
            for id_, counted in known.items():
                if transaction.write(_TAKE_OUT, (self._model, id_)):
                    change.add(-1, *counted)
            self._count(transaction, change)
        self._stale.give_up()
        self._bare.give_up()

    def tend(self) -> None:
        """Forget some of what models left that no kernel has used for long: now and then, not on a caller's time."""
        with self._database.transaction() as transaction:
            transaction.write(_USE, (days_now(), self._model))
            transaction.write("delete from embedding_lexemes where held <= 0")
            for (model,) in transaction.read(_UNUSED, (days_now() - UNUSED_DAYS,)):
                if not transaction.write(_FORGET, (model, _MOST_FORGOTTEN)):
                    transaction.write("delete from embedding_lexemes where model = ?", (model,))
                    transaction.write("delete from embedding_models where model = ?", (model,))

    def _missing(self, walk: _Walk, limit: int) -> Sequence[Listed]:
        if not walk.legs:
            ((head,),) = self._database.read(_HEAD)
            if head == walk.head:
                return ()
            somewhere = self._database.read(_SOMEWHERE)
            walk.begin(int(str(head)), str(somewhere[0][0]) if somewhere else FIRST_ID)
        statement = filled(_MISSING, changed=_CHANGED if walk.before >= 0 else "? < 0")
        while walk.legs:
            place, end = walk.legs[0]
            rows = self._database.read(statement, (place, end, self._model, walk.least, walk.before, limit))
            if rows:
                walk.legs[0] = (str(rows[-1][-1]), end)
                return [to_listed(row[:-1], self._database) for row in rows]
            walk.legs.pop(0)
        return ()

    def _write(self, transaction: Transaction, leaves: Sequence[Leaf]) -> None:
        known, change = self._known(transaction, [leaf.version_id for leaf in leaves]), _Change()
        for leaf in leaves:
            lexemes = lexemes_of(leaf.impacts)
            if transaction.write(*self._adding(leaf, vector_of(lexemes))):
                change.add(1, [*lexemes], leaf.lengths)
                if leaf.version_id in known:
                    change.add(-1, *known[leaf.version_id])
        self._count(transaction, change)

    def _known(self, transaction: Transaction, ids: Sequence[str]) -> Mapping[str, tuple[Sequence[str], _Lengths]]:
        """Return what the items of some versions hold in the index, whichever version that is from."""
        rows = transaction.read(f"{_KNOWN} ({marks_for(ids)})", (self._model, *ids))
        read = self._database.decode_list
        return {str(id_): (read(lexemes), [*map(int, read(lengths))]) for id_, lexemes, lengths in rows}

    def _adding(self, leaf: Leaf, fts: str) -> tuple[str, Sequence[Value]]:
        statement = filled(_ADD, **(_COMPARED if self._compares else _KEPT_ONLY))
        dimension, embedding = max(len(leaf.vector) - 4, 0), as_text(leaf.vector) or None
        lengths = self._database.encode_list([*map(str, leaf.lengths)])
        values = (self._model, dimension, leaf.digest.hex(), lengths, fts, leaf.words, leaf.vector)
        return statement, (*values, *([embedding] if self._compares else []), leaf.version_id)

    def _count(self, transaction: Transaction, change: _Change) -> None:
        rows = transaction.read(_MODEL, (self._model,))
        before = [*map(int, self._database.decode_list(rows[0][1]))] if rows else []
        lengths = [sum(pair) for pair in zip_longest(before, change.lengths, fillvalue=0)]
        total = (int(str(rows[0][0])) if rows else 0) + change.total
        as_list = self._database.encode_list
        transaction.write(_COUNT, (self._model, total, as_list([*map(str, lengths)]), days_now()))
        if held := {lexeme: str(count) for lexeme, count in change.held.items() if count}:
            transaction.write(_HOLD, (self._model, as_list([*held]), as_list([*held.values()])))
