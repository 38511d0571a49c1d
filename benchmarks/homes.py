"""Homes that are kept between runs: one for each file of tools, and for each way in which a home is made of it.

A home's name is a digest of all that it depends on, so that whatever else lies there is neither used nor touched.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from kiwi_mcp import __version__
from kiwi_mcp.domain.json import Json, as_text
from kiwi_mcp.search.encoder import encoder_name
from kiwi_mcp.search.index_file import format_id

_STAMP = "stocked.json"
"""Written once a home is complete: what whoever gave the tools calls each, by its full name."""
_MOST = 4
"""How many homes are kept; one of 100,000 tools takes some 300 MB."""


def home_of(folder: Path, tools: Path, *, encode: int | None, is_worded: bool) -> Path:
    """Return where the home of a file of tools is kept; what other code would make of them is kept elsewhere."""
    how = f"{__version__} {format_id(encoder_name())} {encode} {is_worded}\n".encode()
    return folder / f"home-{sha256(how + tools.read_bytes()).hexdigest()[:32]}"


def names_in(home: Path) -> Mapping[str, str] | None:
    """Return the names of a home's tools, or None where it was never completed."""
    try:
        response: Json = json.loads((home / _STAMP).read_bytes())
    except (OSError, ValueError):
        return None
    return {name: as_text(called) for name, called in response.items()} if isinstance(response, dict) else None


def complete(home: Path, named: Mapping[str, str]) -> None:
    """Note that a home is complete; of many, those that were made first go."""
    fresh = home / f"{_STAMP}.new"
    fresh.write_text(json.dumps(dict(named)), encoding="utf-8")
    fresh.replace(home / _STAMP)
    stamps = sorted(home.parent.glob(f"home-*/{_STAMP}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in stamps[_MOST:]:
        discard(old.parent)


def discard(home: Path) -> None:
    """Remove a home, or what is left of one."""
    shutil.rmtree(home, ignore_errors=True)
