"""Levels of log lines: which a client of the handshake era wants to hear."""

from __future__ import annotations

from typing import get_args

import mcp_types as types

from kiwi_mcp.surfaces.mcp.port import Context, connection_of

LEVELS: tuple[types.LoggingLevel, ...] = get_args(types.LoggingLevel)
"""From the least to the most urgent."""

_KEY = "kiwi.log_level"


async def set_level(context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    """Remember from which level on a client wants to hear, for as long as it stays."""
    connection_of(context).state[_KEY] = params.level
    return types.EmptyResult()


def is_wanted(context: Context, level: str) -> bool:
    """Whether a client wants to hear lines of a level; one that never said so hears all that is worth a notice."""
    least = connection_of(context).state.get(_KEY, "info")
    return level in LEVELS and LEVELS.index(level) >= LEVELS.index(least)
