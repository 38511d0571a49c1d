"""Addresses of resources: Kiwi's own, and those that a template stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

HELP = "kiwi://help/"
KNOWLEDGE = "kiwi://knowledge/"

_EXPRESSION = re.compile(r"\{(\+?)([A-Za-z0-9_.]+)\*?\}")
_BORDERS = frozenset("/?#")
"""What ends a part of an address: `{name}` stands for one part, `{+name}` for several."""


def tail(uri: str, head: str) -> str:
    """Return what an address names below one of Kiwi's own; nothing where it does not begin like that."""
    return unquote(uri.removeprefix(head)) if uri.startswith(head) else ""


def match(template: str, uri: str) -> Mapping[str, str] | None:
    """Return what a template has to be filled with to be an address; None where it cannot be that address."""
    head, *rest = _EXPRESSION.split(template)
    if not rest or not uri.startswith(head):
        return None
    left, values = uri.removeprefix(head), dict[str, str]()
    for at in range(0, len(rest), 3):
        plus, name, literal = rest[at : at + 3]
        if at + 3 == len(rest):
            value = left.removesuffix(literal) if left.endswith(literal) else ""
        elif literal:
            value, _, left = left.partition(literal)
        else:  # two values side by side could be told apart in many ways
            return None
        if not value or (not plus and _BORDERS & set(value)):
            return None
        values[name] = unquote(value)
    return values
