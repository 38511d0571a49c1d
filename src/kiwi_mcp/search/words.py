"""Words of requests and of cards: identifiers split, lower case, endings off."""

from __future__ import annotations

import re
from functools import lru_cache
from threading import local

import Stemmer  # type: ignore[import-not-found]  # a compiled module without types

_WIDE = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Scripts without spaces are cut into characters.
_WORD = re.compile(rf"[{_WIDE}]|[^\W_{_WIDE}]+")
_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_MARKS = re.compile(r"[_\-./:{}@#]+")
# `organise` and `organize` are one; that `raise` becomes `raize` does no harm, since it does so everywhere.
_ISE = re.compile(r"(?<=..)is(e|ed|es|er|ers|ing|ations?)$")
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
"""Words that say nothing about a need."""

_SHORTEST = 3
_own = local()


def spelled(name: str) -> str:
    """Return a name as words: `getUser_byId` is `get User by Id`."""
    return _MARKS.sub(" ", _CASE.sub(" ", name)).strip()


def words(text: str) -> list[str]:
    """Return the words of a text as they are written, in order, lower case, identifiers split."""
    return [word[:_MAX_WORD] for word in _WORD.findall(_CASE.sub(" ", text).lower())]


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """Return what a word shares with its other forms: `searches`, `searching` and `search` are one."""
    if len(word) <= _SHORTEST or not word.isascii():
        return word
    return str(_stemmer().stemWord(_ISE.sub(r"iz\1", word)))


def _stemmer() -> Stemmer.Stemmer:
    # One must not be used by two threads at once.
    if not hasattr(_own, "stemmer"):
        _own.stemmer = Stemmer.Stemmer("english")
    return _own.stemmer
