"""Words of a text: tokens, stems, expansion by prefix and typo, weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache, lru_cache
from math import log
from pathlib import Path
from string import ascii_lowercase, digits
from threading import local

import Stemmer  # type: ignore[import-not-found]  # a compiled module without types

from kiwi_mcp.domain.patterns import lazy_pattern

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
"""Words that people use to ask for anything: few items hold them, so they would seem significant."""


def word_weight(word: str) -> float:
    """Return the weight of a word, from 0.5 for the most common to 1; words that ask for anything have half."""
    ranks, asked = _ranks(), _ASKED if word in _ASKING else 1.0
    return asked * (_LEAST + (1 - _LEAST) * log(ranks.get(word, len(ranks))) / log(len(ranks)) if ranks else 1.0)


def is_known(word: str) -> bool:
    """Whether a word is in the vocabulary, and so no typo of another."""
    return word in _ranks()


@cache
def _ranks() -> Mapping[str, int]:
    # The encoder's vocabulary lists words by frequency, from `the` on.
    try:
        listed = _WORDS.read_bytes().decode().split()
    except OSError:
        return {}
    whole = filter(str.isalpha, listed[listed.index(_FIRST) :] if _FIRST in listed else ())
    return {word: rank for rank, word in enumerate(whole, start=1)}


_WIDE = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Scripts without spaces are cut into characters.
_WORD = lazy_pattern(rf"[{_WIDE}]|[^\W_{_WIDE}]+")
_CASE = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_MARKS = lazy_pattern(r"[_\-./:{}@#]+")
# `organise` and `organize` are one word; `raise` becomes `raize` everywhere, which does no harm.
_ISE = lazy_pattern(r"(?<=..)is(e|ed|es|er|ers|ing|ations?)$")
_MAX_WORD = 40

COMMON = frozenset({
    "a", "about", "all", "also", "am", "an", "and", "any", "are", "as", "at", "be", "been", "being", "but", "by",
    "can", "could", "did", "do", "does", "for", "from", "get", "give", "had", "has", "have", "he", "her", "hers",
    "him", "his", "how", "i", "if", "in", "into", "is", "it", "its", "just", "know", "let", "like", "me", "my",
    "need", "of", "on", "one", "or", "our", "please", "she", "should", "so", "some", "such", "tell", "than", "that",
    "the", "their", "them", "then", "there", "these", "they", "this", "those", "to", "too", "up", "us", "use",
    "using", "very", "want", "was", "we", "were", "what", "when", "where", "which", "who", "whom", "why", "will",
    "with", "would", "you", "your",
})  # fmt: skip
"""Stop words."""

_SHORTEST = 3
_own = local()


def spelled(name: str) -> str:
    """Return a name as words: `getUser_byId` is `get User by Id`."""
    return _MARKS.sub(" ", _CASE.sub(" ", name)).strip()


def words(text: str) -> list[str]:
    """Return the words of a text in order, in lower case, with identifiers split."""
    return [word[:_MAX_WORD] for word in _WORD.findall(_CASE.sub(" ", text).lower())]


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """Return the stem of a word: `searches`, `searching` and `search` have one."""
    if len(word) <= _SHORTEST or not word.isascii():
        return word
    if not hasattr(_own, "stemmer"):  # a stemmer must not be used by two threads at once
        _own.stemmer = Stemmer.Stemmer("english")
    return str(_own.stemmer.stemWord(_ISE.sub(r"iz\1", word)))


_RUN = lazy_pattern(r"[^\W_]+")


def forms_in(text: str, wanted: Collection[str]) -> tuple[str, ...]:
    """Return the words of a text, as they are written there, that are forms of some words."""
    stems = {stem(word) for word in wanted}
    return tuple(word for word in _RUN.findall(text) if stem(word.lower()) in stems)


_PREFIX, _TYPO = 0.7, 0.6
_MAX_EXPANSIONS = 16
_SHORTEST_PREFIX, _SHORTEST_TYPO = 3, 4
_MAX_TYPOS = 8  # how many words of a query may be typos: each is compared with thousands of stems


def expand_terms(
    words: Collection[str],
    known_stems: Callable[[AbstractSet[str]], AbstractSet[str]],
    beginning_with: Callable[[str, int], Collection[str]],
) -> Mapping[str, Mapping[str, float]]:
    """Return the stems that each word matches, with their weights relative to the word itself.

    `known_stems` returns those of some stems that a card holds, `beginning_with` some stems with a prefix.
    """
    roots = {word: stem(word) for word in words}
    known = known_stems({*roots.values()})
    found: dict[str, Mapping[str, float]] = {}
    for word, root in roots.items():
        is_prefix = root not in known and len(word) >= _SHORTEST_PREFIX
        longer = beginning_with(word, _MAX_EXPANSIONS) if is_prefix else ()
        found[word] = {root: 1.0} if root in known else dict.fromkeys(sorted(longer)[:_MAX_EXPANSIONS], _PREFIX)
    unknown = [word for word in words if not found[word] and len(word) >= _SHORTEST_TYPO and not is_known(word)]
    wrong = {word: {*_typos(word), *_typos(roots[word])} for word in unknown[:_MAX_TYPOS]}
    # All at once: the stems may be on a server.
    right = known_stems({one for some in wrong.values() for one in some}) if wrong else frozenset()
    near = {word: dict.fromkeys(sorted(right & some)[:_MAX_EXPANSIONS], _TYPO) for word, some in wrong.items()}
    return {**found, **near}


def idf(held: int, total: int) -> float:
    """Return the inverse document frequency of a word that `held` of `total` cards contain."""
    return log(1 + (max(total - held, 0) + 0.5) / (held + 0.5))


def _typos(word: str) -> Iterator[str]:
    """Yield every text one edit away: a letter removed, added, replaced, or swapped with the next."""
    for at in range(len(word) + 1):
        head, tail = word[:at], word[at:]
        yield from (f"{head}{letter}{tail}" for letter in ascii_lowercase + digits)
        if tail:
            yield head + tail[1:]
            yield from (f"{head}{letter}{tail[1:]}" for letter in ascii_lowercase + digits)
        if len(tail) > 1:
            yield f"{head}{tail[1]}{tail[0]}{tail[2:]}"
