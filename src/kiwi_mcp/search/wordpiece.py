"""Word pieces: a text as the numbers that a sentence encoder was trained on.

Lower case, accents off, punctuation and Chinese characters apart, then each word as the longest pieces that the
vocabulary holds. Marks such as `[SEP]` in a text are text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

_LONGEST_WORD = 100
_WHITE = "\t\n\r"
_IDEOGRAPHS = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip
_MARKS = ("[UNK]", "[CLS]", "[SEP]")


class WordPieces:
    """A vocabulary, and how a text is cut into its pieces."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._numbers = dict(zip(vocabulary, range(len(vocabulary)), strict=True))
        self._unknown, self._first, self._last = (self._numbers[mark] for mark in _MARKS)
        self._known = lru_cache(maxsize=65_536)(self._cut)

    def numbers(self, text: str, *, most: int) -> list[int]:
        """Return the numbers of a text's pieces between those of its start and its end, at most so many in all."""
        numbers = [self._first]
        # Words of a hundred letters are the longest that are known, so what lies further on would not be used.
        for word in words(text[: most * _LONGEST_WORD]):
            numbers += self._known(word)
            if len(numbers) >= most:
                break
        return [*numbers[: most - 1], self._last]

    def _cut(self, word: str) -> tuple[int, ...]:
        if len(word) > _LONGEST_WORD:
            return (self._unknown,)
        pieces: list[int] = []
        rest, mark = word, ""
        while rest:
            sizes = range(len(rest), 0, -1)
            size = next((size for size in sizes if mark + rest[:size] in self._numbers), 0)
            if not size:
                return (self._unknown,)
            pieces.append(self._numbers[mark + rest[:size]])
            rest, mark = rest[size:], "##"
        return tuple(pieces)


def words(text: str) -> list[str]:
    """Return the words of a text and its punctuation, in order."""
    return unicodedata.normalize("NFD", text).translate(_spelling).split()


class _Spelling(dict[int, str]):
    """How each character is spelt, found out when it is first met."""

    def __missing__(self, code: int) -> str:
        spelt = _spelt(chr(code))
        # Not without a limit: a text could hold every character there is.
        if len(self) < 65_536:  # noqa: PLR2004 - as many as are in use
            self[code] = spelt
        return spelt


def _spelt(char: str) -> str:
    category = unicodedata.category(char)
    if char in _WHITE or category.startswith("Z"):
        return " "
    if category.startswith("C") or category == "Mn" or char == "\ufffd":
        return ""
    is_apart = category.startswith("P") or (char.isascii() and not char.isalnum()) or _is_ideograph(ord(char))
    return f" {char} " if is_apart else char.lower()


def _is_ideograph(code: int) -> bool:
    return any(first <= code <= last for first, last in _IDEOGRAPHS)


_spelling = _Spelling()
