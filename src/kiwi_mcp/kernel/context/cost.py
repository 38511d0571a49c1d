"""What a text costs in a model's context: its bytes, and about how many tokens a tokenizer makes of them.

Tokenizers split words off from signs, signs from numbers, and long words further. So the runs of each are counted, and
weighed as fits seven tokenizers best: cl100k, o200k, those of Claude 2, Llama 3 and 4 and Qwen, and Tekken. On
definitions, answers, manuals and code the estimate is within a tenth of their mean, from which they themselves differ
by as much; on numbers and in other languages than English it may be a third off, as they are. A quarter of the bytes,
the usual guess, is a sixth too many for definitions, a sixth too few for answers, and half of what numbers cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_letters, digits, punctuation
from typing import NamedTuple

from kiwi_mcp.domain.json import Json, JsonObject, compact

ERROR = 0.1
"""How far the tokens of an English text, of JSON or of code are off, as a share."""

_WORD, _LETTER, _NUMBER, _DIGIT, _SIGNS, _OTHER = 0.6, 0.11, 1.2, 0.3, 0.92, 0.22
"""Tokens of each run of letters, letter, run of digits, digit, run of signs, and byte of any other character."""
_SAMPLES, _SAMPLE = 4, 4_096
"""How many parts of a long text stand for all of it, and how long each is."""


class _Kind:
    """One kind of characters: how many of them a text has, and in how many runs."""

    def __init__(self, characters: str) -> None:
        own = characters.encode()
        self._others = bytes(byte for byte in range(256) if byte not in own)
        self._alone = bytes(byte if byte in own else 0x20 for byte in range(256))

    def count(self, data: bytes) -> int:
        return len(data.translate(None, self._others))

    def runs(self, data: bytes) -> int:
        return len(data.translate(self._alone).split())


_LETTERS, _DIGITS, _PUNCTUATION = map(_Kind, (ascii_letters, digits, punctuation))
_ASCII = bytes(range(128))


class Cost(NamedTuple):
    """What something takes up of a context."""

    bytes: int = 0
    tokens: int = 0

    def to_json(self) -> JsonObject:
        """Return it in words."""
        return {"bytes": self.bytes, "tokens": self.tokens}


def cost_of(text: str) -> Cost:
    """Return what a text costs."""
    data = text.encode(errors="replace")
    if len(data) <= _SAMPLES * _SAMPLE:
        return Cost(len(data), _tokens(data))
    step = (len(data) - _SAMPLE) // (_SAMPLES - 1)
    parts = b"".join(data[at * step : at * step + _SAMPLE] for at in range(_SAMPLES))
    return Cost(len(data), round(_tokens(parts) * len(data) / len(parts)))


def cost_of_json(value: Json) -> Cost:
    """Return what a value costs that is told as JSON."""
    return cost_of(compact(value))


def total(costs: Iterable[Cost]) -> Cost:
    """Return what several things cost together."""
    known = [*costs]
    return Cost(sum(cost.bytes for cost in known), sum(cost.tokens for cost in known))


def _tokens(data: bytes) -> int:
    weighed = (
        _WORD * _LETTERS.runs(data)
        + _LETTER * _LETTERS.count(data)
        + _NUMBER * _DIGITS.runs(data)
        + _DIGIT * _DIGITS.count(data)
        + _SIGNS * _PUNCTUATION.runs(data)
        + _OTHER * len(data.translate(None, _ASCII))
    )
    return max(round(weighed), bool(data))
