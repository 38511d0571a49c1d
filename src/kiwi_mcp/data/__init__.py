"""What ships as data: type specs, built-in tools, help pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from kiwi_mcp.domain.json import JsonObject

FOLDER = Path(__file__).parent
PARSED = FOLDER / "parsed.json"
"""The content of the YAML files that most commands need, by the hash of their text. `make reference` writes it."""


def parsed(text: str) -> JsonObject | None:
    """Return the content of a YAML file that ships with Kiwi, without parsing it; None for any other text."""
    return _parsed().get(sha256(text.encode()).hexdigest())


@cache
def _parsed() -> Mapping[str, JsonObject]:
    found: Mapping[str, JsonObject] = json.loads(PARSED.read_bytes())
    return found
