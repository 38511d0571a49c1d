"""Likely cards: those of a registry on a server that may answer a request, as a pool that is ranked like any other.

Where the registry is on PostgreSQL, this stands in for an index over all of its cards. With `model = model_of(name)`:

- in the background, `fill(Embeddings(database, model), encoder, card_of, seconds=…)` until nothing is left, then
  `tend()`; again whenever the head of the registry's log has moved. One kernel or several may do it.
- for a request, `likely(request, Candidates(database, actor, model), card_of, wanted)`, beside the pools of others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import log
from time import monotonic

import numpy as np

from kiwi_mcp.domain.registry import Listed
from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.search.frequency import weight_of
from kiwi_mcp.search.lexicon import meanings_of, rarity_of
from kiwi_mcp.search.port import Card, Encoder, Floats
from kiwi_mcp.search.request import Request
from kiwi_mcp.search.segment import Segment, impacts_of
from kiwi_mcp.search.sheet import digest_of, is_sound, pack_vectors, passage_of, unpack_words, words_of
from kiwi_mcp.store.candidates import EVERYTHING, Candidates, Counts, Wanted
from kiwi_mcp.store.embeddings import Embeddings, Leaf

_USUAL = np.array([3, 2, 12, 3, 12], np.float32)
"""How long the fields of a card usually are, where not all cards are at hand."""
_WORDED, _ENCODED = 500, 64
"""How many items are taken at a time."""


def model_of(encoder: str) -> str:
    """Return the word for what an encoder and the words of this Kiwi give: another for whatever cannot be compared."""
    return f"{encoder or 'words'}:{digest_of(Card('', ''), encoder).hex()}"


class Likely:
    """The cards that a server found for one request; words are counted in all that it holds."""

    def __init__(self, segment: Segment, count: int, held: Mapping[str, int], damaged: Sequence[str] = ()) -> None:
        self.damaged = damaged
        """The versions of which what the server keeps is damaged."""
        self.segments: Sequence[Segment] = (segment,)
        self.count = count
        self._held = held

    def holding(self, stem: str) -> int:
        """Return how many of all cards hold a stem."""
        return self._held.get(stem) or self.segments[0].holding(stem)

    def among(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of some stems that any card holds."""
        return (self._held.keys() & stems) | self.segments[0].among(stems)

    def named(self, tool_id: str) -> Sequence[Card]:
        """Return the cards of a name."""
        return [card for card in self.segments[0].cards if card.tool_id == tool_id]


class _Lexicon:
    """The words of a server, and what it told of those that it was asked for."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self.counts = Counts()
        self.held: dict[str, int] = {}

    def among(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        self.counts = self._candidates.counts([*stems])
        self.held |= self.counts.held
        return self.counts.held.keys()

    def beginning_with(self, word: str, most: int) -> Collection[str]:
        longer = self._candidates.beginning_with(word, most)
        self.held |= longer
        return longer


def likely(
    request: Request,
    candidates: Candidates,
    card_of: Callable[[Listed], Card | None],
    wanted: Wanted = EVERYTHING,
    names: Iterable[str] = (),
    fresh: Sequence[Listed] = (),
) -> Likely:
    """Return a pool of the cards that may answer a request, and of items of some names, such as are remembered.

    Where `card_of` gives none, an item is left out. Those that are `fresh` the server's index does not know yet.
    """
    lexicon = _Lexicon(candidates)
    shares = _shares(request, lexicon)
    held, total = lexicon.held, lexicon.counts.total
    weights = {one: share * rarity_of(held[one], total) for one, share in shares.items()}
    vectors = pack_vectors(request.vectors) if request.vectors is not None else ()
    said = request.text.strip().rpartition("/")[2].partition("@")[0]
    found = candidates.find(weights, vectors, wanted=wanted, names=[said, *names])
    new = {one.id: one for one in fresh}
    kept = {one.listed.id: Kept(one.words, one.vector) for one in found if one.listed.id not in new}
    sound = {id_: sheet for id_, sheet in kept.items() if is_sound(sheet)}
    listed = {**{one.listed.id: one.listed for one in found}, **new}
    segment = _segment(listed, sound, card_of, _usual(lexicon.counts))
    return Likely(segment, total, held, [id_ for id_ in kept if id_ not in sound])


def fill(embeddings: Embeddings, encoder: Encoder | None, card_of: Callable[[Listed], Card], *, seconds: float) -> bool:
    """Index what the server's index misses, words first, for about so long; return whether more is to do."""
    until = monotonic() + seconds
    name = encoder.name if encoder else ""
    while found := embeddings.stale(_WORDED):
        embeddings.index(_leaves(found, [card_of(one) for one in found], name))
        if monotonic() > until:
            return True
    while encoder and (found := embeddings.bare(_ENCODED)):
        cards = [card_of(one) for one in found]
        vectors = pack_vectors(encoder.encode([passage_of(card) for card in cards]))
        leaves = zip(_leaves(found, cards, name), vectors, strict=True)
        embeddings.index([leaf._replace(vector=vector) for leaf, vector in leaves])
        if monotonic() > until:
            return True
    return False


def _leaves(found: Sequence[Listed], cards: Sequence[Card], encoder: str) -> Sequence[Leaf]:
    """Return versions as the server's index takes them; how much a word says need only be nearly right there."""
    leaves = []
    for listed, card in zip(found, cards, strict=True):
        packed = words_of(card)
        stems, counts = unpack_words(packed)
        impacts, _ = impacts_of(counts, np.zeros(len(stems), np.int32), 1, _USUAL)
        said = dict(zip(stems, impacts.tolist(), strict=True))
        leaves.append(Leaf(listed.id, digest_of(card, encoder), said, counts.sum(axis=0, dtype=int).tolist(), packed))
    return leaves


def _usual(counts: Counts) -> Floats | None:
    return np.maximum(np.array(counts.usual, np.float32), np.float32(1)) if counts.usual else None


def _segment(
    listed: Mapping[str, Listed],
    kept: Mapping[str, Kept],
    card_of: Callable[[Listed], Card | None],
    usual: Floats | None,
) -> Segment:
    """Return versions that are shown as one segment; the words of those of which nothing is kept are made anew."""
    cards = {id_: card for id_, one in listed.items() if (card := card_of(one))}
    sheets = [kept.get(id_) or Kept(words_of(card), b"") for id_, card in cards.items()]
    segment = Segment.of([*cards.values()], [sheet.words for sheet in sheets], usual)
    if encoded := {slot: sheet.vector for slot, sheet in enumerate(sheets) if sheet.vector}:
        segment.put_vectors([*encoded], [*encoded.values()])
    return segment


def _shares(request: Request, lexicon: _Lexicon) -> Mapping[str, float]:
    """Return the stems that the words of a request stand for, and how much each counts."""
    said = request.counted[0]
    shares: dict[str, float] = {}
    for word, stems in meanings_of(said, lexicon).items():
        for one, share in stems.items():
            shares[one] = shares.get(one, 0.0) + share * weight_of(word) * (1 + log(said[word]))
    return shares
