"""Offers: the items that a client of MCP sees without searching for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kiwi_mcp.domain.json import JsonObject

TaskUse: TypeAlias = Literal["auto", "always", "required", "never"]
"""When a call becomes a task: once it takes long; at once where the client can; at once or not at all; never."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client may be told of the effects of a tool; None where nothing is known."""

    is_read_only: bool | None = None
    is_destructive: bool | None = None
    is_idempotent: bool | None = None
    is_open_world: bool | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """One item under the name that clients call it by."""

    name: str
    """The name, or the address of a resource, or the template of addresses."""
    identity: str
    """The item, as `execute` and `load` take it."""
    title: str = ""
    description: str = ""
    parameters: JsonObject = field(default_factory=dict)
    """JSON Schema of what it takes."""
    outputs: JsonObject = field(default_factory=dict)
    """JSON Schema of its result, where its author declares one."""
    hints: Hints = Hints()
    task: TaskUse = "auto"
    mime_type: str = ""
    digest: str = field(default="", compare=False)
    """Of its content, which may change while all that clients see of it stays."""


@dataclass(frozen=True, slots=True)
class Offers:
    """All that a client sees without searching, in an order that does not change by itself."""

    meta_tools: tuple[str, ...]
    tools: tuple[Offer, ...] = ()
    prompts: tuple[Offer, ...] = ()
    resources: tuple[Offer, ...] = ()
    templates: tuple[Offer, ...] = ()
    notices: tuple[str, ...] = ()
    """What the owner prefers and is not here, not permitted, or not possible, each with what to do."""
    servers: tuple[str, ...] = ()
    """The MCP servers whose items are found by searching, those with most first."""
    namespaces: tuple[str, ...] = ()
    """The namespaces of the registry whose items are, in the same order."""
