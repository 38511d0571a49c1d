"""Look-alikes: names of publishers that a reader may take for another's."""

from __future__ import annotations

from collections.abc import Iterable

from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE
from kiwi_mcp.manifest.trust import Trusted

_SHORT = 4
_ALIKE = (("rn", "m"), ("vv", "w"), ("cl", "d"), ("0", "o"), ("1", "l"), ("i", "l"), ("5", "s"), ("-", ""), ("_", ""))
"""What looks like what in most typefaces; a name is lower-case ASCII, so this is all there is."""


def alike(scope: str, trusted: Trusted, own: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the known publishers whose names look like that of a scope and are not."""
    name = scope.partition("/")[0]
    known = {known.partition("/")[0] for known in (*trusted.publishers, *own, BUILTIN_NAMESPACE)}
    return tuple(sorted(one for one in known if one != name and looks_like(name, one)))


def looks_like(one: str, other: str) -> bool:
    """Whether two names look alike: the same but for letters that do, or but for one letter."""
    first, second = _drawn(one), _drawn(other)
    return first == second or (min(len(first), len(second)) >= _SHORT and _is_near(first, second))


def _drawn(name: str) -> str:
    for seen, meant in _ALIKE:
        name = name.replace(seen, meant)
    return name


def _is_near(one: str, other: str) -> bool:
    """Whether one letter more, less or other, or two that changed places, make one name the other."""
    if abs(len(one) - len(other)) > 1:
        return False
    short, long = sorted((one, other), key=len)
    at = next((place for place, letter in enumerate(short) if letter != long[place]), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    is_swapped = short[at : at + 2] == long[at : at + 2][::-1] and short[at + 2 :] == long[at + 2 :]
    return short[at + 1 :] == long[at + 1 :] or is_swapped
