"""Lexemes: the stems of items as PostgreSQL's full text index holds them, and which of them a search asks it for.

Every stem is a lexeme, under a label that tells how much it says about the item. One that says much is a second lexeme
besides, so that of a common word the items that it matters to can be asked for alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

MOST_STEMS = 32
"""How many stems of a request are looked at: those that weigh most."""
MOST_MATCHES = 4_000
"""How many items the server scores, unless fewer are wanted; each costs a look into the table."""

_LABELS = "DCBA"
_IMPACTS = (0.35, 0.5, 0.6)
"""From which impact on a label is given."""
_USUAL = (0.22, 0.42, 0.55, 0.71)
"""The usual impact under each label."""
_STRONG = 2
"""From which label on a stem is a second lexeme."""

WEIGHTS = "{" + ", ".join(map(str, _USUAL)) + "}"
"""What PostgreSQL takes each label for."""


def strong(stem: str) -> str:
    """Return the second lexeme of a stem that says much about an item; no stem ends so."""
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


def vector_of(lexemes: Mapping[str, str]) -> str:
    """Return lexemes with their labels as the text of a `tsvector`."""
    return " ".join(f"{quoted(lexeme)}:1{label}" for lexeme, label in lexemes.items())


def quoted(lexeme: str) -> str:
    """Return a lexeme as it stands in the text of a `tsvector` or a `tsquery`."""
    escaped = lexeme.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def weightiest(stems: Mapping[str, float]) -> Mapping[str, float]:
    """Return the stems of a request that weigh most."""
    return dict(sorted(stems.items(), key=lambda one: -one[1])[:MOST_STEMS])


def asked_for(stems: Mapping[str, float], held: Mapping[str, int], most: int) -> Sequence[str]:
    """Return the lexemes that find the best matches: those that say most come first, as long as few hold them.

    `held` tells how many items hold each lexeme. What only holds words that are common everywhere is not found by them,
    unless the request has no others.
    """
    worth = [(weight * usual, lexeme) for lexeme, weight, usual in _choices(stems) if held.get(lexeme)]
    chosen: list[str] = []
    left = most
    for _, lexeme in sorted(worth, reverse=True):
        # The second lexeme of a stem is among the first, so that asking for both costs no more than for one.
        again = held[strong(lexeme)] if strong(lexeme) in chosen else 0
        if held[lexeme] - again <= left:
            chosen.append(lexeme)
            left -= held[lexeme] - again
    return chosen or sorted((lexeme for _, lexeme in worth), key=lambda lexeme: held[lexeme])[:1]


def _choices(stems: Mapping[str, float]) -> Iterable[tuple[str, float, float]]:
    for stem, weight in stems.items():
        yield strong(stem), weight, _USUAL[-1]
        yield stem, weight, _USUAL[0]
