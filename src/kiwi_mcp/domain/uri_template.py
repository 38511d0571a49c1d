"""URI templates of MCP servers, as far as Kiwi supports them: `{name}` is one part of an address, `{+name}` several."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote

from kiwi_mcp.domain.patterns import lazy_pattern

_EXPRESSION = lazy_pattern(r"\{(\+?)([A-Za-z0-9_.]+)\*?\}")
_BORDERS = frozenset("/?#")
"""The end of a part of an address."""
_RESERVED = ":/?#[]@!$&'()*+,;="


def names_in(template: str) -> tuple[str, ...]:
    """Return the variables of a URI template."""
    return tuple(dict.fromkeys(name for _, name in _EXPRESSION.findall(template)))


def variables_of(template: str) -> tuple[str, ...] | None:
    """Return the variables of a URI template; None if it has forms that Kiwi does not support."""
    left = _EXPRESSION.sub("", template)
    return None if "{" in left or "}" in left else names_in(template)


def expand(template: str, values: Mapping[str, str]) -> str:
    """Return the address that a template and the values of all its variables make."""
    return _EXPRESSION.sub(lambda one: quote(values[one[2]], safe=_RESERVED if one[1] else ""), template)


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
        else:  # two adjacent values could be separated in many ways
            return None
        if not value or (not plus and _BORDERS & set(value)):
            return None
        values[name] = unquote(value)
    return values
