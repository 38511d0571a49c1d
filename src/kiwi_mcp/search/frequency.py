"""How common words are in English at large: what everybody says tells little about a need."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log
from pathlib import Path

_WORDS = Path(__file__).parent.parent / "data" / "encoder" / "vocabulary.txt"
_FIRST = "the"
_LEAST = 0.5


def weight_of(word: str) -> float:
    """Return how much a word counts, from a half for the most common one to 1 for one that is rare."""
    ranks = _ranks()
    return _LEAST + (1 - _LEAST) * log(ranks.get(word, len(ranks))) / log(len(ranks)) if ranks else 1.0


def is_known(word: str) -> bool:
    """Whether a word is one that people write, and so no slip of another."""
    return word in _ranks()


@cache
def _ranks() -> Mapping[str, int]:
    # The encoder's vocabulary has the pieces of words as they were found: the most frequent first, from `the` on.
    try:
        listed = _WORDS.read_text(encoding="utf-8").split()
    except OSError:
        return {}
    whole = [word for word in listed[listed.index(_FIRST) :] if word.isalpha()] if _FIRST in listed else []
    return {word: rank for rank, word in enumerate(whole, start=1)}
