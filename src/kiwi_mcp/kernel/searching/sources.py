"""Which sources a search looks through, told without loading what searches need."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from kiwi_mcp.domain.items import Source
from kiwi_mcp.kernel.requests import SearchRequest

SOURCES: Mapping[str, tuple[Source, ...]] = MappingProxyType(
    {"local": ("project", "user", "mcp"), "all": get_args(Source), **{word: (word,) for word in get_args(Source)}}
)
"""Which sources a word stands for."""


def asks_registry(request: SearchRequest) -> bool:
    """Whether a search looks through what is published, which may be much and may be far."""
    return "registry" in SOURCES[request.source]
