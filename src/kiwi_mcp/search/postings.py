"""The index behind keyword search: for each word, the cards that hold it and how much it says about them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kiwi_mcp.search.port import Card
from kiwi_mcp.search.words import COMMON, stem, words

_SATURATION = 1.2
_MANY_DEAD = 1_000


@dataclass(frozen=True, slots=True)
class Field:
    """One part of a card: how much its words count, how much its length counts, and how long it usually is."""

    weight: float
    by_length: float
    usual: int


_NAME = Field(2.0, 0.3, 3)
_HOME = Field(1.0, 0.3, 2)
_DESCRIPTION = Field(1.0, 0.6, 16)
_PARAMETERS = Field(0.7, 0.6, 6)
_PARAMETER_TEXTS = Field(0.3, 0.7, 24)


@dataclass(slots=True)
class Posting:
    """The cards that hold one word, by slot, with the impact of the word on each; `dead` of them are gone."""

    slots: array[int] = field(default_factory=lambda: array("I"))
    impacts: array[float] = field(default_factory=lambda: array("f"))
    dead: int = 0

    @property
    def count(self) -> int:
        """How many cards hold the word."""
        return len(self.slots) - self.dead


class Postings:
    """An index over cards that follows them: a card that changes costs as much as that card."""

    def __init__(self) -> None:
        self.by_stem: dict[str, Posting] = {}
        self.cards: dict[int, Card] = {}
        self._slots: dict[tuple[str, str], int] = {}
        self._next = 0
        self._vocabulary: list[str] | None = None

    def follow(self, cards: Sequence[Card]) -> None:
        """Make the index one over exactly these cards."""
        wanted = {(card.identity, card.path): card for card in cards}
        changed = {key: slot for key, slot in self._slots.items() if self.cards[slot] is not wanted.get(key)}
        for key, slot in changed.items():
            if wanted.get(key) != self.cards[slot]:
                self._remove(key)
        for key, card in wanted.items():
            if key not in self._slots:
                self._add(key, card)

    @property
    def is_worn(self) -> bool:
        """Whether so many cards are gone that an index made anew would be better."""
        return self._next - len(self.cards) > max(_MANY_DEAD, len(self.cards))

    def vocabulary(self) -> Sequence[str]:
        """Return every stem that some card holds, sorted."""
        if self._vocabulary is None:
            self._vocabulary = sorted(word for word, posting in self.by_stem.items() if posting.count)
        return self._vocabulary

    def _add(self, key: tuple[str, str], card: Card) -> None:
        slot = self._slots[key] = self._next
        self._next += 1
        self.cards[slot] = card
        for word, impact in impacts(card).items():
            posting = self.by_stem.get(word)
            if posting is None:
                posting = self.by_stem[word] = Posting()
                self._vocabulary = None
            posting.slots.append(slot)
            posting.impacts.append(impact)

    def _remove(self, key: tuple[str, str]) -> None:
        card = self.cards.pop(self._slots.pop(key))
        self._vocabulary = None
        for word in impacts(card):
            self.by_stem[word].dead += 1


def impacts(card: Card) -> Mapping[str, float]:
    """Return for each stem of a card how much it says about it, from 0 to 1: its fields weighed, and saturated."""
    frequency: dict[str, float] = {}
    for part, text in _fields(card):
        found = [stem(word) for word in words(text) if word not in COMMON]
        norm = 1 - part.by_length + part.by_length * len(found) / part.usual
        for word, count in Counter(found).items():
            frequency[word] = frequency.get(word, 0.0) + part.weight * count / norm
    return {word: weight / (_SATURATION + weight) for word, weight in frequency.items()}


def _fields(card: Card) -> Iterator[tuple[Field, str]]:
    yield _NAME, card.tool_id if stem(card.name) == stem(card.tool_id) else f"{card.tool_id} {card.name}"
    yield _HOME, f"{card.category} {' '.join(card.tags)}"
    yield _DESCRIPTION, card.description
    yield _PARAMETERS, " ".join(name for name, _ in card.parameters)
    yield _PARAMETER_TEXTS, " ".join(text for _, text in card.parameters)
