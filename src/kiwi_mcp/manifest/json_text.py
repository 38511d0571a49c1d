"""JSON and TOML, read strictly: no duplicate keys, no NaN, within limits of size, depth and count."""

from __future__ import annotations

import json
import tomllib
from typing import NoReturn

from kiwi_mcp.manifest.document import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_NODES,
    Document,
    Limits,
    Raw,
    WrittenFloat,
    readable,
    refuse,
    settle,
)


def read_json(
    text: str, *, what: str, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH
) -> Document:
    """Return the one value a JSON text holds."""
    limits = Limits(what, max_nodes, max_depth)
    try:
        value: Raw = json.loads(
            readable(text, what=what, max_bytes=max_bytes),
            object_pairs_hook=lambda pairs: _unique(pairs, what),
            parse_constant=lambda word: _refuse_constant(word, what),
            parse_float=WrittenFloat,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        raise refuse(what, f"not JSON: {error.msg}", "Mend the JSON at this line.", line=error.lineno) from None
    except RecursionError:
        raise limits.too_deep() from None
    return Document(settle(value, limits))


def read_toml(
    text: str, *, what: str, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH
) -> Document:
    """Return the table a TOML text holds; its dates become text."""
    limits = Limits(what, max_nodes, max_depth)
    try:
        value: Raw = tomllib.loads(readable(text, what=what, max_bytes=max_bytes), parse_float=WrittenFloat)
    except tomllib.TOMLDecodeError as error:
        raise refuse(what, f"not TOML: {error}", "Mend the TOML there.") from None
    except ValueError:
        # Python refuses to convert integers of thousands of digits.
        raise refuse(what, f"a number of more than {MAX_DIGITS} digits", "Write it as text.") from None
    except RecursionError:
        raise limits.too_deep() from None
    return Document(settle(value, limits))


def _unique(pairs: list[tuple[str, Raw]], what: str) -> Raw:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise refuse(what, f"the key {twice!r} stands twice in one object", "Keep one of them.", place=twice)
    return found


def _refuse_constant(word: str, what: str) -> NoReturn:
    raise refuse(what, f"{word} is not JSON", "Write a finite number, or text.")


def _integer(digits: str) -> Raw:
    # As in YAML: a number that not every reader keeps exactly stays text.
    return digits if len(digits.lstrip("-")) > MAX_DIGITS else int(digits)
