"""Isolation as `doctor` tells it: how tools are held here, and which levels this machine gives."""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import LEVELS, Level
from kiwi_mcp.drivers.held import known_standings
from kiwi_mcp.sandbox.levels import floor
from kiwi_mcp.sandbox.standing import Standing, choose

_COMMON = (
    f"what ships with Kiwi runs as you, what you or a model wrote is {floor('owner_written')}, what nobody is known to "
    f"have written is {floor('unknown')}"
)
_UNTESTED = "whether this machine can give that was not tested yet; the first tool does so"


def tell_isolation(space: Space) -> str:
    """Return how tools are held, from what was found out before; nothing is started to find out more."""
    known = known_standings(space)
    reached = [_tell_level(level, known) for level in LEVELS if level != "trusted"] if known else [_UNTESTED]
    return f"{_COMMON}: {'; '.join(reached)}"


def missing_sandbox(space: Space) -> str:
    """Return what to do where this machine is known to have no sandbox, so that no tool of the owner's own runs."""
    known = known_standings(space)
    refused = _refusal(floor("owner_written"), known) if known else None
    return refused.suggestion if refused else ""


def _tell_level(level: Level, known: Sequence[Standing]) -> str:
    if (refused := _refusal(level, known)) is not None:
        return f"{level} is refused ({refused.suggestion})"
    return f"{level} by {choose(level, known).backend.name}"


def _refusal(level: Level, known: Sequence[Standing]) -> IsolationUnavailable | None:
    try:
        choose(level, known)
    except IsolationUnavailable as refused:
        return refused
    return None
