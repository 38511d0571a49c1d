"""Isolation as `doctor` tells it: how tools are held here, and which levels this machine gives to those that ask."""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import LEVELS, Level
from kiwi_mcp.drivers.process.jail import known_standings
from kiwi_mcp.sandbox.standing import Standing, choose

ADVICE = "Run only tools you would run by hand, or that say `isolation: sandboxed`; `kiwi help isolation` tells more."
"""What to do about tools that nothing holds."""
_COMMON = (
    "tools run as you (own process group, clean environment, time and output limits), except those whose manifest asks "
    "for more"
)
_UNTESTED = "whether this machine can give it was not tested yet; the first tool that asks does so"


def tell_isolation(space: Space) -> str:
    """Return how tools are held, from what was found out before; nothing is started to find out more."""
    known = known_standings(space)
    reached = [_tell_level(level, known) for level in LEVELS if level != "trusted"] if known else [_UNTESTED]
    return f"{_COMMON}: {'; '.join(reached)}"


def _tell_level(level: Level, known: Sequence[Standing]) -> str:
    try:
        return f"{level} by {choose(level, known).backend.name}"
    except IsolationUnavailable as refused:
        return f"{level} is refused ({refused.suggestion})"
