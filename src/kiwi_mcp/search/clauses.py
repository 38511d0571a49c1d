"""Parts of a request: one that asks for three things has three, each of which may need a tool of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST = 12
_FEWEST_WORDS = 3

_ENDS = re.compile(
    r"""(?<=[.!?])["')\]]*\s+   # the end of a sentence
    | ,?\s+\b(?:and\ then|then|also|finally|additionally|furthermore|moreover|lastly|next|as\ well\ as
                |after\ that|afterwards)\b,?\s*
    | ,\s+(?:and|but)\s+""",
    re.IGNORECASE | re.VERBOSE,
)
# An `and` between two things is left alone; one before something to do begins a new part.
_DOING = re.compile(
    r"""\s+and\s+(?=[a-z]+\s+(?:(?:me|us|it|them|him|her|the|an?|my|our|your|all|any|some|its|their|if|whether|what
                               |how|which|who|for|to|on|in|with|by|from|of|this|that|these|those)\b
                             |[a-z]+\s+(?:for|to|on|in|with|by|from|of)\b))""",
    re.IGNORECASE | re.VERBOSE,
)
_LISTED = re.compile(r"[;\n]+")
_WORD = re.compile(r"\w+")
_EDGES = " ,.;:!?\"'"


def parts_of(request: str) -> Sequence[str]:
    """Return the parts of a request that has several; of one that has none, nothing."""
    # Runs of spaces would be gone through again from each of them.
    listed = [" ".join(line.split()) for line in _LISTED.split(request)]
    named = [line for line in listed if _WORD.search(line)]
    parts = [*dict.fromkeys(part for line in named for part in _sentences(line, is_listed=len(named) > 1))][:MOST]
    return parts if len(parts) > 1 else ()


def _sentences(line: str, *, is_listed: bool) -> Sequence[str]:
    """Return the parts of a line; one of several lines is a part however short it is."""
    found = [part.strip(_EDGES) for piece in _ENDS.split(line) for part in _DOING.split(piece)]
    parts = [part for part in found if len(_WORD.findall(part)) >= _FEWEST_WORDS]
    return parts or ([line.strip(_EDGES)] if is_listed else [])
