"""Traces: what use leaves behind, so that what was wanted once is found sooner the next time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trace:
    """A request after which an item was used."""

    item: str
    """Its full name, whatever its version."""
    request: str
    is_run: bool
    """Whether it was run, and not only read."""
    at: int
    """When that was last, in milliseconds since 1970."""
    project: str = ""
    """The project whose item it is; empty where it is the same item everywhere."""
    encoder: str = ""
    """What the vector was made by."""
    vector: bytes = b""
    """What the request means; empty where nobody has found out yet."""
