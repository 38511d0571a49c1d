"""Candidates: the few items of a large registry that may answer a request, found on the PostgreSQL server that has it.

A kernel does not load such a registry. The server finds the best by words (a GIN index over our own stems) and the
nearest in meaning (an HNSW index over vectors); whoever asks scores what is found as it scores everything else.
A model is a recipe for words and vectors: those of two models are never compared, and live side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, cast

from kiwi_mcp.domain.paths import is_tool_id
from kiwi_mcp.domain.registry import Actor, Listed
from kiwi_mcp.store.database import Database, Value, within
from kiwi_mcp.store.lexemes import MOST_MATCHES, WEIGHTS, asked_for, quoted, strong, weightiest
from kiwi_mcp.store.rows import BY_ITEM, LISTED, Sight, filled, marks_for, to_listed

COORDINATES = 384
"""How long the vectors are that the server compares: a signed byte for each, with their scale behind them."""

_PATIENCE = 10.0
_FEWEST_NEAR = 30
"""How many items are found by each part of a request that has many."""
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
# Who may see an item, and whether it was yanked, is asked of the item itself: the index may be seconds behind.
_FOUND = (
    filled(LISTED, tables="tool_embeddings e cross join tools t cross join tool_versions v").replace(
        "v.manifest,", "'{}' as manifest,"
    )
    + """t.id = e.tool_id and e.model = ? and e.tool_id in ($found) and v.is_latest = true and v.yanked_at is null
  and t.is_builtin = false and $sees"""
).replace("\nfrom", ", e.text_hash, e.words, e.vector\nfrom")
# What was published last is rarely in the index already: few rows of the log tell which items that may be.
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which items are looked at; an empty list lets all through."""

    namespaces: Sequence[str] = ()
    tool_types: Sequence[str] = ()
    tags: Sequence[str] = ()
    categories: Sequence[str] = ()
    """A category covers those below it."""


EVERYTHING = Wanted()


class Counts(NamedTuple):
    """How many items can be found, whoever sees them, how many of them hold each stem, and their usual lengths."""

    total: int = 0
    held: Mapping[str, int] = MappingProxyType({})
    usual: tuple[float, ...] = ()
    """How many words each field of a text has, on average."""


class Candidate(NamedTuple):
    """An item that may answer a request, with what is kept of its text; its manifest is left out."""

    listed: Listed
    digest: bytes
    words: bytes
    vector: bytes


