"""The output of a program or service as a value: strict JSON, or text."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import NoReturn

from msgspec import Struct

from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.patterns import lazy_pattern

_DEEPEST = 200
"""The deepest nesting of a result: deeper ones break programs that read it later."""
_JSON_STARTS = frozenset(b"%c" % letter for letter in b'{["-0123456789tfn')
_SURROGATE = lazy_pattern(r"\\u[dD][89a-fA-F]")


class NotJsonOutput(ValueError):
    """Text that was to be JSON and is not, or cannot be passed on."""


class ParsedOutput(Struct, frozen=True):
    """A result, and whether characters that no text can hold were replaced in it."""

    value: Json
    is_repaired: bool = False


def parse(output: bytes) -> ParsedOutput:
    """Return strict JSON: no NaN or infinity, no deep nesting, no halves of characters."""
    text, is_repaired = _decoded(output)
    try:
        value: Json = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise NotJsonOutput("it is nested too deeply") from None
    except ValueError as error:
        raise NotJsonOutput(str(error)) from error
    if text.count("[") + text.count("{") > _DEEPEST and _depth(value) > _DEEPEST:
        raise NotJsonOutput(f"it is nested more than {_DEEPEST} levels deep")
    if _SURROGATE.search(text):
        # Escapes can write lone surrogates, which no file or protocol can carry.
        whole = json.dumps(value, ensure_ascii=False)
        try:
            whole.encode("utf-8")
        except UnicodeEncodeError:
            return ParsedOutput(json.loads(whole.encode("utf-8", errors="replace")), is_repaired=True)
    return ParsedOutput(value, is_repaired)


def json_or_text(output: bytes) -> ParsedOutput:
    """Return JSON where the output is JSON, else the text."""
    if output.lstrip()[:1] in _JSON_STARTS:  # the first character shows that most text is not JSON
        with suppress(NotJsonOutput):
            return parse(output)
    text, is_repaired = _decoded(output)
    # As in a shell, the newline that ends the last line is not part of the output.
    return ParsedOutput(text.removesuffix("\n"), is_repaired)


def _decoded(output: bytes) -> tuple[str, bool]:
    try:
        return output.decode("utf-8"), False
    except UnicodeDecodeError:
        return output.decode("utf-8", errors="replace"), True


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in {float("inf"), float("-inf")}:
        raise ValueError(f"{digits[:40]} is too large for a number")
    return number


def _depth(value: Json) -> int:
    """Return how deep a value is nested, counted without recursion."""
    level, depth = [value], 0
    while level := [
        child
        for node in level
        if isinstance(node, dict | list)
        for child in (node.values() if isinstance(node, dict) else node)
    ]:
        depth += 1
    return depth
