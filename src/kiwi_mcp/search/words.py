"""Words of queries and of cards: identifiers split, lower case, plurals and endings off."""

from __future__ import annotations

import re
from functools import lru_cache

_WIDE = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Scripts without spaces are cut into characters.
_WORD = re.compile(rf"[{_WIDE}]|[^\W_{_WIDE}]+")
_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_MARKS = re.compile(r"[_\-./:{}@#]+")
_MAX_WORD = 40

COMMON = frozenset({
    "a", "about", "all", "also", "an", "and", "any", "are", "as", "at", "be", "by", "can", "do", "for", "from",
    "get", "give", "has", "have", "how", "i", "if", "in", "into", "is", "it", "its", "me", "my", "of", "on", "one",
    "or", "our", "please", "so", "some", "that", "the", "their", "them", "then", "there", "these", "this", "those",
    "to", "use", "using", "want", "was", "we", "what", "when", "where", "which", "who", "will", "with", "would",
    "you", "your",
})  # fmt: skip
"""Words that say nothing about a need."""

# Longest first; each needs a stem of at least three letters before it.
_ENDINGS = (
    ("izations", "iz"), ("ization", "iz"), ("ations", "at"), ("ation", "at"), ("ators", "at"), ("ator", "at"),
    ("nesses", ""), ("ments", ""), ("ment", ""), ("ness", ""), ("ising", "iz"), ("izing", "iz"), ("ised", "iz"),
    ("ized", "iz"), ("ises", "iz"), ("izes", "iz"), ("ise", "iz"), ("ize", "iz"), ("izers", "iz"), ("izer", "iz"),
    ("isers", "iz"), ("iser", "iz"), ("ating", "at"), ("ated", "at"), ("ates", "at"), ("ate", "at"), ("ies", "y"),
    ("ions", ""), ("ion", ""), ("ings", ""), ("ing", ""), ("ers", ""), ("ors", ""), ("er", ""), ("or", ""),
    ("ed", ""), ("es", ""), ("ly", ""), ("al", ""), ("e", ""), ("s", ""),
)  # fmt: skip


def spelled(name: str) -> str:
    """Return a name as words: `getUser_byId` is `get User by Id`."""
    return _MARKS.sub(" ", _CASE.sub(" ", name)).strip()


def words(text: str) -> list[str]:
    """Return the words of a text as they are written, in order, lower case, identifiers split."""
    return [word[:_MAX_WORD] for word in _WORD.findall(_CASE.sub(" ", text).lower())]


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """Return what a word shares with its other forms: `searches`, `searching` and `search` are one."""
    if len(word) <= 3 or not word.isascii() or word.endswith("ss"):  # noqa: PLR2004 - too short to have an ending
        return word
    for ending, rest in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:  # noqa: PLR2004 - what is left must say something
            return _single(word[: -len(ending)] + rest)
    return word


def _single(text: str) -> str:
    # `running` and `run`, `stopped` and `stop`.
    is_double = len(text) > 3 and text[-1] == text[-2] and text[-1] not in "lsz"  # noqa: PLR2004 - as above
    return text[:-1] if is_double else text