class Candidates:
    """What one actor may find in a registry on PostgreSQL; it may be used from several threads."""

    def __init__(self, database: Database, actor: Actor, model: str, *, most_matches: int = MOST_MATCHES) -> None:
        self._database = database
        self._sight = Sight(actor)
        self._model = model
        self._most_matches = most_matches

    @cached_property
    def _compares(self) -> bool:
        return compares_vectors(self._database)

    def counts(self, stems: Sequence[str] = ()) -> Counts:
        """Return what tells how rare each stem is, and how long a text."""
        with within(_PATIENCE):
            rows = self._database.read(_COUNTED, (self._database.encode_list(stems), self._model))
        if not rows:
            return Counts()
        total, lengths = int(str(rows[0][0])), self._database.decode_list(rows[0][1])
        held = {str(lexeme): int(str(held)) for *_, lexeme, held in rows if lexeme is not None}
        return Counts(total, held, tuple(int(length) / max(total, 1) for length in lengths))

    def beginning_with(self, word: str, most: int) -> Mapping[str, int]:
        """Return some of the stems that begin so, and how many items hold each."""
        with within(_PATIENCE):
            rows = self._database.read(_BEGINNING, (self._model, word, word, most))
        return {str(lexeme): int(str(held)) for lexeme, held in rows}

    def find(
        self,
        stems: Mapping[str, float],
        vectors: Sequence[bytes],
        *,
        limit: int = 300,
        wanted: Wanted = EVERYTHING,
        names: Sequence[str] = (),
    ) -> Sequence[Candidate]:
        """Return about so many items: the best by weighted stems, the nearest to vectors, and those of some names."""
        parts = [*self._by_words(stems, limit, wanted), *self._by_meaning(vectors, limit, wanted)]
        if known := [*filter(is_tool_id, names)]:
            parts.append((_BY_NAME, [self._database.encode_list(known)]))
        if not parts:
            return ()
        found = " union ".join(f"({statement})" for statement, _ in parts)
        values = [value for _, some in parts for value in some]
        statement = filled(_FOUND, found=found, sees=self._sight.listed)
        with within(_PATIENCE):
            rows = self._database.read(statement, (self._model, *values, *self._sight.members))
        return [self._candidate(row) for row in rows]

    def fresh(self, most: int) -> Sequence[Listed]:
        """Return those of the items published last that the index does not know yet."""
        with within(_PATIENCE):
            rows = self._database.read(
                filled(_FRESH, sees=self._sight.listed), (*self._sight.members, most, self._model)
            )
        return [to_listed(row, self._database) for row in rows]

    def _by_words(
        self, stems: Mapping[str, float], limit: int, wanted: Wanted
    ) -> Sequence[tuple[str, Sequence[Value]]]:
        heavy = weightiest(stems)
        held = self._held([*heavy, *map(strong, heavy)]) if heavy else {}
        asked = asked_for(heavy, held, self._most_matches)
        if not asked:
            return ()
        condition, filters = self._wanted(wanted)
        score = " + ".join([_SCORE] * len(heavy))
        weights: list[Value] = [value for stem, weight in heavy.items() for value in (weight, quoted(stem))]
        query = " | ".join(map(quoted, asked))
        values = (self._model, query, *filters, 2 * self._most_matches, *weights, max(limit // 2, 1))
        return [(filled(_BY_WORDS, wanted=condition, score=score), values)]

    def _by_meaning(
        self, vectors: Sequence[bytes], limit: int, wanted: Wanted
    ) -> Sequence[tuple[str, Sequence[Value]]]:
        asked = [text for vector in vectors if (text := as_text(vector))]
        if not asked or not self._compares:
            return ()
        condition, filters = self._wanted(wanted)
        each = max(limit // (2 * len(asked)), _FEWEST_NEAR)
        values = (self._database.encode_list(asked), self._model, *filters, each)
        return [(filled(_BY_MEANING, wanted=condition), values)]

    def _wanted(self, wanted: Wanted) -> tuple[str, Sequence[Value]]:
        """Return the condition for what is looked at, by what the index knows of items, and its values."""
        # The index knows whom it may show an item to; the table of items, which is far larger, is asked at the end.
        conditions, values = [self._sight.listed.replace("t.", "e.")], [*self._sight.members]
        for column, some in (("e.namespace", wanted.namespaces), ("e.tool_type", wanted.tool_types)):
            if some:
                conditions.append(f"{column} in ({marks_for(some)})")
                values += some
        if wanted.tags:
            conditions.append("e.tags && ?::text[]")
            values.append(self._database.encode_list(wanted.tags))
        if wanted.categories:
            below = " or ".join(["starts_with(e.category || '/', ?)"] * len(wanted.categories))
            conditions.append(f"({below})")
            values += (f"{category}/" for category in wanted.categories)
        return " and ".join(conditions), values

    def _held(self, lexemes: Sequence[str]) -> Mapping[str, int]:
        with within(_PATIENCE):
            rows = self._database.read(_HELD, (self._model, self._database.encode_list(lexemes)))
        return {str(lexeme): int(str(held)) for lexeme, held in rows}

    def _candidate(self, row: Sequence[Value]) -> Candidate:
        *listed, text_hash, words, vector = row
        digest = bytes.fromhex(str(text_hash))
        return Candidate(to_listed(tuple(listed), self._database), digest, cast("bytes", words), cast("bytes", vector))


def compares_vectors(database: Database) -> bool:
    """Whether the server finds what is near in meaning; without pgvector it finds words only."""
    return bool(database.read(_IS_COMPARED))


def as_text(vector: bytes) -> str:
    """Return a packed vector as the server reads it, "" where it has another length: its scale changes no angle."""
    return str(memoryview(vector)[:COORDINATES].cast("b").tolist()) if len(vector) == COORDINATES + 4 else ""
