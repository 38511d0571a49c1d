"""What a word of a request stands for among the words that cards hold: itself, longer ones, or what it is a slip of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from math import log
from string import ascii_lowercase, digits
from typing import Protocol

from kiwi_mcp.search.frequency import is_known
from kiwi_mcp.search.words import stem

_PREFIX, _TYPO = 0.7, 0.6
_MOST_EXPANSIONS = 16
_SHORTEST_PREFIX, _SHORTEST_TYPO = 3, 4
_MOST_SLIPS = 8
"""How many words of a request may be slips: each is held against thousands, and who writes more means other words."""


class Lexicon(Protocol):
    """The stems that some cards hold."""

    def among(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of some stems that a card holds."""

    def beginning_with(self, word: str, most: int) -> Collection[str]:
        """Return some of the stems that begin so."""


def meanings_of(words: Collection[str], lexicon: Lexicon) -> Mapping[str, Mapping[str, float]]:
    """Return, for each word, the stems it stands for, and how much each says of what it says itself."""
    roots = {word: stem(word) for word in words}
    known = lexicon.among({*roots.values()})
    found = {word: {root: 1.0} if root in known else _longer(word, lexicon) for word, root in roots.items()}
    unknown = [word for word in words if not found[word] and len(word) >= _SHORTEST_TYPO and not is_known(word)]
    wrong = {word: {*_slips(word), *_slips(roots[word])} for word in unknown[:_MOST_SLIPS]}
    # All are asked for at once: the words may be on a server.
    right = lexicon.among({one for some in wrong.values() for one in some}) if wrong else frozenset()
    near = {word: dict.fromkeys(sorted(right & some)[:_MOST_EXPANSIONS], _TYPO) for word, some in wrong.items()}
    return {**found, **near}


def rarity_of(held: int, total: int) -> float:
    """Return how much it says of a card that it holds a word, where so many of all cards do."""
    return log(1 + (max(total - held, 0) + 0.5) / (held + 0.5))


def _longer(word: str, lexicon: Lexicon) -> Mapping[str, float]:
    if len(word) < _SHORTEST_PREFIX:
        return {}
    return dict.fromkeys(sorted(lexicon.beginning_with(word, _MOST_EXPANSIONS))[:_MOST_EXPANSIONS], _PREFIX)


def _slips(word: str) -> Iterator[str]:
    """Give every text one slip away: a letter lost, doubled, swapped or replaced."""
    for at in range(len(word) + 1):
        head, tail = word[:at], word[at:]
        yield from (f"{head}{letter}{tail}" for letter in ascii_lowercase + digits)
        if tail:
            yield head + tail[1:]
            yield from (f"{head}{letter}{tail[1:]}" for letter in ascii_lowercase + digits)
        if len(tail) > 1:
            yield f"{head}{tail[1]}{tail[0]}{tail[2:]}"
