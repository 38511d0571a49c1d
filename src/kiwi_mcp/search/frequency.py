"""How common words are, in English at large and in requests: what everybody says tells little about a need."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log
from pathlib import Path

_WORDS = Path(__file__).parent.parent / "data" / "encoder" / "vocabulary.txt"
_FIRST = "the"
_LEAST, _ASKED = 0.5, 0.5

_ASKING = frozenset({
    "able", "assist", "assistance", "available", "based", "best", "better", "check", "current", "currently", "detail",
    "details", "different", "each", "ensure", "every", "example", "explain", "find", "finding", "following", "given",
    "go", "going", "good", "great", "guide", "hello", "help", "helpful", "helping", "here", "hey", "hi", "include",
    "including", "information", "interested", "kindly", "look", "looking", "make", "many", "more", "most", "much",
    "new", "next", "now", "other", "others", "possible", "provide", "provided", "provides", "providing", "really",
    "recommend", "recommendation", "recommendations", "recommended", "regarding", "related", "show", "showing",
    "specific", "specifically", "suggest", "suggestion", "suggestions", "sure", "take", "thank", "thanks", "thing",
    "things", "think", "today", "try", "trying", "understand", "various", "way", "ways", "wonder", "wondering", "work",
    "working",
})  # fmt: skip
"""Words by which people ask, whatever for: few items hold each, so that they would seem to say much."""


def weight_of(word: str) -> float:
    """Return how much a word counts, from a half for the most common one to 1 for one that is rare.

    One by which people ask, whatever for, counts half of that.
    """
    ranks, asked = _ranks(), _ASKED if word in _ASKING else 1.0
    return asked * (_LEAST + (1 - _LEAST) * log(ranks.get(word, len(ranks))) / log(len(ranks)) if ranks else 1.0)


def is_known(word: str) -> bool:
    """Whether a word is one that people write, and so no slip of another."""
    return word in _ranks()


@cache
def _ranks() -> Mapping[str, int]:
    # The encoder's vocabulary has the pieces of words as they were found: the most frequent first, from `the` on.
    try:
        listed = _WORDS.read_bytes().decode().split()
    except OSError:
        return {}
    whole = filter(str.isalpha, listed[listed.index(_FIRST) :] if _FIRST in listed else ())
    return {word: rank for rank, word in enumerate(whole, start=1)}
