"""The index of a registry on a server: PostgreSQL finds the candidates, so that the registry is never loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import log
from time import monotonic

import numpy as np

from kiwi_mcp.domain.cards import Card, CardFeatures, card_of_version
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.registry import VersionInfo
from kiwi_mcp.search.encoder import encoder_name
from kiwi_mcp.search.index import IndexProgress
from kiwi_mcp.search.port import Encoder, Filter, PublishedItems
from kiwi_mcp.search.query import ParsedQuery
from kiwi_mcp.search.segment import (
    Segment,
    digest_of,
    impacts_of,
    is_sound,
    pack_vectors,
    passage_of,
    unpack_words,
    words_of,
)
from kiwi_mcp.search.tokens import expand_terms, idf, word_weight
from kiwi_mcp.store.search_index.postgres_search import (
    EVERYTHING,
    CandidateFilter,
    Embeddings,
    IndexedVersion,
    PostgresSearch,
    TermCounts,
)

_USUAL = np.array([3, 2, 12, 3, 12], np.float32)
"""The usual lengths of the fields of a card, for when not all cards are at hand."""
_WORDED, _ENCODED = 500, 64
"""How many items are taken at a time."""
_MAINTAINED = 3_600.0
"""How many seconds pass between two times that the server's index is maintained."""
_PUBLISHED = "registry/"
_MAX_RECALLED = 50
"""How many recalled items the server is asked for by name."""
_MAX_FRESH = 64
"""How many of the items published last are found by their words before the index has them."""


class ServerIndex:
    """The index of one registry on its server, shared by all its users; one thread fills it."""

    def __init__(self, published: PublishedItems) -> None:
        registry, model = published.registry, model_of(encoder_name())
        self.registry = registry
        self.is_behind = self.is_unread = True
        """Whether the index may lack something that was published, and whether it may even lack its words."""
        self._is_listed = published.is_listed
        self._generation: tuple[int, ...] = ()
        self._candidates = PostgresSearch(registry.database, registry.actor, model)
        self._embeddings = Embeddings(registry.database, model)
        self._damaged: set[str] = set()
        self._maintained = monotonic()

    def follow(self, generation: tuple[int, ...]) -> bool:
        """Return whether the registry has changed; if so, the index is behind."""
        is_new = generation != self._generation
        if is_new:
            self._generation, self.is_behind, self.is_unread = generation, True, True
        return is_new

    def pool(self, query: ParsedQuery, wanted: Filter, recalled: Sequence[str] = ()) -> CandidatePool:
        """Return the candidates for a query, and the items that were recalled for it."""
        filters = CandidateFilter(tool_types=wanted.types, tags=wanted.tags, categories=wanted.categories)
        names = [item.rpartition("/")[2] for item in recalled if item.startswith(_PUBLISHED)]
        fresh = self._candidates.fresh(_MAX_FRESH) if self.is_unread else ()

        def card_of(version: VersionInfo) -> Card | None:
            return card_of_version(version) if self._is_listed(version) else None

        found = find_candidates(query, self._candidates, card_of, filters, names[:_MAX_RECALLED], fresh)
        if found.damaged:
            self._damaged |= {*found.damaged}
            self.is_behind = self.is_unread = True
        return found

    def index_words(self, *, seconds: float) -> bool:
        """Index the words of missing items, for about `seconds`; return whether more is left."""
        generation = self._generation
        try:
            if damaged := {*self._damaged}:  # then they are indexed again
                self._embeddings.remove([*damaged])
                self._damaged -= damaged
            if fill(self._embeddings, None, card_of_version, seconds=seconds):
                return True
        except KiwiError:  # the search itself reports that the server cannot be asked
            return False
        self.is_unread = generation != self._generation
        return self.is_unread

    def catch_up(self, encoder: Encoder | None, *, seconds: float) -> bool:
        """Index what is missing once the words are indexed, for about `seconds`; return whether more is left."""
        generation = self._generation
        try:
            if fill(self._embeddings, encoder, card_of_version, seconds=seconds):
                return True
            if monotonic() - self._maintained > _MAINTAINED:
                self._maintained = monotonic()
                self._embeddings.maintain()
        except KiwiError:  # as above
            return False
        self.is_behind = generation != self._generation
        return self.is_behind

    @property
    def progress(self) -> IndexProgress:
        """The number of items that can be found, and by meaning; the server counts them, which takes a moment."""
        worded, encoded = self._embeddings.progress()
        return IndexProgress(worded, worded, encoded)


def model_of(encoder: str) -> str:
    """Return the name of an index: it changes with the encoder and with how words are read."""
    return f"{encoder or 'words'}:{digest_of(Card('registry', '', ''), encoder).hex()}"


