"""Naming what is here: models do not search for what they do not know to exist, so `search` names the servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

from kiwi_mcp.kernel.context.cost import cost_of
from kiwi_mcp.kernel.verbs import Verb

_LONGEST, _DEAREST = 300, 60
"""How many characters, and about how many tokens, the names of servers may take up in every conversation."""
_LONGEST_NAME = 40
_SEARCH = "search"
_MARK = ("state", "servers")
"""The file that is another one whenever servers may be others: what was kept under an older one is out of date."""


def description_of(verb: Verb, servers: Sequence[str]) -> str:
    """Return what a model is told of a verb, where some servers are installed."""
    return f"{verb.description}{_naming(servers)}" if verb.name == _SEARCH and servers else verb.description


def mark_changed(user: Path) -> None:
    """Let all who keep a description know that the servers of a user may be others now."""
    place = user.joinpath(*_MARK)
    with suppress(OSError):  # where this cannot be written, no description is kept either
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = mkstemp(dir=place.parent)
        os.close(descriptor)
        Path(draft).replace(place)


def _naming(servers: Sequence[str]) -> str:
    """Return a sentence that names servers, as many of the first as there is room for."""
    told = _sentence(servers, 0)
    for count in range(len(servers)):
        longer = _sentence(servers, count + 1)
        if len(longer) > _LONGEST or cost_of(longer).tokens > _DEAREST:
            break
        told = longer
    return told


def _sentence(servers: Sequence[str], count: int) -> str:
    names, rest = ", ".join(name[:_LONGEST_NAME] for name in servers[:count]), len(servers) - count
    if not names:
        return f" {rest} MCP servers are installed here."
    return f" Installed here: {names}{f' and {rest} more' if rest else ''}."