class CandidatePool:
    """The cards that a server found for one request; words are counted in all that it holds."""

    def __init__(self, segment: Segment, count: int, held: Mapping[str, int], damaged: Sequence[str] = ()) -> None:
        self.damaged = damaged
        """The versions of which what the server keeps is damaged."""
        self.segments: Sequence[Segment] = (segment,)
        self.count = count
        self._held = held

    def document_frequency(self, stem: str) -> int:
        """Return how many of all cards hold a stem."""
        return self._held.get(stem) or self.segments[0].document_frequency(stem)

    def known_stems(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of some stems that any card holds."""
        return (self._held.keys() & stems) | self.segments[0].known_stems(stems)

    def named(self, tool_id: str) -> Sequence[Card]:
        """Return the cards of a name."""
        return [card for card in self.segments[0].cards if card.tool_id == tool_id]


class _Lexicon:
    """The words of a server, and its answers about the words that it was asked for."""

    def __init__(self, candidates: PostgresSearch) -> None:
        self._candidates = candidates
        self.counts = TermCounts()
        self.held: dict[str, int] = {}

    def known_stems(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        self.counts = self._candidates.counts([*stems])
        self.held |= self.counts.held
        return self.counts.held.keys()

    def beginning_with(self, word: str, most: int) -> Collection[str]:
        longer = self._candidates.beginning_with(word, most)
        self.held |= longer
        return longer


def find_candidates(
    query: ParsedQuery,
    candidates: PostgresSearch,
    card_of: Callable[[VersionInfo], Card | None],
    wanted: CandidateFilter = EVERYTHING,
    names: Iterable[str] = (),
    fresh: Sequence[VersionInfo] = (),
) -> CandidatePool:
    """Return cards that may match a query, those with some names, and `fresh` ones that are not indexed yet."""
    lexicon = _Lexicon(candidates)
    # The stems that the words of a request match, and the weight of each.
    said = query.counted[0]
    shares: dict[str, float] = {}
    for word, stems in expand_terms(said, lexicon).items():
        for one, share in stems.items():
            shares[one] = shares.get(one, 0.0) + share * word_weight(word) * (1 + log(said[word]))
    held, total = lexicon.held, lexicon.counts.total
    weights = {one: share * idf(held[one], total) for one, share in shares.items()}
    vectors = pack_vectors(query.vectors) if query.vectors is not None else ()
    name = query.text.strip().rpartition("/")[2].partition("@")[0]
    found = candidates.find(weights, vectors, wanted=wanted, names=[name, *names])
    new = {one.id: one for one in fresh}
    kept = {one.listed.id: CardFeatures(one.words, one.vector) for one in found if one.listed.id not in new}
    sound = {id_: sheet for id_, sheet in kept.items() if is_sound(sheet)}
    listed = {**{one.listed.id: one.listed for one in found}, **new}
    cards = {id_: card for id_, one in listed.items() if (card := card_of(one))}
    # The words of versions without stored features are computed.
    features = [sound.get(id_) or CardFeatures(words_of(card), b"") for id_, card in cards.items()]
    usual = np.maximum(np.array(lexicon.counts.usual, np.float32), np.float32(1)) if lexicon.counts.usual else None
    segment = Segment.from_features([*cards.values()], features, usual)
    return CandidatePool(segment, total, held, [id_ for id_ in kept if id_ not in sound])


def fill(
    embeddings: Embeddings, encoder: Encoder | None, card_of: Callable[[VersionInfo], Card], *, seconds: float
) -> bool:
    """Index what the server's index lacks, words first, for about `seconds`; return whether more is left."""
    until = monotonic() + seconds
    name = encoder.name if encoder else ""
    while found := embeddings.without_words(_WORDED):
        embeddings.index(_indexed_versions(found, [card_of(one) for one in found], name))
        if monotonic() > until:
            return True
    while encoder and (found := embeddings.without_vectors(_ENCODED)):
        cards = [card_of(one) for one in found]
        vectors = pack_vectors(encoder.encode([passage_of(card) for card in cards]))
        versions = zip(_indexed_versions(found, cards, name), vectors, strict=True)
        embeddings.index([version._replace(vector=vector) for version, vector in versions])
        if monotonic() > until:
            return True
    return False


def _indexed_versions(found: Sequence[VersionInfo], cards: Sequence[Card], encoder: str) -> Sequence[IndexedVersion]:
    """Return versions as the server's index takes them; how much a word says need only be nearly right there."""
    versions = []
    for listed, card in zip(found, cards, strict=True):
        packed = words_of(card)
        stems, counts = unpack_words(packed)
        impacts, _ = impacts_of(counts, np.zeros(len(stems), np.int32), 1, _USUAL)
        said = dict(zip(stems, impacts.tolist(), strict=True))
        versions.append(
            IndexedVersion(listed.id, digest_of(card, encoder), said, counts.sum(axis=0, dtype=int).tolist(), packed)
        )
    return versions
